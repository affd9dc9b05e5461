-- The second part of acquire_all.lua: one of the locks is held or somebody waits for it, its last
-- holder has not released it, or the fence is ahead of the server's clock.
-- KEYS  as for acquire_all.lua; each.lua selects those of one lock
-- ARGV  as for acquire_all.lua
-- Reply as for acquire_all.lua

-- Locks that an earlier request of the same claims has acquired
local own = {}
local holder, at
for i = 1, count do
  select_lock(i)
  holder, at = redis.pcall('GET', KEYS[1]), i - 1
  if type(holder) == 'table' then
    if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
    return nonce .. ' type ' .. now .. ' ' .. at
  end
  if not holder then used = RESERVED end -- as in acquire_contended.lua
  if not holder and redis.call('LLEN', KEYS[2]) > 0 then
    -- As in acquire_contended.lua: a lock that is free belongs to its first waiter.
    if redis.pcall('GET', KEYS[3]) == LEFT_FREE then
      holder = LEFT_FREE
    else
      holder = grant_next(redis.call('LPOP', KEYS[2]), now)
    end
  end
  if holder == ARGV[5 + i] then
    own[i] = true
  elseif holder then
    break
  end
  holder = nil
end

if not holder then
  local reply = {nonce, 'held', now}
  -- The tokens come first: if one cannot be stored, no lock may have been taken, because scripts
  -- are not rolled back.
  for i = 1, count do
    select_lock(i)
    used = own[i] and 0 or RESERVED
    reply[3 + i] = next_token(now, ARGV[5])
  end
  for i = 1, count do
    select_lock(i)
    -- Never shorten the TTL, because this may be a delayed request.
    if not own[i] then
      redis.call('SET', KEYS[1], ARGV[5 + i], 'PX', ttl)
    elseif redis.call('PTTL', KEYS[1]) < tonumber(ttl) then
      redis.call('PEXPIRE', KEYS[1], ttl)
    end
  end
  return table.concat(reply, ' ')
end

local left = redis.call('PTTL', holder == LEFT_FREE and KEYS[3] or KEYS[1])
if left == -1 and ARGV[4] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  left = ARGV[4]
end
local head = nonce .. ' busy ' .. now .. ' ' .. at
