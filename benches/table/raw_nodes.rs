//! What a lock over several nodes costs without the library: the same requests, made ready beforehand, written to one
//! blocking connection per node, and the answers read, from one thread.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    time::{Duration, SystemTime},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{RecvFlags, recv},
};

use crate::{Result, cluster::Cluster, measure::now, support::RedisServer};

const ACQUIRE: &str =
    concat!(include_str!("../../src/node/lua/shared.lua"), include_str!("../../src/node/lua/acquire.lua"));
const RELEASE: &str =
    concat!(include_str!("../../src/node/lua/shared.lua"), include_str!("../../src/node/lua/release.lua"));

/// The name of the lock; as long as the one that the library is given.
pub(crate) const NAME: &str = "bare";

/// How many answers are waited for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Until {
    All,
    /// The rest is read before the next request.
    Quorum,
}

pub(crate) struct RawNodes {
    nodes: Vec<RawNode>,
    acquire: redis::Script,
    release: redis::Script,
    last_token: u64,
}

struct RawNode {
    stream: TcpStream,
    input: Vec<u8>,
    /// Answers under way that nobody has waited for.
    owed: usize,
}

/// The requests that take and release a lock on any of the nodes.
pub(crate) struct Requests {
    nonce: String,
    acquire: Vec<u8>,
    release: Vec<u8>,
}

impl RawNodes {
    pub(crate) fn connect(cluster: &Cluster) -> Result<RawNodes> {
        let (acquire, release) = (redis::Script::new(ACQUIRE), redis::Script::new(RELEASE));
        for server in &cluster.servers {
            for text in [ACQUIRE, RELEASE] {
                server.cli(&["SCRIPT", "LOAD", text]);
            }
        }
        let nodes: Result<Vec<RawNode>> = cluster.servers.iter().map(RawNode::connect).collect();
        Ok(RawNodes { nodes: nodes?, acquire, release, last_token: 0 })
    }

    /// Prepares a lock and its release, each field as long as the library's.
    pub(crate) fn prepare(&mut self) -> Result<Requests> {
        let id = distlock::generate_lock_id();
        let now_us = u64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_micros())?;
        self.last_token = (now_us + 10_000).max(self.last_token + 1);
        let (token_min, not_after) = (format!("{:016}", self.last_token), format!("{:016}", now_us + 60_000_000));
        // The library begins anywhere below this, and counts.
        let nonce = ((1 << 47) + self.last_token % (1 << 40)).to_string();
        let request = |script: &redis::Script, args: &[&str]| {
            let mut command = redis::cmd("EVALSHA");
            command.arg(script.get_hash()).arg(3);
            command.arg(format!("lock:{NAME}"));
            command.arg(format!("distlock:queue:{{lock:{NAME}}}")).arg(format!("distlock:fence:{{lock:{NAME}}}"));
            command.arg(&nonce).arg(args);
            command.get_packed_command()
        };
        let id = id.as_str();
        Ok(Requests {
            acquire: request(&self.acquire, &[id, "10000", "try", "", &not_after, "60000", &token_min]),
            release: request(&self.release, &[id, "", ""]),
            nonce,
        })
    }

    /// Takes and releases a lock; how long each took.
    pub(crate) fn run(&mut self, requests: &Requests, until: Until) -> Result<(Duration, Duration)> {
        let started = now();
        self.exchange(&requests.acquire, &requests.nonce, " held ", until, false)?;
        let between = now();
        // Backwards, as the library does it.
        self.exchange(&requests.release, &requests.nonce, " released", until, true)?;
        Ok((between - started, now() - between))
    }

    fn exchange(&mut self, request: &[u8], nonce: &str, wanted: &str, until: Until, backwards: bool) -> Result<()> {
        let count = self.nodes.len();
        for turn in 0..count {
            let node = &mut self.nodes[if backwards { count - 1 - turn } else { turn }];
            if node.owed > 0 {
                node.collect_owed()?;
            }
            node.stream.write_all(request)?;
        }
        let mut answers = Vec::with_capacity(count);
        match until {
            Until::All => {
                for node in &mut self.nodes {
                    answers.push(node.answer()?);
                }
            }
            Until::Quorum => {
                let mut open: Vec<usize> = (0..count).collect();
                while answers.len() <= count / 2 {
                    let mut polled: Vec<PollFd<'_>> =
                        open.iter().map(|node| PollFd::new(&self.nodes[*node].stream, PollFlags::IN)).collect();
                    poll(&mut polled, None)?;
                    let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
                    let mut ready = ready.into_iter();
                    let mut still = Vec::with_capacity(count);
                    for node in open {
                        let answer = if ready.next() == Some(true) { self.nodes[node].answer_so_far()? } else { None };
                        match answer {
                            Some(answer) => answers.push(answer),
                            None => still.push(node),
                        }
                    }
                    open = still;
                }
                open.iter().for_each(|node| self.nodes[*node].owed += 1);
            }
        }
        match answers.iter().find(|answer| answer.strip_prefix(nonce).is_none_or(|rest| !rest.starts_with(wanted))) {
            None => Ok(()),
            Some(other) => Err(format!("a raw request was answered with {other:?}").into()),
        }
    }
}

impl RawNode {
    fn connect(server: &RedisServer) -> Result<RawNode> {
        let stream = TcpStream::connect(server.addr())?;
        stream.set_nodelay(true)?;
        Ok(RawNode { stream, input: Vec::new(), owed: 0 })
    }

    /// The answer to the last request, blocking.
    fn answer(&mut self) -> Result<String> {
        loop {
            if let Some(answer) = self.take()? {
                return Ok(answer);
            }
            let mut buffer = [0; 1024];
            match self.stream.read(&mut buffer)? {
                0 => return Err("a server has closed the raw connection".into()),
                read => self.input.extend_from_slice(&buffer[..read]),
            }
        }
    }

    /// The same if it is there.
    fn answer_so_far(&mut self) -> Result<Option<String>> {
        let mut buffer = [0; 1024];
        match recv(&self.stream, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err("a server has closed the raw connection".into()),
            Ok((read, _)) => self.input.extend_from_slice(&buffer[..read]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        self.take()
    }

    fn collect_owed(&mut self) -> Result<()> {
        match self.answer_so_far()? {
            None => Ok(()),
            Some(answer) => Err(format!("the answer to nothing: {answer:?}").into()),
        }
    }

    /// Takes answers out of what was read; those that are owed are dropped.
    fn take(&mut self) -> Result<Option<String>> {
        loop {
            let Some(head) = self.input.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
            let text = std::str::from_utf8(&self.input[..head])?;
            let Some(length) = text.strip_prefix('$') else {
                return Err(format!("a raw request was answered with {text:?}").into());
            };
            let length: usize = length.trim_end().parse()?;
            let (begin, end) = (head + 1, head + 1 + length);
            if self.input.len() < end + 2 {
                return Ok(None);
            }
            let answer = String::from_utf8(self.input[begin..end].to_vec())?;
            self.input.drain(..end + 2);
            if self.owed == 0 {
                return Ok(Some(answer));
            }
            self.owed -= 1;
        }
    }
}
