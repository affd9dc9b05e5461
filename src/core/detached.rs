//! `Detached`: what a successor must know to adopt a lock. Pure.

use std::{
    fmt::{self, Write as _},
    str::FromStr,
    time::Duration,
};

use super::{
    claim::whole_ms,
    id::LockId,
    kind::{LockKind, number},
};

/// A lock that its holder has left to a successor:
/// [`LockGuard::detach`](crate::LockGuard::detach). It is neither renewed nor released. If nobody
/// [adopts](crate::RedisMgr::adopt) it, it expires after its ttl.
///
/// Its text is one line: `kind ttl-ms id name`, the name with escaped control characters. It can be
/// sent to another process, which parses it. A line break at the end does not matter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "unless it is adopted, the lock stays held until it expires"]
pub struct Detached {
    pub(crate) name: String,
    pub(crate) id: LockId,
    pub(crate) kind: LockKind,
    pub(crate) ttl: Duration,
}

impl Detached {
    /// Returns the name of the lock, without its prefix.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the identifier of the former holder.
    pub fn id(&self) -> &LockId {
        &self.id
    }

    /// Returns how the lock is held.
    pub fn kind(&self) -> LockKind {
        self.kind
    }

    /// Returns the ttl that the successor uses too.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }
}

impl fmt::Display for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} ", self.kind.text(), whole_ms(self.ttl), self.id)?;
        self.name.chars().try_for_each(|c| match c {
            '\\' => f.write_str("\\\\"),
            c if c.is_control() => write!(f, "{}", c.escape_unicode()),
            c => f.write_char(c),
        })
    }
}

impl FromStr for Detached {
    type Err = ParseDetachedError;

    fn from_str(text: &str) -> Result<Detached, ParseDetachedError> {
        parse(text).ok_or(ParseDetachedError(()))
    }
}

fn parse(text: &str) -> Option<Detached> {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    let mut fields = text.splitn(4, ' ');
    let kind = LockKind::from_text(fields.next()?)?;
    let ttl = Duration::from_millis(number(fields.next()?)?);
    let id = fields.next()?.parse().ok()?;
    let name = unescape(fields.next()?)?;
    Some(Detached { name, id, kind, ttl })
}

/// Reads a name whose control characters and backslashes are escaped: `\u{a}`, `\\`.
fn unescape(mut text: &str) -> Option<String> {
    let mut name = String::with_capacity(text.len());
    while let Some(first) = text.chars().next() {
        if first.is_control() {
            return None;
        }
        let (next, rest) = match text.strip_prefix('\\') {
            None => (first, &text[first.len_utf8()..]),
            Some(rest) if rest.starts_with('\\') => ('\\', &rest[1..]),
            Some(rest) => {
                let (code, rest) = rest.strip_prefix("u{")?.split_once('}')?;
                (u32::from_str_radix(code, 16).ok().and_then(char::from_u32)?, rest)
            }
        };
        name.push(next);
        text = rest;
    }
    Some(name)
}

/// The error of parsing a text that is not a [`Detached`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseDetachedError(());

impl fmt::Display for ParseDetachedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "not a detached lock; give the whole text that the former holder printed: kind, ttl in \
             ms, id and name",
        )
    }
}

impl std::error::Error for ParseDetachedError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{id::generate_lock_id, kind::PERMITS_MAX};

    #[test]
    fn text_of_a_detached_lock_is_parsed() {
        for kind in [
            LockKind::Mutex,
            LockKind::Read,
            LockKind::Write,
            LockKind::Permits { limit: 7, count: 3 },
            LockKind::Permits { limit: u32::MAX, count: PERMITS_MAX },
        ] {
            let (id, ttl) = (generate_lock_id(), Duration::from_secs(30));
            let detached = Detached { name: "two words ".into(), id, kind, ttl };
            assert_eq!(detached.to_string().parse(), Ok(detached));
        }
    }

    #[test]
    fn any_name_stays_on_one_line() {
        let (id, kind, ttl) = (generate_lock_id(), LockKind::Mutex, Duration::from_secs(30));
        for name in ["line\nbreak\r\n", "back\\slash\\u{a}", "\u{85}\0é\u{1f512}", "ends \\"] {
            let detached = Detached { name: name.into(), id: id.clone(), kind, ttl };
            let text = detached.to_string();
            assert!(!text.contains(char::is_control), "{text:?}");
            for end in ["", "\n", "\r\n"] {
                assert_eq!(format!("{text}{end}").parse(), Ok(detached.clone()));
            }
        }
    }

    #[test]
    fn other_text_is_refused() {
        let id = generate_lock_id();
        for text in [
            String::new(),
            "mutex".into(),
            format!("mutex 30000 {id}"),
            format!("mutex +1 {id} x"),
            format!("odd 30000 {id} x"),
            format!("permits/2/3 30000 {id} x"),
            format!("permits/2/0 30000 {id} x"),
            // No claim has as many.
            format!("permits/20000/10000 30000 {id} x"),
            "mutex 30000 foreign x".into(),
            format!("mutex 30000 {id} x\n\n"),
            format!("mutex 30000 {id} x\\"),
            format!("mutex 30000 {id} \\n"),
            format!("mutex 30000 {id} \\u{{110000}}"),
        ] {
            assert!(text.parse::<Detached>().is_err(), "{text}");
        }
    }
}
