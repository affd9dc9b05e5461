//! `BroadcastOptions`: whom a broadcast asks, and how long it waits.

use std::time::Duration;

use smallvec::SmallVec;

use crate::{
    backend::redis::{InFlightRequest, LateReader},
    core::{node_reply::Vote, quorum::NodeSet},
    sys::clock::Moment,
};

/// Usual wait for preferred nodes once the outcome is decided.
pub(super) const PREFERRED_WAIT_MIN: Duration = Duration::from_millis(20);

/// Targets and limits of one broadcast.
pub(crate) struct BroadcastOptions<'a> {
    pub(crate) targets: NodeSet,
    /// Time at which the request expires, and connections without a reply are closed.
    pub(crate) deadline: Moment,
    /// Time until which to wait for replies; may be before `deadline`.
    pub(crate) wait_until: Moment,
    /// Time at which a connection attempt ends. A connection that is ready only after `deadline`
    /// is left to the next caller.
    pub(crate) connect_by: Moment,
    /// Maximum wait for the remaining nodes once the outcome is decided.
    pub(crate) straggler_grace: Duration,
    /// Wait for all replies, whatever the verdict.
    pub(crate) wait_for_all: bool,
    /// The caller will ask failed nodes again, so too many failures do not end the broadcast.
    pub(crate) will_retry: bool,
    /// Earlier votes of nodes that are not asked again, if this is a second broadcast.
    pub(crate) prior_votes: SmallVec<[Option<Vote>; 8]>,
    /// Nodes whose replies are worth a wait.
    pub(crate) preferred: NodeSet,
    /// Maximum wait for these once the outcome is decided.
    pub(crate) preferred_wait: Duration,
    /// Ask the last node first.
    pub(crate) reverse_order: bool,
    /// Returns those of these silent nodes that are needed although a quorum has replied.
    pub(crate) needed: Option<&'a dyn Fn(NodeSet) -> NodeSet>,
    /// Maximum wait for needed nodes once a quorum has replied.
    pub(crate) needed_wait: Duration,
    /// Returns what receives the reply of a node to this request, if it arrives later.
    pub(crate) late_reader: Option<&'a dyn Fn(usize, InFlightRequest) -> LateReader>,
    /// Called while replies are outstanding. Returns when to call it next, or `None` to stop
    /// waiting.
    pub(crate) on_idle: Option<&'a mut dyn FnMut(Moment) -> Option<Moment>>,
}

impl<'a> BroadcastOptions<'a> {
    pub(crate) fn new(targets: NodeSet, deadline: Moment) -> BroadcastOptions<'a> {
        BroadcastOptions {
            targets,
            deadline,
            wait_until: deadline,
            connect_by: deadline,
            straggler_grace: Duration::ZERO,
            wait_for_all: false,
            will_retry: false,
            prior_votes: SmallVec::new(),
            preferred: NodeSet::EMPTY,
            preferred_wait: PREFERRED_WAIT_MIN,
            reverse_order: false,
            needed: None,
            needed_wait: Duration::ZERO,
            late_reader: None,
            on_idle: None,
        }
    }

    pub(crate) fn awaiting_all(targets: NodeSet, deadline: Moment) -> BroadcastOptions<'a> {
        BroadcastOptions { wait_for_all: true, ..BroadcastOptions::new(targets, deadline) }
    }
}
