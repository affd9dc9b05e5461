-- The second part of release.lua: somebody waits for the lock, another client holds it, the request
-- is not a usual one, or the fence is ahead of the token.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  as for release.lua
-- Reply as for release.lua

local entry, not_after = '', ''
if #ARGV > 4 then entry, not_after = ARGV[3], ARGV[4] end
if not_after ~= '' then
  local now = clock()
  -- Report the time, because a caller with a wrong estimate would be late again.
  if now > not_after then return nonce .. ' late ' .. now end
end

if entry ~= '' then
  local removed = redis.pcall('LREM', KEYS[2], 0, entry)
  if type(removed) == 'table' and not string.find(removed.err, 'WRONGTYPE', 1, true) then
    redis.call('LREM', KEYS[2], 0, entry)
  end
end
if holder == nil then holder = redis.pcall('GET', KEYS[1]) end
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and nonce .. ' type'
    or redis.call('GET', KEYS[1])
end
-- A forced release knows only the first 512 bytes of the id, because scripts report no more.
local is_free = not holder or holder == id or string.sub(holder, 1, 512) == id
if is_free then
  if holder == id and #ARGV == 4 then
    spent = ARGV[3]
  elseif not holder or #ARGV == 5 and entry == '' and not_after == '' then
    -- Its client is not known to be the last holder inside its process.
    used = RESERVED
  end
  waiter = waiter or redis.pcall('LPOP', KEYS[2])
  if type(waiter) == 'table' then
    -- Treat a queue key of another type as empty; otherwise the lock could not be released. Any
    -- other error is raised by the second LPOP.
    waiter = not string.find(waiter.err, 'WRONGTYPE', 1, true) and redis.call('LPOP', KEYS[2])
  end
  if not waiter then
    free()
    return nonce .. (holder and ' released' or ' gone')
  end
end

-- Leaves the lock free for a while, in which only clients that do not queue can acquire it. The
-- head of the queue is sent a grant that is too short to be used, so it asks, and the reply says
-- when to ask again. Returns false if the head cannot be notified.
local function leave_free()
  local channel, waiting = string.match(waiter, '^%d+ (%S+) (.+)$')
  if not waiting or not has_subscriber(channel) then return false end
  redis.call('LPUSH', KEYS[2], waiter)
  redis.call('PEXPIRE', KEYS[2], QUEUE_MS)
  free()
  redis.call('SET', KEYS[3], LEFT_FREE, 'PX', ARGV[5], 'NX')
  local now = clock()
  notify(channel, now .. ' ' .. now .. ' 1 ' .. waiting)
  return true
end

if is_free then
  if ARGV[6] and holder and leave_free() then return nonce .. ' released' end
  if not grant_next(waiter) then free() end
  return nonce .. (holder and ' released' or ' gone')
end
local head, left = nonce .. ' other ' .. clock()
