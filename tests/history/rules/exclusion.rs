//! Mutual exclusion: nobody holds a lock beside a mutex or a writer, readers and permits exclude
//! each other, and nobody is granted permits above the limit of its own request, whatever limits
//! others have requested. If a single server lost the lock, or a database the holder's connection,
//! an overlap is excused until the earlier holder can notice.

use std::collections::BTreeMap;

use super::{Finding, Rule, span};
use crate::history::{
    event::{Kind, Said},
    model::{FaultPeriod, Hold, Story},
    sharing::Sharing,
};

/// How late a renewal may be confirmed although no lateness was measured.
const GRACE: u64 = 100_000_000;

/// Two holds of one lock at the same time, or too many.
#[derive(Clone, Debug)]
pub(crate) struct Overlap<'a> {
    pub(crate) earlier: &'a Hold,
    pub(crate) later: &'a Hold,
    pub(crate) until: u64,
    /// The number of permits that were held, and the limit that forbids it.
    pub(crate) permits: Option<(u32, u32)>,
    /// The number of the fault that excuses it.
    pub(crate) excuse: Option<u32>,
}

impl Overlap<'_> {
    pub(crate) fn length(&self) -> u64 {
        self.until - self.later.from
    }
}

pub(crate) fn overlaps(story: &Story) -> Vec<Overlap<'_>> {
    let mut found = Vec::new();
    // Earlier holds that have not ended when the current one begins.
    let mut open: BTreeMap<u32, Vec<&Hold>> = BTreeMap::new();
    for later in &story.holds {
        let open = open.entry(later.lock).or_default();
        open.retain(|earlier| earlier.until > later.from);
        for earlier in open.iter().copied() {
            let Some(until) = earlier.excludes_until(later) else { continue };
            if until <= later.from {
                continue;
            }
            // The holder with the smaller token lost the lock. It must not consider the lock held
            // any more, even after the other holder has released it.
            let excuse = excuse(story, earlier, later);
            found.push(Overlap { earlier, later, until, permits: None, excuse });
        }
        open.push(later);
        found.extend(too_many_permits(story, open));
    }
    found
}

/// The fault that excuses that both held the lock.
fn excuse(story: &Story, earlier: &Hold, later: &Hold) -> Option<u32> {
    // A client of another library has no token; it acquires only a lock that is free.
    let by_token = [earlier, later].iter().all(|hold| hold.sharing != Sharing::Foreign);
    let in_order = !by_token || earlier.token < later.token;
    let (old, new) = if in_order { (earlier, later) } else { (later, earlier) };
    let mut excuses = story.excuses(later.lock, old.asked, new.from.max(later.from), old.until);
    let excuse = excuses.find(|fault| old.until <= must_notice_by(story, old, fault));
    excuse.map(|period| period.fault.number)
}

/// The last of these holds, if one of their holders was granted permits above its own limit. The
/// server may have granted the permits in another order than their holders noticed. But permits
/// that were held before others were requested were granted before them. Among the rest, the last
/// grant was within the limit of its request, and a smaller limit would forbid it too.
fn too_many_permits<'a>(story: &Story, open: &[&'a Hold]) -> Option<Overlap<'a>> {
    let later = *open.last()?;
    let permits = || {
        open.iter().filter_map(|hold| match hold.sharing {
            Sharing::Permits { limit, count } => Some((*hold, limit, count)),
            _ => None,
        })
    };
    permits().find_map(|(last, limit, _)| {
        let is_counted = |hold: &Hold, other: u32| hold.from <= last.asked || other <= limit;
        let counted = || permits().filter(|(hold, other, _)| is_counted(hold, *other));
        let held = counted().map(|(_, _, count)| count).sum::<u32>();
        if held <= limit || !counted().any(|(hold, ..)| std::ptr::eq(hold, later)) {
            return None;
        }
        let others = || counted().map(|(hold, ..)| hold).filter(|hold| !std::ptr::eq(*hold, later));
        let earlier = others().next()?;
        let until = others().map(|hold| hold.until).min()?.min(later.until);
        let excuse = others().find_map(|earlier| excuse(story, earlier, later));
        Some(Overlap { earlier, later, until, permits: Some((held, limit)), excuse })
    })
}

