-- Give the lock up, to the next waiter where there is one; also withdraws a waiter that gave up.
-- KEYS  1 lock, 2 queue, 3 fence
-- ARGV  1 nonce, 2 id ('' means whoever holds it), 3 waiter entry to take out of the line, or ''
-- Reply {nonce, 'released'}
--       {nonce, 'gone'}                                          nobody held it
--       {nonce, 'other', now, holder, pttl, last token, waiters} somebody else holds it
--       {nonce, 'type'}                                          the key holds something else than a lock
local nonce, id, entry = ARGV[1], ARGV[2], ARGV[3]
if entry ~= '' then redis.call('LREM', KEYS[2], 0, entry) end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return {nonce, 'type'} end
if not holder then
  grant_next()
  return {nonce, 'gone'}
end
if holder == id or id == '' then
  if not grant_next() then redis.call('DEL', KEYS[1]) end
  return {nonce, 'released'}
end
local t = redis.call('TIME')
return {nonce, 'other', t[1] * 1000000 + t[2], string.sub(holder, 1, 512), redis.call('PTTL', KEYS[1]),
  tonumber(redis.call('GET', KEYS[3]) or 0) or 0, redis.call('LLEN', KEYS[2])}
