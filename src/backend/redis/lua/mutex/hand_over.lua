-- The usual hand-over: the first waiter has a subscriber, and the server's clock is ahead of the
-- fence and of the token. Follows the usual case of release.lua, and defines no functions either.
-- Whatever is unusual is left to release_contended.lua: then `waiter` has been removed from the
-- queue, and nothing else has changed. grant_next() in grant.lua does the same for all cases.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  as for release.lua
-- Reply as for release.lua

if type(waiter) == 'string' then
  local call, pcall, spent = redis.call, redis.pcall, ARGV[3]
  local px, channel, next_id = string.match(waiter, '^([1-9]%d*) (%S+) (.+)$')
  local subscribers = next_id and #px < 16 and pcall('PUBSUB', 'NUMSUB', channel)
  if subscribers and subscribers[2] and subscribers[2] > 0 then
    local t = call('TIME')
    local now = string.sub('000000000' .. t[1], -10) .. string.sub('00000' .. t[2], -6)
    local fence = pcall('GET', KEYS[4])
    local is_above = not fence or type(fence) == 'string' and fence < now
    local token_ttl = px + 3600000 -- as in notify.lua
    local last = is_above and spent < now and pcall('SET', KEYS[3], now, 'PX', token_ttl, 'GET')
    if type(last) == 'string' and last >= now then
      call('SET', KEYS[3], last, 'PX', token_ttl)
    elseif type(last) == 'string' then
      local replicate = redis.set_repl
      if replicate then replicate(redis.REPL_NONE) end
      local message = now .. ' ' .. now .. ' ' .. px .. ' ' .. next_id
      local receivers = pcall('PUBLISH', channel, message)
      if replicate then replicate(redis.REPL_ALL) end
      if type(receivers) == 'number' and receivers > 0 then
        call('SET', KEYS[1], next_id, 'PX', px)
        if string.sub(spent, 1, 9) ~= string.sub(now, 1, 9) then
          pcall('PEXPIRE', KEYS[2], '60000') -- as in notify.lua
        end
        return nonce .. ' released'
      end
    end
  end
end
