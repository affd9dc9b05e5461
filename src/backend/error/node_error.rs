//! `NodeError`: an exchange that failed, and whether the server may have carried out the request.

#[cfg(test)]
mod tests;

use std::{error::Error, fmt, io, sync::Arc, time::Duration};

#[cfg(feature = "tls")]
use crate::backend::tls_advice::tls_advice;
use crate::sys::display::HumanDuration;

/// An exchange that failed: the request was not applied, or its outcome is unknown.
#[derive(Clone, Debug)]
pub(crate) struct NodeError {
    /// Whether the request may have been applied, because at least one byte of it may have reached
    /// the server.
    pub(crate) outcome_unknown: bool,
    pub(crate) kind: NodeErrorKind,
}

#[derive(Clone, Debug)]
pub(crate) enum NodeErrorKind {
    Io(Arc<io::Error>),
    TimedOut,
    /// A timeout that was shorter than the operation timeout, because the lease is short.
    ShortLease(Duration),
    /// The server replied with an error. `code` is the error's first word.
    Refused {
        code: String,
        message: String,
    },
    /// A secure connection is not possible, for this reason.
    Tls(String),
    /// The reply is malformed or does not match the request.
    Protocol(String),
    /// The server speaks another protocol. Its first bytes, escaped.
    NotRedis(String),
    /// A connection was opened, and the server did not begin in time as MySQL servers do.
    #[cfg(feature = "mysql")]
    NoGreeting,
    /// A quorum granted the lock, but repeatedly with different fencing tokens.
    TokenDisagreement,
    /// All pooled connections are in use.
    PoolExhausted {
        pool_size: u32,
    },
    /// The manager has been shut down, and its pool is closed.
    Closed,
    /// The server cannot be one of several nodes, for this reason.
    Ineligible(String),
    /// The server may have lost locks that it granted. For the time `left`, its vote does not
    /// count, or it grants nothing if it decides alone.
    Quarantined {
        left: Duration,
        votes: bool,
    },
    /// Too few replicas had the lock in time.
    NotReplicated {
        count: u32,
        needed: u32,
        within: Duration,
    },
    /// The node is in back-off and was not asked, because the others can form a quorum.
    BackingOff,
}

/// Error codes that a server returns before it carries out a request or the first write of a
/// script.
const NOT_APPLIED_CODES: [&str; 19] = [
    "ASK",
    "BUSY",
    "CLUSTERDOWN",
    "CROSSSLOT",
    "DENIED",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "MOVED",
    "NOAUTH",
    "NOPERM",
    "NOREPLICAS",
    "NOSCRIPT",
    "OOM",
    "READONLY",
    "TRYAGAIN",
    "UNKILLABLE",
    "WRONGPASS",
    "WRONGTYPE",
];

impl NodeError {
    /// The server has not carried out the request, and will not do so.
    pub(crate) fn not_applied(kind: impl Into<NodeErrorKind>) -> NodeError {
        NodeError { outcome_unknown: false, kind: kind.into() }
    }

    /// A reply that makes no sense. The request may have been carried out.
    pub(crate) fn protocol(what: impl Into<String>) -> NodeError {
        NodeError::outcome_unknown(NodeErrorKind::Protocol(what.into()))
    }

    pub(crate) fn outcome_unknown(kind: NodeErrorKind) -> NodeError {
        NodeError { outcome_unknown: true, kind }
    }

    /// Creates an error from an error reply. `quote` removes secrets from the text and makes it
    /// printable.
    pub(crate) fn from_server(
        code: &str,
        message: &str,
        quote: impl Fn(&str) -> String,
    ) -> NodeError {
        let (code, message) = unwrap_script_error(code, message);
        // Well-known codes are kept verbatim; redaction could mangle them, for example if the
        // password is part of a code.
        let code = if NOT_APPLIED_CODES.contains(&code) { code.to_owned() } else { quote(code) };
        NodeError::refused(code, quote(message))
    }

