-- Who holds the lock; changes nothing.
-- KEYS  1 lock, 2 queue, 3 fence
-- ARGV  1 nonce
-- Reply {nonce, 'busy', now, holder, pttl, last token, waiters}
--       {nonce, 'free'}
--       {nonce, 'type'}   the key holds something else than a lock
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return {ARGV[1], 'type'} end
if not holder then return {ARGV[1], 'free'} end
local t = redis.call('TIME')
return {ARGV[1], 'busy', t[1] * 1000000 + t[2], string.sub(holder, 1, 512), redis.call('PTTL', KEYS[1]),
  tonumber(redis.call('GET', KEYS[3]) or 0) or 0, redis.call('LLEN', KEYS[2])}
