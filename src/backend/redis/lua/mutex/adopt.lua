-- Gives the lock of one holder to another client, with a new id and a new token. The former id has
-- nothing then, so there is one successor at most.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  1 nonce, 2 former id, 3 new id, 4 TTL in ms, 5 not_after, in us on the server's clock,
--       6 TTL of the token key in ms, 7 protocol version
-- Reply one string:
--       nonce held now token                         also if it had been done before
--       nonce gone now                               the lock was not held
--       nonce other now pttl token waiters holder    another holder has the lock
--       nonce type now                               the key is not a lock
--       nonce late now                               not_after has passed; nothing was done

local nonce, id, ttl = ARGV[1], ARGV[3], ARGV[4]
local now = clock()
if now > ARGV[5] then return nonce .. ' late ' .. now end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and nonce .. ' type ' .. now or holder
end
if not holder then return nonce .. ' gone ' .. now end
if holder == ARGV[2] or holder == id then
  -- PEXPIRE comes first, because it works if the server is out of memory.
  redis.call('PEXPIRE', KEYS[1], ttl)
  local token = next_token(now, ARGV[6])
  redis.call('SET', KEYS[1], id, 'PX', ttl)
  return nonce .. ' held ' .. now .. ' ' .. token
end
local head, left = nonce .. ' other ' .. now
