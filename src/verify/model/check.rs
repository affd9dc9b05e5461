//! Explores a model, and checks that it detects rules that are broken.

use std::{fmt::Debug, hash::Hash};

use stateright::{Checker as _, HasDiscoveries, Model};

/// A model with rules that can be broken.
pub(super) trait Breakable:
    Clone
    + Model<
        State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
        Action: Clone + Debug + PartialEq,
    > + Send
    + Sync
    + 'static
{
    type Rule: Debug + 'static;

    fn with_broken(&self, broken: &'static [Self::Rule]) -> Self;
}

/// Checks that all properties hold, and that more than `states_min` states were explored.
#[track_caller]
pub(super) fn assert_holds<M: Breakable>(model: M, states_min: usize) {
    let checker = model.checker().spawn_bfs().join();
    checker.assert_properties();
    let states = checker.unique_state_count();
    assert!(states > states_min, "only {states} states");
}

/// Checks that a property is violated if these rules are broken.
#[track_caller]
pub(super) fn assert_violated<M: Breakable>(
    model: &M,
    broken: &'static [M::Rule],
    property: &'static str,
) {
    let checker = model
        .with_broken(broken)
        .checker()
        .finish_when(HasDiscoveries::AllOf([property].into()))
        .spawn_bfs()
        .join();
    assert!(
        checker.discovery(property).is_some(),
        "breaking {broken:?} does not violate: {property}"
    );
}