    /// Creates an error from a code and a message. The known codes are returned before a request is
    /// carried out. Any other code may also end a script halfway, or come from a proxy that does
    /// not know the outcome.
    pub(crate) fn refused(code: String, message: String) -> NodeError {
        NodeError {
            outcome_unknown: !NOT_APPLIED_CODES.contains(&code.as_str()),
            kind: NodeErrorKind::Refused { code, message },
        }
    }

    /// Whether time ran out, whether or not the error says for what.
    pub(crate) fn is_timeout(&self) -> bool {
        match &self.kind {
            NodeErrorKind::Io(error) => error.kind() == io::ErrorKind::TimedOut,
            kind => matches!(kind, NodeErrorKind::TimedOut),
        }
    }

    /// Whether retrying soon may help without any intervention.
    pub(crate) fn is_transient(&self) -> bool {
        match &self.kind {
            NodeErrorKind::Refused { code, .. } => {
                let codes = ["LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN"];
                codes.contains(&code.as_str())
                    || self.is_max_clients()
                    || self.is_moved_within_script()
            }
            NodeErrorKind::Closed
            | NodeErrorKind::Ineligible(_)
            | NodeErrorKind::Tls(_)
            | NodeErrorKind::NotRedis(_) => false,
            _ => true,
        }
    }

    /// Whether the connection broke after the request was sent, or the reply was lost. The request
    /// may have been carried out, and asking again over a new connection may find out.
    pub(crate) fn is_reply_lost(&self) -> bool {
        self.outcome_unknown && self.is_transient()
    }

    /// Whether the server does not carry out this command, or not for this user.
    pub(crate) fn is_command_refused(&self) -> bool {
        match &self.kind {
            NodeErrorKind::Refused { code, .. } => {
                (code == "ERR" || code == "NOPERM") && !self.is_max_clients()
            }
            _ => false,
        }
    }

    /// Whether the server has reached `maxclients` of Redis, or `max_connections` of MySQL or its
    /// limits for a user. Redis sends this error to every new connection, before it reads anything.
    pub(crate) fn is_max_clients(&self) -> bool {
        let NodeErrorKind::Refused { code, message } = &self.kind else { return false };
        match code.as_str() {
            "ERR" => message.starts_with("max number of clients"),
            "1226" => message.contains("'max_user_connections'"),
            code => matches!(code, "1040" | "1203"),
        }
    }

    /// Whether a key went to another node of a cluster while a script was using it.
    fn is_moved_within_script(&self) -> bool {
        matches!(
            &self.kind,
            NodeErrorKind::Refused { code, message }
                if code == "ERR" && message.contains("access a non local key")
        )
    }

    /// Whether the server is not a master, so another server must be the master.
    pub(crate) fn is_not_master(&self) -> bool {
        matches!(
            &self.kind,
            NodeErrorKind::Refused { code, .. }
                if matches!(code.as_str(), "READONLY" | "MASTERDOWN")
        )
    }

    /// Whether a failover may be the cause, so that its end may help. A new master has no replicas
    /// until they have found it.
    pub(crate) fn may_be_failover(&self) -> bool {
        let has_no_replicas =
            matches!(&self.kind, NodeErrorKind::Refused { code, .. } if code == "NOREPLICAS");
        has_no_replicas || self.is_not_master()
    }

    /// Whether any other request to this server would fail in the same way.
    pub(crate) fn is_server_wide(&self) -> bool {
        let NodeErrorKind::Refused { code, .. } = &self.kind else { return true };
        let codes = ["MISCONF", "OOM", "NOAUTH", "WRONGPASS", "CLUSTERDOWN", "UNKILLABLE"];
        self.is_transient() || self.may_be_failover() || codes.contains(&code.as_str())
    }

    /// Whether the key has an unexpected type. The server itself is working.
    pub(crate) fn is_wrong_type(&self) -> bool {
        matches!(&self.kind, NodeErrorKind::Refused { code, .. } if code == "WRONGTYPE")
    }

    /// Whether the server does not have the script that the request named by its hash.
    pub(crate) fn is_unknown_script(&self) -> bool {
        matches!(&self.kind, NodeErrorKind::Refused { code, .. } if code == "NOSCRIPT")
    }

