-- Extends the TTL of many locks in one call. Uses PEXPIRE, because SET fails if the server is out
-- of memory.
-- KEYS  the lock keys, then the token keys to extend: a lock may be held for longer than these last
-- ARGV  1 nonce, 2 not_after, in us on the server's clock, then id and TTL in ms for each lock key,
--       TTL in ms for each token key, and the protocol version. After not_after, no TTL is
--       shortened: the holder may have a longer ttl now. Before, a TTL may be too long only if the
--       clock was set back. A TTL with a minus sign never shortens that of the key: the holder has
--       changed its ttl before.
-- Reply {'nonce now', element for each lock}: 1 renewed, 0 gone, -1 not a lock, or the id of
--       another holder
local locks = #ARGV - 3 - #KEYS
local t = redis.call('TIME')
local is_late = t[1] * 1000000 + t[2] > tonumber(ARGV[2])
local reply = {ARGV[1] .. ' ' .. t[1] .. string.sub('00000' .. t[2], -6)}
for i = 1, locks do
  local holder = redis.pcall('GET', KEYS[i])
  if holder == ARGV[2 * i + 1] then
    local ttl = ARGV[2 * i + 2]
    if is_late or string.byte(ttl) == 45 then
      ttl = math.max(redis.call('PTTL', KEYS[i]), math.abs(ttl))
    end
    reply[i + 1] = redis.call('PEXPIRE', KEYS[i], ttl)
  elseif not holder then
    -- A replica may lack the lock. This write has no effect, and is an error there.
    reply[i + 1] = redis.call('DEL', KEYS[i])
  elseif type(holder) == 'table' then
    if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
    reply[i + 1] = -1
  else
    -- As in report.lua: only a master may report another holder.
    local written = redis.pcall('LREM', KEYS[i], 0, '')
    if type(written) == 'table' and string.find(written.err, 'READONLY', 1, true) then
      return written
    end
    reply[i + 1] = string.sub(holder, 1, 512)
  end
end
for i = locks + 1, #KEYS do
  -- A token key of another type is not ours, and its owner may want it to have no expiry.
  if type(redis.pcall('GET', KEYS[i])) == 'string' then
    redis.call('PEXPIRE', KEYS[i], ARGV[locks + 2 + i])
  end
end
return reply
