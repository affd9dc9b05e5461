//! `Released`: how a release ended.

use crate::holder::Holder;

/// How a release ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Released {
    /// The lock was ours until now.
    Released,
    /// Nobody held it any more: it had expired or been deleted.
    Gone,
    /// It had been lost, and another holds it; that was left alone.
    OwnedByOther(Holder),
}
