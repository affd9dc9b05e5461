-- After release_alone.lua: releases the lock for a member of a group, or for one holder alone, and
-- grants what is free to the waiters that fit. Also removes the queue entry of a waiter that has
-- stopped waiting.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence, 5 members
-- ARGV  1 nonce, 2 id, or its first 512 bytes; the name of a group releases all its members,
--       3 queue entry to remove, or '', 4 not_after, in us on the server's clock, or '',
--       5 number of members that the claim has; 0 if unknown, then it also ends their period; -1 if
--       it has the lock alone, then it leaves the reader that it has become, whose id is the same,
--       6 protocol version
-- Reply as for mutex/release.lua; "released" and "gone" may be followed by
--       more        only the first waiters that fit were granted the lock: repeat the request

local n = tonumber(ARGV[5])
if entry ~= '' then typed('LREM', KEYS[2], 0, entry) end

holder = value
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and nonce .. ' type' or holder
end

-- Removes the members of the claim. Returns the number of those that had not expired.
local function remove_members()
  if not typed('ZREMRANGEBYSCORE', KEYS[5], '-inf', in_ms(now)) then return 0 end
  local removed, i = redis.call('ZREM', KEYS[5], id), 2
  if removed == 0 and n == 0 then
    -- The caller knows a kept member by the id of its claim: release_and_keep.lua has renamed it.
    id = 'kept ' .. id
    removed = redis.call('ZREM', KEYS[5], id)
  end
  while removed > 0 and (i <= n or n == 0) do
    if redis.call('ZREM', KEYS[5], id .. '#' .. i) == 0 and n == 0 then break end
    i = i + 1
  end
  return removed
end

local tag = ' gone'
if holder and (holder == id or string.sub(holder, 1, 512) == id) then
  tag, holder = ' released', false
elseif n >= 0 and GROUPS[holder] and remove_members() > 0 then
  tag = ' released'
  local last = redis.call('ZRANGE', KEYS[5], -1, -1, 'WITHSCORES')[2]
  if last then set_expiry(KEYS[1], KEYS[5], last) else holder = false end
end
if not holder or GROUPS[holder] then
  local _, more = grant_next(now)
  if not holder then free() end
  return nonce .. tag .. (more and ' more' or '')
end
local head, left = nonce .. ' other ' .. now
