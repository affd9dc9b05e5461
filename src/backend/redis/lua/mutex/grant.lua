-- Granting a free lock to the first waiter whose channel has a subscriber. Comes after the usual
-- case, in which nobody waits: each function that a script defines costs time.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence

-- What the token key holds while a lock is left free for clients that do not queue, and what those
-- who ask see as its holder
local LEFT_FREE = 'left free for other clients'

-- Grants the lock to the first waiter with a subscriber, beginning with `waiter`, which was removed
-- from the queue. Returns its id, or false if none can be granted the lock.
local function grant_next(waiter, now)
  for _ = 1, DEAD_MAX do
    waiter = waiter or redis.call('LPOP', KEYS[2])
    if not waiter then return false end
    local px, channel, id = string.match(waiter, '^([1-9]%d*) (%S+) (.+)$')
    -- After a forced release of a writer, the head may be a reader. If it is alive, it gets the
    -- lock by polling.
    local of_group = not id and string.match(waiter, '^distlock:%l+/%S+ (%S+) ')
    local must_stay = of_group and has_subscriber(of_group)
    -- The server rejects a larger expiry, which would fail the whole script. Our entries have none.
    -- Ask for subscribers first: nobody may hear of a grant that is not made. In a cluster, a
    -- message also reaches subscribers at other nodes, which its count does not include.
    if id and #px < 16 and has_subscriber(channel) then
      now = now or clock()
      -- pcall, because scripts are not rolled back: a token key of another type or a missing
      -- permission to publish must not stop a release halfway.
      local minted, token = pcall(next_token, now, px + TOKEN_EXTRA_MS)
      local receivers = minted and notify(channel, token .. ' ' .. now .. ' ' .. px .. ' ' .. id)
      must_stay = type(receivers) ~= 'number'
      if not must_stay and receivers > 0 then
        redis.call('SET', KEYS[1], id, 'PX', px)
        -- A waiter that joins behind others does not extend the TTL of the queue, so the first
        -- hand-over of each ten seconds does: tokens are times. An error changes nothing, because
        -- the lock has been granted.
        if string.sub(spent, 1, 9) ~= string.sub(now, 1, 9) then
          redis.pcall('PEXPIRE', KEYS[2], QUEUE_MS)
        end
        return id
      end
    end
    if must_stay then
      -- The queue key and its TTL went away with the last entry.
      if redis.call('LPUSH', KEYS[2], waiter) == 1 then redis.call('PEXPIRE', KEYS[2], QUEUE_MS) end
      return false
    end
    waiter = nil
  end
  return false
end
