use super::*;
use crate::history::rules::tests::story;

/// A ttl of 3 s and an operation timeout of 0.5 s. So a lock may stay free for 5 s after a
/// crash, and for 2 s after a release.
fn violations(nodes: usize, text: &str) -> usize {
    let text =
        text.lines().map(|line| line.replacen(' ', "000000 ", 1)).collect::<Vec<_>>().join("\n");
    let terms =
        "0 0 1 terms NODES 3000000000 500000000 200000000".replace("NODES", &nodes.to_string());
    find(&story(&format!("{terms}\n{text}"))).findings.len()
}

fn crash(acquired_at: u64) -> String {
    format!(
        "\
            10 1@1 7 enter 2000000000 5 a\n\
            20 2@1 8 wait\n\
            1000 0 7 killed\n\
            {acquired_at} 2@1 8 enter 9000000000 6 b"
    )
}

#[test]
fn lock_of_killed_holder_is_acquired_after_its_lease() {
    assert_eq!(violations(1, &crash(6000)), 0);
    assert_eq!(violations(1, &crash(6001)), 1);
}

#[test]
fn released_lock_is_handed_over_sooner() {
    let left = |at: u64| crash(at).replace("1000 0 7 killed", "1000 1@1 7 leave");
    assert_eq!(violations(1, &left(3000)), 0);
    assert_eq!(violations(1, &left(3001)), 1);
    let killed =
        |lock: u32| violations(1, &format!("{}\n4 3@{lock} 9 wait\n5 0 9 killed", left(3001)));
    assert_eq!(killed(1), 0, "a waiter was killed just before");
    assert_eq!(killed(2), 1, "it waited for another lock");
}

#[test]
fn failover_costs_at_most_one_claim_window() {
    let failover = |acquired_at: u64| {
        let left = crash(acquired_at).replace("1000 0 7 killed", "1000 1@1 7 leave");
        let again = "2900 2@1 8 again unavailable: no answer\n2900 2@1 8 wait";
        let fault = "1000 0 1 fault 1 1 promote 0\n2800 0 1 over 1";
        violations(1, &format!("{left}\n{fault}\n{again}"))
    };
    assert_eq!(failover(3000), 0);
    assert_eq!(failover(3001), 1);
}

#[test]
fn free_lock_without_waiters_is_allowed() {
    assert_eq!(violations(1, &crash(9000).replace("20 2@1", "4000 2@1")), 0);
    assert_eq!(violations(1, &crash(9001).replace("20 2@1", "4000 2@1")), 1);
    assert_eq!(violations(1, &format!("{}\n3000 0 8 stopped\n8000 0 8 continued", crash(9000))), 0);
}

#[test]
fn retried_wait_counts_as_one_wait() {
    let again = |why: &str| {
        let text = format!("3000 2@1 8 again {why}\n3000 2@1 8 wait\n6100 2");
        violations(1, &crash(6100).replace("6100 2", &text))
    };
    assert_eq!(again("contended: by a"), 1);
    assert_eq!(again("unavailable: no answer"), 0, "the failed call may have left a lease");
}

#[test]
fn time_without_the_server_does_not_count() {
    let stopped =
        |node: u32| format!("{}\n2000 0 1 fault 1 {node} freeze 0\n8000 0 1 over 1", crash(12900));
    assert_eq!(violations(1, &stopped(1)), 0);
    assert_eq!(violations(5, &stopped(1)), 1, "a quorum is available");
    assert_eq!(violations(5, &stopped(0)), 0, "all nodes have the fault");
    assert_eq!(
        violations(1, &stopped(1).replace("12900", "13001")),
        1,
        "the time counts from the end of the fault"
    );
}

#[test]
fn fault_of_another_lock_allows_no_further_lease() {
    let often = |what: &str| {
        let times = (0..20).map(|n| 2000 + 2900 * n);
        times.map(|at| format!("\n{}", what.replace("AT", &at.to_string()))).collect::<String>()
    };
    assert_eq!(violations(1, &crash(60_000)), 1);
    let fault = "AT 0@2 1 fault AT 1 delete 0\nAT 0 1 over AT";
    assert_ne!(violations(1, &(crash(60_000) + &often(fault))), 0, "a key of another lock");
    let fault = "AT 3@2 9 wait\nAT 3@2 9 again unavailable: x";
    assert_ne!(violations(1, &(crash(60_000) + &often(fault))), 0, "a call for another lock");
    let fault = "AT 0 1 fault AT 1 flush-scripts 0\nAT 0 1 over AT";
    assert_ne!(
        violations(1, &(crash(60_000) + &often(fault))),
        0,
        "unknown scripts are sent again"
    );
}

#[test]
fn stopped_waiter_of_another_lock_allows_no_extra_time() {
    let stopped = |wanted: u32| {
        let asked = format!("1 3@{wanted} 9 wait\n2 3@{wanted} 9 again contended: by a");
        violations(1, &format!("{asked}\n{}\n1500 0 9 stopped\n9000 0 9 continued", crash(6700)))
    };
    assert_eq!(stopped(1), 0);
    assert_eq!(stopped(2), 1);
}

