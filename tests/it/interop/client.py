"""Locks with one Python library, as told on standard input: client.py LIBRARY PORT NAME."""

import logging
import sys
import time

import redis

logging.disable(logging.CRITICAL)
library, port, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
server = redis.Redis(port=port)


def attempt(ttl):
    """Returns how to release the lock, or None if another client has it."""
    if library == "redis-py":
        lock = server.lock(name, timeout=ttl)
        return lock.release if lock.acquire(blocking=False) else None
    if library == "python-redis-lock":
        import redis_lock

        lock = redis_lock.Lock(server, name.removeprefix("lock:"), expire=ttl)
        return lock.release if lock.acquire(blocking=False) else None
    if library == "redlock-py":
        import redlock

        manager = redlock.Redlock([server], retry_count=1, retry_delay=0.001)
        lock = manager.lock(name, ttl * 1000)
        return (lambda: manager.unlock(lock)) if lock else None
    if library == "pottery":
        import pottery

        lock = pottery.Redlock(
            key=name.removeprefix("redlock:"), masters={server}, auto_release_time=ttl
        )
        return lock.release if lock.acquire(blocking=False) else None
    raise ValueError(library)


def acquire(ttl):
    while not (release := attempt(ttl)):
        time.sleep(0.001)
    return release


print("ready", flush=True)
for line in sys.stdin:
    command, *words = line.split()
    reply = "done"
    if command == "try":
        release = attempt(int(words[0]))
        reply = "held" if release else "busy"
    elif command == "acquire":
        release = acquire(int(words[0]))
        reply = "held"
    elif command == "release":
        release()
    elif command == "count":
        for _ in range(int(words[0])):
            release = acquire(30)
            count = int(server.get("count") or 0)
            server.set("count", count + 1)
            release()
    elif command == "wait":  # python-redis-lock only: its own way to wait
        import redis_lock

        lock = redis_lock.Lock(server, name.removeprefix("lock:"), expire=30)
        reply = "held" if lock.acquire(timeout=int(words[0])) else "busy"
        release = lock.release
    elif command == "reset_all":  # python-redis-lock only
        import redis_lock

        redis_lock.reset_all(server)
    print(reply, flush=True)
