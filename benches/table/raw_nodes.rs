//! A lock over several nodes without the library. One thread writes the same requests, which are
//! prepared, to a blocking connection for each node, and reads the replies.

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

const ACQUIRE: &str = concat!(
    include_str!("../../src/backend/redis/lua/mutex/acquire.lua"),
    include_str!("../../src/backend/redis/lua/prelude.lua"),
    include_str!("../../src/backend/redis/lua/token.lua"),
    include_str!("../../src/backend/redis/lua/notify.lua"),
    include_str!("../../src/backend/redis/lua/mutex/grant.lua"),
    include_str!("../../src/backend/redis/lua/mutex/acquire_contended.lua"),
    include_str!("../../src/backend/redis/lua/report.lua")
);
const RELEASE: &str = concat!(
    include_str!("../../src/backend/redis/lua/mutex/release.lua"),
    include_str!("../../src/backend/redis/lua/mutex/hand_over.lua"),
    include_str!("../../src/backend/redis/lua/prelude.lua"),
    include_str!("../../src/backend/redis/lua/free.lua"),
    include_str!("../../src/backend/redis/lua/token.lua"),
    include_str!("../../src/backend/redis/lua/notify.lua"),
    include_str!("../../src/backend/redis/lua/mutex/grant.lua"),
    include_str!("../../src/backend/redis/lua/mutex/release_contended.lua"),
    include_str!("../../src/backend/redis/lua/report.lua")
);

/// The lock name. It is as long as the one that the library gets.
pub(crate) const NAME: &str = "bare";

/// Which replies to wait for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Until {
    All,
    /// The other replies are read before the next request.
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
    /// Number of replies that have not been read.
    unread: usize,
}

/// The requests that acquire and release a lock, the same for all nodes.
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

    /// Prepares a lock and its release. Each field is as long as the library's.
    pub(crate) fn prepare(&mut self) -> Result<Requests> {
        let id = distlock::generate_lock_id();
        let now_us =
            u64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_micros())?;
        self.last_token = (now_us + 10_000).max(self.last_token + 1);
        let (token_min, not_after) =
            (format!("{:016}", self.last_token), format!("{:016}", now_us + 60_000_000));
        // As long as most nonces of the library, which start at a random 48-bit number.
        let nonce = ((1 << 47) + self.last_token % (1 << 40)).to_string();
        let request = |script: &redis::Script, args: &[&str]| {
            let mut command = redis::cmd("EVALSHA");
            command.arg(script.get_hash()).arg(4);
            command.arg(format!("lock:{NAME}"));
            command
                .arg(format!("distlock:queue:{{lock:{NAME}}}"))
                .arg(format!("distlock:token:{{lock:{NAME}}}"))
                .arg("distlock:fence");
            command.arg(&nonce).arg(args).arg("1");
            command.get_packed_command()
        };
        let id = id.as_str();
        Ok(Requests {
            acquire: request(
                &self.acquire,
                &[id, "10000", &not_after, "60000", "try", "", &token_min, "3610000"],
            ),
            release: request(&self.release, &[id, &token_min]),
            nonce,
        })
    }

    /// Acquires and releases a lock. Returns how long each took.
    pub(crate) fn run(
        &mut self,
        requests: &Requests,
        until: Until,
    ) -> Result<(Duration, Duration)> {
        let started = now();
        self.exchange(&requests.acquire, &requests.nonce, " held ", until, false)?;
        let locked = now();
        // In reverse order, as the library does.
        self.exchange(&requests.release, &requests.nonce, " released", until, true)?;
        Ok((locked - started, now() - locked))
    }

    fn exchange(
        &mut self,
        request: &[u8],
        nonce: &str,
        expected: &str,
        until: Until,
        reverse_order: bool,
    ) -> Result<()> {
        let count = self.nodes.len();
        for turn in 0..count {
            let node = &mut self.nodes[if reverse_order { count - 1 - turn } else { turn }];
            if node.unread > 0 {
                node.drain_unread()?;
            }
            node.stream.write_all(request)?;
        }
        let mut replies = Vec::with_capacity(count);
        match until {
            Until::All => {
                for node in &mut self.nodes {
                    replies.push(node.reply()?);
                }
            }
            Until::Quorum => {
                let mut pending: Vec<usize> = (0..count).collect();
                while replies.len() <= count / 2 {
                    let mut polled: Vec<PollFd<'_>> = pending
                        .iter()
                        .map(|node| PollFd::new(&self.nodes[*node].stream, PollFlags::IN))
                        .collect();
                    poll(&mut polled, None)?;
                    let ready: Vec<bool> =
                        polled.iter().map(|fd| !fd.revents().is_empty()).collect();
                    let mut ready = ready.into_iter();
                    let mut still = Vec::with_capacity(count);
                    for node in pending {
                        let reply = if ready.next() == Some(true) {
                            self.nodes[node].try_reply()?
                        } else {
                            None
                        };
                        match reply {
                            Some(reply) => replies.push(reply),
                            None => still.push(node),
                        }
                    }
                    pending = still;
                }
                pending.iter().for_each(|node| self.nodes[*node].unread += 1);
            }
        }
        match replies
            .iter()
            .find(|reply| reply.strip_prefix(nonce).is_none_or(|rest| !rest.starts_with(expected)))
        {
            None => Ok(()),
            Some(other) => Err(format!("unexpected reply to a raw request: {other:?}").into()),
        }
    }
}

impl RawNode {
    fn connect(server: &RedisServer) -> Result<RawNode> {
        let stream = TcpStream::connect(server.addr())?;
        stream.set_nodelay(true)?;
        Ok(RawNode { stream, input: Vec::new(), unread: 0 })
    }

    /// Waits for the reply to the last request.
    fn reply(&mut self) -> Result<String> {
        loop {
            if let Some(reply) = self.parse()? {
                return Ok(reply);
            }
            let mut buffer = [0; 1024];
            match self.stream.read(&mut buffer)? {
                0 => return Err("a server closed the raw connection".into()),
                read => self.input.extend_from_slice(&buffer[..read]),
            }
        }
    }

    /// Returns the reply to the last request if it has arrived.
    fn try_reply(&mut self) -> Result<Option<String>> {
        let mut buffer = [0; 1024];
        match recv(&self.stream, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err("a server closed the raw connection".into()),
            Ok((read, _)) => self.input.extend_from_slice(&buffer[..read]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        self.parse()
    }

    fn drain_unread(&mut self) -> Result<()> {
        match self.try_reply()? {
            None => Ok(()),
            Some(reply) => Err(format!("a reply without a request: {reply:?}").into()),
        }
    }

    /// Parses replies from the input. Replies to earlier requests are dropped.
    fn parse(&mut self) -> Result<Option<String>> {
        loop {
            let Some(head) = self.input.iter().position(|byte| *byte == b'\n') else {
                return Ok(None);
            };
            let text = std::str::from_utf8(&self.input[..head])?;
            let Some(length) = text.strip_prefix('$') else {
                return Err(format!("unexpected reply to a raw request: {text:?}").into());
            };
            let length: usize = length.trim_end().parse()?;
            let (begin, end) = (head + 1, head + 1 + length);
            if self.input.len() < end + 2 {
                return Ok(None);
            }
            let reply = String::from_utf8(self.input[begin..end].to_vec())?;
            self.input.drain(..end + 2);
            if self.unread == 0 {
                return Ok(Some(reply));
            }
            self.unread -= 1;
        }
    }
}
