-- Releases the lock and hands it to the next waiter, if there is one. Also removes the queue entry
-- of a waiter that has stopped waiting.
-- KEYS  1 lock, 2 queue, 3 fence
-- ARGV  1 nonce, 2 id, or its first 512 bytes, 3 queue entry to remove, or '',
--       4 not_after, in us on the server's clock, or ''
-- Reply one string:
--       nonce released
--       nonce gone                                   the lock was not held
--       nonce other now pttl token waiters holder    another holder has the lock
--       nonce type                                   the key is not a lock
--       nonce late now                               not_after has passed; nothing was done
local nonce, id, entry = ARGV[1], ARGV[2], ARGV[3]
if ARGV[4] ~= '' then
  local now = clock()
  -- Report the time, because a caller with a wrong estimate would be late again.
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
-- A forced release knows only the first 512 bytes of the id, because scripts report no more.
if holder == id or string.sub(holder, 1, 512) == id then
  if not grant_next() then redis.call('DEL', KEYS[1]) end
  return nonce .. ' released'
end
return nonce .. ' other ' .. clock() .. ' ' .. describe(holder)