/// Thread 2 waits behind thread 4 of its own process, which has its turn first.
#[test]
fn processes_take_turns() {
    let overtaken_by = |processes: u32| {
        let turn = |n: u32| {
            let (at, seat, pid) = (6000 + 100 * n, 10 + n % processes, 20 + n % processes);
            format!(
                "{at} {seat}@1 {pid} wait\n{} {seat}@1 {pid} enter 90000000000 {n} a\n{} {seat}@1 \
                 {pid} leave\n",
                at + 1,
                at + 99
            )
        };
        let turns: String = (0..7).map(turn).collect();
        let held = "2 3@1 9 enter 5999000000 1 x\n5999 3@1 9 leave";
        violations(1, &format!("1 4@1 8 wait\n2 2@1 8 wait\n{held}\n{turns}"))
    };
    assert_eq!(overtaken_by(3), 0, "three others have a turn each, besides four in any case");
    assert_eq!(overtaken_by(1), 2, "one other process passes seven times");
}

#[test]
fn waiter_overtaken_by_many_is_found() {
    // The effects of earlier events end after 5 s.
    let overtaken_by = |later: u64, more: &str| {
        let turn = |n: u64| {
            let at = 6000 + 100 * n;
            format!(
                "{at} 1@1 7 wait\n{} 1@1 7 enter 90000000000 {n} a\n{} 1@1 7 leave\n",
                at + 1,
                at + 99
            )
        };
        let turns: String = (0..later).map(turn).collect();
        violations(
            1,
            &format!("1 2@1 8 wait\n2 3@1 9 enter 5999000000 1 x\n5999 3@1 9 leave\n{turns}{more}"),
        )
    };
    assert_eq!(overtaken_by(4, ""), 0);
    assert_eq!(overtaken_by(5, ""), 1);
    let enters = |token: u64| format!("6990 2@1 8 enter 90000000000 {token} w\n6991 2@1 8 leave");
    assert_eq!(overtaken_by(5, &enters(9)), 1);
    assert_eq!(overtaken_by(5, &enters(0)), 0, "it was granted the lock before them");
    assert_eq!(
        overtaken_by(60, "6001 0 8 stopped\n6002 0 8 continued"),
        1,
        "it was stopped long before the last ones"
    );
    assert_eq!(
        overtaken_by(50, "6001 0 8 stopped\n6002 0 8 continued"),
        0,
        "it was stopped while it waited"
    );
    assert_eq!(
        overtaken_by(50, "6001 0 1 fault 1 1 cut-clients 0\n6002 0 1 over 1"),
        0,
        "its connection was cut"
    );
    assert_eq!(
        overtaken_by(50, "6001 0@2 1 fault 1 1 delete 0\n6002 0 1 over 1"),
        1,
        "another lock's key"
    );
    assert_eq!(
        overtaken_by(5, "6700 2@1 8 enter 90000000000 99 b"),
        1,
        "it acquired the lock afterwards"
    );
}

#[test]
fn readers_that_pass_a_waiting_writer_are_found() {
    let passed_by = |kind: &str, others: &str| {
        let turn = |n: u64| {
            let at = 6000 + 100 * n;
            format!(
                "{at} 1@1 7 wait\n{at} 1@1 7 as {kind}\n\
                 {} 1@1 7 enter 90000000000 {n} a\n{} 1@1 7 leave\n",
                at + 1,
                at + 99
            )
        };
        let turns: String = (0..5).map(turn).collect();
        let first = "1 3@1 9 wait\n1 3@1 9 as OTHERS\n2 3@1 9 enter 5999000000 1 x";
        let first = first.replace("OTHERS", others);
        violations(
            1,
            &format!("1 2@1 8 wait\n1 2@1 8 as write\n{first}\n5999 3@1 9 leave\n{turns}"),
        )
    };
    assert_eq!(passed_by("read", "read"), 1);
    assert_eq!(passed_by("permits 2 1", "write"), 1);
    assert_eq!(passed_by("foreign", "read"), 0, "it has no place in the queue");
    assert_eq!(passed_by("read", "mutex"), 0, "a mutex does not keep the places of groups");
}

#[test]
fn mutex_that_readers_pass_without_end_is_found() {
    let passed = |later: u64, waits_as: &str| {
        let turn = |n: u64| {
            let at = 6000 + 100 * n;
            let (asks, enters, leaves) = (at, at + 1, at + 99);
            format!(
                "{asks} 1@1 7 wait\n{asks} 1@1 7 as read\n\
                 {enters} 1@1 7 enter 90000000000 {n} a\n{leaves} 1@1 7 leave\n"
            )
        };
        let turns: String = (0..later).map(turn).collect();
        let waits = format!("1 2@1 8 wait\n1 2@1 8 as {waits_as}");
        violations(
            1,
            &format!(
                "{waits}\n1 3@1 9 wait\n2 3@1 9 enter 5999000000 1 x\n5999 3@1 9 leave\n{turns}"
            ),
        )
    };
    // Three threads, each of which may pass it four times.
    assert_eq!(passed(12, "mutex"), 0);
    assert_eq!(passed(13, "mutex"), 1);
    assert_eq!(passed(60, "write"), 0, "the release of a mutex may remove its queue entry");
}

