//! `Failure`: an exchange with a server that did not end in an answer, and whether the server may have acted on it.

use std::{error::Error, fmt, io, time::Duration};

use super::script::Script;
use crate::text::Span;

/// Every exchange is applied, not applied, or unknown; this is the "not" or the "unknown".
#[derive(Debug)]
pub(crate) struct Failure {
    /// A byte of the request may have reached the server, so it may have been carried out.
    pub(crate) sent: bool,
    pub(crate) reason: Reason,
}

#[derive(Debug)]
pub(crate) enum Reason {
    Io(io::Error),
    TimedOut,
    /// The same, where a lease is so short that there was less time than usual.
    ShortLease(Duration),
    /// The server says no; `code` is the first word of its error.
    Refused {
        code: String,
        message: String,
    },
    /// An answer that is not an answer to the question.
    Garbled(String),
    /// They keep the lock, each under a token of its own, however often they are asked for one.
    NoOneToken,
    /// All pooled connections are in use.
    PoolExhausted,
    /// The manager has been shut down, and its pool with it.
    Closed,
    /// It cannot be one of several nodes; says why.
    Unfit(String),
    /// Its vote does not count yet: it may have forgotten what it granted.
    Quarantined(Duration),
    /// It failed a short time ago, and the others were enough to ask.
    Resting,
}

/// Refusals before a request, or the first write of a script, is carried out.
const BEFOREHAND: [&str; 19] = [
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

impl Failure {
    pub(crate) fn not_sent(error: io::Error) -> Failure {
        Failure { sent: false, reason: error.into() }
    }

    pub(crate) fn unclear(reason: Reason) -> Failure {
        Failure { sent: true, reason }
    }

    /// The same from the words of a server's error, of which `quote` makes something that can be shown.
    pub(crate) fn told(code: &str, message: &str, quote: impl Fn(&str) -> String) -> Failure {
        let (code, message) = unwrapped(code, message);
        // What everybody knows is not quoted: our password may be a part of it.
        let code = if BEFOREHAND.contains(&code) { code.to_owned() } else { quote(code) };
        Failure::refused(code, quote(message))
    }

    /// Most codes are only given before anything is done. Others also end a script half way, or come from a proxy that
    /// does not know.
    pub(crate) fn refused(code: String, message: String) -> Failure {
        Failure { sent: !BEFOREHAND.contains(&code.as_str()), reason: Reason::Refused { code, message } }
    }

    /// Whether trying again soon may help without anybody doing anything.
    pub(crate) fn is_passing(&self) -> bool {
        match &self.reason {
            Reason::Refused { code, .. } => {
                matches!(code.as_str(), "LOADING" | "BUSY" | "MASTERDOWN" | "TRYAGAIN") || self.is_for_want_of_a_place()
            }
            Reason::Closed | Reason::Unfit(_) => false,
            _ => true,
        }
    }

    /// The server has as many clients as it takes, which it tells whoever connects, without having heard anything.
    pub(crate) fn is_for_want_of_a_place(&self) -> bool {
        let Reason::Refused { code, message } = &self.reason else { return false };
        code == "ERR" && message.starts_with("max number of clients")
    }

    /// The server is no master, so that another one must be.
    pub(crate) fn is_about_a_replica(&self) -> bool {
        matches!(&self.reason, Reason::Refused { code, .. } if matches!(code.as_str(), "READONLY" | "MASTERDOWN"))
    }

    /// The same would be said about whatever is asked.
    pub(crate) fn is_about_the_server(&self) -> bool {
        let Reason::Refused { code, .. } = &self.reason else { return true };
        let codes = ["MISCONF", "NOREPLICAS", "OOM", "NOAUTH", "WRONGPASS", "CLUSTERDOWN", "UNKILLABLE"];
        self.is_passing() || self.is_about_a_replica() || codes.contains(&code.as_str())
    }

    /// Said about what is kept under one name, by a server that does as it should.
    pub(crate) fn is_about_a_key(&self) -> bool {
        matches!(&self.reason, Reason::Refused { code, .. } if code == "WRONGTYPE")
    }

    /// With the right in it that the user lacks, where the server does not say which.
    pub(crate) fn naming(mut self, script: Option<&Script>) -> Failure {
        if let (Reason::Refused { message, .. }, Some(script)) = (&mut self.reason, script)
            && let Some(right) = script.missing_right(message)
        {
            message.push_str(&format!("; it takes {right}"));
        }
        self
    }

    /// The server does not know the script of this hash.
    pub(crate) fn is_unknown_script(&self) -> bool {
        matches!(&self.reason, Reason::Refused { code, .. } if code == "NOSCRIPT")
    }

    pub(crate) fn into_redis(self) -> redis::RedisError {
        match self.reason {
            Reason::Io(error) => error.into(),
            Reason::TimedOut => io::Error::from(io::ErrorKind::TimedOut).into(),
            reason => io::Error::other(reason).into(),
        }
    }
}

/// Servers before Redis 7 wrap what a script is refused in an error about the script.
fn unwrapped<'a>(code: &'a str, message: &'a str) -> (&'a str, &'a str) {
    let inner = || {
        let (_, line) = message.strip_prefix("Error running script ")?.rsplit_once("@user_script:")?;
        // Behind the number of the line, which is written in two ways.
        let (code, rest) =
            line.trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit()).strip_prefix(": ")?.split_once(' ')?;
        let code = code.trim_start_matches('-');
        BEFOREHAND.contains(&code).then_some((code, rest))
    };
    if code == "ERR" { inner().unwrap_or((code, message)) } else { (code, message) }
}

