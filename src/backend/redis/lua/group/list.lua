-- Lists the members of groups. Changes nothing.
-- KEYS  lock and members key of each lock
-- ARGV  1 nonce, 2 maximum number of members to list for each lock, 3 for all locks together,
--       4 protocol version
-- Reply {'nonce now', element for each lock}: 0 if no group has it, or
--       {'group size', 'left member', ...}, with the time left in ms; first those that expire first
local GROUPS = {['distlock:read'] = true, ['distlock:permits'] = true}
local t = redis.call('TIME')
local reply = {ARGV[1] .. ' ' .. t[1] .. string.sub('00000' .. t[2], -6)}
local each, left = tonumber(ARGV[2]), tonumber(ARGV[3])
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for i = 1, #KEYS / 2 do
  local group = redis.pcall('GET', KEYS[2 * i - 1])
  local answer = 0
  if type(group) == 'string' and GROUPS[group] then
    local alive = '(' .. string.format('%.0f', now)
    local size = redis.pcall('ZCOUNT', KEYS[2 * i], alive, '+inf')
    answer = {group .. ' ' .. (type(size) == 'number' and size or 0)}
    local found = redis.pcall('ZRANGEBYSCORE', KEYS[2 * i], alive, '+inf', 'WITHSCORES', 'LIMIT',
      0, math.min(each, left))
    if not found.err then left = left - #found / 2 end
    for at = 1, found.err and 0 or #found, 2 do
      answer[#answer + 1] = string.format('%.0f', found[at + 1] - now) .. ' ' .. found[at]
    end
  end
  reply[i + 1] = answer
end
return reply
