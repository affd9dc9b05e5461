//! `FakeNode`: a server that does exactly what the library asks of one, on a clock of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use super::{
    scripts::{Call, Flaw, Reply, Script},
    store::{Bytes, Keys},
};

/// The scripts by their hashes and their texts.
static KNOWN: LazyLock<Vec<(String, Script)>> = LazyLock::new(|| {
    let hash = |script: Script| redis::Script::new(script.text()).get_hash().to_owned();
    Script::ALL.into_iter().map(|script| (hash(script), script)).collect()
});

const LOADING: &str = "LOADING Redis is loading the dataset in memory";
const MISCONF: &str = "MISCONF Redis is configured to save RDB snapshots, but cannot";

/// What a server answers besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    #[default]
    Well,
    /// No memory is left.
    Full,
    /// It reads its data still.
    Loading,
    /// It cannot write to its disk.
    Misconfigured,
}

/// Who is asking: a connection, as far as a server cares.
pub(crate) type Peer = u64;

#[derive(Clone, Debug, Default)]
pub(crate) struct FakeNode {
    pub(crate) keys: Keys,
    pub(crate) mode: Mode,
    pub(crate) flaw: Option<Flaw>,
    /// Everything is on disk before it is answered.
    pub(crate) durable: bool,
    /// Which run of the server this is, and since when on its clock.
    pub(crate) run: u64,
    pub(crate) up_since_us: u64,
    scripts: BTreeSet<String>,
    channels: BTreeMap<Bytes, Vec<Peer>>,
}

/// What a request led to.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) reply: Bytes,
    /// What others are told.
    pub(crate) news: Vec<(Peer, Bytes)>,
    /// The keys whose texts were written or deleted.
    pub(crate) touched: BTreeSet<Bytes>,
}

impl FakeNode {
    /// The server begins anew, with these keys.
    pub(crate) fn restart(&mut self, run: u64, now_us: u64, keys: Keys) {
        let FakeNode { flaw, durable, .. } = *self;
        let scripts = BTreeSet::new();
        let channels = BTreeMap::new();
        *self = FakeNode { keys, mode: Mode::Well, flaw, durable, run, up_since_us: now_us, scripts, channels };
    }

    /// It forgets the scripts, as by `SCRIPT FLUSH`.
    pub(crate) fn forget_scripts(&mut self) {
        self.scripts.clear();
    }

    pub(crate) fn hang_up(&mut self, peer: Peer) {
        for peers in self.channels.values_mut() {
            peers.retain(|other| *other != peer);
        }
        self.channels.retain(|_, peers| !peers.is_empty());
    }

    pub(crate) fn answer(&mut self, peer: Peer, request: &[Bytes], now_us: u64) -> Outcome {
        let mut outcome = Outcome::default();
        let reply = self.reply(peer, request, now_us, &mut outcome);
        reply.encode(&mut outcome.reply);
        outcome
    }

    fn reply(&mut self, peer: Peer, request: &[Bytes], now_us: u64, outcome: &mut Outcome) -> Reply {
        let Some((command, args)) = request.split_first() else { return Reply::Error("ERR no command".into()) };
        let command = String::from_utf8_lossy(command).to_ascii_uppercase();
        match (command.as_str(), args) {
            ("TIME", []) => {
                let parts = [now_us / 1_000_000, now_us % 1_000_000];
                Reply::Array(parts.map(|part| Reply::Line(part.to_string())).to_vec())
            }
            ("INFO", [section]) => Reply::Line(self.info(&String::from_utf8_lossy(section), now_us)),
            ("CONFIG", [_, _]) => {
                let value = if self.durable { "always" } else { "everysec" };
                Reply::Array(vec![Reply::Line("appendfsync".into()), Reply::Line(value.into())])
            }
            ("GET" | "SET" | "DEL", [key, rest @ ..]) => self.plain(&command, key, rest, now_us),
            ("PING", []) if self.listens(peer) => {
                Reply::Array(vec![Reply::Line("pong".into()), Reply::Line("".into())])
            }
            ("PING", []) => Reply::Status("PONG".into()),
            ("SUBSCRIBE", [channel]) => {
                self.channels.entry(channel.clone()).or_default().push(peer);
                Reply::Array(vec![Reply::Line("subscribe".into()), Reply::Bulk(channel.clone()), Reply::Int(1)])
            }
            ("EVALSHA", [hash, rest @ ..]) => {
                let hash = String::from_utf8_lossy(hash).into_owned();
                match KNOWN.iter().find(|(known, _)| *known == hash) {
                    Some((_, script)) if self.scripts.contains(&hash) => self.eval(*script, rest, now_us, outcome),
                    _ => Reply::Error("NOSCRIPT No matching script. Please use EVAL.".into()),
                }
            }
            ("EVAL", [text, rest @ ..]) => match KNOWN.iter().find(|(_, script)| script.text().as_bytes() == text) {
                Some((hash, script)) => {
                    self.scripts.insert(hash.clone());
                    self.eval(*script, rest, now_us, outcome)
                }
                None => Reply::Error("ERR this server knows only the scripts of the library".into()),
            },
            (other, _) => Reply::Error(format!("ERR unknown command '{other}'")),
        }
    }

