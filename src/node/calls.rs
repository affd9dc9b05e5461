//! What a server is asked, and what it answers: one type for each request and each reply. Pure.

use redis::Value;

use super::{
    connection::write_command,
    script::{ACQUIRE, By, Call, INSPECT, RELEASE, RENEW, Script},
    wire::{Fields, bulk, clock, line, micros, number},
};
use crate::{holder::Holder, key::LockKey};

/// Whether and how an acquire joins the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Try,
    Join,
    Look,
    Leave,
}

pub(crate) struct Acquire<'a> {
    pub(crate) key: &'a LockKey,
    pub(crate) id: &'a str,
    pub(crate) ttl_ms: u64,
    pub(crate) mode: Mode,
    pub(crate) waiter: &'a str,
    /// The expiry that another holder is given if it has none; 0 for none.
    pub(crate) heal_ms: u64,
    /// The token is to be this or larger.
    pub(crate) token_min: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    Held { now_us: u64, token: u64 },
    Busy { now_us: u64, holder: Holder },
    Queued { now_us: u64, holder: Holder, position: u64, joined: bool, deaf: bool },
    WrongType,
    Late { now_us: u64 },
}

impl Acquired {
    /// Who is in the way.
    pub(crate) fn holder(&self) -> Option<&Holder> {
        match self {
            Acquired::Busy { holder, .. } | Acquired::Queued { holder, .. } => Some(holder),
            _ => None,
        }
    }

    pub(crate) fn token(&self) -> Option<u64> {
        match *self {
            Acquired::Held { token, .. } => Some(token),
            _ => None,
        }
    }
}

impl Call for Acquire<'_> {
    type Reply = Acquired;

    fn server_us(reply: &Acquired) -> Option<u64> {
        match *reply {
            Acquired::Held { now_us, .. }
            | Acquired::Busy { now_us, .. }
            | Acquired::Queued { now_us, .. }
            | Acquired::Late { now_us } => Some(now_us),
            Acquired::WrongType => None,
        }
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&ACQUIRE)
    }

    fn encode(&self, by: By, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        ACQUIRE.begin(by, 3, 8, out);
        lock_keys(out, self.key);
        number(out, nonce);
        bulk(out, &[self.id.as_bytes()]);
        number(out, self.ttl_ms);
        let mode: &[u8] = match self.mode {
            Mode::Try => b"try",
            Mode::Join => b"join",
            Mode::Look => b"look",
            Mode::Leave => b"leave",
        };
        bulk(out, &[mode]);
        bulk(out, &[self.waiter.as_bytes()]);
        micros(out, not_after_us);
        number(out, self.heal_ms);
        micros(out, self.token_min);
    }

    fn read(&self, nonce: u64, reply: Value) -> Option<Acquired> {
        let line = line(&reply)?;
        let (tag, mut rest) = Fields::open(line, nonce)?;
        let now_us = rest.clock()?;
        Some(match tag {
            "held" => Acquired::Held { now_us, token: rest.exact().filter(|token| *token > 0)? },
            "busy" => Acquired::Busy { now_us, holder: rest.holder(now_us)? },
            "queued" => {
                let (pttl_ms, position, state) = (rest.number()?, rest.number()?, rest.number::<u8>()?);
                let (joined, deaf) = (state & 1 != 0, state & 2 != 0);
                let holder = Holder::reported(rest.rest(), pttl_ms, 0, 0, now_us);
                Acquired::Queued { now_us, holder, position, joined, deaf }
            }
            "type" => Acquired::WrongType,
            "late" => Acquired::Late { now_us },
            _ => return None,
        })
    }
}

pub(crate) struct Release<'a> {
    pub(crate) key: &'a LockKey,
    /// Whoever takes a lock away names others as they name themselves, which may be no text.
    pub(crate) id: &'a [u8],
    /// A waiter to take out of the line, or empty.
    pub(crate) waiter: &'a str,
    /// Refused when it arrives too late for its caller; else it is carried out whenever it arrives.
    pub(crate) in_time: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReleaseReply {
    Released,
    Gone,
    Other(Holder),
    WrongType,
    Late { now_us: u64 },
}

