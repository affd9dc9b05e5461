-- The usual case of a write lock, before anything else is defined: the caller holds it, and nobody
-- waits.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  as for group/release.lua
-- Reply as for group/release.lua

local nonce, id, entry = ARGV[1], ARGV[2], ARGV[3]
local now = clock()
if ARGV[4] ~= '' and now > ARGV[4] then return nonce .. ' late ' .. now end
local value = redis.pcall('GET', KEYS[1])
if value == id and entry == '' and redis.pcall('LLEN', KEYS[2]) == 0 then
  free()
  return nonce .. ' released'
end
