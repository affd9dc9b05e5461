-- Acquires the lock. If it is held, reports the holder, and joins or leaves the queue if asked to.
-- KEYS  1 lock, 2 queue, 3 fence
-- ARGV  1 nonce, 2 id, 3 TTL in ms, 4 mode, 5 queue entry "claim-ms channel id",
--       6 not_after, in us on the server's clock, 7 repair TTL in ms,
--       8 token_min, 16 digits: minimum token, so that several nodes grant the same one
--       mode    try: do not wait         join: enter the queue (first request)
--               look: poll (later ones)  leave: leave the queue (last request)
--       repair  TTL to set if the holder's key has none; 0 for none
-- Reply one string, which costs only one allocation:
--       nonce held now token
--       nonce busy now pttl token waiters holder
--             for try and leave; token is the last one given
--       nonce queued now pttl position state holder
--             for join and look; state is the sum of 1 if this request entered the queue,
--             and 2 if the entry's channel has no subscriber here
--       nonce type now
--             the key is not a lock
--       nonce late now
--             not_after has passed; nothing was done

local nonce, id, ttl, mode, entry = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local now = clock()
if now > ARGV[6] then return nonce .. ' late ' .. now end

local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  if not is_wrong_type(holder) then return holder end
  if mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
  return nonce .. ' type ' .. now
end
if not holder then
  -- LLEN before LPOP, because the server checks its memory limit only until a script's first write.
  -- LPOP is exempt from the check but counts as a write, so the SET below would not be checked.
  holder = redis.call('LLEN', KEYS[2]) > 0 and grant_next(now)
  if not holder then
    -- No waiter could be notified, perhaps because PUBLISH is not permitted. A waiter that acquires
    -- the lock by polling leaves the queue.
    if mode == 'look' or mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
    local token = next_token(now > ARGV[8] and now or ARGV[8])
    redis.call('SET', KEYS[1], id, 'PX', ttl)
    return nonce .. ' held ' .. now .. ' ' .. token
  end
end
if holder == id then
  -- Never shorten the TTL, because this may be a delayed request with an older, shorter TTL.
  if redis.call('PTTL', KEYS[1]) < tonumber(ttl) then redis.call('PEXPIRE', KEYS[1], ttl) end
  local token = string.match(redis.call('GET', KEYS[3]) or '', '^%d+$')
  if not token or tonumber(token) > TOKEN_MAX then
    token = next_token(now > ARGV[8] and now or ARGV[8])
  elseif tonumber(token) < tonumber(ARGV[8]) then
    token = next_token(ARGV[8])
  end
  return nonce .. ' held ' .. now .. ' ' .. token
end

local left = redis.call('PTTL', KEYS[1])
if left == -1 and ARGV[7] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[7])
  left = ARGV[7]
end

if mode == 'join' or mode == 'look' then
  local place = mode == 'look' and redis.call('LPOS', KEYS[2], entry)
  local state = 0
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
return nonce .. ' busy ' .. now .. ' ' .. describe(holder, left)
