//! `Detached`: a lock whose holder has left it to another process.

use std::{fmt, str::FromStr};

use super::{id::LockId, key::LockKey};

/// A lock that is held, but by no guard: from [`LockGuard::detach`](crate::LockGuard::detach). Its
/// text can be sent to another process, which takes the lock over with
/// [`RedisMgr::adopt`](crate::RedisMgr::adopt) before its ttl has run out.
///
/// ```
/// # #[cfg(feature = "testing")] {
/// # let mgr = distlock::testing::MemoryServer::new().manager();
/// let guard = mgr.lock("orders:42")?;
/// let message: String = guard.detach()?.to_string();
///
/// // In the other process, with the same servers:
/// let detached: distlock::Detached = message.parse().unwrap();
/// assert_eq!(detached.name(), "orders:42");
/// let guard = mgr.adopt(&detached)?;
/// # assert!(guard.is_held());
/// # }
/// # Ok::<(), distlock::LockError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Detached {
    name: String,
    id: LockId,
}

impl Detached {
    pub(crate) fn new(name: &str, id: &LockId) -> Detached {
        Detached { name: name.to_owned(), id: id.clone() }
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the id under which the lock is held until it is adopted.
    pub fn id(&self) -> &LockId {
        &self.id
    }
}

/// The id, a space, and the name.
impl fmt::Display for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.name)
    }
}

impl FromStr for Detached {
    type Err = ParseDetachedError;

    fn from_str(text: &str) -> Result<Detached, ParseDetachedError> {
        let (id, name) = text.split_once(' ').ok_or(ParseDetachedError(None))?;
        let id = id.parse().map_err(|_| ParseDetachedError(None))?;
        LockKey::new("", name).map_err(|invalid| ParseDetachedError(Some(invalid.0)))?;
        Ok(Detached { name: name.to_owned(), id })
    }
}

/// The error of parsing a text that is not a [`Detached`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseDetachedError(Option<String>);

impl fmt::Display for ParseDetachedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("not a detached lock: expected an identifier, a space and a name"),
            Some(invalid) => write!(f, "not a detached lock: {invalid}"),
        }
    }
}

impl std::error::Error for ParseDetachedError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::id::generate_lock_id;

    #[test]
    fn text_of_a_detached_lock_parses() {
        for name in ["orders:42", "a name with spaces", " ", "ü|\n"] {
            let detached = Detached::new(name, &generate_lock_id());
            assert_eq!(detached.to_string().parse(), Ok(detached));
        }
        let id = generate_lock_id();
        for nonsense in ["", " ", "x y", id.as_str(), &format!("{id} ")] {
            let error = nonsense.parse::<Detached>().unwrap_err().to_string();
            assert!(error.starts_with("not a detached lock: "), "{error}");
        }
    }
}
