// Locks with one Node library, as told on standard input: client.js LIBRARY PORT NAME.

import { createRequire } from "node:module";
import readline from "node:readline";

// The libraries are in the folder that the test names, not beside this file.
const require = createRequire(process.env.DISTLOCK_MODULES + "/");
const [library, port, name] = process.argv.slice(2);
const { Redis } = require("ioredis");
const server = new Redis(Number(port));

// Returns how to release the lock, or null if another client has it.
async function attempt(ttl) {
  if (library === "redis-semaphore") {
    const { Mutex } = require("redis-semaphore");
    const mutex = new Mutex(server, name.replace(/^mutex:/, ""), {
      lockTimeout: ttl * 1000,
      acquireAttemptsLimit: 1,
      refreshInterval: 0,
    });
    return (await mutex.tryAcquire()) ? () => mutex.release() : null;
  }
  const { Redlock, default: Default } = require(library);
  const redlock = new (Redlock ?? Default)([server], { retryCount: 0 });
  try {
    const lock = await redlock.acquire([name], ttl * 1000);
    return () => lock.release();
  } catch (error) {
    if (error.name !== "ExecutionError") throw error;
    return null;
  }
}

async function acquire(ttl) {
  for (;;) {
    const release = await attempt(ttl);
    if (release) return release;
    await new Promise((wake) => setTimeout(wake, 1));
  }
}

let release;
const commands = {
  try: async (ttl) => ((release = await attempt(ttl)) ? "held" : "busy"),
  acquire: async (ttl) => ((release = await acquire(ttl)), "held"),
  release: async () => (await release(), "done"),
  count: async (rounds) => {
    for (let round = 0; round < rounds; round++) {
      const release = await acquire(30);
      const count = Number(await server.get("count"));
      await server.set("count", count + 1);
      await release();
    }
    return "done";
  },
};

console.log("ready");
for await (const line of readline.createInterface({ input: process.stdin })) {
  const [command, ...words] = line.split(" ");
  console.log(await commands[command](...words.map(Number)));
}
server.disconnect();