/// When a holder must notice that the server lost its lock: at its next renewal, or at once if a
/// database has closed its connection; unless something may have delayed that. Then the hold may
/// last until its deadline, and `u64::MAX` is returned.
fn must_notice_by(story: &Story, hold: &Hold, fault: &FaultPeriod) -> u64 {
    let (terms, pid, ended) = (&story.terms, hold.pid, fault.until);
    // The lock may have been granted before the fault and reported after it, so the time of the
    // next renewal is unknown.
    if hold.from >= ended {
        return u64::MAX;
    }
    // A database ends the holder's connection, which the holder notices at once, unless only the
    // other side of the connection has ended.
    if terms.is_database && fault.fault.kind == Kind::HalfOpen {
        return u64::MAX;
    }
    let notice = if terms.is_database { 0 } else { terms.ttl / 3 };
    let due = ended.saturating_add(notice + GRACE);
    let since = ended.saturating_sub(terms.ttl / 3);
    let late = story.lateness(pid, since, due) + story.lateness(story.parent, since, due);
    let due = due.saturating_add(2 * late);
    // A renewal that failed shortly before may be retried late. The fault itself, once it has
    // ended, delays no renewal.
    let delays_renewal = |other: &FaultPeriod| {
        other.fault.number != fault.fault.number
            && hinders_renewal(other, hold.lock)
            && other.from < due
            && other.until.saturating_add(terms.operation_timeout) > since
    };
    let hindered = story.faults.iter().any(delays_renewal);
    // A process that was continued long before has renewed its locks since.
    let stopped = story.stops.iter().any(|stop| stop.0 == pid && stop.1 < due && stop.2 > since);
    // A busy machine or a slow disk may hold up the server, which then replies to nobody.
    let silent = story.seen.iter().any(|seen| {
        seen.said.iter().all(|said| *said == Said::Nothing) && seen.from < due && seen.until > ended
    });
    if hindered || stopped || silent { u64::MAX } else { due }
}

