//! What servers send: replies, grant messages, and the replies to INFO.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Read},
    time::Duration,
};

use redis::{Parser, Value};

use super::{corpus, fuzz};
use crate::{
    backend::{
        Inspection,
        redis::{
            INFO_COMMANDS, PubSubMessage, Request, ServerInfoReader, parse_grant, parse_time,
            requests::list::{DescribeLocks, HeldDescription, Scan},
            requests::{
                Acquire, AcquireMode, AcquireReply, LeaseToRenew, Ping, Release, ReleaseReply,
                Renew, RenewReply,
            },
        },
    },
    core::{
        clock_sample::ClockSample,
        holder::Holder,
        key::LockKey,
        kind::LockKind,
        validity::{deadline_from_sent, time_of_grant},
    },
    sys::clock::Moment,
};

/// The nonce of the requests that the replies in the corpus belong to.
const NONCE: u64 = 1000;
/// Above this, Lua does not count exactly.
const EXACT_MAX: u64 = 1 << 53;
/// Maximum length of a sentence about a holder, whatever a server sends; see text.rs.
const SENTENCE_MAX: usize = 2048;

fn outcome(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Decodes a reply. Checks that it is accepted as the reply to one request only.
fn taken<C: Request>(call: &C, reply: &Value) -> Option<C::Reply> {
    let answer = call.decode(NONCE, reply.clone());
    if answer.is_some() && call.script().is_some() {
        assert!(
            call.decode(NONCE + 1, reply.clone()).is_none(),
            "accepted as the reply to two requests"
        );
    }
    let (answer, server_us) = answer?;
    assert!(server_us.is_none_or(|now_us| now_us < EXACT_MAX));
    Some(answer)
}

/// Checks that what is reported about a holder can be printed on a terminal.
fn presentable(holder: &Holder) {
    assert!(holder.id().len() <= 512, "an identifier of {} bytes", holder.id().len());
    printable(&holder.to_string());
    if let Some(id) = holder.lock_id() {
        assert_eq!((id.as_str(), Some(id.pid())), (holder.id(), holder.pid()));
    }
}

fn printable(text: &str) {
    assert!(text.len() <= SENTENCE_MAX, "a sentence of {} bytes", text.len());
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

fn check_reply(reply: &Value) -> u64 {
    let keys = ["a", "b"].map(|name| LockKey::new("lock:", name).unwrap());
    let key = &keys[0];
    let renewal = LeaseToRenew {
        key,
        id: "me",
        count: 0,
        ttl_ms: 10,
        never_shorten: false,
        refresh_token: false,
    };
    let renewals = [renewal; 3];
    let acquire = Acquire {
        kind: LockKind::Mutex,
        key,
        id: "me",
        ttl_ms: 10,
        mode: AcquireMode::Poll,
        queue_entry: "w",
        repair_ttl_ms: 60,
        token_min: None,
        is_token_decided: false,
    };
    // Only the short request may be answered with `fenced`.
    let short = Acquire { mode: AcquireMode::Try, ..acquire };
    let fenced = taken(&short, reply).and_then(|answer| answer.token());
    assert!(fenced.is_none_or(|token| token > 0 && token < EXACT_MAX));
    let acquired = taken(&acquire, reply).map(|answer| {
        if let Some(token) = answer.token() {
            assert!(token > 0 && token < EXACT_MAX);
        }
        answer.holder().into_iter().for_each(presentable);
        match answer {
            AcquireReply::Held { .. } => 0,
            AcquireReply::Busy { .. } => 1,
            AcquireReply::Queued { newly_queued, no_subscriber, .. } => {
                2 + u8::from(newly_queued) + 2 * u8::from(no_subscriber)
            }
            AcquireReply::WrongType => 6,
            AcquireReply::Late => 7,
        }
    });
    let released = taken(&Release::new(LockKind::Mutex, key, b"me"), reply).map(|answer| {
        if let ReleaseReply::HeldByOther(holder) = &answer {
            presentable(holder);
        }
        std::mem::discriminant(&answer)
    });
    let renewed =
        (1..=3).filter_map(|count| taken(&Renew(&renewals[..count]), reply)).map(|answers| {
            for answer in &answers {
                if let RenewReply::HeldByOther(id) = answer {
                    presentable(&Holder::from_id(id.clone()));
                }
            }
            answers.iter().map(std::mem::discriminant).collect::<Vec<_>>()
        });
    let renewed: Vec<_> = renewed.collect();
    let surveyed = (1..=2).filter_map(|count| {
        taken(
            &DescribeLocks { keys: &keys[..count], waiters_per_lock_max: 3, waiters_total_max: 5 },
            reply,
        )
    });
    let surveyed = surveyed.map(|answers| {
        let look = |answer: &Inspection<HeldDescription>| match answer {
            Inspection::Held(standing) => {
                presentable(&standing.holder);
                let members = standing.group.iter().flat_map(|group| &group.members);
                members.for_each(presentable);
                assert!(standing.token < EXACT_MAX);
                2 + standing.waiters.len()
            }
            Inspection::Free => 0,
            Inspection::WrongType => 1,
        };
        answers.iter().map(look).collect::<Vec<_>>()
    });
    let surveyed: Vec<_> = surveyed.collect();
    let scanned = taken(&Scan { cursor: "0", pattern: "*" }, reply)
        .map(|step| (step.next_cursor.is_some(), step.keys.len()));
    let pinged = taken(&Ping, reply).is_some();
    let time = parse_time(reply).is_some();
    let grouped =
        taken(&Release::new(LockKind::Read, key, b"me"), reply).map(|answer| answer.has_more());
    outcome((acquired, released, renewed, surveyed, scanned, pinged, time, grouped))
}

#[test]
fn replies() {
    let groups = [
        "$20\r\n1000 read 1795272161\r\n",
        "$18\r\n1000 released more\r\n",
        "$67\r\n1000 busy 1795272161083114 4997 0 0 distlock:permits 7 web-3|pid7#3\r\n",
        "*3\r\n$9\r\n1000 1795\r\n:0\r\n*3\r\n$18\r\ndistlock:permits 2\r\n$5\r\n50 me\r\n$7\r\n\
         50 me#2\r\n",
    ];
    let groups = groups.map(|reply| reply.as_bytes().to_vec());
    let parse = |bytes: Vec<u8>| redis::parse_redis_value(&bytes).unwrap();
    fuzz(corpus("replies").into_iter().chain(groups).map(parse).collect(), check_reply);
}

/// A reader that returns a few bytes at a time, with timeouts in between, as a socket does.
struct Trickle<'a> {
    bytes: &'a [u8],
    step: usize,
    paused: bool,
}

impl Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.paused = !self.paused && !self.bytes.is_empty();
        if self.paused {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let step = self.step.min(self.bytes.len()).min(buffer.len());
        let (now, rest) = self.bytes.split_at(step);
        buffer[..step].copy_from_slice(now);
        self.bytes = rest;
        Ok(step)
    }
}

