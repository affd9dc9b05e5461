-- Turns the holder alone into a reader, without a moment in which it has nothing. Readers at the
-- head of the queue are granted the lock too, up to a hundred; polls serve the others. The token
-- stays.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence, 5 members
-- ARGV  1 nonce, 2 id, 3 TTL in ms, 4 protocol version
-- Reply one string:
--       nonce read now                               for a whole TTL from now on, also if this had
--                                                    been done before
--       nonce gone now                               the lock was not held
--       nonce other now pttl token waiters holder    another holder has the lock
--       nonce type                                   the key is not a lock

local nonce, id, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now = clock()
holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and nonce .. ' type' or holder
end
if holder == id then
  -- PEXPIRE comes first, because it works if the server is out of memory.
  redis.call('PEXPIRE', KEYS[1], ttl)
  holder = false
  add_member(now, 'distlock:read', id, 1, ttl)
  write_members(now)
  grant_next(now)
  return nonce .. ' read ' .. now
end
if holder == 'distlock:read' and is_member(now, id) then
  -- The lease counts from this request.
  add_member(now, holder, id, 1, ttl)
  write_members(now)
  return nonce .. ' read ' .. now
end
if not holder or GROUPS[holder] then return nonce .. ' gone ' .. now end
local head, left = nonce .. ' other ' .. now
