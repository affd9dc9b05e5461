-- Granting what is free to the head of the queue, and to the waiters behind it as long as they fit.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence, 5 members

-- maximum number of grants, and of members, per call; otherwise a long queue of readers would
-- block the server
local GRANTS_MAX, MEMBERS_ADDED_MAX = 100, 1000

-- Returns claim window, channel and id of a queue entry, and for a claim of a group also the group,
-- its limit, and the number of members. Returns nothing if the entry is not valid.
local function parse(entry)
  local px, channel, id = string.match(entry, '^([1-9]%d*) (%S+) (.+)$')
  local group, limit, n = false, '0', '1'
  if not px then
    group, limit, n, px, channel, id =
      string.match(entry, '^(distlock:%l+)/(%d+)/([1-9]%d*),([1-9]%d*) (%S+) (.+)$')
  end
  -- The server rejects a larger expiry, which would fail the whole script. Our entries have none.
  if px and #px < 16 and (not group or GROUPS[group] and #n < 5 and #limit < 16) then
    return tonumber(px), channel, id, group, tonumber(limit), tonumber(n)
  end
end

-- Stops at the first waiter that is alive and does not fit, because nobody may pass it. Dead
-- waiters are removed. `own` is the entry of the caller, which needs no message and gets the lock
-- for `own_px`, with a token that is at least `own_from`. Returns the caller's token if it was
-- granted the lock, and whether there may be more to grant.
local function grant_next(now, own, own_px, own_from)
  local own_token, more
  local granted = 0
  for _ = 1, DEAD_MAX do
    local head = typed('LINDEX', KEYS[2], 0)
    if not head then break end
    local px, channel, id, group, limit, n = parse(head)
    -- A request that is carried out late, or twice, leaves an entry of a client that has the lock.
    local is_left = head ~= own and group and group == holder and not is_new and is_member(now, id)
    if not px or is_left or (head ~= own and not has_subscriber(channel)) then
      redis.call('LPOP', KEYS[2])
    else
      -- Check this before the message is sent: nobody may hear of a place that does not exist.
      if not fits(now, group, limit, n) then break end
      more = granted == GRANTS_MAX or #added >= 2 * MEMBERS_ADDED_MAX
      if more then break end
      local from = now
      if head == own then px, from = own_px, own_from end
      -- LPOP comes first, because the server checks its memory limit only until a script's first
      -- write, and not for LPOP.
      redis.call('LPOP', KEYS[2])
      -- pcall, because scripts are not rolled back: a token key of another type or a missing
      -- permission to publish must not stop a release halfway.
      local minted, token = pcall(next_token, from, px + TOKEN_EXTRA_MS)
      local receivers
      if minted and head == own then
        receivers, own_token = 1, token
      elseif minted then
        receivers = notify(channel, token .. ' ' .. now .. ' ' .. px .. ' ' .. id)
      end
      if type(receivers) ~= 'number' then
        -- The queue key and its TTL went away with the last entry.
        if redis.call('LPUSH', KEYS[2], head) == 1 then
          redis.call('PEXPIRE', KEYS[2], QUEUE_MS)
        end
        break
      end
      if receivers > 0 then
        granted = granted + 1
        if group then
          add_member(now, group, id, n, px)
        else
          redis.call('SET', KEYS[1], id, 'PX', px)
          holder = id
          break
        end
      end
    end
  end
  write_members(now)
  return own_token, more
end
