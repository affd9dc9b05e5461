//! `Feature`: what not every backend can do. Pure.

use crate::core::kind::LockKind;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Feature {
    /// Locks of this kind.
    Kind(LockKind),
    /// Another ttl for a lock that is held.
    OtherTtl,
    /// A lock of this kind that stays taken after its release.
    Keeping(LockKind),
    /// A lock that passes to a successor.
    Adoption,
}

impl Feature {
    /// Why a server that decides alone cannot do this, as a part of a sentence; `None` if it can.
    pub(crate) fn refusal_of_one_server(self) -> Option<&'static str> {
        matches!(self, Feature::Keeping(LockKind::Read | LockKind::Write)).then_some(
            "hold_at_least works with mutexes and permits only, and not with read-write locks",
        )
    }

    /// The same for backends that keep only mutexes, and only for as long as they are held.
    pub(crate) fn refusal_of_mutexes_only(self) -> Option<&'static str> {
        match self {
            Feature::Kind(LockKind::Mutex) => None,
            Feature::Kind(_) => {
                Some("read-write locks and semaphores can be kept in Redis or Valkey only")
            }
            Feature::OtherTtl => Some("extend works on one Redis server or in a cluster only"),
            Feature::Keeping(_) => {
                Some("hold_at_least works on one Redis server or in a cluster only")
            }
            Feature::Adoption => {
                Some("detach and adopt work on one Redis server or in a cluster only")
            }
        }
    }
}
