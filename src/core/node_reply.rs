//! `NodeReply`: what one of several nodes replied.

use std::{fmt, sync::Arc};

/// How a node's reply counts. `Unknown` never counts as `Yes` or `No`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Vote {
    /// The node did what it was asked to do, or agrees.
    Yes,
    /// The node replied, and refused or disagrees.
    No,
    /// The node did not reply, or its reply does not count.
    Unknown,
}

/// The reply of one node, for people and for programs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeReply {
    /// The address of the node, as shown in errors.
    pub node: Arc<str>,
    /// How the reply counts.
    pub vote: Vote,
    /// The reply, or why there is none, as a part of a sentence.
    pub message: String,
}

impl NodeReply {
    pub(crate) fn new(node: &Arc<str>, vote: Vote, says: impl Into<String>) -> NodeReply {
        NodeReply { node: node.clone(), vote, message: says.into() }
    }
}

impl fmt::Display for NodeReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.node, self.message)
    }
}

/// The replies of all nodes, separated by semicolons.
pub(crate) struct ReplyList<'a>(pub(crate) &'a [NodeReply]);

impl fmt::Display for ReplyList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, reply) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            reply.fmt(f)?;
        }
        Ok(())
    }
}