/// All values up to the first invalid one, and whether the bytes ended there.
fn stream(bytes: &[u8], step: usize) -> (Vec<Value>, bool) {
    let (mut parser, mut trickle) = (Parser::new(), Trickle { bytes, step, paused: true });
    let mut values = Vec::new();
    loop {
        match parser.parse_value(&mut trickle) {
            Ok(value) => values.push(value),
            Err(error) if error.is_timeout() => {}
            Err(error) => return (values, error.kind() == redis::ErrorKind::Io),
        }
    }
}

/// A stream has the same values however it is cut into pieces, and never makes the parser panic.
/// The parser skips invalid bytes that arrive one by one, and reads on behind them. That is why
/// every reply has a nonce.
#[test]
fn streams() {
    let replies = corpus("replies").into_iter().chain(corpus("streams"));
    fuzz(replies.collect(), |bytes: &Vec<u8>| {
        // Compared as text, because NaN is not equal to itself.
        let text = |values: &[Value]| format!("{values:?}");
        let (whole, sound) = stream(bytes, usize::MAX);
        for step in [1, 3, 17] {
            let (pieces, _) = stream(bytes, step);
            assert!(
                pieces.len() == whole.len() || !sound,
                "{pieces:?} in pieces of {step}, and {whole:?}"
            );
            assert_eq!(text(&pieces[..whole.len()]), text(&whole), "in pieces of {step}");
        }
        outcome(
            whole
                .iter()
                .map(|value| (std::mem::discriminant(value), check_reply(value)))
                .collect::<Vec<_>>(),
        )
    });
}

#[test]
fn grants() {
    let (sent, now) = (Moment::from_nanos(60_000_000_000), Moment::from_nanos(61_000_000_000));
    let reading = ClockSample::new(
        sent,
        sent.saturating_add(Duration::from_millis(1)),
        1_763_712_345_678_901,
    );
    fuzz(corpus("grants"), |payload: &Vec<u8>| {
        let message = Value::Array(vec![
            Value::BulkString(b"message".to_vec()),
            Value::BulkString(b"distlock:client:x".to_vec()),
            Value::BulkString(payload.clone()),
        ]);
        let heard = PubSubMessage::parse(&message);
        let Some((id, news)) = parse_grant(payload) else {
            assert!(matches!(heard, PubSubMessage::Invalid));
            return 0;
        };
        assert!(matches!(heard, PubSubMessage::Grant(_, same) if same == news));
        assert!(news.token > 0 && news.token < EXACT_MAX && news.px_ms > 0);
        assert!(payload.ends_with(id.as_bytes()));
        // Whatever time the message claims, the deadline is limited by the time of its receipt.
        let px = Duration::from_millis(news.px_ms).min(Duration::from_secs(10));
        let deadline = deadline_from_sent(time_of_grant(&reading, news.granted_at_us, now), px);
        assert!(deadline <= deadline_from_sent(now, px));
        outcome((1, id.len().min(8), deadline > now))
    });
}

#[test]
fn messages() {
    let parse = |bytes: Vec<u8>| redis::parse_redis_value(&bytes).unwrap();
    fuzz(corpus("messages").into_iter().map(parse).collect(), |message: &Value| {
        match PubSubMessage::parse(message) {
            PubSubMessage::Grant(id, _) => outcome((0, id.is_empty())),
            PubSubMessage::Invalid => 1,
            PubSubMessage::NotAMessage => outcome((2, std::mem::discriminant(message))),
        }
    });
}

#[test]
fn server_info() {
    fuzz(corpus("introductions"), |bytes: &Vec<u8>| {
        let mut facts = ServerInfoReader::default();
        let mut took = Vec::new();
        for (question, answer) in INFO_COMMANDS.iter().zip(stream(bytes, usize::MAX).0) {
            took.push(facts.read_reply(question, &answer));
        }
        let identity = facts.server_info(Moment::from_nanos(7));
        if let Some(identity) = &identity {
            assert!(!identity.run_id.is_empty());
            // A server may claim any uptime, which only means that it votes.
            let _ = identity.observed_at.saturating_add(identity.uptime);
        }
        outcome((
            took,
            identity.map(|identity| (identity.is_master, identity.promotion_id.is_some())),
        ))
    });
}
