-- Gives the lock of a holder to its successor, under another id and with a new token. So there is
-- one successor at most, and late renewals of the former holder find another holder.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence, 5 members
-- ARGV  1 nonce, 2 former id, 3 id, 4 TTL in ms, 5 number of members that the claim has,
--       6 not_after, in us on the server's clock, 7 protocol version
-- Reply one string:
--       nonce held now token                         also if it had been done before
--       nonce gone now                               the former holder does not hold the lock
--       nonce other now pttl token waiters holder    another holder has the lock
--       nonce type now                               the key is not a lock
--       nonce late now                               not_after has passed; nothing was done

local nonce, former, id, ttl, n = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local now = clock()
if now > ARGV[6] then return nonce .. ' late ' .. now end
-- how much longer than its lock a token key is kept, as in notify.lua
local token_ttl = ttl + 3600000

local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and nonce .. ' type ' .. now or holder
end
if holder == id then
  -- An earlier copy of this request has done it. Never shorten the TTL, because the successor may
  -- have extended it since.
  if redis.call('PTTL', KEYS[1]) < ttl then redis.call('PEXPIRE', KEYS[1], ttl) end
  local token = redis.call('GET', KEYS[3])
  if not token or not is_token(token) then token = next_token(now, token_ttl) end
  return nonce .. ' held ' .. now .. ' ' .. token
end
if holder == former then
  -- PEXPIRE comes first, because it works if the server is out of memory.
  redis.call('PEXPIRE', KEYS[1], ttl)
  used = RESERVED
  local token = next_token(now, token_ttl)
  redis.call('SET', KEYS[1], id, 'PX', ttl)
  return nonce .. ' held ' .. now .. ' ' .. token
end
if holder == 'distlock:read' or holder == 'distlock:permits' then
  local ms = tonumber(string.sub(now, 1, -4))
  local pruned = redis.pcall('ZREMRANGEBYSCORE', KEYS[5], '-inf', ms)
  if type(pruned) == 'table' then
    return string.find(pruned.err, 'WRONGTYPE', 1, true) and nonce .. ' gone ' .. now or pruned
  end
  for i = 1, n do
    local number = i == 1 and '' or '#' .. i
    if not redis.call('ZSCORE', KEYS[5], former .. number)
      and not redis.call('ZSCORE', KEYS[5], id .. number) then
      return nonce .. ' gone ' .. now
    end
  end
  local token = next_token(now, token_ttl)
  for i = 1, n do
    local number = i == 1 and '' or '#' .. i
    redis.call('ZREM', KEYS[5], former .. number)
    redis.call('ZADD', KEYS[5], 'GT', ms + 1 + ttl, id .. number)
  end
  local last = redis.call('ZRANGE', KEYS[5], -1, -1, 'WITHSCORES')[2]
  redis.call('PEXPIREAT', KEYS[1], last)
  redis.call('PEXPIREAT', KEYS[5], last)
  return nonce .. ' held ' .. now .. ' ' .. token
end
if not holder then return nonce .. ' gone ' .. now end
local head, left = nonce .. ' other ' .. now
