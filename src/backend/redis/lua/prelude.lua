-- What scripts for one lock begin with, those of a mutex after their usual case. Defines little,
-- because each function that a script defines takes time.
-- KEYS  none

-- 2^53 - 1, the largest integer that Lua numbers represent exactly; every token is smaller
local TOKEN_MAX = '9007199254740991'
-- number of tokens after that of a grant which its client may use, to hand the lock over inside its
-- process, as in src/core/claim.rs
local RESERVED = 9999
-- number of tokens after the one in the token key that may have been used
local used = 0
-- the last token that was used, if it is known
local spent = ''

-- The server's clock in microseconds, as a string of 16 digits, even before 2001. It stays a
-- string, because it is mostly stored and sent, and strings of equal length compare like numbers.
local function clock()
  local t = redis.call('TIME')
  return string.sub('000000000' .. t[1], -10) .. string.sub('00000' .. t[2], -6)
end

-- Whether the value of a token key or of the fence is a token. Anything else is not ours.
local function is_token(value)
  return #value == 16 and value < TOKEN_MAX and not string.find(value, '%D')
end
