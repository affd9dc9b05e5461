//! `FakeNode`: a server that understands exactly the commands that the library sends, on a clock of
//! its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use super::{
    redis_scripts::{Call, Flaw, Reply, Script},
    store::{Bytes, Keys},
};

/// Each script with its SHA-1 hash.
static SCRIPTS: LazyLock<Vec<(String, Script)>> = LazyLock::new(|| {
    let hash = |script: Script| redis::Script::new(script.text()).get_hash().to_owned();
    Script::ALL.into_iter().map(|script| (hash(script), script)).collect()
});

const LOADING: &str = "LOADING Redis is loading the dataset in memory";
const MISCONF: &str = "MISCONF Redis is configured to save RDB snapshots, but cannot";

/// Which requests a server refuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    #[default]
    Normal,
    /// Out of memory.
    Full,
    /// Still reading its data.
    Loading,
    /// Not able to write to its disk, so it refuses writes.
    ReadOnly,
}

/// A connection, as the server knows it.
pub(crate) type Peer = u64;

#[derive(Clone, Debug, Default)]
pub(crate) struct FakeNode {
    pub(crate) keys: Keys,
    pub(crate) mode: Mode,
    pub(crate) flaw: Option<Flaw>,
    /// The `run_id` of INFO, and when this run started on the server's clock.
    pub(crate) run_id: u64,
    pub(crate) up_since_us: u64,
    loaded_scripts: BTreeSet<String>,
    channels: BTreeMap<Bytes, Vec<Peer>>,
}

/// Effects of a request.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) reply: Bytes,
    /// Messages for subscribers.
    pub(crate) messages: Vec<(Peer, Bytes)>,
    /// The string keys that were written or deleted.
    pub(crate) changed_keys: BTreeSet<Bytes>,
}

impl FakeNode {
    /// Restarts the server with these keys.
    pub(crate) fn restart(&mut self, run_id: u64, now_us: u64, keys: Keys) {
        let flaw = self.flaw;
        let loaded_scripts = BTreeSet::new();
        let channels = BTreeMap::new();
        *self = FakeNode {
            keys,
            mode: Mode::Normal,
            flaw,
            run_id,
            up_since_us: now_us,
            loaded_scripts,
            channels,
        };
    }

    /// Forgets the scripts, as `SCRIPT FLUSH` does.
    pub(crate) fn flush_scripts(&mut self) {
        self.loaded_scripts.clear();
    }

    pub(crate) fn disconnect(&mut self, peer: Peer) {
        for peers in self.channels.values_mut() {
            peers.retain(|other| *other != peer);
        }
        self.channels.retain(|_, peers| !peers.is_empty());
    }

    pub(crate) fn execute(&mut self, peer: Peer, request: &[Bytes], now_us: u64) -> Outcome {
        let mut outcome = Outcome::default();
        let reply = self.reply(peer, request, now_us, &mut outcome);
        reply.encode(&mut outcome.reply);
        outcome
    }

    fn reply(
        &mut self,
        peer: Peer,
        request: &[Bytes],
        now_us: u64,
        outcome: &mut Outcome,
    ) -> Reply {
        let Some((command, args)) = request.split_first() else {
            return Reply::Error("ERR no command".into());
        };
        let command = String::from_utf8_lossy(command).to_ascii_uppercase();
        match (command.as_str(), args) {
            ("TIME", []) => {
                let parts = [now_us / 1_000_000, now_us % 1_000_000];
                Reply::Array(parts.map(|part| Reply::Text(part.to_string())).to_vec())
            }
            ("INFO", [section]) => {
                Reply::Text(self.info(&String::from_utf8_lossy(section), now_us))
            }
            ("PING", []) if self.is_subscribed(peer) => {
                Reply::Array(vec![Reply::Text("pong".into()), Reply::Text("".into())])
            }
            ("PING", []) => Reply::Status("PONG".into()),
            ("SUBSCRIBE", [channel]) => {
                self.channels.entry(channel.clone()).or_default().push(peer);
                Reply::Array(vec![
                    Reply::Text("subscribe".into()),
                    Reply::Bulk(channel.clone()),
                    Reply::Int(1),
                ])
            }
            ("EVALSHA", [hash, rest @ ..]) => {
                let hash = String::from_utf8_lossy(hash).into_owned();
                match SCRIPTS.iter().find(|(known, _)| *known == hash) {
                    Some((_, script)) if self.loaded_scripts.contains(&hash) => {
                        self.eval(*script, rest, now_us, outcome)
                    }
                    _ => Reply::Error("NOSCRIPT No matching script. Please use EVAL.".into()),
                }
            }
            ("EVAL", [text, rest @ ..]) => {
                match SCRIPTS.iter().find(|(_, script)| script.text().as_bytes() == text) {
                    Some((hash, script)) => {
                        self.loaded_scripts.insert(hash.clone());
                        self.eval(*script, rest, now_us, outcome)
                    }
                    None => {
                        Reply::Error("ERR this server knows only the scripts of the library".into())
                    }
                }
            }
            (other, _) => Reply::Error(format!("ERR unknown command '{other}'")),
        }
    }

