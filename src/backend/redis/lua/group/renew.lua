-- Extends the time of many members of groups in one call.
-- KEYS  lock, members and token key of each claim
-- ARGV  1 nonce, then for each claim: id, number of its members, TTL in ms, and TTL in ms for the
--       token key, 0 to leave that alone; last: protocol version
-- Reply {'nonce now', element for each claim}: 1 renewed, 0 gone, -1 not a lock, or the id of
--       another holder
local GROUPS = {['distlock:read'] = true, ['distlock:permits'] = true}
-- maximum number of members in one command; Lua cannot unpack more than about 8,000 values
local MEMBERS_MAX = 1000

local t = redis.call('TIME')
local reply = {ARGV[1] .. ' ' .. t[1] .. string.sub('00000' .. t[2], -6)}
local now = t[1] * 1000 + math.floor(t[2] / 1000)

-- Extends the time of the members from `first` to `last` of a claim, or of none if one is missing.
local function extend(key, id, first, last, expires)
  local members, scores = {}, {}
  for i = first, last do members[#members + 1] = i == 1 and id or id .. '#' .. i end
  for i, score in ipairs(redis.call('ZMSCORE', key, unpack(members))) do
    if not score then return false end
    -- Never shorten the time, as in mutex/renew.lua.
    scores[2 * i - 1], scores[2 * i] = math.max(expires, tonumber(score)), members[i]
  end
  redis.call('ZADD', key, unpack(scores))
  return true
end

for i = 1, #KEYS / 3 do
  local lock, members, token = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i]
  local id, token_ttl = ARGV[4 * i - 2], ARGV[4 * i + 1]
  local n, ttl = tonumber(ARGV[4 * i - 1]), tonumber(ARGV[4 * i])
  local holder = redis.pcall('GET', lock)
  local answer
  if type(holder) == 'table' then
    if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
    answer = -1
  elseif GROUPS[holder] then
    -- Expired members must stay so. And the first write must be one that the server permits if it
    -- is out of memory.
    local pruned = redis.pcall('ZREMRANGEBYSCORE', members, '-inf', now)
    if type(pruned) == 'table' then
      if not string.find(pruned.err, 'WRONGTYPE', 1, true) then return pruned end
      answer = -1
    else
      local expires = now + 1 + ttl
      answer = 1
      for first = 1, n, MEMBERS_MAX do
        local last = math.min(first + MEMBERS_MAX - 1, n)
        if not extend(members, id, first, last, expires) then answer = 0 end
      end
      local last = redis.call('ZRANGE', members, -1, -1, 'WITHSCORES')[2]
      if last and tonumber(last) <= expires then
        redis.call('PEXPIREAT', lock, last)
        redis.call('PEXPIREAT', members, last)
      end
      -- A token key of another type is not ours.
      if token_ttl ~= '0' and type(redis.pcall('GET', token)) == 'string' then
        redis.call('PEXPIRE', token, token_ttl)
      end
    end
  elseif holder then
    -- As in report.lua: only a master may report another holder.
    local written = redis.pcall('LREM', lock, 0, '')
    if type(written) == 'table' and string.find(written.err, 'READONLY', 1, true) then
      return written
    end
    answer = string.sub(holder, 1, 512)
  else
    -- The write has no effect. It is an error at a replica, which may lack the lock.
    answer = redis.call('DEL', lock)
  end
  reply[i + 1] = answer
end
return reply
