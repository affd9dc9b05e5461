-- Take the lock, or learn who has it, or wait in line for it.
-- KEYS  1 lock, 2 queue, 3 fence
-- ARGV  1 nonce, 2 id, 3 ttl in ms, 4 mode, 5 waiter entry "claim-ms channel id", 6 not_after in server us, 7 heal
--       mode  try: never wait   join: wait, first ask   look: wait, asking again   leave: last ask, leaves the line
--       heal  1: a holder without a TTL is given ours
-- Reply {nonce, 'held', now, token}
--       {nonce, 'busy', now, holder, pttl, last token, waiters}     try and leave
--       {nonce, 'queued', now, holder, pttl, position, joined}      join and look; joined is 1 when the line was entered by this call
--       {nonce, 'type', now}                                        the key holds something else than a lock
--       {nonce, 'late', now}                                        not_after has passed; nothing was done
local QUEUE_MS = 60000 -- above the longest pause between two looks of a waiter

local nonce, id, ttl, mode, entry = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if now > tonumber(ARGV[6]) then return {nonce, 'late', now} end

if redis.call('EXISTS', KEYS[1], KEYS[2]) == 0 then
  local token = next_token(now)
  redis.call('SET', KEYS[1], id, 'PX', ttl)
  return {nonce, 'held', now, token}
end

local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  if mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
  return {nonce, 'type', now}
end
if not holder then
  holder = grant_next(now)
  if not holder then
    local token = next_token(now)
    redis.call('SET', KEYS[1], id, 'PX', ttl)
    return {nonce, 'held', now, token}
  end
end
if holder == id then
  redis.call('PEXPIRE', KEYS[1], ttl)
  return {nonce, 'held', now, tonumber(redis.call('GET', KEYS[3]) or false) or next_token(now)}
end

local left = redis.call('PTTL', KEYS[1])
if left == -1 and ARGV[7] == '1' then
  redis.call('PEXPIRE', KEYS[1], ttl)
  left = tonumber(ttl)
end
holder = string.sub(holder, 1, 512)

if mode == 'join' or mode == 'look' then
  local place = mode == 'look' and redis.call('LPOS', KEYS[2], entry)
  local joined = 0
  if not place then
    place = redis.call('RPUSH', KEYS[2], entry) - 1
    joined = 1
  end
  redis.call('PEXPIRE', KEYS[2], QUEUE_MS)
  return {nonce, 'queued', now, holder, left, place, joined}
end
if mode == 'leave' then redis.call('LREM', KEYS[2], 0, entry) end
return {nonce, 'busy', now, holder, left, tonumber(redis.call('GET', KEYS[3]) or 0) or 0, redis.call('LLEN', KEYS[2])}