/// A holder of one kind from 10 ms to 90 s, and a waiter of another from 20 ms to `until`.
fn beside(holder: &str, waiter: &str, until: u64, more: &str) -> usize {
    let text = format!(
        "1 1@1 7 wait\n1 1@1 7 as {holder}\n10 1@1 7 enter 90000000000 5 a\n\
         20 2@1 8 wait\n20 2@1 8 as {waiter}\n{until} 2@1 8 enter 90000000000 6 b\n{more}"
    );
    violations(1, text.trim_end())
}

#[test]
fn waiter_that_could_join_the_holders_is_found() {
    assert_eq!(beside("read", "read", 5020, ""), 0);
    assert_eq!(beside("read", "read", 5021, ""), 1);
    assert_eq!(beside("permits 2 1", "permits 2 1", 5021, ""), 1);
    assert_eq!(beside("permits 2 1", "permits 2 2", 60_000, ""), 0, "there is one permit left");
    assert_eq!(beside("permits 3 1", "permits 1 1", 60_000, ""), 0, "its own limit is lower");
    assert_eq!(beside("read", "write", 60_000, ""), 0);
    assert_eq!(beside("write", "read", 60_000, ""), 0);
    assert_eq!(beside("write", "read", 5021, "15 1@1 7 downgrade"), 1);
    assert_eq!(beside("foreign", "read", 60_000, ""), 0);
}

#[test]
fn waiter_behind_one_that_does_not_fit_may_wait() {
    let writer = "5 3@1 9 wait\n5 3@1 9 as write\n";
    assert_eq!(
        beside("read", "read", 60_000, &format!("{writer}60000 3@1 9 again contended: x")),
        0
    );
    // But not after that one has left the queue.
    let left = format!("{writer}54000 3@1 9 again contended: x");
    assert_eq!(beside("read", "read", 59_000, &left), 0);
    assert_eq!(beside("read", "read", 59_001, &left), 1);
    assert_eq!(
        beside("read", "read", 9000, "4000 0 1 fault 1 1 cut-clients 0\n4001 0 1 over 1"),
        0,
        "the time counts from the end of the fault"
    );
    assert_eq!(beside("read", "read", 9000, "4000 0 8 stopped\n8000 0 8 continued"), 0);
}

#[test]
fn wait_without_recent_faults_counts_at_once() {
    let overtaken_by = |later: u64, more: &str| {
        let turn = |n: u64| {
            let at = 20_000 + 100 * n;
            format!(
                "{at} 1@1 7 wait\n{} 1@1 7 enter 90000000000 {n} a\n{} 1@1 7 leave\n",
                at + 1,
                at + 99
            )
        };
        let turns: String = (0..later).map(turn).collect();
        violations(
            1,
            &format!(
                "\
                    19998 2@1 8 wait\n\
                    19997 3@1 9 enter 90000000000 1 x\n\
                    19999 3@1 9 leave\n\
                    {turns}{more}"
            ),
        )
    };
    assert_eq!(overtaken_by(4, ""), 0);
    assert_eq!(overtaken_by(5, ""), 1);
    assert_eq!(
        overtaken_by(6, "14000 0 1 fault 1 1 mute 0\n14998 0 1 over 1"),
        1,
        "the fault ended long before"
    );
    assert_eq!(
        overtaken_by(6, "14000 0 1 fault 1 1 mute 0\n15598 0 1 over 1"),
        0,
        "fewer than five came after the effects of the fault"
    );
    assert_eq!(
        overtaken_by(6, "15500 0 8 stopped\n15598 0 8 continued"),
        0,
        "the waiter was stopped"
    );
    assert_eq!(overtaken_by(6, "19000 4 8 call connection 9\n19001 4 8 back 0"), 1);
    assert_eq!(
        overtaken_by(6, "19600 4 8 call connection 9\n19601 4 8 back 0"),
        0,
        "it had no connection to enter the queue"
    );
    assert_eq!(
        overtaken_by(6, "19600 4 7 call connection 9\n19601 4 7 back 0"),
        1,
        "another process borrowed connections"
    );
    assert_eq!(overtaken_by(6, "20300 0 8 late 300000000"), 0, "the waiter had no processor");
}

#[test]
fn time_without_a_quorum_does_not_count() {
    let stopped = |nodes: &[u32]| {
        let lines = nodes
            .iter()
            .map(|node| format!("\n2000 0 1 fault {node} {node} freeze 0\n8000 0 1 over {node}"));
        violations(5, &(crash(12900) + &lines.collect::<String>()))
    };
    assert_eq!(stopped(&[1, 2]), 1);
    assert_eq!(stopped(&[1, 2, 4]), 0);
}
