-- Extends the TTL of many locks in one call. Uses PEXPIRE, because SET fails if the server is out
-- of memory.
-- KEYS  the lock keys, then the token keys to extend: a lock may be held for longer than these last
-- ARGV  1 nonce, then id and TTL in ms for each lock key, TTL in ms for each token key, and the
--       protocol version. A TTL with a minus sign never shortens that of the key: the holder has
--       changed its ttl, so this may be a delayed request with a shorter one.
-- Reply {'nonce now', element for each lock}: 1 renewed, 0 gone, -1 not a lock, or the id of
--       another holder
local locks = #ARGV - 2 - #KEYS
local t = redis.call('TIME')
local reply = {ARGV[1] .. ' ' .. t[1] .. string.sub('00000' .. t[2], -6)}
for i = 1, locks do
  local holder = redis.pcall('GET', KEYS[i])
  if holder == ARGV[2 * i] then
    local ttl = ARGV[2 * i + 1]
    if string.byte(ttl) == 45 then ttl = math.max(redis.call('PTTL', KEYS[i]), -ttl) end
    reply[i + 1] = redis.call('PEXPIRE', KEYS[i], ttl)
  elseif not holder then
    -- A replica may lack the lock. This write has no effect, and is an error there.
    reply[i + 1] = redis.call('DEL', KEYS[i])
  elseif type(holder) == 'table' then
    if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
    reply[i + 1] = -1
  else
    reply[i + 1] = string.sub(holder, 1, 512)
  end
end
for i = locks + 1, #KEYS do
  -- A token key of another type is not ours, and its owner may want it to have no expiry.
  if type(redis.pcall('GET', KEYS[i])) == 'string' then
    redis.call('PEXPIRE', KEYS[i], ARGV[locks + 1 + i])
  end
end
return reply
