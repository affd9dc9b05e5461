//! The poller: asks every node, bypassing the proxies, for the holder of each lock, and records the
//! replies.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use redis::Client;

use crate::{
    Outcome,
    cluster::{Cluster, Servers, lock_key},
    database,
    history::{Event, Journal, Record, Said, now},
    pause,
};

const POLL_INTERVAL: Duration = Duration::from_millis(30);
/// A node that takes longer counts as not replying.
const POLL_TIMEOUT: Duration = Duration::from_millis(200);

/// Returns the holder and the remaining lifetime of each lock; an empty holder if it is free.
pub(crate) const HOLDERS_AND_TTLS: &str = "
local said = {}
for _, key in ipairs(KEYS) do
  said[#said + 1] = redis.call('GET', key) or ''
  said[#said + 1] = redis.call('PTTL', key)
end
return said";

pub(crate) struct Poller {
    ended: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// The poller's connection to a node.
struct NodeConnection {
    connect: Box<dyn Fn() -> Outcome<Ask> + Send>,
    connection: Option<Ask>,
    down: Arc<AtomicBool>,
}

/// Asks a node about this number of locks.
type Ask = Box<dyn FnMut(u32) -> Outcome<Vec<Said>> + Send>;

impl Poller {
    pub(crate) fn start(cluster: &Cluster, locks: u32, journal: Arc<Journal>) -> Outcome<Poller> {
        let connect = |node| {
            let connect: Box<dyn Fn() -> Outcome<Ask> + Send> = match &cluster.servers {
                Servers::Redis(nodes) => {
                    let client = Client::open(nodes.server(node).url())?;
                    Box::new(move || connect_to_redis(&client))
                }
                Servers::Database(database) => {
                    let url = database.server.url();
                    Box::new(move || {
                        let mut connection = database::connect(&url, POLL_TIMEOUT)?;
                        Ok(Box::new(move |locks| Ok(database::ask(&mut connection, locks)?)))
                    })
                }
            };
            Ok(NodeConnection { connect, connection: None, down: cluster.down(node) })
        };
        let mut nodes = (0..cluster.len()).map(connect).collect::<Outcome<Vec<_>>>()?;
        let ended = Arc::new(AtomicBool::new(false));
        let flag = ended.clone();
        let thread = thread::spawn(move || {
            while !flag.load(Ordering::Acquire) && poll(&mut nodes, locks, &journal).is_ok() {
                pause(POLL_INTERVAL);
            }
        });
        Ok(Poller { ended, thread })
    }

    pub(crate) fn end(self) {
        self.ended.store(true, Ordering::Release);
        let _ = self.thread.join();
    }
}

fn poll(nodes: &mut [NodeConnection], locks: u32, journal: &Journal) -> Outcome {
    let began = now();
    let said: Vec<Option<Vec<Said>>> = nodes.iter_mut().map(|node| node.ask(locks)).collect();
    let at = now();
    for lock in 1..=locks {
        let reply = |node: &Option<Vec<Said>>| {
            node.as_ref()
                .and_then(|said| said.get(lock as usize - 1))
                .cloned()
                .unwrap_or(Said::Nothing)
        };
        let event = Event::Seen { began, said: said.iter().map(reply).collect() };
        journal.write(&Record { at, seat: 0, lock, pid: std::process::id(), event })?;
    }
    Ok(())
}

impl NodeConnection {
    fn ask(&mut self, locks: u32) -> Option<Vec<Said>> {
        if self.down.load(Ordering::SeqCst) {
            self.connection = None;
            return None;
        }
        let said = self.try_ask(locks).ok();
        if said.is_none() {
            self.connection = None;
        }
        said
    }

    fn try_ask(&mut self, locks: u32) -> Outcome<Vec<Said>> {
        let ask = match &mut self.connection {
            Some(ask) => ask,
            empty => empty.insert((self.connect)()?),
        };
        ask(locks)
    }
}

fn connect_to_redis(client: &Client) -> Outcome<Ask> {
    let mut connection = client.get_connection_with_timeout(POLL_TIMEOUT)?;
    connection.set_read_timeout(Some(POLL_TIMEOUT))?;
    connection.set_write_timeout(Some(POLL_TIMEOUT))?;
    Ok(Box::new(move |locks| {
        let keys: Vec<String> = (1..=locks).map(lock_key).collect();
        let mut request = redis::cmd("EVAL");
        request.arg(HOLDERS_AND_TTLS).arg(keys.len()).arg(&keys);
        let said: Vec<(String, i64)> = request.query(&mut connection)?;
        Ok(said.into_iter().map(|(id, left)| parse_reply(id, left)).collect())
    }))
}

pub(crate) fn parse_reply(id: String, left: i64) -> Said {
    // The key may have expired between the two commands, because the clock goes on.
    match u64::try_from(left) {
        Ok(left_ms) if !id.is_empty() => Said::Kept { id, left_ms },
        _ => Said::Free,
    }
}
