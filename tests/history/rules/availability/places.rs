//! Places in a group that nobody uses although all waiters would fit.

use std::collections::BTreeMap;

use super::POLL_INTERVAL;
use crate::history::{
    model::{Hold, Wait},
    sharing::Sharing,
};

/// What begins or ends at a moment.
#[derive(Default)]
struct Change<'a> {
    begins: Vec<Member<'a>>,
    ends: Vec<Member<'a>>,
}

#[derive(Clone, Copy)]
enum Member<'a> {
    Hold(&'a Hold),
    Wait(&'a Wait),
}

/// Returns the times in which a group had a lock, and each waiter of that time would fit beside
/// all holders. Then nobody may be waiting for long, not even behind another waiter. Only waits
/// that are long enough to be of interest.
pub(super) fn unused<'a>(waits: &[&'a Wait], holds: &[&Hold]) -> Vec<(&'a Wait, u64, u64)> {
    let mut changes: BTreeMap<u64, Change<'_>> = BTreeMap::new();
    for hold in holds.iter().filter(|hold| hold.from < hold.until) {
        changes.entry(hold.from).or_default().begins.push(Member::Hold(hold));
        changes.entry(hold.until).or_default().ends.push(Member::Hold(hold));
    }
    for wait in waits.iter().filter(|wait| wait.from < wait.until) {
        changes.entry(wait.from).or_default().begins.push(Member::Wait(wait));
        changes.entry(wait.until).or_default().ends.push(Member::Wait(wait));
    }
    let (mut holding, mut waiting) = (Vec::<&Hold>::new(), Vec::<&Wait>::new());
    // Since when there has been a place for all; and these times.
    let (mut since, mut idle) = (None, Vec::new());
    for (at, change) in &changes {
        for ended in &change.ends {
            match ended {
                Member::Hold(hold) => holding.retain(|other| !std::ptr::eq(*other, *hold)),
                Member::Wait(wait) => waiting.retain(|other| !std::ptr::eq(*other, *wait)),
            }
        }
        for begun in &change.begins {
            match begun {
                Member::Hold(hold) => holding.push(hold),
                Member::Wait(wait) => waiting.push(wait),
            }
        }
        let is_idle = !holding.is_empty() && waiting.iter().all(|wait| fits(wait, &holding));
        match (is_idle, since) {
            (true, None) => since = Some(*at),
            (false, Some(from)) => {
                idle.push((from, *at));
                since = None;
            }
            _ => {}
        }
    }
    let mut unused = Vec::new();
    for wait in waits.iter().copied().filter(|wait| wait.until - wait.from > POLL_INTERVAL) {
        let first = idle.partition_point(|(_, until)| *until <= wait.from);
        let within = idle[first..].iter().take_while(|(from, _)| *from < wait.until);
        unused.extend(
            within.map(|(from, until)| (wait, wait.from.max(*from), wait.until.min(*until))),
        );
    }
    unused
}

/// Whether the waiter could hold the lock beside all these holders.
fn fits(wait: &Wait, holding: &[&Hold]) -> bool {
    let is_shared = |hold: &&Hold| {
        let has_become_reader = hold.downgraded.is_some() && wait.sharing == Sharing::Read;
        wait.sharing.is_shared_with(hold.sharing) || has_become_reader
    };
    let permits = |sharing| match sharing {
        Sharing::Permits { count, .. } => count,
        _ => 0,
    };
    let held: u32 = holding.iter().map(|hold| permits(hold.sharing)).sum();
    holding.iter().all(is_shared)
        && match wait.sharing {
            Sharing::Permits { limit, count } => held + count <= limit,
            _ => true,
        }
}
