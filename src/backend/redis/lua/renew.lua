-- Extends the time of many locks in one call. Uses PEXPIRE, because SET fails if the server is out
-- of memory.
-- KEYS  for each lock its key; then its members key, unless one client has it alone; then its token
--       key, if that is extended: a lock may be held for longer than this lasts
-- ARGV  1 nonce, 2 not_after, in us on the server's clock, then for each lock: id, and TTL in ms;
--       last: protocol version. After not_after, no TTL is shortened: the holder may have a longer
--       ttl now. Before, a TTL may be too long only if the clock was set back. A TTL with a minus
--       sign never shortens that of the key: the holder has changed its ttl before. The time of
--       members is never shortened.
--       If the lock needs more than its key, "+TTL members token-TTL" instead of the TTL: the
--       number of the members of its claim, 0 if one client has it alone, and the TTL for the token
--       key, 0 to leave that alone. The usual lock so costs no more than two arguments.
-- Reply {'nonce now', element for each lock}: 1 renewed, 0 gone, -1 not a lock, or the id of
--       another holder
-- maximum number of members in one command; Lua cannot unpack more than about 8,000 values
local MEMBERS_MAX = 1000

local t = redis.call('TIME')
local is_late = t[1] * 1000000 + t[2] > tonumber(ARGV[2])
local reply = {ARGV[1] .. ' ' .. t[1] .. string.sub('00000' .. t[2], -6)}

-- No part of this is a function, because each function that a script defines takes time.
local first_byte = string.byte
-- index of the next key
local at = 1
for i = 3, #ARGV - 1, 2 do
  local id, ttl, n, token_ttl = ARGV[i], ARGV[i + 1]
  local sign = first_byte(ttl)
  if sign == 43 then
    ttl, n, token_ttl = string.match(ttl, '^%+(%S+) (%d+) (%d+)$')
    sign = first_byte(ttl)
    if n == '0' then n = nil end
    if token_ttl == '0' then token_ttl = nil end
  end
  local lock = KEYS[at]
  at = at + (n and 2 or 1)
  local holder = redis.pcall('GET', lock)
  local result
  if not n and holder == id then
    if is_late or sign == 45 then
      ttl = math.max(redis.call('PTTL', lock), math.abs(ttl))
    end
    result = redis.call('PEXPIRE', lock, ttl)
  elseif not holder then
    -- A replica may lack the lock. This write has no effect, and is an error there.
    result = redis.call('DEL', lock)
  elseif type(holder) == 'table' then
    if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
    result = -1
  elseif n and (holder == 'distlock:read' or holder == 'distlock:permits') then
    local key, now = KEYS[at - 1], t[1] * 1000 + math.floor(t[2] / 1000)
    local expires = now + 1 + math.abs(ttl)
    -- Expired members must stay so. And the first write must be one that the server permits if it
    -- is out of memory.
    local pruned = redis.pcall('ZREMRANGEBYSCORE', key, '-inf', now)
    if type(pruned) ~= 'table' then
      result = 1
      for first = 1, tonumber(n), MEMBERS_MAX do
        local members, scores, missing = {}, {}, false
        for j = first, math.min(first + MEMBERS_MAX - 1, n) do
          members[#members + 1] = j == 1 and id or id .. '#' .. j
        end
        for j, score in ipairs(redis.call('ZMSCORE', key, unpack(members))) do
          missing = missing or not score
          scores[2 * j - 1], scores[2 * j] = math.max(expires, tonumber(score or 0)), members[j]
        end
        if missing then result = 0 else redis.call('ZADD', key, unpack(scores)) end
      end
      local last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
      if last and tonumber(last) <= expires then
        redis.call('PEXPIREAT', lock, last)
        redis.call('PEXPIREAT', key, last)
      end
    elseif string.find(pruned.err, 'WRONGTYPE', 1, true) then
      result = -1
    else
      return pruned
    end
  else
    -- As in report.lua: only a master may report another holder.
    local written = redis.pcall('LREM', lock, 0, '')
    if type(written) == 'table' and string.find(written.err, 'READONLY', 1, true) then
      return written
    end
    result = string.sub(holder, 1, 512)
  end
  -- A token key of another type is not ours, and its owner may want it to have no expiry.
  if token_ttl then
    if result == 1 and type(redis.pcall('GET', KEYS[at])) == 'string' then
      redis.call('PEXPIRE', KEYS[at], token_ttl)
    end
    at = at + 1
  end
  reply[#reply + 1] = result
end
return reply
