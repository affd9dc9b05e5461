-- What all kinds of locks need to serve their queue. Comes after the usual case, in which nobody
-- waits.
-- KEYS  none

-- how much longer than its lock a token key is kept: a lock that expires does not raise the fence
local TOKEN_EXTRA_MS = 3600000
local QUEUE_MS = '60000' -- TTL of a queue, longer than any poll interval
-- maximum number of entries skipped per call; otherwise a million dead entries would block the
-- server
local DEAD_MAX = 1000

-- Whether a client is subscribed to the channel itself. Pattern subscribers also receive what is
-- published, so a monitoring client would make dead waiters look alive. If PUBSUB is not permitted,
-- returns true, and the count that PUBLISH returns must decide.
local function has_subscriber(channel)
  local reply = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return not reply[2] or reply[2] > 0
end

-- Sends a message to a waiter. Returns the number of receivers, or an error.
local function notify(channel, message)
  -- Do not replicate the message. A waiter may still be subscribed to a former master that has
  -- become a replica, and would take the copy for a grant by its own server. Some servers have no
  -- such switch, and do not replicate messages of scripts.
  local replicate = redis.set_repl
  if replicate then replicate(redis.REPL_NONE) end
  local receivers = redis.pcall('PUBLISH', channel, message)
  if replicate then replicate(redis.REPL_ALL) end
  return receivers
end
