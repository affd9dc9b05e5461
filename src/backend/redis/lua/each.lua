-- Common start of scripts for several locks, because the functions of token.lua and
-- mutex/grant.lua work on the keys of one lock.
-- KEYS  lock, queue and token key of each lock, then the fence

-- From here on, `KEYS` are the keys of the selected lock, numbered as in all other scripts.
local all_keys, KEYS = KEYS, {[4] = KEYS[#KEYS]}

-- Selects the lock with this index, which begins with 1.
local function select_lock(index)
  for place = 1, 3 do KEYS[place] = all_keys[3 * index - 3 + place] end
end
