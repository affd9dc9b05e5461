-- Shared head of acquire.lua and release.lua: handing a free lock to the first waiter that still listens.
-- KEYS  1 lock, 2 queue, 3 fence

local FENCE_MS = 86400000 -- a day: long enough to be read back, short enough not to leave a key per name for ever

-- The next fencing token: above every earlier one, and at least the server's clock in microseconds,
-- so that it goes on rising when the fence key is lost.
local function next_token(now)
  local last = tonumber(redis.call('SET', KEYS[3], string.format('%.0f', now), 'PX', FENCE_MS, 'GET') or 0)
  if not last or last < now then return now end
  redis.call('SET', KEYS[3], string.format('%.0f', last + 1), 'PX', FENCE_MS)
  return last + 1
end

-- Gives the lock to the first waiter whose process hears it; returns its id, or false when nobody does.
local function grant_next(now)
  local waiter = redis.call('LPOP', KEYS[2])
  while waiter do
    local px, channel, id = string.match(waiter, '^(%d+) (%S+) (.+)$')
    if id then
      if not now then
        local t = redis.call('TIME')
        now = t[1] * 1000000 + t[2]
      end
      local token = next_token(now)
      -- pcall: scripts are not rolled back, and a missing right to publish must not undo a release.
      local heard = redis.pcall('PUBLISH', channel, string.format('%.0f %.0f %s %s', token, now, px, id))
      if type(heard) ~= 'number' then
        redis.call('LPUSH', KEYS[2], waiter)
        return false
      end
      if heard > 0 then
        redis.call('SET', KEYS[1], id, 'PX', px)
        return id
      end
    end
    waiter = redis.call('LPOP', KEYS[2])
  end
  return false
end
