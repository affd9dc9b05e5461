//! The verdict: all rules together, and whether there was anything to judge. Pure.

use std::collections::BTreeMap;

use super::{
    Finding, Kind, Overlap, Rule, Story, agreement, bounds, exclusion, fence, losses, order, peace,
    remains, silence, updates,
};

/// With so many stops that outlast the lease, somebody must have come too late.
const STOPS: usize = 20;

/// With so many waits, some must have been long, in peace, and for a lock that others got
/// meanwhile.
const WAITS: usize = 30_000;
/// Where the parent got no processor for more than this part of the time, that is not asked for.
const SLOW: u64 = 20;

pub(crate) struct Verdict<'a> {
    /// By the moment they began.
    pub(crate) findings: Vec<Finding>,
    pub(crate) overlaps: Vec<Overlap<'a>>,
    pub(crate) compared: usize,
    pub(crate) gaps: peace::Gaps,
    pub(crate) losses: losses::Losses,
    pub(crate) fenced: fence::Fenced,
    pub(crate) faults: BTreeMap<Kind, usize>,
}

impl<'a> Verdict<'a> {
    pub(crate) fn of(story: &'a Story) -> Verdict<'a> {
        let (compared, mut findings) = agreement::find(story);
        let (gaps, losses, fenced) = (peace::find(story), losses::find(story), fence::find(story));
        findings.extend(exclusion::find(story));
        findings.extend(order::find(story));
        findings.extend(bounds::find(story));
        findings.extend(updates::find(story));
        findings.extend(remains::find(story));
        findings.extend(silence::find(story));
        findings
            .extend(gaps.findings.iter().chain(&losses.findings).chain(&fenced.findings).cloned());
        findings.extend(nothing_shown(story, &gaps, &fenced, compared));
        findings.sort_by_key(|finding| finding.from);
        let mut faults = BTreeMap::new();
        for done in &story.done {
            *faults.entry(done.fault.kind).or_default() += 1;
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

/// A storm in which nothing happened proves nothing.
fn nothing_shown(
    story: &Story,
    gaps: &peace::Gaps,
    fenced: &fence::Fenced,
    compared: usize,
) -> Vec<Finding> {
    let mut texts = Vec::new();
    if story.holds.is_empty() {
        texts.push("nobody ever held a lock".to_owned());
    }
    if story.done.is_empty() {
        texts.push("nothing was done to a server or to the way to it".to_owned());
    }
    if compared == 0 {
        texts.push(
            "no server was ever asked for whom it kept a lock that somebody believed in".to_owned(),
        );
    }
    let long = story.stops.iter().filter(|(_, from, until)| until - from > story.terms.ttl).count();
    if long >= STOPS && fenced.stale_refused == 0 {
        texts.push(format!(
            "{long} times somebody was stopped for longer than the lease, and nobody came too late"
        ));
    }
    // On a machine with other things to do there may be no peace that lasts.
    let late = story.lateness(story.parent, story.start, story.end);
    let slow = late > (story.end - story.start) / SLOW;
    if story.waits.len() >= WAITS && gaps.lined == 0 && !slow {
        texts.push(format!(
            "{} times somebody waited, and nobody who could have been overtaken",
            story.waits.len()
        ));
    }
    let finding = |text| Finding {
        rule: Rule::Remains,
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

    const GOOD: &str = "0 0 1 terms 1 100 10 0\n2 0 1 fault 9 1 cut-clients 0\n3 0 1 over 9\n24 0@1 1 seen 22 9:a\n10 1@1 7 wait\n20 1@1 7 enter 60 5 a\n30 1@1 7 leave\n40 2@1 8 wait\n50 2@1 8 enter 99 6 b\n60 2@1 8 leave";

    #[test]
    fn every_rule_counts() {
        assert!(is_good(GOOD));
        for (rule, more) in [
            (Rule::Exclusion, "21 3@1 9 enter 40 7 c\n30 3@1 9 leave"),
            (Rule::Order, "70 3@1 9 wait\n80 3@1 9 enter 90 6 c"),
            (Rule::Agreement, "25 0@1 1 seen 22 -"),
            (Rule::Bounds, "60 3@1 9 call drop 5\n200000000 3@1 9 back"),
            (Rule::Peace, "60 3@1 9 wait\n9000000000 3@1 9 enter 9900000000 7 c"),
            (
                Rule::Losses,
                "1000 1@1 7 enter 9999 9 d\n2001 0@1 1 seen 2000 9:d\n2003 0@1 1 seen 2002 9:d\n2005 0@1 1 seen 2004 9:d\n2007 0@1 1 seen 2006 9:d\n2009 0@1 1 seen 2008 9:d\n2010 1@1 7 lost x",
            ),
            (Rule::Fence, "25 1@1 7 met 5\n55 2@1 8 met 6\n65 1@1 7 write 5 1 accepted"),
            (Rule::Updates, "25 1@1 7 write 5 1 accepted\n55 2@1 8 write 6 1 accepted"),
            (Rule::Remains, "99 0 7 leak 3 threads"),
            (
                Rule::Remains,
                "3000 3@1 9 wait\n3012 0@1 1 seen 3011 -\n3014 0@1 1 seen 3013 -\n3016 0@1 1 seen 3015 -\n3018 0@1 1 seen 3017 -\n3020 0@1 1 seen 3019 -\n3030 3@1 9 again unavailable: x",
            ),
        ] {
            let story = story(&format!("{GOOD}\n{more}"));
            let verdict = Verdict::of(&story);
            assert_eq!(verdict.against(rule).len(), 1, "{rule:?}");
            assert!(!verdict.is_good());
        }
    }

    #[test]
    fn a_storm_without_faults_or_without_a_witness_proves_nothing() {
        let without = |what: &str| {
            GOOD.lines().filter(|line| !line.contains(what)).collect::<Vec<_>>().join("\n")
        };
        assert!(is_good(&without("nothing of it")));
        assert!(!is_good(&without("fault")), "no faults");
        assert!(!is_good(&without("seen")), "no witness");
        assert!(!is_good(&GOOD.replace("24 0@1 1 seen 22", "90 0@1 1 seen 80")), "that saw nobody");
    }

    #[test]
    fn a_loss_without_a_word_is_no_good() {
        let lost = |why: &str| {
            is_good(&format!(
                "{GOOD}\n70 3@1 9 wait\n80 3@1 9 enter 90 7 c\n85 0@1 1 fault 1 1 delete 0\n86 0 1 over 1\n89 3@1 9 lost {why}"
            ))
        };
        assert!(lost("gone"));
        assert!(!lost("without a word"));
    }

    #[test]
    fn a_storm_without_locks_or_without_latecomers_proves_nothing() {
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
    fn very_many_waits_without_a_line_prove_nothing() {
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
        let turn = |n: u64| {
            let at = 3_000_000_000 + n;
            format!(
                "\n2999999999 {n}@1 {n} wait\n{at} {n}@1 {n} enter 8999999999 {at} a\n{at} {n}@1 {n} leave"
            )
        };
        let turns: String = (11..16).map(turn).collect();
        let line =
            format!("\n3000000000 3@1 9 wait{turns}\n3000000019 3@1 9 again contended: by a");
        assert!(is_good(&format!("{}{line}", waits(29_998))));
    }
}