/// Whether a renewal may fail because of the fault. A renewal does not access other locks, nor the
/// queue and the fence, and an unknown script is sent again at once.
fn hinders_renewal(period: &FaultPeriod, lock: u32) -> bool {
    let is_harmless =
        matches!(period.fault.kind, Kind::FlushScripts | Kind::DeleteQueue | Kind::DeleteFence);
    !is_harmless && (period.lock == 0 || period.lock == lock)
}

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let unexcused = overlaps(story).into_iter().filter(|overlap| overlap.excuse.is_none());
    unexcused
        .map(|overlap| {
            let Overlap { earlier, later, until, .. } = overlap;
            let what = match overlap.permits {
                Some((held, limit)) => format!("held {held} permits where the limit is {limit}"),
                None => "both held the lock".to_owned(),
            };
            Finding {
                rule: Rule::Exclusion,
                lock: later.lock,
                seats: vec![earlier.seat, later.seat],
                from: later.from,
                until,
                text: format!(
                    "at {} child {} ({}, token {}) and child {} ({}, token {}) {what}, for {}",
                    story.clock(later.from),
                    earlier.seat,
                    earlier.sharing,
                    earlier.token,
                    later.seat,
                    later.sharing,
                    later.token,
                    span(overlap.length())
                ),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    /// One server and a ttl of 3 s. Times are in milliseconds and scaled to nanoseconds here.
    fn overlaps_of(lines: &str) -> Vec<(u64, bool)> {
        overlaps_on("", lines)
    }

    /// The same on this `kind` of server.
    fn overlaps_on(kind: &str, lines: &str) -> Vec<(u64, bool)> {
        let text = lines.lines().map(|line| {
            let words = line.trim().split(' ').enumerate();
            let scaled = words.map(|(at, word)| {
                let is_time =
                    at == 0 || (at == 4 && (line.contains("enter") || line.contains("look")));
                if is_time { format!("{word}000000") } else { word.to_owned() }
            });
            scaled.collect::<Vec<_>>().join(" ")
        });
        let text: Vec<_> = text.collect();
        let terms = format!("0 0 1 terms 1 3000000000 500000000 0{kind}");
        let story = story(&format!("{terms}\n{}", text.join("\n")));
        overlaps(&story)
            .iter()
            .map(|overlap| (overlap.length() / 1_000_000, overlap.excuse.is_some()))
            .collect()
    }

    const FIRST: &str = "10 1@1 7 wait\n20 1@1 7 enter 3000 5 a";

    #[test]
    fn consecutive_holds_do_not_overlap() {
        let after = format!("{FIRST}\n900 1@1 7 leave\n900 2@1 8 enter 3900 6 b");
        assert_eq!(overlaps_of(&after), []);
        assert_eq!(
            overlaps_of(&after.replace("900 1@1 7 leave", "901 1@1 7 look 3500\n902 1@1 7 leave")),
            [(2, false)]
        );
    }

    #[test]
    fn holds_of_different_locks_do_not_overlap() {
        let both = format!("{FIRST}\n30 2@2 8 enter 3900 6 b\n40 2@2 8 leave\n50 1@1 7 leave");
        assert_eq!(overlaps_of(&both), []);
        assert_eq!(overlaps_of(&both.replace("@2", "@1")), [(10, false)]);
    }

    /// Two holds at the same time, as these kinds.
    fn both(first: &str, second: &str) -> Vec<(u64, bool)> {
        overlaps_of(&format!(
            "10 1@1 7 wait\n11 1@1 7 as {first}\n20 1@1 7 enter 3000 5 a\n\
             25 2@1 8 wait\n26 2@1 8 as {second}\n30 2@1 8 enter 3900 6 b\n\
             50 1@1 7 leave\n60 2@1 8 leave"
        ))
    }

    #[test]
    fn nobody_holds_beside_a_writer() {
        assert_eq!(both("read", "read"), []);
        for other in ["mutex", "write", "foreign", "permits 3 1"] {
            assert_eq!(both("read", other), [(20, false)], "{other}");
            assert_eq!(both(other, "read"), [(20, false)], "{other}");
            assert_eq!(both("write", other), [(20, false)], "{other}");
        }
    }

    #[test]
    fn writer_that_downgrades_admits_readers_from_then_on() {
        let downgraded = |at: u64, other: &str| {
            overlaps_of(&format!(
                "11 1@1 7 as write\n20 1@1 7 enter 3000 5 a\n{at} 1@1 7 downgrade\n\
                 26 2@1 8 as {other}\n30 2@1 8 enter 3900 6 b\n50 1@1 7 leave\n60 2@1 8 leave"
            ))
        };
        assert_eq!(downgraded(30, "read"), []);
        assert_eq!(downgraded(31, "read"), [(1, false)]);
        assert_eq!(downgraded(30, "write"), [(20, false)]);
    }

    #[test]
    fn permits_above_a_limit_are_found() {
        assert_eq!(both("permits 2 1", "permits 2 1"), []);
        assert_eq!(both("permits 2 1", "permits 3 2"), []);
        assert_eq!(both("permits 2 1", "permits 2 2"), [(20, false)]);
        assert_eq!(both("permits 3 2", "permits 3 2"), [(20, false)]);
    }

    #[test]
    fn lowered_limit_holds_for_later_requests_only() {
        assert_eq!(both("permits 3 2", "permits 2 1"), [(20, false)]);
        assert_eq!(both("permits 2 2", "permits 3 1"), [], "the limit was raised");
        let asked = |at: u64, third: &str| {
            overlaps_of(&format!(
                "10 1@1 7 wait\n11 1@1 7 as permits 4 1\n20 1@1 7 enter 3000 5 a\n\
                 {at} 2@1 8 wait\n{at} 2@1 8 as permits 2 2\n30 2@1 8 enter 3900 6 b\n{third}\
                 50 1@1 7 leave\n60 2@1 8 leave"
            ))
        };
        assert_eq!(asked(19, ""), [], "the server may have granted the second request first");
        assert_eq!(asked(21, ""), [(20, false)]);
        // Whatever the order, the last of those with a limit of 2 is one too many.
        let third = "19 3@1 9 wait\n19 3@1 9 as permits 2 1\n35 3@1 9 enter 3900 7 c\n\
                     55 3@1 9 leave\n";
        assert_eq!(asked(19, third), [(20, false)]);
        assert_eq!(asked(19, &third.replace("permits 2 1", "permits 4 1")), []);
    }

    #[test]
    fn stopped_hold_lasts_until_its_deadline() {
        let lines = |at: u64| {
            format!("{FIRST}\n30 0 7 stopped\n{at} 2@1 8 enter 9000 6 b\n4000 2@1 8 leave")
        };
        assert_eq!(overlaps_of(&lines(3000)), []);
        assert_eq!(overlaps_of(&lines(2999)), [(1, false)]);
    }

    #[test]
    fn three_holds_at_once_are_three_overlaps() {
        let three = format!(
            "\
                {FIRST}\n\
                30 2@1 8 enter 3900 6 b\n\
                40 3@1 9 enter 3900 7 c\n\
                50 1@1 7 leave\n\
                60 2@1 8 leave"
        );
        assert_eq!(overlaps_of(&three).len(), 3);
    }

    const AFTER: &str =
        "600 2@1 8 enter 3900 6 b\n700 1@1 7 look 3000\n800 1@1 7 lost x\n900 2@1 8 leave";

    #[test]
    fn server_without_data_is_an_excuse() {
        let forgot = format!("{FIRST}\n500 0 1 fault 1 1 forget 0\n550 0 1 over 1\n{AFTER}");
        assert_eq!(overlaps_of(&forgot), [(200, true)]);
        assert_eq!(overlaps_of(&forgot.replace("forget", "freeze")), [(200, false)]);
        assert_eq!(overlaps_of(&forgot.replace("forget", "restart")), [(200, false)]);
    }

    #[test]
    fn deleted_key_of_another_lock_is_no_excuse() {
        let deleted = format!("{FIRST}\n500 0@1 1 fault 1 1 delete 0\n501 0 1 over 1\n{AFTER}");
        assert_eq!(overlaps_of(&deleted), [(200, true)]);
        assert_eq!(overlaps_of(&deleted.replace("0@1 1 fault", "0@2 1 fault")), [(200, false)]);
    }

    #[test]
    fn earlier_or_later_fault_is_no_excuse() {
        let before = format!("1 0 1 fault 1 1 evict 0\n9 0 1 over 1\n{FIRST}\n{AFTER}");
        assert_eq!(overlaps_of(&before), [(200, false)]);
        assert_eq!(overlaps_of(&before.replace("9 0 1 over", "10 0 1 over")), [(200, true)]);
        let after = format!("{FIRST}\n{AFTER}\n601 0 1 fault 1 1 evict 0\n602 0 1 over 1");
        assert_eq!(overlaps_of(&after), [(200, false)]);
    }

    #[test]
    fn excuse_ends_when_the_next_renewal_must_have_failed() {
        // A third of the ttl and a tenth of a second after the key was deleted: 1.601 s.
        let late = |at: u64| {
            format!(
                "\
                    {FIRST}\n\
                    500 0@1 1 fault 1 1 delete 0\n\
                    501 0 1 over 1\n\
                    600 2@1 8 enter 3900 6 b\n\
                    {at} 1@1 7 look 3000\n\
                    {at} 1@1 7 leave\n\
                    3000 2@1 8 leave"
            )
        };
        assert_eq!(overlaps_of(&late(1601)), [(1001, true)]);
        assert_eq!(overlaps_of(&late(1602)), [(1002, false)]);
        // The same if the other holder has released the lock.
        let left = |at: u64| late(at).replace("3000 2@1", "700 2@1");
        assert_eq!(overlaps_of(&left(1601)), [(100, true)]);
        assert_eq!(overlaps_of(&left(1602)), [(100, false)]);
        // But not for the holder with the later grant.
        let newer = left(1602)
            .replace("3000 5 a", "3000 8 a")
            .replace("20 1@1 7 enter", "490 2@1 8 wait\n510 1@1 7 enter");
        assert_eq!(overlaps_of(&newer), [(100, true)]);
        // A holder that was stopped meanwhile cannot have noticed.
        let stopped = late(2500).replace("600 2", "550 0 7 stopped\n560 0 7 continued\n600 2");
        assert_eq!(overlaps_of(&stopped), [(1900, true)]);
        // Nor one whose server replied to nobody when the renewal was due.
        let polled = |at: u64, reply: &str| {
            let began = (at - 200) * 1_000_000;
            late(2500).replace("600 2", &format!("{at} 0@1 1 seen {began} {reply}\n600 2"))
        };
        assert_eq!(overlaps_of(&polled(900, "?")), [(1900, true)]);
        assert_eq!(overlaps_of(&polled(900, "-")), [(1900, false)]);
        assert_eq!(overlaps_of(&polled(499, "?")), [(1900, false)]);
    }

    #[test]
    fn fault_unrelated_to_renewal_does_not_extend_excuse() {
        let late = format!(
            "\
                {FIRST}\n\
                500 0@1 1 fault 1 1 delete 0\n\
                501 0 1 over 1\n\
                600 2@1 8 enter 3900 6 b\n\
                2900 1@1 7 look 3000\n\
                2900 1@1 7 leave\n\
                3000 2@1 8 leave"
        );
        assert_eq!(overlaps_of(&late), [(2300, false)]);
        for other in [
            "0@2 1 fault 2 1 delete",
            "0@2 1 fault 2 1 delete-fence",
            "0 1 fault 2 1 flush-scripts",
        ] {
            let more = format!("{late}\n400 {other} 0\n401 0 1 over 2");
            assert_eq!(overlaps_of(&more), [(2300, false)], "{other}");
        }
    }

    #[test]
    fn stop_that_ended_long_before_is_no_excuse() {
        let long = "\
            10 1@1 7 wait\n\
            20 1@1 7 enter 3000 5 a\n\
            21 0 7 stopped\n\
            22 0 7 continued\n\
            20000 1@1 7 look 23000\n\
            20500 0@1 1 fault 1 1 delete 0\n\
            20501 0 1 over 1\n\
            20610 2@1 8 enter 23600 6 b\n\
            22900 1@1 7 look 23000\n\
            22900 1@1 7 leave\n\
            23000 2@1 8 leave";
        assert_eq!(overlaps_of(long), [(2290, false)]);
    }

    #[test]
    fn excuse_ends_with_the_last_lease_from_before_the_fault() {
        let stopped = "550 0 7 stopped\n560 0 7 continued\n600 2@1 8 enter 9000 6 b";
        let late = |at: u64| {
            format!(
                "\
                    {FIRST}\n\
                    500 0 1 fault 1 1 forget 0\n\
                    520 0 1 over 1\n\
                    {stopped}\n\
                    {at} 1@1 7 look 9000\n\
                    {at} 1@1 7 leave\n\
                    8000 2@1 8 leave"
            )
        };
        assert_eq!(overlaps_of(&late(3520)), [(2920, true)]);
        assert_eq!(overlaps_of(&late(3521)), [(2921, false)]);
    }

    #[test]
    fn end_of_a_connection_to_a_database_is_a_short_excuse() {
        // Within a tenth of a second after the fault: 601 ms.
        let late = |kind: &str, at: u64| {
            let text = format!(
                "\
                    {FIRST}\n\
                    500 0 1 fault 1 1 {kind} 0\n\
                    501 0 1 over 1\n\
                    550 2@1 8 enter 3900 6 b\n\
                    {at} 1@1 7 look 3000\n\
                    {at} 1@1 7 leave\n\
                    3000 2@1 8 leave"
            );
            overlaps_on(" database", &text)
        };
        for kind in ["restart", "delete", "cut-clients", "reset", "refuse"] {
            assert_eq!(late(kind, 601), [(51, true)], "{kind}");
            assert_eq!(late(kind, 602), [(52, false)], "{kind}");
        }
        for kind in ["freeze", "blackhole", "drop-reply"] {
            assert_eq!(late(kind, 601), [(51, false)], "{kind}");
        }
        // The holder does not notice before its deadline that the other side has ended.
        assert_eq!(late("half-open", 2999), [(2449, true)]);
    }

    #[test]
    fn killed_holder_of_a_database_lock_holds_until_the_kill() {
        let killed = "10 1@1 7 wait\n20 1@1 7 enter 3000 5 a\n90 0 7 doomed\n\
                      95 2@1 8 enter 3900 6 b\n100 0 7 killed\n200 2@1 8 leave";
        assert_eq!(overlaps_on(" database", killed), []);
        assert_eq!(overlaps_of(killed), [(5, false)]);
        let early = killed.replace("95 2@1", "85 2@1");
        assert_eq!(overlaps_on(" database", &early), [(5, false)]);
    }

    #[test]
    fn overlap_on_several_nodes_has_no_excuse() {
        let text = "\
            0 0 1 terms 5 3000 1 0\n\
            1 1@1 7 wait\n\
            2 1@1 7 enter 9 5 a\n\
            3 0 1 fault 1 1 forget 0\n\
            4 0 1 over 1\n\
            5 2@1 8 enter 9 6 b";
        assert_eq!(find(&story(text)).len(), 1);
        assert_eq!(find(&story(&text.replace("terms 5", "terms 1"))).len(), 0);
    }
}