    fn is_subscribed(&self, peer: Peer) -> bool {
        self.channels.values().any(|peers| peers.contains(&peer))
    }

    fn info(&self, section: &str, now_us: u64) -> String {
        match section {
            "server" => {
                // As a real server does, which rounds both moments down to whole seconds.
                let uptime = now_us / 1_000_000 - self.up_since_us / 1_000_000;
                format!("# Server\r\nrun_id:{:040x}\r\nuptime_in_seconds:{uptime}\r\n", self.run_id)
            }
            _ => "# Replication\r\nrole:master\r\n".into(),
        }
    }

    fn eval(
        &mut self,
        script: Script,
        rest: &[Bytes],
        now_us: u64,
        outcome: &mut Outcome,
    ) -> Reply {
        let count =
            rest.first().and_then(|count| std::str::from_utf8(count).ok()?.parse::<usize>().ok());
        let Some(count) = count.filter(|count| *count < rest.len()) else {
            return Reply::Error("ERR Number of keys can't be greater than number of args".into());
        };
        match self.mode {
            Mode::Normal | Mode::Full => {}
            Mode::Loading => return Reply::Error(LOADING.into()),
            Mode::ReadOnly => return Reply::Error(MISCONF.into()),
        }
        let (keys, args) = rest[1..].split_at(count);
        let (channels, messages) = (&self.channels, &mut outcome.messages);
        let mut publish = |channel: &[u8], payload: &[u8]| {
            let peers = channels.get(channel).map_or(&[][..], Vec::as_slice);
            for peer in peers {
                let parts = [b"message", channel, payload].map(|part| Reply::Bulk(part.to_vec()));
                let mut message = Bytes::new();
                Reply::Array(parts.to_vec()).encode(&mut message);
                messages.push((*peer, message));
            }
            peers.len()
        };
        let subscribers = |channel: &[u8]| channels.get(channel).map_or(0, Vec::len);
        let db = self.keys.open(now_us, self.mode == Mode::Full);
        let call = Call {
            keys,
            args,
            db,
            publish: &mut publish,
            subscribers: &subscribers,
            flaw: self.flaw,
        };
        let (reply, changed_keys) = call.run(script);
        outcome.changed_keys = changed_keys;
        reply
    }
}

/// Removes the first request from the buffer, if it is complete.
pub(crate) fn take_request(buffer: &mut Bytes) -> Option<Vec<Bytes>> {
    let mut at = 0;
    let count = |kind: u8, at: &mut usize| -> Option<usize> {
        let end = *at + buffer[*at..].windows(2).position(|pair| pair == b"\r\n")?;
        assert_eq!(
            buffer[*at],
            kind,
            "not a request: {}",
            String::from_utf8_lossy(&buffer[*at..end])
        );
        let number = std::str::from_utf8(&buffer[*at + 1..end]).ok()?.parse().ok()?;
        *at = end + 2;
        Some(number)
    };
    if buffer.is_empty() {
        return None;
    }
    let parts = count(b'*', &mut at)?;
    let mut request = Vec::with_capacity(parts);
    for _ in 0..parts {
        if at >= buffer.len() {
            return None;
        }
        let length = count(b'$', &mut at)?;
        if buffer.len() < at + length + 2 {
            return None;
        }
        request.push(buffer[at..at + length].to_vec());
        at += length + 2;
    }
    buffer.drain(..at);
    Some(request)
}
