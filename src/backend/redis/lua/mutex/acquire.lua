-- Acquires the lock. If it is held, reports the holder, and joins or leaves the queue if asked to.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence
-- ARGV  1 nonce, 2 id, 3 TTL in ms, 4 not_after, in us on the server's clock, 5 repair TTL in ms,
--       6 TTL of the token key in ms, last: protocol version;
--       after the fifth, unless mode is try and the server decides alone: 6 mode,
--       7 queue entry "claim-ms channel id", 8 token_min, 16 digits: minimum token, so that several
--       nodes grant the same one; the TTL of the token key is the ninth then
--       mode    try: do not wait         join: enter the queue (first request)
--               look: poll (later ones)  leave: leave the queue (last request)
--               join-heard: as join; the server is known to have a subscriber for the entry
--       repair  TTL to set if the holder's key has none; 0 for none
-- Reply one string, which costs only one allocation:
--       nonce held now token
--       nonce fenced now
--             as held; the token is now, and the fence has risen to it already
--       nonce busy now pttl token waiters holder
--             for try and leave; token is the last one given
--       nonce queued now pttl position state holder
--             for join and look; state is the sum of 1 if this request entered the queue,
--             and 2 if the entry's channel has no subscriber here, which join-heard need not
--             report; pttl is -3 if this request entered the queue behind others
--       nonce type now
--             the key is not a lock
--       nonce late now
--             not_after has passed; nothing was done

-- Comes first in the script, because each function that a script defines takes time. The usual
-- cases need none: a first request finds neither lock nor queue, and no token that limits the new
-- one; or it joins the queue of a held lock. All else is left to acquire_contended.lua.

local nonce, id, ttl, token_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[6]
local mode, entry, token_min = 'try', '', ''
local call = redis.call
-- as clock() in prelude.lua
local t = call('TIME')
local now = t[1] .. t[2]
if #now < 16 then now = string.sub('000000000' .. t[1], -10) .. string.sub('00000' .. t[2], -6) end
if now > ARGV[4] then return nonce .. ' late ' .. now end
local from, holder = now

-- A server that decides alone raises the fence at once, so that the release need not.
if #ARGV == 7 then
  if call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) == 0 then
    local fence = call('SET', KEYS[4], now, 'GET')
    if not fence or fence < now then
      call('SET', KEYS[3], now, 'PX', token_ttl)
      call('SET', KEYS[1], id, 'PX', ttl)
      return nonce .. ' fenced ' .. now
    end
    call('SET', KEYS[4], fence)
  end
else
  mode, entry, token_min, token_ttl = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
  if token_min > now then from = token_min end
end

-- A client that has waited before joins the queue with its first request. It usually finds the lock
-- held, so read the holder first.
local is_heard = mode == 'join-heard'
if is_heard then mode = 'join' end
if mode == 'join' then holder = redis.pcall('GET', KEYS[1]) end
if type(holder) == 'string' and holder ~= id then
  local place = call('RPUSH', KEYS[2], entry) - 1
  -- Behind others, it learns the time left when it polls. grant_next and the polls extend the TTL
  -- of the queue.
  local left = '-3'
  if place == 0 then
    left = call('PTTL', KEYS[1])
    if left == -1 and ARGV[5] ~= '0' then
      call('PEXPIRE', KEYS[1], ARGV[5])
      left = ARGV[5]
    end
    call('PEXPIRE', KEYS[2], '60000') -- as in notify.lua
  end
  local state = 1
  if not is_heard then
    -- as has_subscriber() in notify.lua
    local reply = redis.pcall('PUBSUB', 'NUMSUB', string.match(entry, '^%d+ (%S+)') or '')
    if reply[2] and reply[2] <= 0 then state = 3 end
  end
  return nonce .. ' queued ' .. now .. ' ' .. left .. ' ' .. place .. ' ' .. state .. ' '
    .. string.sub(holder, 1, 512)
end
if not holder and #ARGV > 7 and (mode == 'try' or mode == 'join')
  and call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) == 0 then
  local fence = call('GET', KEYS[4])
  if not fence or fence < from then
    call('SET', KEYS[3], from, 'PX', token_ttl)
    call('SET', KEYS[1], id, 'PX', ttl)
    return nonce .. ' held ' .. now .. ' ' .. from
  end
end