    pub(crate) fn into_redis_error(self) -> redis::RedisError {
        match self.kind {
            NodeErrorKind::Io(error) => io::Error::new(error.kind(), error).into(),
            NodeErrorKind::TimedOut => io::Error::from(io::ErrorKind::TimedOut).into(),
            reason => io::Error::other(reason).into(),
        }
    }
}

/// Unwraps the inner error of a script. Servers before Redis 7 put a place in the script before it,
/// and an error that the script does not catch into an "Error running script" message.
fn unwrap_script_error<'a>(code: &'a str, message: &'a str) -> (&'a str, &'a str) {
    let inner = || {
        let line = match code {
            "ERR" => message.strip_prefix("Error running script ")?.rsplit_once("@user_script:")?.1,
            "@user_script:" => message,
            _ => return None,
        };
        // Skip the line number, which appears in two formats.
        let (code, rest) = line
            .trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit())
            .strip_prefix(": ")?
            .split_once(' ')?;
        let code = code.trim_start_matches('-');
        NOT_APPLIED_CODES.contains(&code).then_some((code, rest))
    };
    inner().unwrap_or((code, message))
}

impl From<io::Error> for NodeErrorKind {
    fn from(error: io::Error) -> NodeErrorKind {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock if error.get_ref().is_none() => {
                NodeErrorKind::TimedOut
            }
            #[cfg(feature = "tls")]
            _ if tls_advice(&error).is_some() => {
                NodeErrorKind::Tls(tls_advice(&error).unwrap_or_default())
            }
            _ => NodeErrorKind::Io(Arc::new(error)),
        }
    }
}

impl From<io::ErrorKind> for NodeErrorKind {
    fn from(kind: io::ErrorKind) -> NodeErrorKind {
        io::Error::from(kind).into()
    }
}

impl fmt::Display for NodeErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodeErrorKind::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("it closed the connection")
            }
            NodeErrorKind::Io(error) => write!(f, "{error}"),
            NodeErrorKind::TimedOut => f.write_str("no reply in time"),
            NodeErrorKind::ShortLease(ttl) => {
                write!(f, "no reply in the time that a lease of {} leaves", HumanDuration(*ttl))
            }
            NodeErrorKind::Refused { code, message } => write!(f, "it replied {code} {message}"),
            NodeErrorKind::TokenDisagreement => {
                f.write_str("the nodes do not agree on a fencing token")
            }
            NodeErrorKind::Protocol(what) => {
                write!(f, "it does not reply as expected: {what}")
            }
            NodeErrorKind::NotRedis(begin) => {
                write!(f, "it is not a Redis server (its reply begins with \"{begin}\")")
            }
            #[cfg(feature = "mysql")]
            NodeErrorKind::NoGreeting => {
                f.write_str("it sent no greeting in time: it hangs, or is no MySQL server")
            }
            NodeErrorKind::PoolExhausted { .. } => f.write_str("all pooled connections are in use"),
            NodeErrorKind::Closed => f.write_str("the lock manager has been shut down"),
            NodeErrorKind::Ineligible(why) | NodeErrorKind::Tls(why) => f.write_str(why),
            NodeErrorKind::Quarantined { left, votes: true } => {
                write!(
                    f,
                    "it may have lost its data in a restart, and votes again in {}",
                    HumanDuration(*left)
                )
            }
            NodeErrorKind::Quarantined { left, votes: false } => {
                write!(
                    f,
                    "it may have lost locks in a restart or a failover, and grants none for {}",
                    HumanDuration(*left)
                )
            }
            NodeErrorKind::NotReplicated { count, needed, within } => {
                write!(
                    f,
                    "only {count} of {needed} replicas had the lock within {} (Config::replicas)",
                    HumanDuration(*within)
                )
            }
            NodeErrorKind::BackingOff => f.write_str("it failed recently and was not asked"),
        }
    }
}

impl Error for NodeErrorKind {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            NodeErrorKind::Io(error) => Some(&**error),
            _ => None,
        }
    }
}