impl From<io::Error> for Reason {
    fn from(error: io::Error) -> Reason {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Reason::TimedOut,
            _ => Reason::Io(error),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("it closed the connection")
            }
            Reason::Io(error) => write!(f, "{error}"),
            Reason::TimedOut => f.write_str("no answer in time"),
            Reason::ShortLease(ttl) => {
                write!(f, "no answer in time for a lease of {}, and a longer one leaves more time", Span(*ttl))
            }
            Reason::Refused { code, message } => write!(f, "it answered {code} {message}"),
            Reason::NoOneToken => f.write_str("the nodes do not agree on a fencing token"),
            Reason::Garbled(what) => write!(f, "it does not answer like a Redis server: {what}"),
            Reason::PoolExhausted => f.write_str("all pooled connections are in use"),
            Reason::Closed => f.write_str("the lock manager has been shut down"),
            Reason::Unfit(why) => f.write_str(why),
            Reason::Quarantined(left) => {
                write!(f, "it may have lost its data in a restart, and does not vote for another {}", Span(*left))
            }
            Reason::Resting => f.write_str("it failed a short time ago, and was not asked"),
        }
    }
}

impl Error for Reason {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Reason::Io(error) => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_disagree_are_not_told_as_no_servers() {
        assert_eq!(Reason::NoOneToken.to_string(), "the nodes do not agree on a fencing token");
    }

    /// As Redis 6.2.14 says it.
    #[test]
    fn what_an_old_server_refuses_a_script_is_known_by_its_code() {
        let wrapped = |rest: &str| {
            let message = format!("Error running script (call to f_a60f99108415347c2c750b5af9b2212a81ec1d57): {rest}");
            match Failure::told("ERR", &message, str::to_owned) {
                Failure { sent, reason: Reason::Refused { code, message } } => (sent, code, message),
                other => panic!("{other:?}"),
            }
        };
        for (line, code, message) in [
            (
                "-READONLY You can't write against a read only replica.",
                "READONLY",
                "You can't write against a read only replica.",
            ),
            (
                "-OOM command not allowed when used memory > 'maxmemory'.",
                "OOM",
                "command not allowed when used memory > 'maxmemory'.",
            ),
            ("-NOREPLICAS Not enough good replicas to write.", "NOREPLICAS", "Not enough good replicas to write."),
        ] {
            let told = wrapped(&format!("@user_script:48: @user_script: 48: {line}"));
            assert_eq!(told, (false, code.to_owned(), message.to_owned()));
        }
        let wrong = "WRONGTYPE Operation against a key holding the wrong kind of value";
        assert_eq!(wrapped(&format!("@user_script:1: {wrong}")).1, "WRONGTYPE");
        for other in [
            "@user_script:1: @user_script: 1: The user executing the script can't run this command or subcommand",
            "@user_script:1: -FOO bar",
            "@user_script:1: ",
            "@user_script:",
            "READONLY is all it says",
        ] {
            let (sent, code, message) = wrapped(other);
            assert!(sent && code == "ERR" && message.ends_with(other), "{other}: {code} {message}");
        }
    }

    #[test]
    fn a_code_is_known_although_the_password_is_a_part_of_it() {
        let quote = |text: &str| text.replace("SCRIPT", "<password>");
        let failure = Failure::told("NOSCRIPT", "No matching SCRIPT.", quote);
        assert!(failure.is_unknown_script(), "{failure:?}");
        assert!(!format!("{failure:?}").contains("matching SCRIPT"), "{failure:?}");
        let unknown = Failure::told("MYSCRIPT", "no", quote);
        assert!(!format!("{unknown:?}").contains("SCRIPT"), "{unknown:?}");
    }
}
