-- Extends the time of many locks in one call. Uses PEXPIRE, because SET fails if the server is out
-- of memory.
-- KEYS  for each lock its key; then its members key, unless one client has it alone; then its token
--       key, if that is extended: a lock may be held for longer than this lasts
-- ARGV  1 nonce, 2 not_after, in us on the server's clock, then for each lock: id, number of the
--       members of its claim, 0 if one client has it alone, TTL in ms, and TTL in ms for the token
--       key, 0 to leave that alone; last: protocol version. After not_after, no TTL is shortened:
--       the holder may have a longer ttl now. Before, a TTL may be too long only if the clock was
--       set back. A TTL with a minus sign never shortens that of the key: the holder has changed
--       its ttl before. The time of members is never shortened.
-- Reply {'nonce now', element for each lock}: 1 renewed, 0 gone, -1 not a lock, or the id of
--       another holder
-- maximum number of members in one command; Lua cannot unpack more than about 8,000 values
local MEMBERS_MAX = 1000

local t = redis.call('TIME')
local is_late = t[1] * 1000000 + t[2] > tonumber(ARGV[2])
local reply = {ARGV[1] .. ' ' .. t[1] .. string.sub('00000' .. t[2], -6)}

-- Extends the time of the members from `first` to `last` of a claim, or of none if one is missing.
local function extend(key, id, first, last, expires)
  local members, scores = {}, {}
  for i = first, last do members[#members + 1] = i == 1 and id or id .. '#' .. i end
  for i, score in ipairs(redis.call('ZMSCORE', key, unpack(members))) do
    if not score then return false end
    scores[2 * i - 1], scores[2 * i] = math.max(expires, tonumber(score)), members[i]
  end
  redis.call('ZADD', key, unpack(scores))
  return true
end

-- Extends the time of a claim of `n` members. Returns its element of the reply, or an error.
local function renew_members(lock, key, id, n, ttl)
  local now = t[1] * 1000 + math.floor(t[2] / 1000)
  -- Expired members must stay so. And the first write must be one that the server permits if it is
  -- out of memory.
  local pruned = redis.pcall('ZREMRANGEBYSCORE', key, '-inf', now)
  if type(pruned) == 'table' then
    return string.find(pruned.err, 'WRONGTYPE', 1, true) and -1 or pruned
  end
  local answer, expires = 1, now + 1 + math.abs(ttl)
  for first = 1, n, MEMBERS_MAX do
    local last = math.min(first + MEMBERS_MAX - 1, n)
    if not extend(key, id, first, last, expires) then answer = 0 end
  end
  local last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  if last and tonumber(last) <= expires then
    redis.call('PEXPIREAT', lock, last)
    redis.call('PEXPIREAT', key, last)
  end
  return answer
end

-- index of the next key
local at = 1
for i = 3, #ARGV - 1, 4 do
  local id, n, ttl, token_ttl = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local lock, is_alone = KEYS[at], n == '0'
  at = at + (is_alone and 1 or 2)
  local holder = redis.pcall('GET', lock)
  local answer
  if is_alone and holder == id then
    if is_late or string.byte(ttl) == 45 then
      ttl = math.max(redis.call('PTTL', lock), math.abs(ttl))
    end
    answer = redis.call('PEXPIRE', lock, ttl)
  elseif not holder then
    -- A replica may lack the lock. This write has no effect, and is an error there.
    answer = redis.call('DEL', lock)
  elseif type(holder) == 'table' then
    answer = string.find(holder.err, 'WRONGTYPE', 1, true) and -1 or holder
  elseif not is_alone and (holder == 'distlock:read' or holder == 'distlock:permits') then
    answer = renew_members(lock, KEYS[at - 1], id, tonumber(n), ttl)
  else
    -- As in report.lua: only a master may report another holder.
    local written = redis.pcall('LREM', lock, 0, '')
    local is_replica = type(written) == 'table' and string.find(written.err, 'READONLY', 1, true)
    answer = is_replica and written or string.sub(holder, 1, 512)
  end
  if type(answer) == 'table' then return answer end
  -- A token key of another type is not ours, and its owner may want it to have no expiry.
  if token_ttl ~= '0' then
    if answer == 1 and type(redis.pcall('GET', KEYS[at])) == 'string' then
      redis.call('PEXPIRE', KEYS[at], token_ttl)
    end
    at = at + 1
  end
  reply[#reply + 1] = answer
end
return reply
