-- Take the lock, or learn who has it, or wait in line for it.
-- KEYS  1 lock, 2 queue, 3 fence
-- ARGV  1 nonce, 2 id, 3 ttl in ms, 4 mode, 5 waiter entry "claim-ms channel id", 6 not_after in server us, 7 heal in ms,
--       8 token_min: several nodes are to give one token, as 16 digits
--       mode  try: never wait   join: wait, first ask   look: wait, asking again   leave: last ask, leaves the line
--       heal  a holder without a TTL is given this one; 0: none
-- Reply one text, in order to cost one allocation:
--       nonce held now token
--       nonce busy now pttl token waiters holder       try and leave; the token is the last one given
--       nonce queued now pttl position state holder    join and look; state is 1 when this call entered the line, and 2
--                                                      more when nobody listens here on the channel of the entry
--       nonce type now                                 the key holds something else than a lock
--       nonce late now                                 not_after has passed; nothing was done

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
  -- Looking before popping: the server checks its memory before a script's first write only, and popping needs none.
  holder = redis.call('LLEN', KEYS[2]) > 0 and grant_next(now)
  if not holder then
    -- Nobody in line could be told, perhaps for want of a right; who gets the lock by looking leaves the line.
    if mode == 'look' or mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
    local token = next_token(now > ARGV[8] and now or ARGV[8])
    redis.call('SET', KEYS[1], id, 'PX', ttl)
    return nonce .. ' held ' .. now .. ' ' .. token
  end
end
if holder == id then
  -- Never earlier than it stands: this may be an old request for less, which the holder has long forgotten.
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
  return nonce .. ' queued ' .. now .. ' ' .. left .. ' ' .. place .. ' ' .. state .. ' ' .. string.sub(holder, 1, 512)
end
if mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
return nonce .. ' busy ' .. now .. ' ' .. describe(holder, left)
