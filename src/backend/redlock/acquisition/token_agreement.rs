//! `TokenAgreement`: the rounds in which the nodes agree on one fencing token. Pure.

use crate::core::quorum::NodeSet;

/// Maximum number of rounds in which the nodes may disagree about the fencing token. One more
/// counts as a failure; otherwise a node that never stores the token could cause a tight loop.
const TOKEN_ROUNDS_MAX: u32 = 5;

#[derive(Debug)]
pub(super) struct TokenAgreement {
    /// Token that a quorum must store, once nodes have returned different ones.
    min: Option<u64>,
    /// Nodes whose last reply granted the lock with a token that is at most `min`.
    known: NodeSet,
    rounds: u32,
}

impl TokenAgreement {
    pub(super) fn new() -> TokenAgreement {
        TokenAgreement { min: None, known: NodeSet::EMPTY, rounds: 0 }
    }

    pub(super) fn min(&self) -> Option<u64> {
        self.min
    }

    /// Nodes whose reply in the last round granted the lock with a token that is at most `min`. Of
    /// one round only: a node may grant the lock again meanwhile, after another holder.
    pub(super) fn take_known(&mut self) -> NodeSet {
        std::mem::replace(&mut self.known, NodeSet::EMPTY)
    }

    /// Another holder has got the lock, so the next token is another one.
    pub(super) fn on_rejected(&mut self) {
        self.min = None;
    }

    /// Records that the nodes `granted_on` returned different tokens, of which `highest` is the
    /// highest. Returns false if this has happened too often.
    pub(super) fn on_disagreement(&mut self, highest: u64, granted_on: NodeSet) -> bool {
        (self.min, self.known) = (Some(highest), granted_on);
        self.rounds += 1;
        self.rounds <= TOKEN_ROUNDS_MAX
    }
}
