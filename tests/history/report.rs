//! The verdict: the findings of all rules, and whether the record shows enough to check them. Pure.

use std::collections::BTreeMap;

use super::{
    Finding, Kind, Overlap, Rule, Story, availability, bounds, exclusion, fence, leaks, liveness,
    lost_updates, order, server_agreement, unexplained_losses,
};

/// Number of stops longer than the lease after which a stale write is expected.
const STOPS_WITH_STALE_WRITE: usize = 20;

/// Number of waits after which an undisturbed wait with many other holders is expected.
const WAITS_WITH_QUEUE: usize = 30_000;
/// If the parent waited for a processor for more than this part of the time, such a wait is not
/// expected.
const SLOW_PART: u64 = 20;

pub(crate) struct Verdict<'a> {
    /// Sorted by start.
    pub(crate) findings: Vec<Finding>,
    pub(crate) overlaps: Vec<Overlap<'a>>,
    /// Number of comparisons between a holder and the servers.
    pub(crate) compared: usize,
    pub(crate) gaps: availability::Gaps,
    pub(crate) losses: unexplained_losses::Losses,
    pub(crate) fenced: fence::Fenced,
    pub(crate) faults: BTreeMap<Kind, usize>,
}

impl<'a> Verdict<'a> {
    pub(crate) fn of(story: &'a Story) -> Verdict<'a> {
        let (compared, mut findings) = server_agreement::find(story);
        let (gaps, fenced) = (availability::find(story), fence::find(story));
        let losses = unexplained_losses::find(story);
        findings.extend(exclusion::find(story));
        findings.extend(order::find(story));
        findings.extend(bounds::find(story));
        findings.extend(lost_updates::find(story));
        findings.extend(leaks::find(story));
        findings.extend(liveness::find(story));
        findings
            .extend(gaps.findings.iter().chain(&losses.findings).chain(&fenced.findings).cloned());
        findings.extend(insufficient_evidence(story, &gaps, &fenced, compared));
        findings.sort_by_key(|finding| finding.from);
        let mut faults = BTreeMap::new();
        for period in &story.faults {
            *faults.entry(period.fault.kind).or_default() += 1;
        }
        Verdict {
            findings,
            overlaps: exclusion::overlaps(story),
            compared,
            gaps,
            losses,
            fenced,
            faults,
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        self.findings.is_empty()
    }

    pub(crate) fn against(&self, rule: Rule) -> Vec<&Finding> {
        self.findings.iter().filter(|finding| finding.rule == rule).collect()
    }
}

/// Findings about a record that shows too little to check the rules.
fn insufficient_evidence(
    story: &Story,
    gaps: &availability::Gaps,
    fenced: &fence::Fenced,
    compared: usize,
) -> Vec<Finding> {
    let mut texts = Vec::new();
    if story.holds.is_empty() {
        texts.push("no lock was ever held".to_owned());
    }
    if story.faults.is_empty() {
        texts.push("there was no fault of a server or of the network".to_owned());
    }
    if compared == 0 {
        texts
            .push("no server was ever asked about a lock that a thread considered held".to_owned());
    }
    let long = story.stops.iter().filter(|(_, from, until)| until - from > story.terms.ttl).count();
    if long >= STOPS_WITH_STALE_WRITE && fenced.stale_refused == 0 {
        texts.push(format!(
            "{long} times a process was stopped for longer than the lease, but no stale write \
             was refused"
        ));
    }
    // On a busy machine there may be no undisturbed time that is long enough.
    let late = story.lateness(story.parent, story.start, story.end);
    let slow = late > (story.end - story.start) / SLOW_PART;
    // Neither is there while slots of a cluster move all the time.
    let moves = story.faults.iter().any(|period| period.fault.kind == Kind::Move);
    let is_expected = story.waits.len() >= WAITS_WITH_QUEUE && !slow && !moves;
    if is_expected && gaps.queued_waits == 0 {
        texts.push(format!(
            "there were {} waits, but none in which the order of the queue could be checked",
            story.waits.len()
        ));
    }
    let finding = |text| Finding {
        rule: Rule::Other,
        lock: 0,
        seats: Vec::new(),
        from: story.start,
        until: story.end,
        text,
    };
    texts.into_iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    #[track_caller]
    fn is_good(text: &str) -> bool {
        Verdict::of(&story(text)).is_good()
    }

    const GOOD: &str = "\
        0 0 1 terms 1 100 10 10\n\
        2 0 1 fault 9 1 cut-clients 0\n\
        3 0 1 over 9\n\
        24 0@1 1 seen 22 9:a\n\
        10 1@1 7 wait\n\
        20 1@1 7 enter 60 5 a\n\
        30 1@1 7 leave\n\
        40 2@1 8 wait\n\
        50 2@1 8 enter 99 6 b\n\
        60 2@1 8 leave";

    #[test]
    fn violation_of_any_rule_is_in_the_verdict() {
        assert!(is_good(GOOD));
        for (rule, more) in [
            (Rule::Exclusion, "21 3@1 9 enter 40 7 c\n30 3@1 9 leave"),
            (Rule::Order, "70 3@1 9 wait\n80 3@1 9 enter 90 6 c"),
            (Rule::ServerAgreement, "25 0@1 1 seen 22 -"),
            (Rule::Bounds, "60 3@1 9 call drop 5\n200000000 3@1 9 back"),
            (Rule::Availability, "60 3@1 9 wait\n9000000000 3@1 9 enter 9900000000 7 c"),
            (
                Rule::UnexplainedLosses,
                "\
                    1000 1@1 7 enter 9999 9 d\n\
                    2001 0@1 1 seen 2000 9:d\n\
                    2003 0@1 1 seen 2002 9:d\n\
                    2005 0@1 1 seen 2004 9:d\n\
                    2007 0@1 1 seen 2006 9:d\n\
                    2009 0@1 1 seen 2008 9:d\n\
                    2010 1@1 7 lost x",
            ),
            (Rule::Fence, "25 1@1 7 met 5\n55 2@1 8 met 6\n65 1@1 7 write 5 1 accepted"),
            (Rule::LostUpdates, "25 1@1 7 write 5 1 accepted\n55 2@1 8 write 6 1 accepted"),
            (Rule::Other, "99 0 7 leak 3 threads"),
            (
                Rule::Other,
                "\
                    3000 3@1 9 wait\n\
                    3012 0@1 1 seen 3011 -\n\
                    3014 0@1 1 seen 3013 -\n\
                    3016 0@1 1 seen 3015 -\n\
                    3018 0@1 1 seen 3017 -\n\
                    3020 0@1 1 seen 3019 -\n\
                    3030 3@1 9 again unavailable: x",
            ),
        ] {
            let story = story(&format!("{GOOD}\n{more}"));
            let verdict = Verdict::of(&story);
            assert_eq!(verdict.against(rule).len(), 1, "{rule:?}");
            assert!(!verdict.is_good());
        }
    }

    #[test]
    fn record_without_faults_or_polls_is_rejected() {
        let without = |what: &str| {
            GOOD.lines().filter(|line| !line.contains(what)).collect::<Vec<_>>().join("\n")
        };
        assert!(is_good(&without("a text in no line")));
        assert!(!is_good(&without("fault")), "no faults");
        assert!(!is_good(&without("seen")), "no polls");
        assert!(
            !is_good(&GOOD.replace("24 0@1 1 seen 22", "90 0@1 1 seen 80")),
            "no holder during the poll"
        );
    }

    #[test]
    fn loss_without_a_reason_is_in_the_verdict() {
        let lost = |why: &str| {
            is_good(&format!(
                "\
                    {GOOD}\n\
                    70 3@1 9 wait\n\
                    80 3@1 9 enter 90 7 c\n\
                    85 0@1 1 fault 1 1 delete 0\n\
                    86 0 1 over 1\n\
                    89 3@1 9 lost {why}"
            ))
        };
        assert!(lost("gone"));
        assert!(!lost("not reported"));
    }

    #[test]
    fn record_without_holds_or_stale_writes_is_rejected() {
        assert!(!is_good("0 0 1 terms 1 100 10 0"));
        let stops = |count: u64, length: u64| {
            let stop = |at: u64| {
                format!("\n{} 0 9 stopped\n{} 0 9 continued", 1000 * at, 1000 * at + length)
            };
            format!("{GOOD}{}", (1..=count).map(stop).collect::<String>())
        };
        assert!(is_good(&stops(19, 101)));
        assert!(is_good(&stops(20, 100)));
        assert!(!is_good(&stops(20, 101)));
        let late = "\n25 1@1 7 met 5\n55 2@1 8 met 6\n65 1@1 7 write 5 1 refused";
        assert!(is_good(&format!("{}{late}", stops(20, 101))));
    }

    #[test]
    fn record_without_queued_waits_is_rejected() {
        let waits = |count: usize| {
            let wait = |at: usize| format!("\n{at} 3@1 9 wait\n{at} 3@1 9 again contended: by a");
            format!("{GOOD}{}", (100..100 + count).map(wait).collect::<String>())
        };
        assert!(is_good(&waits(29_997)));
        assert!(!is_good(&waits(29_998)));
        assert!(!is_good(&format!("{}\n20000 0 1 late 1500", waits(29_998))));
        assert!(
            is_good(&format!("{}\n20000 0 1 late 1600", waits(29_998))),
            "the machine was slow"
        );
        let moves = "\n20 0 1 fault 1 1 move 0\n21 0 1 over 1";
        assert!(is_good(&format!("{}{moves}", waits(29_998))), "slots moved");
        let turn = |n: u64| {
            let at = 3_000_000_000 + n;
            format!(
                "\n\
                    2999999999 {n}@1 {n} wait\n\
                    {at} {n}@1 {n} enter 8999999999 {at} a\n\
                    {at} {n}@1 {n} leave"
            )
        };
        let turns: String = (11..16).map(turn).collect();
        let queue =
            format!("\n3000000000 3@1 9 wait{turns}\n3000000019 3@1 9 again contended: by a");
        assert!(is_good(&format!("{}{queue}", waits(29_998))));
    }
}
