-- The usual hand-over: the first waiter has a subscriber, and the server's clock is ahead of the
-- last token. Follows the usual case of release.lua, and defines no functions either. Whatever is
-- unusual is left to release_contended.lua: then `waiter` has been removed from the queue, the
-- token has another TTL, and nothing else has changed. grant_next() in grant.lua does the same for
-- all cases.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  as for release.lua
-- Reply as for release.lua

if type(waiter) == 'string' then
  local call, pcall = redis.call, redis.pcall
  local px, channel, next_id = string.match(waiter, '^([1-9]%d*) (%S+) (.+)$')
  local now = ''
  if next_id and #px < 16 then
    local t = call('TIME')
    now = string.sub('000000000' .. t[1], -10) .. string.sub('00000' .. t[2], -6)
  end
  if ARGV[3] < now then
    local token_ttl = px + 3600000 -- as in notify.lua
    local last = pcall('SET', KEYS[3], now, 'PX', token_ttl, 'GET')
    local rises = not last or type(last) == 'string' and last < now
    -- The first grant of each ten seconds extends the TTL of the queue, and looks whether the fence
    -- shows a newer protocol version: tokens are times. Otherwise the fence need not be read,
    -- because the token of the holder exceeds what this lock has raised it to.
    local is_first = not last or rises and string.sub(last, 1, 9) ~= string.sub(now, 1, 9)
    local fence = is_first and pcall('GET', KEYS[4])
    if rises and (not fence or type(fence) == 'string' and fence < now) then
      -- as notify() in notify.lua
      local replicate = redis.set_repl
      if replicate then replicate(redis.REPL_NONE) end
      local message = now .. ' ' .. now .. ' ' .. px .. ' ' .. next_id
      -- Waiters of a single server also subscribe to the sharded channel of the same name. Patterns
      -- do not match it, so SPUBLISH counts only them, and nobody need be asked first. A cluster,
      -- whose fences have longer names, would also send the message to other nodes. Servers before
      -- Redis 7 have neither sharded channels nor a version number.
      local is_sharded = KEYS[4] == 'distlock:fence' and redis.REDIS_VERSION_NUM and replicate
      local receivers = is_sharded and pcall('SPUBLISH', channel, message)
      if type(receivers) ~= 'number' or receivers == 0 then
        local subscribers = pcall('PUBSUB', 'NUMSUB', channel)
        receivers = subscribers[2] and subscribers[2] > 0 and pcall('PUBLISH', channel, message)
      end
      if replicate then replicate(redis.REPL_ALL) end
      if type(receivers) == 'number' and receivers > 0 then
        call('SET', KEYS[1], next_id, 'PX', px)
        if is_first then pcall('PEXPIRE', KEYS[2], '60000') end -- as in notify.lua
        return nonce .. ' released'
      end
    end
    if not last then
      call('DEL', KEYS[3])
    elseif type(last) == 'string' then
      call('SET', KEYS[3], last, 'PX', token_ttl)
    end
  end
end
