//! The events of a record, about processes, their locks and their servers, and their text form.

use std::{error::Error, fmt, str::FromStr};

use super::sharing::Sharing;

/// The result of parsing, or why the text could not be parsed.
pub(crate) type Reading<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Recorded instead of the reason of a loss if the guard did not report one.
pub(crate) const UNREPORTED: &str = "not reported";

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// The thread begins to acquire the lock.
    Wait,
    /// The next acquisition of this thread has this kind; without this, it is a mutex.
    As { sharing: Sharing },
    /// The thread is about to turn its write lock into a read lock.
    Downgrade,
    /// The lock was acquired: `lock()` had returned before this moment, and `is_held()` returned
    /// true after it.
    Enter { deadline: u64, token: u64, id: String },
    /// `is_held()` returned true after this moment, with this deadline of the lease.
    Look { deadline: u64 },
    /// `is_held()` returned false.
    Lost { why: String },
    /// The resource has seen this token, and rejects smaller ones from now on.
    Met { token: u64 },
    /// The resource accepted or rejected a write with this token.
    Write { token: u64, value: u64, accepted: bool },
    /// The work is done; the lock is released after this moment.
    Leave,
    /// The process has finished all its rounds.
    Done,
    /// The lock was not acquired; the thread will try again.
    Again { why: String },
    /// The process failed.
    Failed { why: String },
    /// Something was left at the end that should have been removed.
    Leak { what: String },
    /// The parent is about to kill the process, which may take a while.
    Doomed,
    /// The parent has killed the process, and it has ended.
    Killed,
    /// The parent has stopped the process.
    Stopped,
    /// The parent is about to continue the process.
    Continued,
    /// The thread calls the library, which must return within `bound` nanoseconds. Without a bound
    /// it may wait for ever.
    Call { what: String, bound: Option<u64> },
    /// The call has returned. For `delayed` nanoseconds of it the thread was ready to run but had
    /// no processor.
    Back { delayed: u64 },
    /// A pause of the process that ended at this moment took `by` nanoseconds longer than
    /// requested.
    Late { by: u64 },
    /// The number of processes that will be started.
    Plan { children: u32 },
    /// The settings with which locks are acquired.
    Terms(Terms),
    /// A change of one of several nodes, as its parent sees it.
    Node { node: usize, change: Change },
    /// A fault of a server or of the network begins.
    Fault(Fault),
    /// The fault with this number has ended.
    Over { number: u32 },
    /// What each node replied about the lock, between `began` and this moment.
    Seen { began: u64, said: Vec<Said> },
}

/// Settings with which locks are acquired. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub(crate) struct Terms {
    pub(crate) nodes: usize,
    /// The longest ttl of any lock.
    pub(crate) ttl: u64,
    pub(crate) operation_timeout: u64,
    pub(crate) claim_window: u64,
    /// The server is a database, which keeps a lock as long as the connection of its holder.
    pub(crate) is_database: bool,
}

/// What happened to a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    /// It runs, has no data, and does not vote until its quarantine has ended.
    Up { votes_from: u64 },
    /// Its quarantine has ended.
    Votes,
    /// The parent has killed it.
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fault {
    /// Identifies the fault; [`Event::Over`] refers to it.
    pub(crate) number: u32,
    /// Zero if it affects all nodes.
    pub(crate) node: usize,
    pub(crate) kind: Kind,
    /// Depends on the kind: for example the milliseconds by which a clock jumps.
    pub(crate) amount: u64,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $word:literal,)*) => {
        /// The kinds of faults of a server or of the network.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) enum Kind { $($(#[$doc])* $kind,)* }

        impl Kind {
            #[cfg(test)]
            pub(crate) const ALL: &[Kind] = &[$(Kind::$kind,)*];

            pub(crate) fn word(self) -> &'static str {
                match self { $(Kind::$kind => $word,)* }
            }

            fn read(word: &str) -> Reading<Kind> {
                match word {
                    $($word => Ok(Kind::$kind),)*
                    _ => Err(format!("unknown fault {word:?}").into()),
                }
            }
        }
    };
}

