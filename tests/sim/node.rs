//! `FakeNode`: a server that understands exactly the commands that the library sends, on a clock of
//! its own.

use std::collections::{BTreeMap, BTreeSet};

use distlock::testing::servers::{Bytes, Channels, CommandError, Keys, Script};
use redis::Value;

use super::flaw::{Flaw, FlawedCall};

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
    loaded_scripts: BTreeSet<Bytes>,
    channels: BTreeMap<Bytes, Vec<Peer>>,
}

/// Effects of a request.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) reply: Bytes,
    /// Messages for subscribers.
    pub(crate) messages: Vec<(Peer, Bytes)>,
    /// The locks whose keys have another value now.
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
        match self.reply(peer, request, now_us, &mut outcome) {
            Ok(reply) => encode(&reply, &mut outcome.reply),
            Err(CommandError(why)) => outcome.reply = format!("-{why}\r\n").into_bytes(),
        }
        outcome
    }

    fn reply(
        &mut self,
        peer: Peer,
        request: &[Bytes],
        now_us: u64,
        outcome: &mut Outcome,
    ) -> Result<Value, CommandError> {
        let error = |why: &str| Err(CommandError(why.into()));
        let text = |text: &str| Value::BulkString(text.into());
        let Some((command, args)) = request.split_first() else { return error("ERR no command") };
        let command = String::from_utf8_lossy(command).to_ascii_uppercase();
        match (command.as_str(), args) {
            ("TIME", []) => {
                let parts = [now_us / 1_000_000, now_us % 1_000_000];
                Ok(Value::Array(parts.map(|part| text(&part.to_string())).to_vec()))
            }
            ("INFO", [section]) => Ok(text(&self.info(&String::from_utf8_lossy(section), now_us))),
            ("INFO", []) => {
                let sections = ["server", "replication"].map(|section| self.info(section, now_us));
                Ok(text(&sections.concat()))
            }
            ("PING", []) if self.is_subscribed(peer) => {
                Ok(Value::Array(vec![text("pong"), text("")]))
            }
            ("PING", []) => Ok(Value::SimpleString("PONG".into())),
            ("SUBSCRIBE", [channel]) => {
                self.channels.entry(channel.clone()).or_default().push(peer);
                let channel = Value::BulkString(channel.clone());
                Ok(Value::Array(vec![text("subscribe"), channel, Value::Int(1)]))
            }
            ("EVALSHA", [hash, rest @ ..]) => match Script::by_hash(hash) {
                Some(script) if self.loaded_scripts.contains(hash) => {
                    self.eval(script, rest, now_us, outcome)
                }
                _ => error("NOSCRIPT No matching script. Please use EVAL."),
            },
            ("EVAL", [text, rest @ ..]) => {
                let hash = redis::Script::new(std::str::from_utf8(text).unwrap());
                let hash = hash.get_hash().as_bytes().to_vec();
                let Some(script) = Script::by_hash(&hash) else {
                    return error("ERR this server knows only the scripts of the library");
                };
                self.loaded_scripts.insert(hash);
                self.eval(script, rest, now_us, outcome)
            }
            (other, _) => error(&format!("ERR unknown command '{other}'")),
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
    ) -> Result<Value, CommandError> {
        match self.mode {
            Mode::Normal | Mode::Full => {}
            Mode::Loading => return Err(CommandError(LOADING.into())),
            Mode::ReadOnly => return Err(CommandError(MISCONF.into())),
        }
        let mut rest = rest.to_vec();
        let flawed = self
            .flaw
            .map(|flaw| FlawedCall::begin(flaw, script, &mut rest, &mut self.keys, now_us));
        let locks: Vec<_> = rest.iter().filter(|key| key.starts_with(b"lock:")).cloned().collect();
        let values = |keys: &Keys| -> Vec<Option<Bytes>> {
            locks.iter().map(|lock| keys.peek(lock, now_us).map(<[u8]>::to_vec)).collect()
        };
        let before = values(&self.keys);
        let mut subscriptions = Subscriptions { channels: &self.channels, published: Vec::new() };
        let db = self.keys.open(now_us, self.mode == Mode::Full);
        let mut reply = script.run(&rest, db, &mut subscriptions);
        let mut published = subscriptions.published;
        if let (Some(flawed), Ok(reply)) = (flawed, &mut reply) {
            let payloads = published.iter_mut().map(|(_, payload)| payload);
            flawed.end(&mut self.keys, reply, payloads);
        }
        let changed = locks.iter().zip(before).zip(values(&self.keys));
        let changed = changed.filter(|((_, before), after)| before != after);
        outcome.changed_keys.extend(changed.map(|((lock, _), _)| lock.clone()));
        for (channel, payload) in published {
            for peer in &self.channels[&channel] {
                let parts = [b"message", &*channel, &*payload];
                let mut message = Bytes::new();
                let parts = parts.map(|part| Value::BulkString(part.to_vec()));
                encode(&Value::Array(parts.to_vec()), &mut message);
                outcome.messages.push((*peer, message));
            }
        }
        reply
    }
}

/// What a script publishes: channels and payloads.
struct Subscriptions<'a> {
    channels: &'a BTreeMap<Bytes, Vec<Peer>>,
    published: Vec<(Bytes, Bytes)>,
}

impl Channels for Subscriptions<'_> {
    fn publish(&mut self, channel: &[u8], payload: &[u8]) -> usize {
        let count = self.subscribers(channel);
        if count > 0 {
            self.published.push((channel.to_vec(), payload.to_vec()));
        }
        count
    }

    fn subscribers(&self, channel: &[u8]) -> usize {
        self.channels.get(channel).map_or(0, Vec::len)
    }
}

fn encode(value: &Value, out: &mut Bytes) {
    match value {
        Value::SimpleString(text) => out.extend(format!("+{text}\r\n").bytes()),
        Value::BulkString(bytes) => {
            out.extend(format!("${}\r\n", bytes.len()).bytes());
            out.extend(bytes);
            out.extend(b"\r\n");
        }
        Value::Int(number) => out.extend(format!(":{number}\r\n").bytes()),
        Value::Array(items) => {
            out.extend(format!("*{}\r\n", items.len()).bytes());
            items.iter().for_each(|item| encode(item, out));
        }
        other => unreachable!("no reply has {other:?}"),
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
