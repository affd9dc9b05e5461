//! Whether holders of one lock may hold it at the same time.

use std::{fmt, str::FromStr};

use super::event::{Reading, number, word};

/// How a thread holds a lock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Sharing {
    /// Alone, as a mutex.
    #[default]
    Mutex,
    /// Alone, as a client that knows only `SET NX PX`. It has no token and no place in the queue.
    Foreign,
    Write,
    Read,
    Permits {
        limit: u32,
        count: u32,
    },
}

impl Sharing {
    /// Whether nobody else may hold the lock.
    pub(crate) fn is_alone(self) -> bool {
        matches!(self, Sharing::Mutex | Sharing::Foreign | Sharing::Write)
    }

    /// Whether two holders may hold the lock at the same time, if there are enough permits.
    pub(crate) fn is_shared_with(self, other: Sharing) -> bool {
        matches!(
            (self, other),
            (Sharing::Read, Sharing::Read) | (Sharing::Permits { .. }, Sharing::Permits { .. })
        )
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sharing::Mutex => f.write_str("mutex"),
            Sharing::Foreign => f.write_str("foreign"),
            Sharing::Write => f.write_str("write"),
            Sharing::Read => f.write_str("read"),
            Sharing::Permits { limit, count } => write!(f, "permits {limit} {count}"),
        }
    }
}

impl FromStr for Sharing {
    type Err = Box<dyn std::error::Error + Send + Sync>;

    fn from_str(text: &str) -> Reading<Sharing> {
        let mut rest = text;
        Ok(match word(&mut rest) {
            "mutex" => Sharing::Mutex,
            "foreign" => Sharing::Foreign,
            "write" => Sharing::Write,
            "read" => Sharing::Read,
            "permits" => Sharing::Permits { limit: number(&mut rest)?, count: number(&mut rest)? },
            other => return Err(format!("unknown kind of lock {other:?}").into()),
        })
    }
}
