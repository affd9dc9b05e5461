-- Common start of the scripts for one lock: the clock, the fencing token, and granting a free lock
-- to the first waiter whose channel has a subscriber.
-- KEYS  1 lock, 2 queue, 3 fence

-- TTL of a fence key, a day: tokens rise for that long even if clocks disagree; without a TTL,
-- every name ever used would keep its key
local FENCE_MS = '86400000'
local QUEUE_MS = '60000' -- TTL of a queue, longer than any poll interval
-- 2^53 - 1, the largest integer that Lua numbers represent exactly; a larger token is not ours
local TOKEN_MAX = 9007199254740991
-- maximum number of entries skipped per call; otherwise a million dead entries would block the
-- server
local DEAD_MAX = 1000

-- The server's clock in microseconds, as a string of 16 digits, even before 2001. It stays a
-- string, because it is mostly stored and sent, and strings of equal length compare like numbers.
local function clock()
  local t = redis.call('TIME')
  return string.sub('000000000' .. t[1], -10) .. string.sub('00000' .. t[2], -6)
end

-- Returns the next fencing token. It exceeds every earlier one and is at least the server's clock,
-- so that tokens keep rising when the fence key is lost.
local function next_token(now)
  local last = redis.call('SET', KEYS[3], now, 'PX', FENCE_MS, 'GET')
  if not last or (#last == 16 and last < now) then return now end
  last = tonumber(last)
  -- Also rejects infinity, and NaN, which makes every comparison false.
  if not last or not (last >= tonumber(now) and last < TOKEN_MAX) then return now end
  local token = string.format('%.0f', last + 1)
  redis.call('SET', KEYS[3], token, 'PX', FENCE_MS)
  return token
end

-- Whether a client is subscribed to the channel itself. Pattern subscribers also receive what is
-- published, so a monitoring client would make dead waiters look alive. If PUBSUB is not permitted,
-- returns true, and the count that PUBLISH returns must decide.
local function has_subscriber(channel)
  local reply = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return not reply[2] or reply[2] > 0
end

-- Whether a command failed because the key has an unexpected type. Other errors must be reported.
local function is_wrong_type(failure)
  return string.find(type(failure) == 'table' and failure.err or failure, 'WRONGTYPE', 1, true)
end

-- Grants the lock to the first waiter with a subscriber. Returns its id, or false if there is none.
local function grant_next(now)
  for _ = 1, DEAD_MAX do
    local popped, waiter = pcall(redis.call, 'LPOP', KEYS[2])
    if not popped then
      -- Treat a queue key of another type as empty; otherwise the lock could not be acquired or
      -- released. Any other error is raised by the second LPOP.
      waiter = not is_wrong_type(waiter) and redis.call('LPOP', KEYS[2])
    end
    if not waiter then return false end
    local px, channel, id = string.match(waiter, '^([1-9]%d*) (%S+) (.+)$')
    -- The server rejects a larger expiry, which would fail the whole script. Our entries have none.
    if id and #px < 16 then
      now = now or clock()
      -- pcall, because scripts are not rolled back: a fence key of another type or a missing
      -- permission to publish must not stop a release halfway.
      local minted, token = pcall(next_token, now)
      local receivers
      if minted then
        -- Do not replicate the message. A waiter may still be subscribed to a former master that
        -- has become a replica, and would take the copy for a grant by its own server.
        redis.set_repl(redis.REPL_NONE)
        receivers = redis.pcall('PUBLISH', channel, token .. ' ' .. now .. ' ' .. px .. ' ' .. id)
        redis.set_repl(redis.REPL_ALL)
      end
      if type(receivers) ~= 'number' then
        -- The queue key and its TTL went away with the last entry.
        if redis.call('LPUSH', KEYS[2], waiter) == 1 then
          redis.call('PEXPIRE', KEYS[2], QUEUE_MS)
        end
        return false
      end
      if receivers > 0 and has_subscriber(channel) then
        redis.call('SET', KEYS[1], id, 'PX', px)
        return id
      end
    end
  end
  return false
end

-- Returns "pttl token waiters holder", with the holder last because it may be any text. A fence key
-- or queue key of another type counts as empty, so the holder can still be reported. Any other
-- error is raised by the second call.
local function describe(holder, left)
  local read, token = pcall(redis.call, 'GET', KEYS[3])
  if not read then token = not is_wrong_type(token) and redis.call('GET', KEYS[3]) end
  local counted, waiters = pcall(redis.call, 'LLEN', KEYS[2])
  if not counted then waiters = not is_wrong_type(waiters) and redis.call('LLEN', KEYS[2]) end
  return (left or redis.call('PTTL', KEYS[1])) .. ' ' .. (string.match(token or '', '^%d+$') or 0)
    .. ' ' .. (waiters or 0) .. ' ' .. string.sub(holder, 1, 512)
end
