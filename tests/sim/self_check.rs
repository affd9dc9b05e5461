//! A simulator that never finds anything proves nothing. Here each of several defects is built into
//! the servers, and must be detected within a few seeds.

use super::{flaw::Flaw, kinds::Family, run};

/// Maximum number of seeds that may be needed; several times as many as are needed today.
const SEEDS_MAX: u64 = 2_000;

/// Returns the first seed with a violation that contains `text`. Earlier seeds may have had others.
fn detect(flaw: Flaw, text: &str) -> (u64, String) {
    for seed in 0..SEEDS_MAX {
        let report = run::run_seed(seed, false, |scenario| {
            scenario.flaw = Some(flaw);
            scenario.family = match flaw {
                Flaw::SharingStealsLock | Flaw::MemberReleasesAll => Family::ReadWriteLocks,
                Flaw::LimitIgnored => Family::Semaphores,
                _ => Family::Mutexes,
            };
            if flaw == Flaw::LimitIgnored {
                scenario.nodes = 1;
            }
            if flaw == Flaw::FenceNotRaised {
                // Without a fence, tokens fall only where clocks differ.
                scenario.nodes = scenario.nodes.max(3);
            }
        });
        if let Some(violation) =
            report.violations.into_iter().find(|violation| violation.contains(text))
        {
            return (seed, violation);
        }
    }
    panic!("{SEEDS_MAX} seeds do not detect {flaw:?}");
}

#[test]
fn flawed_server_is_detected() {
    for (flaw, text) in [
        (Flaw::ReleaseWithoutOwner, "nodes have its key"),
        (Flaw::AcquireStealsLock, "nodes have its key"),
        (Flaw::SharingStealsLock, "nodes have its key"),
        (Flaw::LimitIgnored, "others still hold it"),
        (Flaw::MemberReleasesAll, "nodes have its key"),
        (Flaw::ExecutesExpired, "has failed long ago"),
        (Flaw::TokensLostWithData, "token"),
        (Flaw::FenceNotRaised, "was granted with token"),
        (Flaw::TokensRepeat, "was granted with token"),
        (Flaw::RenewsAnyHolder, "nodes have its key"),
        (Flaw::RenewsNobody, "no reason to report"),
        (Flaw::ExpiresEarly, "nodes have its key"),
    ] {
        let (seed, violation) = detect(flaw, text);
        println!("{flaw:?}: seed {seed}: {violation}");
    }
}

#[test]
fn same_seed_repeats_the_same_run() {
    for seed in 0..24 {
        let (first, second) =
            (run::run_seed(seed, false, |_| {}), run::run_seed(seed, false, |_| {}));
        assert_eq!(
            (first.digest, first.steps, first.counts),
            (second.digest, second.steps, second.counts),
            "seed {seed}"
        );
    }
}
