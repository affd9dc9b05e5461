-- Releases the lock and hands it to the next waiter, if there is one. Also removes the queue entry
-- of a waiter that has stopped waiting.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  1 nonce, 2 id, or its first 512 bytes, 3 queue entry to remove, or '',
--       4 not_after, in us on the server's clock, or '', last: protocol version;
--       between them, if the lock shall be left free before the next waiter gets it: 5 for how many
--       ms
-- Reply one string:
--       nonce released
--       nonce gone                                   the lock was not held
--       nonce other now pttl token waiters holder    another holder has the lock
--       nonce type                                   the key is not a lock
--       nonce late now                               not_after has passed; nothing was done

local nonce, id, entry = ARGV[1], ARGV[2], ARGV[3]
if ARGV[4] ~= '' then
  local now = clock()
  -- Report the time, because a caller with a wrong estimate would be late again.
  if now > ARGV[4] then return nonce .. ' late ' .. now end
end

if entry ~= '' then
  local removed = redis.pcall('LREM', KEYS[2], 0, entry)
  if type(removed) == 'table' and not string.find(removed.err, 'WRONGTYPE', 1, true) then
    redis.call('LREM', KEYS[2], 0, entry)
  end
end
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' then
  return string.find(holder.err, 'WRONGTYPE', 1, true) and nonce .. ' type'
    or redis.call('GET', KEYS[1])
end
-- A forced release knows only the first 512 bytes of the id, because scripts report no more.
local is_free = not holder or holder == id or string.sub(holder, 1, 512) == id
local waiter
if is_free then
  waiter = redis.pcall('LPOP', KEYS[2])
  if type(waiter) == 'table' then
    -- Treat a queue key of another type as empty; otherwise the lock could not be released. Any
    -- other error is raised by the second LPOP.
    waiter = not string.find(waiter.err, 'WRONGTYPE', 1, true) and redis.call('LPOP', KEYS[2])
  end
  if not waiter then
    free()
    return nonce .. (holder and ' released' or ' gone')
  end
end