kinds! {
    /// The server is stopped; its connections stay open.
    Freeze "freeze",
    /// The server is killed and restarted with its data.
    Restart "restart",
    /// The server is killed and restarted without its data.
    Forget "forget",
    /// The server closes its connections.
    CutClients "cut-clients",
    FlushScripts "flush-scripts",
    /// The key of a lock is deleted, or the connection of its holder is killed.
    Delete "delete",
    /// The queue of a lock is deleted.
    DeleteQueue "delete-queue",
    /// The token key of a lock and the fence are deleted.
    DeleteFence "delete-fence",
    /// The server evicts keys because its memory is full.
    Evict "evict",
    /// The memory of the server is full, and it evicts nothing.
    Full "full",
    /// Keys expire earlier, as if the server's clock had jumped forward.
    Step "step",
    /// Nothing passes in either direction, and nothing is closed.
    Blackhole "blackhole",
    /// Requests pass, replies do not.
    OneWay "one-way",
    /// Replies pass, requests do not.
    Deaf "deaf",
    /// New connections are accepted, but get no replies.
    Mute "mute",
    /// Connections are closed on one side only, without notice to the other.
    HalfOpen "half-open",
    Refuse "refuse",
    Reset "reset",
    DropReply "drop-reply",
    DelayReply "delay-reply",
    HoldReply "hold-reply",
    HoldRequest "hold-request",
    DuplicateReply "duplicate-reply",
    DuplicateRequest "duplicate-request",
    ForeignBytes "foreign-bytes",
    Slice "slice",
    ResetAfter "reset-after",
    ResetBefore "reset-before",
    CloseAfter "close-after",
    /// A slot of a cluster moves to another master.
    Move "move",
    /// A master of a cluster hands its slots to its replica.
    Failover "failover",
    /// A master of a cluster is killed, and its replica takes over.
    Promote "promote",
}

impl Kind {
    /// Whether a server that had this fault may grant a held lock again. A database does when it
    /// has noticed the end of the holder's connection.
    pub(crate) fn is_amnesia(self, is_database: bool) -> bool {
        match self {
            Kind::Forget | Kind::Delete | Kind::Evict | Kind::Step => true,
            Kind::Restart
            | Kind::CutClients
            | Kind::HalfOpen
            | Kind::Refuse
            | Kind::Reset
            | Kind::ResetAfter
            | Kind::ResetBefore
            | Kind::CloseAfter => is_database,
            _ => false,
        }
    }
}

/// The reply of one node about the holder of a lock.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Said {
    /// It did not reply.
    Nothing,
    Free,
    Kept {
        id: String,
        left_ms: u64,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Wait => f.write_str("wait"),
            Event::As { sharing } => write!(f, "as {sharing}"),
            Event::Downgrade => f.write_str("downgrade"),
            Event::Enter { deadline, token, id } => write!(f, "enter {deadline} {token} {id}"),
            Event::Look { deadline } => write!(f, "look {deadline}"),
            Event::Lost { why } => write!(f, "lost {}", why.escape_debug()),
            Event::Met { token } => write!(f, "met {token}"),
            Event::Write { token, value, accepted } => {
                write!(
                    f,
                    "write {token} {value} {}",
                    if *accepted { "accepted" } else { "refused" }
                )
            }
            Event::Leave => f.write_str("leave"),
            Event::Done => f.write_str("done"),
            Event::Again { why } => write!(f, "again {}", why.escape_debug()),
            Event::Failed { why } => write!(f, "failed {}", why.escape_debug()),
            Event::Leak { what } => write!(f, "leak {}", what.escape_debug()),
            Event::Doomed => f.write_str("doomed"),
            Event::Killed => f.write_str("killed"),
            Event::Stopped => f.write_str("stopped"),
            Event::Continued => f.write_str("continued"),
            Event::Call { what, bound: Some(bound) } => write!(f, "call {what} {bound}"),
            Event::Call { what, bound: None } => write!(f, "call {what} -"),
            Event::Back { delayed } => write!(f, "back {delayed}"),
            Event::Late { by } => write!(f, "late {by}"),
            Event::Plan { children } => write!(f, "plan {children}"),
            Event::Terms(terms) => {
                let Terms { nodes, ttl, operation_timeout, claim_window, is_database } = terms;
                let kind = if *is_database { " database" } else { "" };
                write!(f, "terms {nodes} {ttl} {operation_timeout} {claim_window}{kind}")
            }
            Event::Node { node, change: Change::Up { votes_from } } => {
                write!(f, "node {node} up {votes_from}")
            }
            Event::Node { node, change: Change::Votes } => write!(f, "node {node} votes"),
            Event::Node { node, change: Change::Down } => write!(f, "node {node} down"),
            Event::Fault(Fault { number, node, kind, amount }) => {
                write!(f, "fault {number} {node} {} {amount}", kind.word())
            }
            Event::Over { number } => write!(f, "over {number}"),
            Event::Seen { began, said } => {
                write!(f, "seen {began}")?;
                said.iter().try_for_each(|said| match said {
                    Said::Nothing => f.write_str(" ?"),
                    Said::Free => f.write_str(" -"),
                    Said::Kept { id, left_ms } => write!(f, " {left_ms}:{id}"),
                })
            }
        }
    }
}

impl FromStr for Event {
    type Err = Box<dyn Error + Send + Sync>;

