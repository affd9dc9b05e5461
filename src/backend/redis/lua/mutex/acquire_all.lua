-- Acquires all locks if all are free and nobody waits for them, otherwise none. Does not wait.
-- KEYS  lock, queue and token key of each lock, then the fence
-- ARGV  1 nonce, 2 TTL in ms, 3 not_after, in us on the server's clock, 4 repair TTL in ms,
--       5 TTL of the token keys in ms, then the id for each lock, then the protocol version
--       repair  TTL to set if the key of a holder has none; 0 for none
-- Reply one string:
--       nonce held now token ...
--             the token of each lock
--       nonce busy now index pttl token waiters holder
--             the first lock that is not free; the index begins with 0
--       nonce type now index
--             the key is not a lock
--       nonce late now
--             not_after has passed; nothing was done

-- Comes first in the script, as acquire.lua does: the usual case finds no lock, no queue, and no
-- token that limits a new one. All else is left to acquire_all_contended.lua.

local nonce, ttl, count = ARGV[1], ARGV[2], #ARGV - 6
-- as clock() in prelude.lua
local t = redis.call('TIME')
local now = t[1] .. t[2]
if #now < 16 then now = string.sub('000000000' .. t[1], -10) .. string.sub('00000' .. t[2], -6) end
if now > ARGV[3] then return nonce .. ' late ' .. now end

if redis.call('EXISTS', unpack(KEYS, 1, #KEYS - 1)) == 0 then
  local fence = redis.call('GET', KEYS[#KEYS])
  if not fence or fence < now then
    -- The tokens come first, as in acquire_all_contended.lua.
    -- Each use of a global costs time, and there are many locks.
    local call, keys, ids, token_ttl = redis.call, KEYS, ARGV, ARGV[5]
    for i = 1, count do call('SET', keys[3 * i], now, 'PX', token_ttl) end
    for i = 1, count do call('SET', keys[3 * i - 2], ids[5 + i], 'PX', ttl) end
    return nonce .. ' held ' .. now .. string.rep(' ' .. now, count)
  end
end
