-- Give the lock up, to the next waiter where there is one; also withdraws a waiter that gave up.
-- KEYS  1 lock, 2 queue, 3 fence
-- ARGV  1 nonce, 2 id, or the first 512 bytes of it, 3 waiter entry to take out of the line, or '', 4 not_after in server us, or ''
-- Reply one text:
--       nonce released
--       nonce gone                                   nobody held it
--       nonce other now pttl token waiters holder    somebody else holds it
--       nonce type                                   the key holds something else than a lock
--       nonce late now                               not_after has passed; nothing was done
local nonce, id, entry = ARGV[1], ARGV[2], ARGV[3]
if ARGV[4] ~= '' then
  local now = clock()
  -- Whoever reckons with a wrong time would be late again, and learns it here.
  if now > ARGV[4] then return nonce .. ' late ' .. now end
end
if entry ~= '' then
  local left, failure = pcall(redis.call, 'LREM', KEYS[2], 0, entry)
  if not left and not is_wrong_type(failure) then redis.call('LREM', KEYS[2], 0, entry) end
end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then return is_wrong_type(holder) and nonce .. ' type' or holder end
if not holder then
  grant_next()
  return nonce .. ' gone'
end
-- Whoever takes a lock away knows as much of its holder as is told.
if holder == id or string.sub(holder, 1, 512) == id then
  if not grant_next() then redis.call('DEL', KEYS[1]) end
  return nonce .. ' released'
end
return nonce .. ' other ' .. clock() .. ' ' .. describe(holder)
