//! `LockError` and `LockLost`: sentences that say what was tried, on which lock and server, and what can be done.

use std::{error::Error, fmt, io, sync::Arc, time::Duration};

use crate::{
    answer::{Answers, NodeAnswer},
    holder::Holder,
    text::{Quoted, Span},
};

/// The result of everything here that can fail.
pub type Result<T, E = LockError> = std::result::Result<T, E>;

/// Why a call did not do what it was asked for.
///
/// "Somebody else has it" and "could not find out" are different answers: ask [`is_contended`](Self::is_contended)
/// and [`is_unavailable`](Self::is_unavailable). After every error of a lock function the caller does not hold the
/// lock; whatever an attempt may have left on the server is undone in the background or expires by itself.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockError {
    /// The lock is held by another, and the caller did not want to wait.
    #[non_exhaustive]
    Held {
        /// The lock.
        name: String,
        /// Who has it.
        holder: Box<Holder>,
        /// The server that said so.
        server: Arc<str>,
    },
    /// The lock did not become free within the time the caller wanted to wait.
    #[non_exhaustive]
    Timeout {
        /// The lock.
        name: String,
        /// Who had it at the end, if the server could still be asked.
        holder: Option<Box<Holder>>,
        /// How long the caller waited.
        waited: Duration,
        /// The server.
        server: Arc<str>,
    },
    /// The server could not be reached, did not answer in time, or is in a state that passes (loading its data, busy
    /// with a script). Whether the operation was carried out is not known; trying again is safe.
    #[non_exhaustive]
    Unavailable {
        /// What was tried.
        action: Action,
        /// The lock, where one was concerned.
        name: Option<String>,
        /// The server.
        server: Arc<str>,
        /// What went wrong.
        cause: Box<dyn Error + Send + Sync>,
    },
    /// Every pooled connection was in use until the time was over. Return connections sooner, or raise
    /// [`Config::pool_size`](crate::Config::pool_size).
    #[non_exhaustive]
    PoolExhausted {
        /// What was tried.
        action: Action,
        /// The lock, where one was concerned.
        name: Option<String>,
        /// The server.
        server: Arc<str>,
        /// The size of the pool.
        pool_size: u32,
    },
    /// The server answered with an error: credentials, rights, read-only, out of memory and the like.
    #[non_exhaustive]
    Refused {
        /// What was tried.
        action: Action,
        /// The lock, where one was concerned.
        name: Option<String>,
        /// The server.
        server: Arc<str>,
        /// The first word of the server's error, such as `NOAUTH`, `WRONGPASS`, `NOPERM`, `READONLY`, `OOM`, `MISCONF`.
        code: String,
        /// The rest of the server's error, cut and escaped.
        message: String,
    },
    /// Too few of several nodes gave an answer that counts: nobody may know who holds the lock.
    #[non_exhaustive]
    NoQuorum {
        /// What was tried.
        action: Action,
        /// The lock, where one was concerned.
        name: Option<String>,
        /// How many nodes have to agree.
        needed: usize,
        /// What each node said.
        answers: Vec<NodeAnswer>,
    },
    /// The key of the lock holds something that is not a lock; it was left alone. Use another name or prefix.
    #[non_exhaustive]
    WrongType {
        /// The lock.
        name: String,
        /// The key in Redis.
        key: String,
        /// The server.
        server: Arc<str>,
    },
    /// The name cannot be the name of a lock.
    #[non_exhaustive]
    InvalidName {
        /// What is wrong with it.
        reason: String,
    },
    /// A duration or another option is out of range, or two do not go together.
    #[non_exhaustive]
    InvalidOptions {
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// The configuration cannot work, for example a URL that this build cannot serve.
    #[non_exhaustive]
    InvalidConfig {
        /// What is wrong; never contains a password.
        reason: String,
    },
    /// The lock was held and is lost. From [`LockGuard::ensure_held`](crate::LockGuard::ensure_held).
    #[non_exhaustive]
    Lost {
        /// The lock.
        name: String,
        /// Why.
        why: LockLost,
    },
    /// [`RedisMgr::init`](crate::RedisMgr::init) came after the process-wide manager had been made.
    AlreadyInitialized,
    /// [`RedisMgr::instance`](crate::RedisMgr::instance) or [`init`](crate::RedisMgr::init) was called by the thread that is
    /// making the process-wide manager just now, as from inside of a logger.
    BeingMade,
    /// The manager has been shut down.
    Shutdown,
    /// This process is a forked child of one that had made a manager. Such a child has only one of the threads, and cannot lock.
    Forked,
    /// The operating system did not give a thread.
    #[non_exhaustive]
    NoThread {
        /// What for.
        purpose: &'static str,
        /// What the system said.
        cause: io::Error,
    },
}

