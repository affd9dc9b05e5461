-- Reports the holder of a lock. Changes nothing.
-- KEYS  1 lock, 2 queue, 3 token
-- ARGV  1 nonce, 2 protocol version
-- Reply one string:
--       nonce busy now pttl token waiters holder
--       nonce free
--       nonce type                                 the key is not a lock

-- A former master may answer for a while after its replica was promoted. So this tries to write,
-- without an effect, because no queue has this entry. Other errors than that of a replica mean
-- nothing here.
local written = redis.pcall('LREM', KEYS[2], 0, 'no entry')
if type(written) == 'table' and string.find(written.err, 'READONLY', 1, true) then
  return written
end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and ARGV[1] .. ' type' or holder
end
if not holder then return ARGV[1] .. ' free' end
local head, left = ARGV[1] .. ' busy ' .. clock()