impl Call for Release<'_> {
    type Reply = ReleaseReply;

    fn server_us(reply: &ReleaseReply) -> Option<u64> {
        match *reply {
            ReleaseReply::Late { now_us } => Some(now_us),
            _ => None,
        }
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&RELEASE)
    }

    fn encode(&self, by: By, nonce: u64, not_after_us: u64, out: &mut Vec<u8>) {
        RELEASE.begin(by, 3, 4, out);
        lock_keys(out, self.key);
        number(out, nonce);
        bulk(out, &[self.id]);
        bulk(out, &[self.waiter.as_bytes()]);
        if self.in_time { micros(out, not_after_us) } else { bulk(out, &[]) }
    }

    fn read(&self, nonce: u64, reply: Value) -> Option<ReleaseReply> {
        let line = line(&reply)?;
        let (tag, mut rest) = Fields::open(line, nonce)?;
        Some(match tag {
            "released" => ReleaseReply::Released,
            "gone" => ReleaseReply::Gone,
            "other" => {
                let now_us = rest.clock()?;
                ReleaseReply::Other(rest.holder(now_us)?)
            }
            "type" => ReleaseReply::WrongType,
            "late" => ReleaseReply::Late { now_us: rest.clock()? },
            _ => return None,
        })
    }
}

/// One lock of a batch of renewals.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Renewal<'a> {
    pub(crate) lock: &'a str,
    pub(crate) id: &'a str,
    pub(crate) ttl_ms: u64,
    /// The key of its token, where that is to live on.
    pub(crate) fence: Option<[&'a str; 3]>,
}

pub(crate) struct Renew<'a>(pub(crate) &'a [Renewal<'a>]);

/// What became of one lock of a batch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Renewed {
    Yes,
    Gone,
    Other(String),
}

impl Call for Renew<'_> {
    type Reply = (u64, Vec<Renewed>);

    fn server_us(reply: &Self::Reply) -> Option<u64> {
        Some(reply.0)
    }

    fn script(&self) -> Option<&'static Script> {
        Some(&RENEW)
    }

    fn encode(&self, by: By, nonce: u64, _: u64, out: &mut Vec<u8>) {
        let fences = self.0.iter().filter_map(|renewal| renewal.fence);
        RENEW.begin(by, self.0.len() + fences.clone().count(), 1 + 2 * self.0.len(), out);
        for renewal in self.0 {
            bulk(out, &[renewal.lock.as_bytes()]);
        }
        for fence in fences {
            bulk(out, &fence.map(str::as_bytes));
        }
        number(out, nonce);
        for renewal in self.0 {
            bulk(out, &[renewal.id.as_bytes()]);
            number(out, renewal.ttl_ms);
        }
    }

    fn read(&self, nonce: u64, reply: Value) -> Option<(u64, Vec<Renewed>)> {
        let Value::Array(values) = reply else { return None };
        let mut values = values.into_iter();
        let head = values.next()?;
        let now_us = clock(Fields::open(line(&head)?, nonce)?.0)?;
        let mut answers = Vec::with_capacity(self.0.len());
        for value in values {
            answers.push(match value {
                Value::Int(1) => Renewed::Yes,
                // A key of another type is no lock of anybody's.
                Value::Int(0 | -1) => Renewed::Gone,
                Value::BulkString(id) => Renewed::Other(String::from_utf8_lossy(&id).into_owned()),
                _ => return None,
            });
        }
        (answers.len() == self.0.len()).then_some((now_us, answers))
    }
}

pub(crate) struct Inspect<'a>(pub(crate) &'a LockKey);

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Inspected {
    Held(Holder),
    Free,
    WrongType,
}

impl Call for Inspect<'_> {
    type Reply = Inspected;

    fn script(&self) -> Option<&'static Script> {
        Some(&INSPECT)
    }

    fn encode(&self, by: By, nonce: u64, _: u64, out: &mut Vec<u8>) {
        INSPECT.begin(by, 3, 1, out);
        lock_keys(out, self.0);
        number(out, nonce);
    }

    fn read(&self, nonce: u64, reply: Value) -> Option<Inspected> {
        let line = line(&reply)?;
        let (tag, mut rest) = Fields::open(line, nonce)?;
        Some(match tag {
            "busy" => {
                let now_us = rest.clock()?;
                Inspected::Held(rest.holder(now_us)?)
            }
            "free" => Inspected::Free,
            "type" => Inspected::WrongType,
            _ => return None,
        })
    }
}

/// Whether anybody is there.
pub(crate) struct Ping;

impl Call for Ping {
    type Reply = ();

    fn script(&self) -> Option<&'static Script> {
        None
    }

    fn encode(&self, _: By, _: u64, _: u64, out: &mut Vec<u8>) {
        write_command(out, &[b"PING"]);
    }

    fn read(&self, _: u64, reply: Value) -> Option<()> {
        (reply == Value::SimpleString("PONG".into())).then_some(())
    }
}

fn lock_keys(out: &mut Vec<u8>, key: &LockKey) {
    bulk(out, &[key.lock().as_bytes()]);
    bulk(out, &key.queue().map(str::as_bytes));
    bulk(out, &key.fence().map(str::as_bytes));
}

#[cfg(test)]
mod tests;
