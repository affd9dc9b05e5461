//! A simulator that finds nothing proves nothing: servers that break one of their rules are found out within a few seeds.

use super::{scripts::Flaw, story};

/// How many seeds it may take: several times as many as it takes now.
const ENOUGH: u64 = 2_000;

/// The first seed that a flaw shows in for what it is, and how. It may do other damage before.
fn found(flaw: Flaw, words: &str) -> (u64, String) {
    for seed in 0..ENOUGH {
        let report = story::run(seed, false, |plan| plan.flaw = Some(flaw));
        if let Some(wrong) = report.wrong.into_iter().find(|wrong| wrong.contains(words)) {
            return (seed, wrong);
        }
    }
    panic!("{flaw:?} goes unnoticed in {ENOUGH} seeds");
}

#[test]
fn servers_that_break_a_rule_are_found_out() {
    for (flaw, words) in [
        (Flaw::ReleaseWithoutOwner, "nodes keep it"),
        (Flaw::AcquireTaken, "nodes keep it"),
        (Flaw::LateIsCarriedOut, "given up"),
        (Flaw::TokensFromOne, "token"),
        (Flaw::TokensRepeat, "was granted under token"),
        (Flaw::RenewsAnybody, "nodes keep it"),
        (Flaw::RenewsNobody, "for nothing"),
        (Flaw::ExpiresEarly, "nodes keep it"),
    ] {
        let (seed, wrong) = found(flaw, words);
        println!("{flaw:?}: seed {seed}: {wrong}");
    }
}

#[test]
fn a_seed_is_a_run() {
    for seed in 0..24 {
        let (first, second) = (story::run(seed, false, |_| {}), story::run(seed, false, |_| {}));
        assert_eq!(
            (first.digest, first.steps, first.counts),
            (second.digest, second.steps, second.counts),
            "seed {seed}"
        );
    }
}