    /// The commands by which a server is told of its memory.
    fn plain(&mut self, command: &str, key: &[u8], rest: &[Bytes], now_us: u64) -> Reply {
        if self.mode == Mode::Loading {
            return Reply::Error(LOADING.into());
        }
        let mut on = self.keys.open(now_us, self.mode == Mode::Full);
        let outcome = match (command, rest) {
            ("GET", []) => on.get(key).map(|text| text.map_or(Reply::Nil, Reply::Bulk)),
            _ if self.mode == Mode::Misconfigured => return Reply::Error(MISCONF.into()),
            ("DEL", []) => on.del(key).map(|()| Reply::Int(1)),
            ("SET", [text, _px, span]) => {
                let span = std::str::from_utf8(span).ok().and_then(|span| span.parse().ok()).expect("a number");
                on.set(key, text, span).map(|()| Reply::Status("OK".into()))
            }
            _ => return Reply::Error("ERR syntax error".into()),
        };
        outcome.unwrap_or_else(|refused| Reply::Error(refused.0))
    }

    fn listens(&self, peer: Peer) -> bool {
        self.channels.values().any(|peers| peers.contains(&peer))
    }

    fn info(&self, section: &str, now_us: u64) -> String {
        match section {
            "server" => {
                // Both ends are cut to whole seconds, each for itself.
                let up_for = now_us / 1_000_000 - self.up_since_us / 1_000_000;
                format!("# Server\r\nrun_id:{:040x}\r\nuptime_in_seconds:{up_for}\r\n", self.run)
            }
            "replication" => "# Replication\r\nrole:master\r\n".into(),
            _ => format!("# Persistence\r\naof_enabled:{}\r\n", u8::from(self.durable)),
        }
    }

    fn eval(&mut self, script: Script, rest: &[Bytes], now_us: u64, outcome: &mut Outcome) -> Reply {
        let count = rest.first().and_then(|count| std::str::from_utf8(count).ok()?.parse::<usize>().ok());
        let Some(count) = count.filter(|count| *count < rest.len()) else {
            return Reply::Error("ERR Number of keys can't be greater than number of args".into());
        };
        match self.mode {
            Mode::Well | Mode::Full => {}
            Mode::Loading => return Reply::Error(LOADING.into()),
            Mode::Misconfigured => return Reply::Error(MISCONF.into()),
        }
        let (keys, args) = rest[1..].split_at(count);
        let (channels, news) = (&self.channels, &mut outcome.news);
        let mut publish = |channel: &[u8], payload: &[u8]| {
            let peers = channels.get(channel).map_or(&[][..], Vec::as_slice);
            for peer in peers {
                let parts = [b"message", channel, payload].map(|part| Reply::Bulk(part.to_vec()));
                let mut message = Bytes::new();
                Reply::Array(parts.to_vec()).encode(&mut message);
                news.push((*peer, message));
            }
            peers.len()
        };
        let listeners = |channel: &[u8]| channels.get(channel).map_or(0, Vec::len);
        let on = self.keys.open(now_us, self.mode == Mode::Full);
        let call = Call { keys, args, on, publish: &mut publish, listeners: &listeners, flaw: self.flaw };
        let (reply, touched) = call.run(script);
        outcome.touched = touched;
        reply
    }
}

/// Takes one request off the front, if it is whole.
pub(crate) fn take_request(buffer: &mut Bytes) -> Option<Vec<Bytes>> {
    let mut at = 0;
    let count = |kind: u8, at: &mut usize| -> Option<usize> {
        let end = *at + buffer[*at..].windows(2).position(|pair| pair == b"\r\n")?;
        assert_eq!(buffer[*at], kind, "a request that is none: {}", String::from_utf8_lossy(&buffer[*at..end]));
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