    fn from_str(text: &str) -> Reading<Event> {
        let mut rest = text;
        let event = match word(&mut rest) {
            "wait" => Event::Wait,
            "as" => Event::As { sharing: rest.parse()? },
            "downgrade" => Event::Downgrade,
            "enter" => Event::Enter {
                deadline: number(&mut rest)?,
                token: number(&mut rest)?,
                id: rest.to_owned(),
            },
            "look" => Event::Look { deadline: number(&mut rest)? },
            "lost" => Event::Lost { why: rest.to_owned() },
            "met" => Event::Met { token: number(&mut rest)? },
            "write" => Event::Write {
                token: number(&mut rest)?,
                value: number(&mut rest)?,
                accepted: match word(&mut rest) {
                    "accepted" => true,
                    "refused" => false,
                    other => {
                        return Err(format!("a write is accepted or refused, not {other:?}").into());
                    }
                },
            },
            "leave" => Event::Leave,
            "done" => Event::Done,
            "again" => Event::Again { why: rest.to_owned() },
            "failed" => Event::Failed { why: rest.to_owned() },
            "leak" => Event::Leak { what: rest.to_owned() },
            "doomed" => Event::Doomed,
            "killed" => Event::Killed,
            "stopped" => Event::Stopped,
            "continued" => Event::Continued,
            "call" => Event::Call {
                what: word(&mut rest).to_owned(),
                bound: if rest == "-" { None } else { Some(number(&mut rest)?) },
            },
            "back" => Event::Back { delayed: if rest.is_empty() { 0 } else { number(&mut rest)? } },
            "late" => Event::Late { by: number(&mut rest)? },
            "plan" => Event::Plan { children: number(&mut rest)? },
            "terms" => Event::Terms(Terms {
                nodes: number(&mut rest)?,
                ttl: number(&mut rest)?,
                operation_timeout: number(&mut rest)?,
                claim_window: number(&mut rest)?,
                is_database: rest == "database",
            }),
            "node" => Event::Node {
                node: number(&mut rest)?,
                change: match word(&mut rest) {
                    "up" => Change::Up { votes_from: number(&mut rest)? },
                    "votes" => Change::Votes,
                    "down" => Change::Down,
                    other => {
                        return Err(format!("a node is up, votes or down, not {other:?}").into());
                    }
                },
            },
            "fault" => Event::Fault(Fault {
                number: number(&mut rest)?,
                node: number(&mut rest)?,
                kind: Kind::read(word(&mut rest))?,
                amount: number(&mut rest)?,
            }),
            "over" => Event::Over { number: number(&mut rest)? },
            "seen" => Event::Seen {
                began: number(&mut rest)?,
                said: rest.split_whitespace().map(said).collect::<Reading<_>>()?,
            },
            other => return Err(format!("unknown event {other:?}").into()),
        };
        Ok(event)
    }
}

fn said(word: &str) -> Reading<Said> {
    Ok(match word {
        "?" => Said::Nothing,
        "-" => Said::Free,
        word => {
            let (left, id) =
                word.split_once(':').ok_or_else(|| format!("unknown reply of a node {word:?}"))?;
            Said::Kept { id: id.to_owned(), left_ms: left.parse()? }
        }
    })
}

pub(super) fn word<'a>(rest: &mut &'a str) -> &'a str {
    let (word, tail) = rest.split_once(' ').unwrap_or((rest, ""));
    *rest = tail;
    word
}

pub(super) fn number<T: FromStr>(rest: &mut &str) -> Reading<T> {
    let word = word(rest);
    word.parse().map_err(|_| format!("{word:?} is not a number").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_text_parses_back() {
        let terms =
            Terms { nodes: 5, ttl: 1, operation_timeout: 2, claim_window: 3, is_database: false };
        let mut events = vec![
            Event::Enter { deadline: 5, token: 7, id: "host|pid1|tid2|ts3|u".into() },
            Event::Write { token: 7, value: 2, accepted: false },
            Event::As { sharing: Sharing::Permits { limit: 3, count: 2 } },
            Event::As { sharing: Sharing::Foreign },
            Event::Downgrade,
            Event::Call { what: "lock".into(), bound: Some(9) },
            Event::Call { what: "lock".into(), bound: None },
            Event::Terms(terms),
            Event::Terms(Terms { is_database: true, ..terms }),
            Event::Seen {
                began: 4,
                said: vec![Said::Nothing, Said::Free, Said::Kept { id: "a|b".into(), left_ms: 6 }],
            },
        ];
        let fault = |(number, kind): (u32, &Kind)| {
            Event::Fault(Fault { number, node: 3, kind: *kind, amount: 80 })
        };
        events.extend((1..).zip(Kind::ALL).map(fault));
        for event in events {
            let text = event.to_string();
            assert_eq!(text.parse::<Event>().expect(&text), event, "{text}");
        }
    }

    #[test]
    fn invalid_event_text_is_rejected() {
        for text in ["", "sing", "fault 1 1 song 0", "seen 5 x", "look soon", "write 1 2 perhaps"] {
            assert!(text.parse::<Event>().is_err(), "{text}");
        }
    }
}
