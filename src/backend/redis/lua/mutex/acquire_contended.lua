-- The second part of acquire.lua: the lock is held, somebody waits for it, the caller has waited,
-- the last holder has not released it, or the fence is ahead of the server's clock.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  as for acquire.lua
-- Reply as for acquire.lua

local function take()
  -- A waiter that acquires the lock leaves the queue.
  if mode == 'look' or mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
  local token = next_token(from, token_ttl)
  redis.call('SET', KEYS[1], id, 'PX', ttl)
  return nonce .. ' held ' .. now .. ' ' .. token
end

holder = holder or redis.pcall('GET', KEYS[1])
-- The last lock was not released, and its client may have used all that is reserved.
if not holder then used = RESERVED end
if not holder and redis.call('LLEN', KEYS[2]) == 0 then return take() end
if type(holder) == 'table' then
  if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
  if mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
  return nonce .. ' type ' .. now
end
local is_left_free = not holder and redis.pcall('GET', KEYS[3]) == LEFT_FREE
if is_left_free then
  holder = LEFT_FREE
elseif not holder then
  -- LLEN came before LPOP, because the server checks its memory limit only until a script's first
  -- write. LPOP is exempt from the check but counts as a write, so a SET would not be checked.
  holder = grant_next(redis.call('LPOP', KEYS[2]), now)
  -- No waiter could be notified, perhaps because PUBLISH is not permitted.
  if not holder then return take() end
end
if holder == id then
  local token = redis.call('GET', KEYS[3])
  -- Never shorten the TTL, because this may be a delayed request with an older, shorter TTL.
  if redis.call('PTTL', KEYS[1]) < tonumber(ttl) then
    redis.call('PEXPIRE', KEYS[1], ttl)
    redis.call('PEXPIRE', KEYS[3], token_ttl)
  end
  if not token or not is_token(token) then
    token = next_token(from, token_ttl)
  elseif token < token_min then
    -- Exactly this one, even if the fence has risen since: all nodes must store the same token.
    token = token_min
    redis.call('SET', KEYS[3], token, 'PX', token_ttl)
  end
  return nonce .. ' held ' .. now .. ' ' .. token
end

local left = redis.call('PTTL', is_left_free and KEYS[3] or KEYS[1])
if left == -1 and ARGV[5] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
  left = ARGV[5]
end

if mode == 'join' or mode == 'look' then
  local state = 0
  local place = mode == 'look' and redis.call('LPOS', KEYS[2], entry)
  if not place then
    place = redis.call('RPUSH', KEYS[2], entry) - 1
    state = 1
  end
  if not has_subscriber(string.match(entry, '^%d+ (%S+)') or '') then state = state + 2 end
  redis.call('PEXPIRE', KEYS[2], QUEUE_MS)
  return nonce .. ' queued ' .. now .. ' ' .. left .. ' ' .. place .. ' ' .. state .. ' '
    .. string.sub(holder, 1, 512)
end
if mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
local head = nonce .. ' busy ' .. now
