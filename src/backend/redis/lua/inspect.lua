-- Reports the holder of a lock. Changes nothing.
-- KEYS  1 lock, 2 queue, 3 token
-- ARGV  1 nonce, 2 protocol version
-- Reply one string:
--       nonce busy now pttl token waiters holder
--       nonce free
--       nonce type                                 the key is not a lock
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and ARGV[1] .. ' type' or holder
end
if not holder then return ARGV[1] .. ' free' end
local head, left = ARGV[1] .. ' busy ' .. clock()
