//! The witness: asks the nodes again and again, past all proxies, for whom they keep the locks, and writes it down.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use redis::{Client, Connection};

use crate::{
    Outcome,
    history::{Event, Journal, Record, Said, now},
    pause,
    stage::{Stage, key_of},
};

const PACE: Duration = Duration::from_millis(30);
/// A node that takes longer has said nothing.
const PATIENCE: Duration = Duration::from_millis(200);

/// For each lock its holder, or nothing, and for how long it is kept.
const LOOK: &str = "
local said = {}
for _, key in ipairs(KEYS) do
  said[#said + 1] = redis.call('GET', key) or ''
  said[#said + 1] = redis.call('PTTL', key)
end
return said";

pub(crate) struct Witness {
    ended: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// One node as it is asked.
struct Line {
    client: Client,
    connection: Option<Connection>,
    away: Arc<AtomicBool>,
}

impl Witness {
    pub(crate) fn start(stage: &Stage, locks: u32, journal: Arc<Journal>) -> Outcome<Witness> {
        let line = |node| {
            let client = Client::open(stage.nodes.server(node).url())?;
            Ok(Line { client, connection: None, away: stage.away(node) })
        };
        let mut lines = (0..stage.len()).map(line).collect::<Outcome<Vec<_>>>()?;
        let ended = Arc::new(AtomicBool::new(false));
        let flag = ended.clone();
        let thread = thread::spawn(move || {
            while !flag.load(Ordering::Acquire) && look(&mut lines, locks, &journal).is_ok() {
                pause(PACE);
            }
        });
        Ok(Witness { ended, thread })
    }

    pub(crate) fn end(self) {
        self.ended.store(true, Ordering::Release);
        let _ = self.thread.join();
    }
}

fn look(lines: &mut [Line], locks: u32, journal: &Journal) -> Outcome {
    let began = now();
    let said: Vec<Option<Vec<Said>>> = lines.iter_mut().map(|line| line.ask(locks)).collect();
    let at = now();
    for lock in 1..=locks {
        let of = |node: &Option<Vec<Said>>| {
            node.as_ref().and_then(|said| said.get(lock as usize - 1)).cloned().unwrap_or(Said::Nothing)
        };
        let event = Event::Seen { began, said: said.iter().map(of).collect() };
        journal.write(&Record { at, seat: 0, lock, pid: std::process::id(), event })?;
    }
    Ok(())
}

impl Line {
    fn ask(&mut self, locks: u32) -> Option<Vec<Said>> {
        if self.away.load(Ordering::SeqCst) {
            self.connection = None;
            return None;
        }
        let said = self.try_ask(locks).ok();
        if said.is_none() {
            self.connection = None;
        }
        said
    }

    fn try_ask(&mut self, locks: u32) -> redis::RedisResult<Vec<Said>> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            empty => {
                let connection = self.client.get_connection_with_timeout(PATIENCE)?;
                connection.set_read_timeout(Some(PATIENCE))?;
                connection.set_write_timeout(Some(PATIENCE))?;
                empty.insert(connection)
            }
        };
        let keys: Vec<String> = (1..=locks).map(key_of).collect();
        let mut ask = redis::cmd("EVAL");
        ask.arg(LOOK).arg(keys.len()).arg(&keys);
        let said: Vec<(String, i64)> = ask.query(connection)?;
        Ok(said.into_iter().map(|(id, left)| read(id, left)).collect())
    }
}

fn read(id: String, left: i64) -> Said {
    // The key may have gone between the two questions, since the clock goes on.
    match u64::try_from(left) {
        Ok(left_ms) if !id.is_empty() => Said::Kept { id, left_ms },
        _ => Said::Free,
    }
}
