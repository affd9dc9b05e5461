-- The usual case of a write lock, before anything else is defined: it is free, and nobody waits.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  as for group/acquire.lua
-- Reply as for group/acquire.lua

local nonce, id, ttl, mode = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[6]
local now = clock()
if now > ARGV[4] then return nonce .. ' late ' .. now end
-- how much longer than its lock a token key is kept, as in notify.lua
local token_ttl = ttl + 3600000
local from = now > ARGV[11] and now or ARGV[11]

local value = redis.pcall('GET', KEYS[1])
-- A mutex of this name may have expired.
if not value then used = RESERVED end
local is_first = mode == 'try' or mode == 'join'
if not value and ARGV[8] == '' and is_first and redis.call('LLEN', KEYS[2]) == 0 then
  local token = next_token(from, token_ttl)
  redis.call('SET', KEYS[1], id, 'PX', ttl)
  return nonce .. ' held ' .. now .. ' ' .. token
end
