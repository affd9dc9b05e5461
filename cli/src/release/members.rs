//! `release --force` of a lock that several clients share.

use distlock::{Holder, LockError, LockInfo, LockManager, Released};

use super::{ReleaseReport, describe_id};
use crate::{
    args::Release,
    exit::{Exit, Failure, Outcome},
    format::{self, quote},
    holders,
    json::HolderJson,
    output,
    release_each::{EachRelease, release_each},
};

/// Releases a lock for all clients that share it.
pub(super) fn release_members(
    mgr: &dyn LockManager,
    options: &Release,
    lock: &LockInfo,
) -> Outcome {
    let name = options.name.as_str();
    let EachRelease { outcomes, error } =
        release_each(mgr, name, lock.members().iter().map(Holder::id));
    let tried = outcomes.len();
    let released: Vec<&Holder> = lock
        .members()
        .iter()
        .zip(outcomes)
        .filter(|(_, outcome)| *outcome == Released::Released)
        .map(|(member, _)| member)
        .collect();
    let ended = match error {
        Some(error) if released.is_empty() => return Err(error.into()),
        error => MemberRelease { lock, tried, released, error },
    };
    if options.json {
        output::print_json(ended.report())?;
    } else {
        output::print(&ended.lines())?;
    }
    match ended.failure() {
        None => Ok(Exit::Success),
        Some(why) => Err(Failure::new(Exit::No, why)),
    }
}

/// How a release for all clients that share a lock ended.
struct MemberRelease<'a> {
    lock: &'a LockInfo,
    /// Number of listed members that have been released, or that no longer had the lock.
    tried: usize,
    released: Vec<&'a Holder>,
    error: Option<LockError>,
}

impl MemberRelease<'_> {
    fn report(&self) -> ReleaseReport<'_> {
        let former: Vec<_> =
            self.released.iter().map(|member| HolderJson::from_holder(member)).collect();
        ReleaseReport {
            name: self.lock.name(),
            released: self.failure().is_none(),
            former_holder: self.released.first().map(|member| HolderJson::from_holder(member)),
            former_holders: former,
            remaining: Some(self.remaining()),
            holder: None,
        }
    }

    /// A line for each member that lost the lock.
    fn lines(&self) -> String {
        let name = quote(self.lock.name());
        let line = |member: &&Holder| {
            let whom = describe_id(member.id());
            let permits = match holders::permits(member) {
                Some(_) => format!(" with {}", holders::short_kind(member.held_by())),
                None => String::new(),
            };
            format!("released lock {name}, which was held by {whom}{permits}\n")
        };
        self.released.iter().map(line).collect()
    }

    /// Number of readers, or of permits in use, that have not been released.
    fn remaining(&self) -> u64 {
        self.total().saturating_sub(count_of(self.lock.members().iter().take(self.tried)))
    }

    fn total(&self) -> u64 {
        let listed = count_of(self.lock.members().iter());
        holders::count(self.lock.holder().held_by()).unwrap_or(0).max(listed)
    }

    /// Why the lock is not released, or not for all of them.
    fn failure(&self) -> Option<String> {
        if self.released.is_empty() {
            return Some("nothing was released: the lock changed hands in the meantime".into());
        }
        if self.remaining() == 0 {
            return None;
        }
        let released = count_of(self.released.iter().copied());
        let all = holders::short_kind(self.lock.holder().held_by());
        let name = quote(self.lock.name());
        let why = match &self.error {
            Some(error) => format!(": {}", format::escape(&error.to_string())),
            None => "; repeat the command for the others".into(),
        };
        Some(format!("released {released} of {all}, and lock {name} is still held{why}"))
    }
}

fn count_of<'a>(members: impl Iterator<Item = &'a Holder>) -> u64 {
    members.filter_map(|member| holders::count(member.held_by())).sum()
}
