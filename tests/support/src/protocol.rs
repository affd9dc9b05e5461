//! How the proxy splits the two streams of a connection into requests and replies.

use std::net::SocketAddr;

use super::mysql_server;
use super::resp::{self, Frames};

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Protocol {
    Redis,
    MySql,
    /// Redis with TLS: what arrives has no words, and no beginning or end.
    Tls,
}

impl Protocol {
    /// The next request that has arrived in full.
    pub(super) fn take_request(self, frames: &mut Frames) -> Option<Vec<u8>> {
        match self {
            Self::Redis => frames.take_frame(),
            Self::MySql => frames.take(packet_end(frames.buffered(), 0)?),
            Self::Tls => take_all(frames),
        }
    }

    /// The next reply. In MySQL, which has no mark at the end of a reply, all packets that have
    /// arrived in full.
    pub(super) fn take_reply(self, frames: &mut Frames) -> Option<Vec<u8>> {
        match self {
            Self::Redis => frames.take_frame(),
            Self::Tls => take_all(frames),
            Self::MySql => {
                let mut end = packet_end(frames.buffered(), 0)?;
                while let Some(next) = packet_end(frames.buffered(), end) {
                    end = next;
                }
                frames.take(end)
            }
        }
    }

    /// The words of a request. In MySQL, the statements of a query are one word, and the packets of
    /// the sign-in have no words.
    pub(super) fn words(self, request: &[u8]) -> Vec<Vec<u8>> {
        match self {
            Self::Redis => resp::words(request),
            Self::Tls => Vec::new(),
            Self::MySql => match request {
                [_, _, _, 0, QUERY, sql @ ..] => vec![sql.to_vec()],
                [_, _, _, 0, command @ ..] => vec![command.to_vec()],
                _ => Vec::new(),
            },
        }
    }

    pub(super) fn url(self, addr: SocketAddr) -> String {
        match self {
            Self::Redis => format!("redis://{addr}"),
            Self::Tls => format!("rediss://{addr}"),
            Self::MySql => mysql_server::url(addr),
        }
    }
}

const QUERY: u8 = 3;

fn take_all(frames: &mut Frames) -> Option<Vec<u8>> {
    let arrived = frames.buffered().len();
    if arrived == 0 { None } else { frames.take(arrived) }
}

/// The index after the packet that begins at `at`.
fn packet_end(bytes: &[u8], at: usize) -> Option<usize> {
    let [a, b, c, _number, ..] = *bytes.get(at..)? else { return None };
    let end = at + 4 + u32::from_le_bytes([a, b, c, 0]) as usize;
    (end <= bytes.len()).then_some(end)
}