/// What was being done when an error came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Taking a lock.
    Acquire,
    /// Giving a lock up.
    Release,
    /// Asking who holds a lock.
    Inspect,
    /// Asking whether the server is there.
    Ping,
    /// Taking a connection out of the pool.
    Connect,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Acquire => "acquire",
            Action::Release => "release",
            Action::Inspect => "inspect",
            Action::Ping => "ping",
            Action::Connect => "connect to",
        })
    }
}

impl LockError {
    /// Somebody else holds the lock: [`Held`](Self::Held) or [`Timeout`](Self::Timeout). Trying later may succeed.
    pub fn is_contended(&self) -> bool {
        matches!(self, LockError::Held { .. } | LockError::Timeout { .. })
    }

    /// The time for waiting ran out while somebody else held the lock.
    pub fn is_timeout(&self) -> bool {
        matches!(self, LockError::Timeout { .. })
    }

    /// It could not be found out who holds the lock: no server, no answer, no quorum, or no free connection to ask.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, LockError::Unavailable { .. } | LockError::PoolExhausted { .. } | LockError::NoQuorum { .. })
    }

    /// The server refused; it will go on refusing until somebody changes its state or our rights.
    pub fn is_refused(&self) -> bool {
        matches!(self, LockError::Refused { .. })
    }

    /// The lock was held and is lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, LockError::Lost { .. })
    }

    /// The call itself was wrong (name, options, configuration) and will fail the same way again.
    pub fn is_invalid(&self) -> bool {
        matches!(
            self,
            LockError::InvalidName { .. } | LockError::InvalidOptions { .. } | LockError::InvalidConfig { .. }
        )
    }

    /// Who holds the lock, where this error knows.
    pub fn holder(&self) -> Option<&Holder> {
        match self {
            LockError::Held { holder, .. } => Some(holder),
            LockError::Timeout { holder, .. } => holder.as_deref(),
            LockError::Lost { why: LockLost::Taken { by }, .. } => Some(by),
            _ => None,
        }
    }

    /// What each of several nodes said, where this error knows.
    pub fn nodes(&self) -> &[NodeAnswer] {
        match self {
            LockError::NoQuorum { answers, .. } => answers,
            _ => self.holder().map_or(&[], Holder::nodes),
        }
    }

    /// The first word of the server's error, of [`Refused`](Self::Refused).
    pub fn code(&self) -> Option<&str> {
        match self {
            LockError::Refused { code, .. } => Some(code),
            _ => None,
        }
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockError::Held { name, holder, server } => {
                write!(f, "lock {} is held by {holder} (said {server})", Quoted(name))
            }
            LockError::Timeout { name, holder, waited, server } => {
                write!(f, "lock {} did not become free within {}: ", Quoted(name), Span(*waited))?;
                match holder {
                    Some(holder) => write!(f, "it is held by {holder} (said {server})"),
                    None => write!(f, "its holder is not known, {server} did not answer"),
                }
            }
            LockError::Unavailable { action, name, server, cause } => {
                write!(f, "could not {action} {} at {server}: {cause}; try again when it is back", Subject(name))
            }
            LockError::PoolExhausted { action, name, server, pool_size } => write!(
                f,
                "could not {action} {} at {server}: all {pool_size} pooled connections stayed in use; \
                 return them sooner or raise Config::pool_size",
                Subject(name)
            ),
            LockError::Refused { action, name, server, code, message } => {
                write!(f, "could not {action} {}: {server} refused with {code} {message}", Subject(name))?;
                advice(code, message).map_or(Ok(()), |advice| write!(f, " ({advice})"))
            }
            LockError::NoQuorum { action, name, needed, answers } => {
                let nodes = answers.len();
                write!(f, "could not {action} {}: it takes {needed} of {nodes} nodes (", Subject(name))?;
                write!(f, "{})", Answers(answers))
            }
            LockError::WrongType { name, key, server } => write!(
                f,
                "lock {} cannot be used: key {} at {server} holds something else than a lock, \
                 which was left alone; choose another name or prefix",
                Quoted(name),
                Quoted(key)
            ),
            LockError::InvalidName { reason } => write!(f, "not a lock name: {reason}"),
            LockError::InvalidOptions { reason } => write!(f, "these lock options cannot work: {reason}"),
            LockError::InvalidConfig { reason } => write!(f, "this configuration cannot work: {reason}"),
            LockError::Lost { name, why } => write!(f, "lock {} is lost: {why}", Quoted(name)),
            LockError::AlreadyInitialized => f.write_str(
                "the process-wide manager exists already and was not changed; call RedisMgr::init before the first \
                 RedisMgr::instance, or make a manager with RedisMgr::new",
            ),
            LockError::BeingMade => f.write_str(
                "there is no process-wide manager yet: this thread is making it just now, and asked for it meanwhile, as from a logger",
            ),
            LockError::Shutdown => f.write_str("the lock manager has been shut down"),
            LockError::Forked => f.write_str(
                "this process was forked from one that had made a lock manager, and cannot lock; fork before the first manager is made, \
                 or start a program in the child (exec)",
            ),
            LockError::NoThread { purpose, cause } => write!(f, "the system gave no thread for the {purpose}: {cause}"),
        }
    }
}

