//! `FramedSocket`: an open transport and the redis crate's parser, with deadlines on reads and
//! writes.

use std::{
    io::{self, Read},
    thread,
    time::Duration,
};

use redis::{Parser, RedisResult, Value};

use super::unread_replies::UnreadReplies;
use crate::{
    backend::transport::{Transport, write_all},
    sys::clock::{self, Moment},
};

/// Maximum size of a reply. Those of our scripts are smaller, so a longer one is an error or an
/// attack.
const REPLY_BYTES_MAX: usize = 4 << 20;
/// Maximum number of bytes read after the deadline, for a reply that has already arrived. Only
/// lists are longer.
const LATE_BYTES_MAX: usize = 128 << 10;
/// Maximum number of bytes that are kept of what the server sent first.
const BEGIN_BYTES_MAX: usize = 256;

pub(super) struct FramedSocket {
    pub(super) transport: Box<dyn Transport>,
    parser: Parser,
    /// Number of bytes that the current reply may still have, over all calls that read it.
    reply_budget: usize,
    pub(super) opened_at: Moment,
    pub(super) used_at: Moment,
    /// Moving average of the time to the first byte of a reply.
    latency_ewma: Duration,
    pub(super) unread: UnreadReplies,
    /// Scripts whose full text was sent, as a bit mask.
    pub(super) loaded_scripts: u32,
    /// The first bytes received. They show what kind of server it is.
    pub(super) begin: Vec<u8>,
    /// Why the last read has failed; the parser reports errors only as text.
    pub(super) failure: Option<io::Error>,
}

impl FramedSocket {
    pub(super) fn new(transport: Box<dyn Transport>) -> FramedSocket {
        let now = clock::now();
        FramedSocket {
            transport,
            parser: Parser::new(),
            reply_budget: REPLY_BYTES_MAX,
            opened_at: now,
            used_at: now,
            latency_ewma: Duration::ZERO,
            unread: UnreadReplies::new(now),
            loaded_scripts: 0,
            begin: Vec::new(),
            failure: None,
        }
    }

    /// Reads one value. At `until`, fails with a timeout and keeps a partial value for the next
    /// call.
    pub(super) fn read(&mut self, until: Moment, spin_max: Duration) -> RedisResult<Value> {
        let started = clock::now();
        let spin_until = started.saturating_add(self.spin_time(spin_max)).min(until);
        let FramedSocket { transport, parser, reply_budget, begin, failure, .. } = self;
        *failure = None;
        let mut reader = DeadlineReader {
            transport: &mut **transport,
            until,
            spin_until,
            first_byte_at: None,
            reply_budget,
            late_budget: LATE_BYTES_MAX,
            begin,
            failure,
        };
        let result = parser.parse_value(&mut reader);
        if let Some(first_at) = reader.first_byte_at {
            self.used_at = first_at;
            self.record_latency(first_at.duration_since(started));
        }
        if result.is_ok() {
            self.reply_budget = REPLY_BYTES_MAX;
        }
        result
    }

    /// Returns the time to busy-wait for a reply: at most `max`, and zero if replies usually take
    /// longer than that.
    pub(super) fn spin_time(&self, max: Duration) -> Duration {
        if self.latency_ewma > max {
            Duration::ZERO
        } else {
            (self.latency_ewma * 2).max(max / 4).min(max)
        }
    }

    fn record_latency(&mut self, latency: Duration) {
        self.latency_ewma = (self.latency_ewma * 7 + latency) / 8;
    }

    pub(super) fn write_all(&mut self, mut bytes: &[u8], deadline: Moment) -> io::Result<()> {
        write_all(&mut *self.transport, &mut bytes, deadline)
    }
}

/// Reads for the parser until a deadline or the size limit is reached.
struct DeadlineReader<'a> {
    transport: &'a mut dyn Transport,
    until: Moment,
    spin_until: Moment,
    first_byte_at: Option<Moment>,
    reply_budget: &'a mut usize,
    /// Number of bytes that this call may still read after the deadline.
    late_budget: usize,
    begin: &'a mut Vec<u8>,
    failure: &'a mut Option<io::Error>,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_some(buffer).map_err(|error| {
            let kind = error.kind();
            *self.failure = Some(error);
            kind.into()
        })
    }
}

impl DeadlineReader<'_> {
    /// Busy-waits for a short time before it blocks, yielding to other threads. Sleeping and waking
    /// up can take longer than a nearby server needs to reply.
    fn read_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if *self.reply_budget == 0 {
            return Err(io::Error::other("the reply is too long: more than 4 MiB"));
        }
        let mut room = buffer.len().min(*self.reply_budget);
        loop {
            let now = clock::now();
            let remaining = self.until.duration_since(now);
            let spinning = now < self.spin_until;
            if remaining.is_zero() {
                // A reply that arrived in time may not have been read yet. Read it, but only up to
                // a limit, because the server may keep sending.
                room = room.min(self.late_budget);
                if room == 0 {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            let longest = if spinning { Duration::ZERO } else { remaining };
            match self.transport.read(&mut buffer[..room], longest) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    *self.reply_budget -= read;
                    if remaining.is_zero() {
                        self.late_budget -= read;
                    }
                    if self.begin.is_empty() {
                        *self.begin = buffer[..read.min(BEGIN_BYTES_MAX)].to_vec();
                    }
                    self.spin_until = Moment::from_nanos(0);
                    self.first_byte_at.get_or_insert_with(clock::now);
                    return Ok(read);
                }
                // Stopping and continuing the process interrupts a read that has a timeout.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                    ) => {}
                Err(error) => return Err(error),
            }
            if remaining.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if spinning {
                thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::transport::{pair, poll_readable};

    /// A socket, and a thread that sends `what` to it until everything is sent or the socket is
    /// closed.
    fn socket_receiving(what: String) -> (FramedSocket, thread::JoinHandle<io::Result<()>>) {
        let (ours, theirs) = pair().unwrap();
        let server = thread::spawn(move || {
            FramedSocket::new(theirs).write_all(what.as_bytes(), Moment::NEVER)
        });
        (FramedSocket::new(ours), server)
    }

    /// Reads as the code for several nodes does: takes the bytes that have arrived, without waiting
    /// for more.
    fn read_in_turns(link: &mut FramedSocket) -> RedisResult<Value> {
        loop {
            match link.read(clock::now(), Duration::ZERO) {
                Err(error) if error.is_timeout() => {
                    poll_readable(&[&*link.transport], Moment::NEVER, Duration::ZERO);
                }
                result => return result,
            }
        }
    }

    /// Fault: N40
    #[test]
    fn reply_size_limit_spans_several_reads() {
        let (mut link, server) =
            socket_receiving(format!("$500000000\r\n{}", "x".repeat(4 * REPLY_BYTES_MAX)));
        read_in_turns(&mut link).unwrap_err();
        let failure = link.failure.take().unwrap();
        assert!(failure.to_string().contains("too long"), "{failure}");
        drop(link);
        assert!(server.join().unwrap().is_err(), "the whole reply was read");
    }

    /// Fault: N40
    #[test]
    fn reply_size_limit_resets_for_each_reply() {
        let text = "x".repeat(REPLY_BYTES_MAX / 2);
        let (mut link, server) =
            socket_receiving(format!("${}\r\n{text}\r\n", text.len()).repeat(4));
        for _ in 0..4 {
            let Value::BulkString(taken) = read_in_turns(&mut link).unwrap() else {
                panic!("not a bulk string")
            };
            assert_eq!(taken.len(), text.len());
        }
        server.join().unwrap().unwrap();
    }
}
