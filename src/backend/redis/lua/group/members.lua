-- Groups: holders that have a lock together. While a group has the lock, the lock key contains the
-- name of the group. It expires with the member that expires last, so a client that knows only the
-- lock key respects all members.
-- KEYS  1 lock, 2 queue, 3 token, 4 fence, 5 members: a sorted set of ids by expiry, in ms on the
--       server's clock. A claim of n permits has n members: id, id#2, ..., id#n.

local GROUPS = {['distlock:read'] = true, ['distlock:permits'] = true}
-- maximum number of arguments in one command; Lua cannot unpack more than about 8,000
local ARGS_MAX = 4000

-- value of the lock key; false if the lock is free
local holder
-- number of members that have not expired; nil until counted, false if the members were lost
local size
-- what add_member has gathered for write_members: score, member, score, member, ...; the latest
-- score; and whether the group begins with these members
local added, latest, is_new = {}, 0, false

-- Calls a command. Returns nil if the key has an unexpected type, and raises any other error.
local function typed(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then redis.call(...) end
end

-- Milliseconds of a time in us, rounded down. A member whose score is not above that has expired.
local function in_ms(now) return tonumber(string.sub(now, 1, -4)) end

-- Whether a claim can have the lock now: a claim of n members of `group`, of which there may be
-- `limit`, or any number if that is 0; or of the lock alone, if `group` is false. A group without
-- members has lost them. How long one of them may still rely on the lock is then known only from
-- the expiry of the lock key, so nobody joins.
local function fits(now, group, limit, n)
  if not holder then return true end
  if holder ~= group then return false end
  if size == nil then
    size = typed('ZCOUNT', KEYS[5], '(' .. in_ms(now), '+inf')
    if not size or size == 0 then size = false end
  end
  return size and (limit == 0 or size + n <= limit)
end

-- Whether this id is a member now.
local function is_member(now, id)
  local expires = typed('ZSCORE', KEYS[5], id)
  return expires and tonumber(expires) > in_ms(now)
end

-- Begins the group with the first member if the lock is free.
local function add_member(now, group, id, n, px)
  local expires = in_ms(now) + 1 + px
  if not holder then holder, is_new, size = group, true, 0 end
  for i = 1, n do
    added[#added + 1] = expires
    added[#added + 1] = i == 1 and id or id .. '#' .. i
  end
  if expires > latest then latest = expires end
  if size then size = size + n end
end

-- Lets the lock key and the members expire with the member that expires last.
local function set_expiry(lock, members, last)
  redis.call('PEXPIREAT', lock, last)
  redis.call('PEXPIREAT', members, last)
end

-- Writes what add_member has gathered.
local function write_members(now)
  if #added == 0 then return end
  if is_new then
    -- Members that are left of an earlier group, whose lock key was deleted, must not come back.
    redis.call('DEL', KEYS[5])
  else
    redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', in_ms(now))
  end
  -- GT never shortens the time of a member, which may have another queue entry.
  for i = 1, #added, ARGS_MAX do
    redis.call('ZADD', KEYS[5], 'GT', unpack(added, i, math.min(i + ARGS_MAX - 1, #added)))
  end
  if is_new then
    -- The lock comes last: if the user may not call a command, nobody has taken it.
    redis.call('PEXPIREAT', KEYS[5], latest)
    redis.call('SET', KEYS[1], holder, 'PXAT', latest)
  else
    local last = redis.call('ZRANGE', KEYS[5], -1, -1, 'WITHSCORES')[2]
    if tonumber(last) <= latest then set_expiry(KEYS[1], KEYS[5], last) end
  end
  added, latest, is_new = {}, 0, false
end

-- The holder as replies report it: an id, or of a group its name, the number of its members, and
-- the member that expires last.
local function reported_holder(now)
  if not GROUPS[holder] then return holder end
  local count = typed('ZCOUNT', KEYS[5], '(' .. in_ms(now), '+inf')
  local last = typed('ZRANGE', KEYS[5], -1, -1)
  return holder .. ' ' .. (count or 0) .. ' ' .. (last and last[1] or '')
end
