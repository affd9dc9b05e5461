-- Describes many locks at once. Changes nothing.
-- KEYS  lock, queue, token and members key of each lock
-- ARGV  1 nonce, 2 maximum number of waiters to list for each lock, 3 for all locks together,
--       4 maximum number of members to list for each lock, 5 for all locks together,
--       6 protocol version
-- Reply {'nonce now', element for each lock}: 0 not held, -1 the key is not a lock, or
--       {'pttl token waiters holder', entry of the first waiter, of the second, ...}, which ends in
--       {'group size', 'left member', ...} if a group has the lock, with the time left in ms; first
--       those that expire first
local GROUPS = {['distlock:read'] = true, ['distlock:permits'] = true}
local function is_error(result)
  return type(result) == 'table' and result.err
    and not string.find(result.err, 'WRONGTYPE', 1, true)
end

-- A former master may reply for a while after its replica was promoted. So this tries to write,
-- without an effect, because no queue has this entry. Other errors than that of a replica mean
-- nothing here.
local written = KEYS[2] and redis.pcall('LREM', KEYS[2], 0, 'no entry')
if type(written) == 'table' and string.find(written.err, 'READONLY', 1, true) then
  return written
end

local t = redis.call('TIME')
local reply = {ARGV[1] .. ' ' .. t[1] .. string.sub('00000' .. t[2], -6)}
local each, left = tonumber(ARGV[2]), tonumber(ARGV[3])
local members_each, members_left = tonumber(ARGV[4]), tonumber(ARGV[5])

local function describe_group(group, key)
  local now = t[1] * 1000 + math.floor(t[2] / 1000)
  local alive = '(' .. string.format('%.0f', now)
  local size = redis.pcall('ZCOUNT', key, alive, '+inf')
  local result = {group .. ' ' .. (type(size) == 'number' and size or 0)}
  local found = redis.pcall('ZRANGEBYSCORE', key, alive, '+inf', 'WITHSCORES', 'LIMIT', 0,
    math.min(members_each, members_left))
  if found.err then return result end
  members_left = members_left - #found / 2
  for at = 1, #found, 2 do
    result[#result + 1] = string.format('%.0f', found[at + 1] - now) .. ' ' .. found[at]
  end
  return result
end

for i = 1, #KEYS, 4 do
  local holder = redis.pcall('GET', KEYS[i])
  if is_error(holder) then return holder end
  if not holder then
    reply[#reply + 1] = 0
  elseif type(holder) == 'table' then
    reply[#reply + 1] = -1
  else
    local waiters = redis.pcall('LLEN', KEYS[i + 1])
    if is_error(waiters) then return waiters end
    if type(waiters) ~= 'number' then waiters = 0 end
    local token = redis.pcall('GET', KEYS[i + 2])
    if is_error(token) then return token end
    token = type(token) == 'string' and string.match(token, '^%d+$') or '0'
    local result = {redis.call('PTTL', KEYS[i]) .. ' ' .. token .. ' ' .. waiters .. ' '
      .. string.sub(holder, 1, 512)}
    local listed = math.min(waiters, each, left)
    if listed > 0 then
      left = left - listed
      for _, entry in ipairs(redis.call('LRANGE', KEYS[i + 1], 0, listed - 1)) do
        result[#result + 1] = string.sub(entry, 1, 1024)
      end
    end
    if GROUPS[holder] then result[#result + 1] = describe_group(holder, KEYS[i + 3]) end
    reply[#reply + 1] = result
  end
end
return reply
