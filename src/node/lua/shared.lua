-- Head of the scripts about one lock: the clock, the token, and handing a free lock to the first waiter that still
-- has_subscriber.
-- KEYS  1 lock, 2 queue, 3 fence

local FENCE_MS = '86400000' -- a day: long enough to be read back, short enough not to leave a key per name for ever
local QUEUE_MS = '60000' -- above the longest pause between two looks of a waiter
local TOKEN_MAX = 9007199254740991 -- up to here Lua's numbers are exact; who stores so much or more is none of us
local DEAD_MAX = 1000 -- so many are passed over in one go: a line of a million strangers must not hold the server up

-- The server's clock in microseconds, as text of 16 digits, also where it stands before 2001. Text, because it is stored
-- and sent more often than counted with, and two texts of one length compare like the numbers.
local function clock()
  local t = redis.call('TIME')
  return string.sub('000000000' .. t[1], -10) .. string.sub('00000' .. t[2], -6)
end

-- The next fencing token: above every earlier one, and at least the server's clock, so that it goes on rising when the
-- fence key is lost.
local function next_token(now)
  local last = redis.call('SET', KEYS[3], now, 'PX', FENCE_MS, 'GET')
  if not last or (#last == 16 and last < now) then return now end
  last = tonumber(last)
  -- Also if it is infinite, or no number in the way that makes all comparisons false.
  if not last or not (last >= tonumber(now) and last < TOKEN_MAX) then return now end
  local token = string.format('%.0f', last + 1)
  redis.call('SET', KEYS[3], token, 'PX', FENCE_MS)
  return token
end

-- Whether a client is subscribed to the channel itself. Those with a pattern hear all that is published, so where somebody
-- watches everything it is heard on the channels of the dead. Without the right to ask, to be heard has to do.
local function has_subscriber(channel)
  local reply = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return not reply[2] or reply[2] > 0
end

-- Whether what failed did so because the key holds something else than it should; other errors are to be told.
local function is_wrong_type(failure)
  return string.find(type(failure) == 'table' and failure.err or failure, 'WRONGTYPE', 1, true)
end

-- Gives the lock to the first waiter whose process hears it; returns its id, or false when nobody does.
local function grant_next(now)
  for _ = 1, DEAD_MAX do
    local popped, waiter = pcall(redis.call, 'LPOP', KEYS[2])
    if not popped then
      -- Nobody stands in a line of another type, and it must not keep the lock. Other failures are raised by asking again.
      waiter = not is_wrong_type(waiter) and redis.call('LPOP', KEYS[2])
    end
    if not waiter then return false end
    local px, channel, id = string.match(waiter, '^([1-9]%d*) (%S+) (.+)$')
    -- A time that the server cannot count to would fail what is under way, and is none of ours.
    if id and #px < 16 then
      now = now or clock()
      -- pcall: scripts are not rolled back, and neither a fence key of another type nor a missing right to publish must
      -- undo a release.
      local minted, token = pcall(next_token, now)
      local receivers
      if minted then
        -- Not to be repeated by a replica: a waiter whose subscription stayed on a master that has become one would take
        -- the word of a server that did not give it the lock for that of the one that did.
        redis.set_repl(redis.REPL_NONE)
        receivers = redis.pcall('PUBLISH', channel, token .. ' ' .. now .. ' ' .. px .. ' ' .. id)
        redis.set_repl(redis.REPL_ALL)
      end
      if type(receivers) ~= 'number' then
        -- The last one's queue went away with it, and its expiry too.
        if redis.call('LPUSH', KEYS[2], waiter) == 1 then redis.call('PEXPIRE', KEYS[2], QUEUE_MS) end
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

-- "pttl token waiters holder", the holder last because it may be any text. Who has the lock can be told also where a token or
-- a line of another type is beside it, which count for none. Other failures are raised by asking again.
local function describe(holder, left)
  local read, token = pcall(redis.call, 'GET', KEYS[3])
  if not read then token = not is_wrong_type(token) and redis.call('GET', KEYS[3]) end
  local counted, waiters = pcall(redis.call, 'LLEN', KEYS[2])
  if not counted then waiters = not is_wrong_type(waiters) and redis.call('LLEN', KEYS[2]) end
  return (left or redis.call('PTTL', KEYS[1])) .. ' ' .. (string.match(token or '', '^%d+$') or 0) .. ' '
    .. (waiters or 0) .. ' ' .. string.sub(holder, 1, 512)
end
