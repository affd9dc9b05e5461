-- The second part of release.lua: another holder has the lock, or somebody waits for it.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence

if is_free then
  if not grant_next(waiter) then free() end
  return nonce .. (holder and ' released' or ' gone')
end
local head, left = nonce .. ' other ' .. clock()
