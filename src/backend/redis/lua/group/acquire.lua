-- After acquire_alone.lua: acquires the lock for a member of a group, or for one holder alone as
-- mutex/acquire.lua does. If it cannot be had, reports the holder, and joins or leaves the queue if
-- asked to.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence, 5 members
-- ARGV  1 nonce, 2 id, 3 TTL in ms, 4 not_after, in us on the server's clock, 5 repair TTL in ms,
--       6 mode, 7 queue entry "claim-ms channel id", for a group "group/limit/n,claim-ms channel
--       id", 8 group, or '' for the lock alone, 9 maximum number of members, 0 for any,
--       10 number of members that this claim needs,
--       11 token_min, 16 digits: minimum token, so that several nodes grant the same one; 0 on one
--       server, 12 1 if token_min is not below the token that this member was given here last,
--       13 protocol version
--       mode and repair as in mutex/acquire.lua; mode 'downgrade' turns the writer with this id
--       into a reader
-- Reply as for mutex/acquire.lua; holder may be "group members member", and to a downgrade, type
--       also means that the writer has lost its lock

local entry = ARGV[7]
local group, limit, n = ARGV[8] ~= '' and ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10])
local is_queued = mode == 'look' or mode == 'leave'
local token_min = ARGV[11]

-- The token of a claim that has the lock already. Of several nodes, each stores token_min or a
-- larger one.
local function token_again()
  local token = redis.call('GET', KEYS[3])
  if not token or not is_token(token) then return next_token(from, token_ttl) end
  if token < token_min then
    -- Exactly this one, even if the fence has risen since: all nodes must store the same token.
    redis.call('SET', KEYS[3], token_min, 'PX', token_ttl)
    return token_min
  end
  return token
end

holder = value
if type(holder) == 'table' then
  if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
  if mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
  return nonce .. ' type ' .. now
end

if group and holder == group then
  local expires = typed('ZSCORE', KEYS[5], id)
  if expires and tonumber(expires) > in_ms(now) then
    -- Asked again: the reply was lost, or the grant message was. LREM comes first, because it works
    -- if the server is out of memory.
    typed('LREM', KEYS[2], 0, entry)
    -- The last token may be another member's. One server gives a new one. Several nodes would
    -- never agree then, because each further member raises the tokens.
    local token
    if tonumber(token_min) == 0 then
      token = next_token(now, token_ttl)
    else
      token = token_again()
      if ARGV[12] == '1' then token = token_min end
    end
    -- Never shorten the time, because this may be a delayed request with an older, shorter TTL.
    if tonumber(expires) < in_ms(now) + ttl then
      add_member(now, group, id, n, ttl)
      write_members(now)
    end
    -- The release that granted this lock may have granted it to the first waiters only. Over
    -- several nodes, it may not have waited for the reply that says so.
    grant_next(now)
    return nonce .. ' held ' .. now .. ' ' .. token
  end
elseif group and holder == id then
  -- A downgrade of this writer, or a later request to one of several nodes that has missed it.
  -- PEXPIRE comes first, because it works if the server is out of memory.
  redis.call('PEXPIRE', KEYS[1], ttl)
  local token = token_again()
  holder = false
  add_member(now, group, id, n, ttl)
  write_members(now)
  grant_next(now)
  return nonce .. ' held ' .. now .. ' ' .. token
end
-- A writer that has lost its lock begins no group, and joins none.
if mode == 'downgrade' and (not holder or GROUPS[holder]) then
  return nonce .. ' type ' .. now
end

local waiting = redis.call('LLEN', KEYS[2])
if waiting > 0 and (not holder or GROUPS[holder]) then
  local token = grant_next(now, is_queued and entry, ttl, from)
  if token then return nonce .. ' held ' .. now .. ' ' .. token end
  waiting = redis.call('LLEN', KEYS[2])
end
-- If the lock is still free, no waiter could be notified, perhaps because PUBLISH is not permitted.
if (waiting == 0 or not holder) and fits(now, group, limit, n) then
  -- A waiter that acquires the lock leaves the queue.
  if is_queued then redis.call('LREM', KEYS[2], 0, entry) end
  local token = next_token(from, token_ttl)
  if group then
    add_member(now, group, id, n, ttl)
    write_members(now)
  else
    redis.call('SET', KEYS[1], id, 'PX', ttl)
  end
  return nonce .. ' held ' .. now .. ' ' .. token
end
if holder == id then
  if redis.call('PTTL', KEYS[1]) < ttl then
    redis.call('PEXPIRE', KEYS[1], ttl)
    redis.call('PEXPIRE', KEYS[3], token_ttl)
  end
  return nonce .. ' held ' .. now .. ' ' .. token_again()
end

local left = redis.call('PTTL', KEYS[1])
if left == -1 and ARGV[5] ~= '0' then
  -- Not earlier than the last member of a group.
  local last = GROUPS[holder] and typed('ZRANGE', KEYS[5], -1, -1, 'WITHSCORES')
  left = math.max(tonumber(ARGV[5]), last and last[2] and last[2] - in_ms(now) or 0)
  redis.call('PEXPIRE', KEYS[1], left)
end
if group and holder == group and limit > 0 then
  -- A permit becomes free when the first member expires, so the waiter polls then.
  local next_free =
    typed('ZRANGEBYSCORE', KEYS[5], '(' .. in_ms(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if next_free and next_free[2] then left = next_free[2] - in_ms(now) end
end

if mode == 'join' or mode == 'look' then
  local place = mode == 'look' and redis.call('LPOS', KEYS[2], entry)
  local state = 0
  if not place then
    place = redis.call('RPUSH', KEYS[2], entry) - 1
    state = 1
  end
  if not has_subscriber(string.match(entry, '^%S+ (%S+)') or '') then state = state + 2 end
  redis.call('PEXPIRE', KEYS[2], QUEUE_MS)
  return nonce .. ' queued ' .. now .. ' ' .. left .. ' ' .. place .. ' ' .. state .. ' '
    .. string.sub(reported_holder(now), 1, 512)
end
-- Waiters behind this one may fit now.
if mode == 'leave' and redis.call('LREM', KEYS[2], 0, entry) > 0 and GROUPS[holder] then
  grant_next(now)
end
local head = nonce .. ' busy ' .. now
holder = reported_holder(now)
