-- Freeing a lock that nobody waits for.
-- KEYS  1 lock, 3 token, 4 fence

-- Deletes the lock and its token, after raising the fence to the token. Nothing here may fail,
-- because scripts are not rolled back. A token that cannot raise the fence is kept, and so is a key
-- of another type.
local function free()
  local token = redis.pcall('GET', KEYS[3])
  local is_safe = type(token) == 'string'
  if is_safe and is_token(token) then
    if used > 0 then token = string.format('%016.0f', token + used) end
    if token < spent then token = spent end
    local fence = redis.pcall('SET', KEYS[4], token, 'GET')
    if type(fence) == 'table' then
      is_safe = false
    elseif fence and fence >= token then
      is_safe = not string.find(fence, '^v%d')
      if not is_safe or is_token(fence) then redis.call('SET', KEYS[4], fence) end
    end
  end
  if is_safe then redis.call('DEL', KEYS[1], KEYS[3]) else redis.call('DEL', KEYS[1]) end
end
