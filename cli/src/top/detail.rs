//! `LockDetail`: the details of one lock.

use distlock::LockInfo;

use crate::{show, top::rows::Row};

#[derive(Clone, Debug)]
pub(crate) struct LockDetail {
    /// The ids of all holders, as the server sent them, because a release must name them exactly.
    pub(crate) ids: Vec<String>,
    /// A short name of the holder; escaped for a terminal, as is `page`.
    pub(crate) holder: String,
    /// What `distlock show` prints.
    pub(crate) page: String,
}

impl LockDetail {
    pub(crate) fn of(lock: &LockInfo) -> LockDetail {
        let row = Row::of(lock);
        LockDetail { ids: row.ids(), holder: row.holder_name(), page: show::format_lock(lock) }
    }
}
