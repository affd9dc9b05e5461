-- Common end of the scripts for one lock: reports the holder. The part before it has set `holder`,
-- `head`, and perhaps `left`, its time left in ms.
-- KEYS  1 lock, 2 queue, 3 token
-- Reply `head`, then "pttl token waiters holder", with the holder last because it may be any text

-- A replica, or a former master, may still know an earlier holder. So this tries to write, without
-- an effect, because the key is a string. Other errors than that of a replica mean nothing here.
local written = redis.pcall('LREM', KEYS[1], 0, '')
if type(written) == 'table' and string.find(written.err, 'READONLY', 1, true) then
  return written
end

-- Whether a command failed because the key has an unexpected type. Other errors must be reported.
local function is_wrong_type(failure)
  return string.find(type(failure) == 'table' and failure.err or failure, 'WRONGTYPE', 1, true)
end

-- A token key or queue key of another type counts as empty, so the holder can still be reported.
-- Any other error is raised by the second call.
local read, token = pcall(redis.call, 'GET', KEYS[3])
if not read then token = not is_wrong_type(token) and redis.call('GET', KEYS[3]) end
local counted, waiters = pcall(redis.call, 'LLEN', KEYS[2])
if not counted then waiters = not is_wrong_type(waiters) and redis.call('LLEN', KEYS[2]) end
return head .. ' ' .. (left or redis.call('PTTL', KEYS[1])) .. ' '
  .. (string.match(token or '', '^%d+$') or 0) .. ' ' .. (waiters or 0) .. ' '
  .. string.sub(holder, 1, 512)
