-- The second part of release.lua: another holder has the lock, or somebody waits for it.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  as for release.lua
-- Reply as for release.lua

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
