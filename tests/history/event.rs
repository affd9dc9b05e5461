//! What can be written down about processes, their locks and their servers, and the words it is
//! written in.

use std::{error::Error, fmt, str::FromStr};

/// A reading that failed, with the reason.
pub(crate) type Reading<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Why a lock was lost, where nobody who should have has said so.
pub(crate) const UNTOLD: &str = "without a word";

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// It asks for the lock.
    Wait,
    /// `lock()` returned before this moment, and `is_held()` said yes after it.
    Enter { deadline: u64, token: u64, id: String },
    /// `is_held()` said yes after this moment. The deadline is what the guard promised then.
    Look { deadline: u64 },
    /// `is_held()` said no.
    Lost { why: String },
    /// The resource has seen this token, and refuses smaller ones from now on.
    Met { token: u64 },
    /// The resource answered a write under this token.
    Write { token: u64, value: u64, accepted: bool },
    /// Its work is over and it will release the lock after this moment.
    Leave,
    /// It has done all its rounds.
    Done,
    /// It got no lock, and asks again.
    Again { why: String },
    /// It could not go on.
    Failed { why: String },
    /// Something is there at the end that should not be.
    Leak { what: String },
    /// The parent is about to kill it, which may take a while.
    Doomed,
    /// The parent has killed it, and it is gone.
    Killed,
    /// The parent has frozen it.
    Stopped,
    /// The parent is about to wake it up.
    Continued,
    /// It calls the library, which has to return within the bound, in nanoseconds; without one it
    /// may wait for ever.
    Call { what: String, bound: Option<u64> },
    /// The call has returned. Its thread was ready to run for so many nanoseconds of it, and did
    /// not get a processor.
    Back { delayed: u64 },
    /// Until this moment the process had got no processor for so many nanoseconds longer than it
    /// had asked for.
    Late { by: u64 },
    /// There are this many processes.
    Plan { children: u32 },
    /// On what terms locks are taken.
    Terms(Terms),
    /// One of the servers that decide together, as its parent sees it.
    Node { node: usize, change: Change },
    /// Something is about to be done to a server, or to the way to it.
    Fault(Fault),
    /// That is over.
    Over { number: u32 },
    /// What the nodes said about the lock, each asked after `began` and answered before this
    /// moment.
    Seen { began: u64, said: Vec<Said> },
}

/// Times in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub(crate) struct Terms {
    pub(crate) nodes: usize,
    /// The longest lease.
    pub(crate) ttl: u64,
    pub(crate) operation_timeout: u64,
    pub(crate) claim_window: u64,
}

/// What happened to a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    /// It answers, knows nothing, and does not vote before the longest lease has passed.
    Up { votes_from: u64 },
    /// Then that was over.
    Votes,
    /// The parent has killed it.
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fault {
    /// By which its end is told.
    pub(crate) number: u32,
    /// Zero for all of them.
    pub(crate) node: usize,
    pub(crate) kind: Kind,
    /// Of a clock's step in milliseconds, say.
    pub(crate) amount: u64,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $word:literal,)*) => {
        /// What may be done to a server, or to the way to it.
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
                    _ => Err(format!("{word:?} is no fault").into()),
                }
            }
        }
    };
}

kinds! {
    /// Stopped, with its connections open.
    Freeze "freeze",
    /// Killed, and started with its data.
    Restart "restart",
    /// Killed, and started without its data.
    Forget "forget",
    /// Its connections were cut by itself.
    CutClients "cut-clients",
    FlushScripts "flush-scripts",
    /// A key of a lock was deleted.
    Delete "delete",
    /// The line of a lock was deleted.
    DeleteLine "delete-line",
    /// The last token of a lock was deleted.
    DeleteFence "delete-fence",
    /// It had to throw keys away.
    Evict "evict",
    /// It had no memory for more.
    Full "full",
    /// Its clock went forward, as far as keys can tell.
    Step "step",
    /// Nothing passes, in neither direction, and nothing is closed.
    Blackhole "blackhole",
    /// Requests pass, replies do not.
    OneWay "one-way",
    /// Replies pass, requests do not.
    Deaf "deaf",
    /// New connections are accepted and never answered.
    Mute "mute",
    /// Connections ended on one side, and the other was not told.
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
}

impl Kind {
    /// Whether a server may give away what it had given, without anybody knowing it for a restart.
    pub(crate) fn is_amnesia(self) -> bool {
        matches!(self, Kind::Forget | Kind::Delete | Kind::Evict | Kind::Step)
    }
}

/// What one node said about a lock.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Said {
    /// It did not answer.
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
            Event::Terms(Terms { nodes, ttl, operation_timeout, claim_window }) => {
                write!(f, "terms {nodes} {ttl} {operation_timeout} {claim_window}")
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
            other => return Err(format!("{other:?} is no event").into()),
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
                word.split_once(':').ok_or_else(|| format!("{word:?} is no answer of a node"))?;
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
    fn what_is_written_is_read_again() {
        let mut events = vec![
            Event::Enter { deadline: 5, token: 7, id: "host|pid1|tid2|ts3|u".into() },
            Event::Write { token: 7, value: 2, accepted: false },
            Event::Call { what: "lock".into(), bound: Some(9) },
            Event::Call { what: "lock".into(), bound: None },
            Event::Terms(Terms { nodes: 5, ttl: 1, operation_timeout: 2, claim_window: 3 }),
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
    fn what_nobody_writes_is_refused() {
        for text in ["", "sing", "fault 1 1 song 0", "seen 5 x", "look soon", "write 1 2 perhaps"] {
            assert!(text.parse::<Event>().is_err(), "{text}");
        }
    }
}
