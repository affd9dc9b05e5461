//! `LockDetail`: the details of one lock.

use distlock::LockInfo;

use crate::{
    holders, show,
    top::rows::{group_name, holder_name},
};

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
        let holder = lock.holder();
        let name = holder_name(holder.host(), holder.pid(), holder.id());
        LockDetail {
            ids: match lock.members() {
                [] => vec![holder.id().to_owned()],
                members => members.iter().map(|member| member.id().to_owned()).collect(),
            },
            holder: match lock.members().len() {
                0 => name,
                members => group_name(&holders::short_kind(holder.held_by()), &name, members),
            },
            page: show::format_lock(lock),
        }
    }
}
