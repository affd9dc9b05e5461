//! The error for responses without a usable verdict.

use super::{
    Redlock,
    responses::{Response, Responses},
};
use crate::{backend::error::BackendError, sys::clock};

impl BackendError {
    /// Creates the error for responses without a usable verdict. `describe` puts a reply into
    /// words.
    pub(crate) fn from_responses<T>(
        redlock: &Redlock,
        responses: Responses<T>,
        describe: impl Fn(&T) -> String,
    ) -> BackendError {
        let nodes = redlock.nodes();
        // An unanswered request does not count, because its connection stays open and keeps
        // requests in order.
        let outcome_unknown = !responses.outcome_unknown().is_empty();
        let is_permanent = |response: &&Response<T>| {
            matches!(
                response, Response::Failed(failure) if !failure.is_transient()
            )
        };
        let permanent = responses.by_node.iter().filter(is_permanent).count();
        let now = clock::now();
        let quarantined = nodes.iter().any(|node| node.quarantine_left(now).is_some());
        let silent = responses.silent();
        let replies = responses.node_replies(redlock, describe);
        BackendError::NoQuorum {
            needed: redlock.quorum_size(),
            replies,
            outcome_unknown,
            transient: permanent <= nodes.len() - redlock.quorum_size(),
            quarantined,
            silent,
        }
    }
}
