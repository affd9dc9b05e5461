//! `NodeAnswer`: what one of several nodes said.

use std::{fmt, sync::Arc};

/// What a node's answer counts as. `Unknown` is never counted as either of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Vote {
    /// It did what it was asked, or agrees.
    Yes,
    /// It answered, and did not.
    No,
    /// It did not answer, or its answer does not count.
    Unknown,
}

/// What one node said, for people and for programs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeAnswer {
    /// The node, as errors call it.
    pub node: Arc<str>,
    /// What its answer counts as.
    pub vote: Vote,
    /// Its answer, or why there is none, as part of a sentence.
    pub says: String,
}

impl NodeAnswer {
    pub(crate) fn new(node: &Arc<str>, vote: Vote, says: impl Into<String>) -> NodeAnswer {
        NodeAnswer { node: node.clone(), vote, says: says.into() }
    }
}

impl fmt::Display for NodeAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.node, self.says)
    }
}

/// The answers of all nodes, one after the other.
pub(crate) struct Answers<'a>(pub(crate) &'a [NodeAnswer]);

impl fmt::Display for Answers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, answer) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            answer.fmt(f)?;
        }
        Ok(())
    }
}
