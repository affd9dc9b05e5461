//! The error for responses without a usable verdict.

use std::mem;

use super::{
    Redlock,
    responses::{Response, Responses},
};
use crate::{
    backend::error::BackendError,
    core::{node_answer::Vote, quorum::NodeSet},
    sys::clock,
};

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
        let answers = responses.node_answers(redlock, describe);
        BackendError::NoQuorum {
            needed: redlock.quorum_size(),
            answers,
            outcome_unknown,
            transient: permanent <= nodes.len() - redlock.quorum_size(),
            quarantined,
            silent,
        }
    }
    /// Replaces the answers of silent nodes by what they said in an earlier round.
    pub(crate) fn recall(&mut self, earlier: Option<BackendError>) {
        let BackendError::NoQuorum { answers, silent, .. } = self else { return };
        let Some(BackendError::NoQuorum { answers: earlier, silent: before, .. }) = earlier else {
            return;
        };
        for (node, (answer, mut earlier)) in answers.iter_mut().zip(earlier).enumerate() {
            if !silent.contains(node) || before.contains(node) {
                continue;
            }
            // An earlier vote does not count any more.
            if mem::replace(&mut earlier.vote, Vote::Unknown) != Vote::Unknown {
                earlier.message.push_str(" earlier");
            }
            *answer = earlier;
            *silent = silent.difference(NodeSet::single(node));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::node_answer::NodeAnswer;

    /// Fault: N145
    #[test]
    fn silent_node_keeps_its_last_reason() {
        let error = |says: [(Vote, &str); 3], silent: &[usize]| BackendError::NoQuorum {
            needed: 2,
            answers: says.map(|(vote, says)| NodeAnswer::new(&"n".into(), vote, says)).into(),
            outcome_unknown: false,
            transient: true,
            quarantined: false,
            silent: silent.iter().copied().collect(),
        };
        let first = [(Vote::Yes, "granted"), (Vote::Unknown, "refused"), (Vote::Unknown, "late")];
        let mut second = error([(Vote::Unknown, "late"); 3], &[0, 1, 2]);
        second.recall(Some(error(first, &[2])));
        let mut third = error([(Vote::Unknown, "late"); 3], &[0, 1, 2]);
        third.recall(Some(second));
        assert_eq!(third.to_string(), "no quorum (n: granted earlier; n: refused; n: late)");
        let BackendError::NoQuorum { answers, .. } = third else { unreachable!() };
        assert!(answers.iter().all(|answer| answer.vote == Vote::Unknown), "{answers:?}");
    }
}
