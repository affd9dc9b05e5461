//! How a holder is named in messages.

use std::fmt;

use super::Holder;
use crate::{
    core::kind::HeldBy,
    sys::display::{HumanDuration, Quoted},
};

/// A holder as the end of a sentence about its lock: "is held by …".
struct HoldClause<'a>(&'a Holder);

impl Holder {
    pub(crate) fn hold_clause(&self) -> impl fmt::Display {
        HoldClause(self)
    }

    fn fmt_client(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts() {
            Some(parts) => {
                write!(f, "{} (pid {}, thread {})", parts.host.escape_debug(), parts.pid, parts.tid)
            }
            None => write!(f, "a client that calls itself {}", Quoted(self.id())),
        }
    }

    fn fmt_expiry(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.ttl_left(), self.waiters()) {
            (Some(left), _) => write!(f, ", expires in {} unless renewed", HumanDuration(left)),
            (None, Some(_)) if self.never_expires() => f.write_str(", without an expiry"),
            (None, _) => Ok(()),
        }
    }
}

impl fmt::Display for HoldClause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HoldClause(holder) = self;
        match holder.held_by() {
            HeldBy::Readers { .. } if holder.admits_caller => {
                return f.write_str(
                    "is held by readers, and other clients, such as a writer, are ahead in its \
                     queue",
                );
            }
            HeldBy::Permits { .. } if holder.admits_caller => {
                return f.write_str(
                    "has enough free permits, but clients that wait for more of them, or have a \
                     lower limit, come first",
                );
            }
            _ => {}
        }
        match (holder.kept_until(), holder.ttl_left) {
            (Some(until), Some(left)) if holder.group.is_none() => {
                let until = humantime::format_rfc3339_millis(until);
                let more = HumanDuration(left);
                write!(f, "stays taken until {until} ({more} more), although ")?;
                holder.fmt_client(f)?;
                f.write_str(" has released it")
            }
            _ => write!(f, "is held by {holder}"),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.held_by() {
            HeldBy::One => {}
            HeldBy::Readers { count: Some(1) } => f.write_str("a reader: ")?,
            HeldBy::Readers { count: Some(count) } => write!(f, "{count} readers, one of them ")?,
            HeldBy::Readers { count: None } => {
                f.write_str("readers")?;
                return self.fmt_expiry(f);
            }
            HeldBy::Permits { count: Some(1) } => f.write_str("the holder of a permit: ")?,
            HeldBy::Permits { count: Some(_) } => {}
            HeldBy::Permits { count: None } => {
                f.write_str("holders of its permits")?;
                return self.fmt_expiry(f);
            }
        }
        self.fmt_client(f)?;
        if let HeldBy::Permits { count: Some(count @ 2..) } = self.held_by() {
            // One client can have all of them.
            write!(f, " and perhaps others, with {count}")?;
            match self.asked() {
                Some((needed, limit)) => {
                    write!(f, " of {limit} permits in use, and {needed} needed")?;
                }
                None => f.write_str(" permits in all")?,
            }
        }
        if self.is_kept() {
            let kept = match self.held_by() {
                HeldBy::Permits { .. } => "; permits that it has released stay taken",
                _ => ", which has released it; it is kept",
            };
            f.write_str(kept)?;
            return match (self.kept_until(), self.ttl_left()) {
                (Some(until), Some(left)) => write!(
                    f,
                    " until {} (for another {})",
                    humantime::format_rfc3339_millis(until),
                    HumanDuration(left)
                ),
                _ => Ok(()),
            };
        }
        if let (Some(held_for), Some(since)) = (self.held_for(), self.since()) {
            write!(
                f,
                " since {} ({})",
                humantime::format_rfc3339_millis(since),
                HumanDuration(held_for)
            )?;
        }
        self.fmt_expiry(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::kind::LockKind;

    const ID: &str = "web-3|pid7|tid9|ts1763712345678|67e55044-10b1-426f-9247-bb680e5fe0c8";

    fn reported(id: &str) -> Holder {
        Holder::from_report(id.as_bytes(), 8_400, 1_000_000, 2, 2_600_000)
    }

    #[test]
    fn kept_lock_is_taken_rather_than_held() {
        let clause = reported(&format!("distlock:kept {ID}")).hold_clause().to_string();
        assert!(clause.starts_with("stays taken until 2"), "{clause}");
        assert!(
            clause.ends_with("Z (8.4s more), although web-3 (pid 7, thread 9) has released it"),
            "{clause}"
        );
        let clause = reported(ID).hold_clause().to_string();
        assert!(clause.starts_with("is held by web-3 (pid 7, thread 9) since "), "{clause}");
    }

    #[test]
    fn caller_that_fits_beside_the_holder_is_behind_waiters() {
        let clause =
            |report: &str, kind| reported(report).found_by(kind, false).hold_clause().to_string();
        let readers = format!("distlock:read 2 {ID}");
        assert_eq!(
            clause(&readers, LockKind::Read),
            "is held by readers, and other clients, such as a writer, are ahead in its queue"
        );
        for kind in [LockKind::Write, LockKind::Mutex] {
            assert!(clause(&readers, kind).starts_with("is held by 2 readers, one of them web-3"));
        }
        assert!(clause("distlock:read 0 ", LockKind::Read).starts_with("is held by 0 readers"));
        assert!(clause(ID, LockKind::Read).starts_with("is held by web-3"));
        let permits = |count| {
            clause(&format!("distlock:permits 3 {ID}"), LockKind::Permits { limit: 5, count })
        };
        assert_eq!(
            permits(2),
            "has enough free permits, but clients that wait for more of them, or have a lower \
             limit, come first"
        );
        assert!(permits(3).starts_with("is held by web-3"), "{}", permits(3));
        let unqueued = Holder::from_report(readers.as_bytes(), 8_400, 0, 0, 0);
        let clause = unqueued.found_by(LockKind::Read, false).hold_clause().to_string();
        assert!(clause.starts_with("is held by 2 readers"), "{clause}");
    }

    #[test]
    fn group_without_known_members_has_its_expiry() {
        assert_eq!(
            reported("distlock:read").to_string(),
            "readers, expires in 8.4s unless renewed"
        );
        let nameless = reported("distlock:permits").to_string();
        assert_eq!(nameless, "holders of its permits, expires in 8.4s unless renewed");
    }

    #[test]
    fn several_permits_may_be_those_of_one_client() {
        assert_eq!(
            reported(&format!("distlock:permits 2 {ID}#2")).to_string(),
            "web-3 (pid 7, thread 9) and perhaps others, with 2 permits in all, expires in 8.4s \
             unless renewed"
        );
        let kept = reported(&format!("distlock:permits 2 kept {ID}#2")).to_string();
        let all = "with 2 permits in all; permits that it has released stay taken until 2";
        assert!(kept.contains(all), "{kept}");
        let one = reported(&format!("distlock:permits 1 {ID}")).to_string();
        assert!(one.starts_with("the holder of a permit: web-3 (pid 7"), "{one}");
    }
}
