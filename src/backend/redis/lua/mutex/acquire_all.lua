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

local nonce, ttl, count = ARGV[1], ARGV[2], #ARGV - 6
local now = clock()
if now > ARGV[3] then return nonce .. ' late ' .. now end

-- Locks that an earlier request of the same claims has acquired
local own = {}
local holder, at
for i = 1, count do
  select_lock(i)
  holder, at = redis.pcall('GET', KEYS[1]), i - 1
  if type(holder) == 'table' then
    if not string.find(holder.err, 'WRONGTYPE', 1, true) then return holder end
    return nonce .. ' type ' .. now .. ' ' .. at
  end
  if not holder then used = RESERVED end -- as in acquire_contended.lua
  if not holder and redis.call('LLEN', KEYS[2]) > 0 then
    -- As in acquire_contended.lua: a lock that is free belongs to its first waiter.
    if redis.pcall('GET', KEYS[3]) == LEFT_FREE then
      holder = LEFT_FREE
    else
      holder = grant_next(redis.call('LPOP', KEYS[2]), now)
    end
  end
  if holder == ARGV[5 + i] then
    own[i] = true
  elseif holder then
    break
  end
  holder = nil
end

if not holder then
  local reply = {nonce, 'held', now}
  -- The tokens come first: if one cannot be stored, no lock may have been taken, because scripts
  -- are not rolled back.
  for i = 1, count do
    select_lock(i)
    used = own[i] and 0 or RESERVED
    reply[3 + i] = next_token(now, ARGV[5])
  end
  for i = 1, count do
    select_lock(i)
    -- Never shorten the TTL, because this may be a delayed request.
    if not own[i] then
      redis.call('SET', KEYS[1], ARGV[5 + i], 'PX', ttl)
    elseif redis.call('PTTL', KEYS[1]) < tonumber(ttl) then
      redis.call('PEXPIRE', KEYS[1], ttl)
    end
  end
  return table.concat(reply, ' ')
end

local left = redis.call('PTTL', holder == LEFT_FREE and KEYS[3] or KEYS[1])
if left == -1 and ARGV[4] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  left = ARGV[4]
end
local head = nonce .. ' busy ' .. now .. ' ' .. at
