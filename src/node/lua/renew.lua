-- Push out the expiry of many locks in one call. PEXPIRE, not SET: it works when the server is out of memory.
-- KEYS  the lock keys
-- ARGV  1 nonce, then id and ttl in ms for each key
-- Reply {'nonce now', answer for each key}: 1 renewed, 0 gone, -1 not a lock any more, or the id of the other holder
local t = redis.call('TIME')
local reply = {ARGV[1] .. ' ' .. t[1] .. string.sub('00000' .. t[2], -6)}
for i = 1, #KEYS do
  local holder = redis.pcall('GET', KEYS[i])
  if holder == ARGV[2 * i] then
    reply[i + 1] = redis.call('PEXPIRE', KEYS[i], ARGV[2 * i + 1])
  elseif not holder then
    reply[i + 1] = 0
  elseif type(holder) == 'table' then
    if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
    reply[i + 1] = -1
  else
    reply[i + 1] = string.sub(holder, 1, 512)
  end
end
return reply
