-- Ends a hold whose period has not ended: the lock, or each permit, stays taken until then.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence, 5 members
-- ARGV  1 nonce, 2 id, 3 queue entry to remove, or '', 4 number of members that the claim has,
--       5 for how many ms to keep what it has, 6 protocol version
-- Reply as for mutex/release.lua; "released now" also if it had been done before

local nonce, id, entry, n, keep = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if entry ~= '' then
  local removed = redis.pcall('LREM', KEYS[2], 0, entry)
  if type(removed) == 'table' and not string.find(removed.err, 'WRONGTYPE', 1, true) then
    redis.call('LREM', KEYS[2], 0, entry)
  end
end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and nonce .. ' type' or holder
end

local kept = 'distlock:kept ' .. id
if holder == id then
  -- PEXPIRE comes first, because it works if the server is out of memory.
  redis.call('PEXPIRE', KEYS[1], keep)
  redis.call('SET', KEYS[1], kept, 'PX', keep)
  holder = kept
end
local now = clock()
if holder == kept then return nonce .. ' released ' .. now end
if holder == 'distlock:permits' then
  local ms = tonumber(string.sub(now, 1, -4))
  local pruned = redis.pcall('ZREMRANGEBYSCORE', KEYS[5], '-inf', ms)
  if type(pruned) == 'table' then
    return string.find(pruned.err, 'WRONGTYPE', 1, true) and nonce .. ' gone' or pruned
  end
  local found = false
  for i = 1, n do
    local member = i == 1 and id or id .. '#' .. i
    if redis.call('ZREM', KEYS[5], member) == 1 then
      redis.call('ZADD', KEYS[5], ms + 1 + keep, 'kept ' .. member)
      found = true
    elseif redis.call('ZSCORE', KEYS[5], 'kept ' .. member) then
      found = true
    end
  end
  if not found then return nonce .. ' gone' end
  local last = redis.call('ZRANGE', KEYS[5], -1, -1, 'WITHSCORES')[2]
  redis.call('PEXPIREAT', KEYS[1], last)
  redis.call('PEXPIREAT', KEYS[5], last)
  return nonce .. ' released ' .. now
end
if not holder or holder == 'distlock:read' then return nonce .. ' gone' end
local head, left = nonce .. ' other ' .. now
