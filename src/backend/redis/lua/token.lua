-- Creating fencing tokens. In the usual cases of a mutex, acquire.lua, hand_over.lua and
-- acquire_all.lua do it themselves: the token is the time then.
-- KEYS  3 token, 4 fence
-- ARGV  the last one is the protocol version of the client
-- Reply none

-- Returns the smallest token that is at least `from`, and larger than the `n` after `last`, if that
-- is a token.
local function token_above(last, from, n)
  if n == 0 and last < from or not is_token(last) then return from end
  if last + n < tonumber(from) then return from end
  return string.format('%016.0f', last + n + 1)
end

-- Returns the next fencing token and stores it in the token key with this TTL. It exceeds the fence
-- and the tokens of the lock that were used. It is at least `from`, which is not behind the
-- server's clock, so that tokens keep rising when both keys are lost.
local function next_token(from, ttl)
  from = token_above(spent, from, 0)
  local fence = redis.call('GET', KEYS[4])
  if fence and fence >= from then
    local version = string.match(fence, '^v(%d+) ')
    if version and version ~= ARGV[#ARGV] then
      error('this database is used with version ' .. version .. ' of the distlock protocol')
    end
    from = token_above(fence, from, 0)
  end
  local last = redis.call('SET', KEYS[3], from, 'PX', ttl, 'GET')
  if not last then return from end
  local token = token_above(last, from, used)
  if token ~= from then redis.call('SET', KEYS[3], token, 'PX', ttl) end
  return token
end
