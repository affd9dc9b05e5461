-- Releases the lock and hands it to the next waiter, if there is one. Also removes the queue entry
-- of a waiter that has stopped waiting.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  usually 1 nonce, 2 id, 3 token of the hold, or '' if the fence has risen to it already,
--       4 protocol version; otherwise
--       1 nonce, 2 id, or its first 512 bytes, 3 queue entry to remove, or '',
--       4 not_after, in us on the server's clock, or '', last: protocol version;
--       between them, if the lock shall be left free before the next waiter gets it: 5 for how many
--       ms
-- Reply one string:
--       nonce released
--       nonce gone                                   the lock was not held
--       nonce other now pttl token waiters holder    another holder has the lock
--       nonce type                                   the key is not a lock
--       nonce late now                               not_after has passed; nothing was done

-- Comes first in the script, because each function that a script defines takes time. The usual case
-- needs none: the caller holds the lock, and nobody waits. All else is left to
-- release_contended.lua.

local nonce, id = ARGV[1], ARGV[2]
local holder, waiter
if #ARGV == 4 then
  holder = redis.pcall('GET', KEYS[1])
  -- LPOP is the first write, because a server that is out of memory permits it, and SET after it.
  if holder == id then waiter = redis.pcall('LPOP', KEYS[2]) end
  if waiter == false then
    local token = ARGV[3]
    local fence = token ~= '' and redis.pcall('SET', KEYS[4], token, 'GET')
    if not fence or type(fence) == 'string' and fence < token then
      redis.call('DEL', KEYS[1], KEYS[3])
      return nonce .. ' released'
    end
    -- free() in free.lua decides whether the fence stays as it was.
    if type(fence) == 'string' then redis.call('SET', KEYS[4], fence) end
  end
end
