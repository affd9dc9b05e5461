//! Readers and writers over three nodes, in the same model as mutexes. Writers can become readers.
//!
//! Bounds: a writer and a reader, two writers, or a writer and two readers; each has one turn. Two
//! or three ticks, except that three clients have none. One fault, or two if there is one client.
//! There is no queue: `groups.rs` has the queue of one server. It takes about twenty seconds.

use super::{
    EXCLUSIVE, Model, QUORUM_KEYS, RISING, Rule,
    check::{assert_holds, assert_violated},
    properties::{NO_FAULTS, base_model},
    world::{Faults, Kind},
};

/// A writer that may become a reader, and a reader.
const WRITER_AND_READER: Model<2> = Model {
    kinds: [Kind::Alone, Kind::Read],
    downgrades: true,
    horizon: 3,
    ttl: 2,
    ..base_model()
};

/// A writer that may become a reader. That is enough to check its lease, and leaves room for more
/// faults.
const WRITER: Model<1> = Model { kinds: [Kind::Alone], downgrades: true, ..base_model() };

#[test]
fn writer_and_reader_break_no_property() {
    let two = WRITER_AND_READER;
    assert_holds(Model { in_flight_max: 2, ..two.clone() }, 30_000);
    assert_holds(Model { kinds: [Kind::Alone; 2], ..two.clone() }, 5_000);
    assert_holds(Model { horizon: 1, rounds: 2, ..two.clone() }, 20_000);
    assert_violated(&two, &[Rule::ReadersExcludeWriters], EXCLUSIVE);
    assert_violated(&two, &[Rule::WritersExcludeReaders], EXCLUSIVE);
    assert_violated(&two, &[Rule::ReadersNeedQuorum], EXCLUSIVE);
    assert_violated(&two, &[Rule::DowngradeEndsWriting], EXCLUSIVE);
    assert_violated(&two, &[Rule::ReaderLeavesOthers], QUORUM_KEYS);
    assert_violated(&two, &[Rule::DecidedForMembersOnly], RISING);
    assert_violated(&two, &[Rule::ReleaseRaisesFence], RISING);
}

#[test]
fn two_readers_and_a_writer_break_no_property() {
    let three = Model::<3> {
        kinds: [Kind::Alone, Kind::Read, Kind::Read],
        horizon: 0,
        ttl: 2,
        ..base_model()
    };
    assert_holds(three.clone(), 50_000);
    assert_violated(&three, &[Rule::ReadersExcludeWriters], EXCLUSIVE);
    assert_violated(&three, &[Rule::ReaderLeavesOthers], EXCLUSIVE);
    // Readers raise the tokens of the nodes in different orders.
    assert_violated(&three, &[Rule::SecondPhase], RISING);
}

#[test]
fn late_replies_to_readers_break_no_property() {
    let two = Model {
        downgrades: false,
        horizon: 2,
        in_flight_max: 2,
        late_replies: true,
        ..WRITER_AND_READER
    };
    assert_holds(two.clone(), 40_000);
    assert_violated(&two, &[Rule::DeadlineFromSent], QUORUM_KEYS);
}

/// Such a node may have lost a reader, and would grant the lock to a writer.
#[test]
fn node_without_its_readers_breaks_no_property() {
    let faults = Faults { restarts: 1, ..NO_FAULTS };
    let two = Model { horizon: 2, faults, ..WRITER_AND_READER };
    assert_holds(two.clone(), 50_000);
    assert_violated(&two, &[Rule::Quarantine], EXCLUSIVE);
    assert_violated(&two, &[Rule::DowngradeIsConfirmed], QUORUM_KEYS);
}

#[test]
fn lost_messages_of_readers_break_no_property() {
    let faults = Faults { breaks: 1, ..NO_FAULTS };
    assert_holds(Model { horizon: 2, faults, ..WRITER_AND_READER }, 90_000);
}

#[test]
fn downgrade_that_nodes_miss_breaks_no_property() {
    let twice = Model { faults: Faults { breaks: 2, ..NO_FAULTS }, ..WRITER };
    assert_holds(twice.clone(), 15_000);
    assert_violated(&twice, &[Rule::RepeatedDowngradeExtends], QUORUM_KEYS);
    // The renewal finds the node, and repairs it.
    let renewed = Model { renewals: 1, faults: Faults { breaks: 1, ..NO_FAULTS }, ..WRITER };
    assert_holds(renewed.clone(), 20_000);
    assert_violated(&renewed, &[Rule::DowngradeIsConfirmed], QUORUM_KEYS);
    assert_violated(&renewed, &[Rule::UnknownIsNotYes], QUORUM_KEYS);
}