/// What to do about an error of the server's, where we know.
fn advice(code: &str, message: &str) -> Option<&'static str> {
    // In the words of Redis, and of Valkey.
    if message.contains("one of the keys") || message.contains("permissions to access a key") {
        return Some("grant the rights listed in the README: here to the keys of its prefix, and to distlock:*");
    }
    // Rights that are missing inside a script come back as a plain ERR.
    if code == "NOPERM"
        || message.contains("NOPERM")
        || message.contains("ACL failure")
        || message.contains("executing the script can")
    {
        return Some("grant the rights listed in the README");
    }
    if message.contains("nknown command") || message.contains("Unknown Redis command") {
        return Some(
            "it takes Redis 6.2 or newer, or any Valkey, with the commands listed in the README under their names",
        );
    }
    match code {
        "DENIED" => Some("set a password on the server, or turn its protected-mode off where only its users reach it"),
        "NOAUTH" => Some("put a password into the URL"),
        "WRONGPASS" => Some("check the user and the password in the URL"),
        "READONLY" => Some("this is a replica; connect to its master"),
        "OOM" => Some("free memory, or raise maxmemory"),
        "MISCONF" => Some("mend the server's persistence"),
        "NOREPLICAS" => Some("bring its replicas back"),
        "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" => {
            Some("Redis Cluster is not supported; connect to a master that stands alone")
        }
        _ => None,
    }
}

struct Subject<'a>(&'a Option<String>);

impl fmt::Display for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(name) => write!(f, "lock {}", Quoted(name)),
            None => f.write_str("the server"),
        }
    }
}

impl Error for LockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            LockError::Unavailable { cause, .. } => Some(&**cause),
            LockError::NoThread { cause, .. } => Some(cause),
            LockError::Lost { why, .. } => Some(why),
            _ => None,
        }
    }
}

/// Why a lock that was held is not held any more. Final: a lost lock never comes back.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockLost {
    /// No renewal was confirmed in time (server away, process paused, or renewal switched off), so the lease ran out
    /// on the local clock. Somebody else may hold the lock now.
    Expired,
    /// The server says that another holds it.
    #[non_exhaustive]
    Taken {
        /// Who.
        by: Box<Holder>,
    },
    /// The server does not know the lock any more: deleted, flushed, evicted, renamed, or lost in a restart.
    Gone,
    /// It was held for [`max_hold`](crate::LockOptions::max_hold), and then given up.
    MaxHold,
    /// The manager was shut down, which gave the lock up.
    Shutdown,
}

impl fmt::Display for LockLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockLost::Expired => f.write_str("its lease ran out without a confirmed renewal"),
            LockLost::Taken { by } => write!(f, "it is now held by {by}"),
            LockLost::Gone => f.write_str("the server does not know it any more"),
            LockLost::MaxHold => f.write_str("it was held for the longest time allowed (max_hold) and was given up"),
            LockLost::Shutdown => f.write_str("its manager was shut down"),
        }
    }
}

impl Error for LockLost {}
