//! Groups: read locks and permits, which several clients hold together, and write locks, which one
//! client holds alone. A write lock is on the server what a mutex is; but its scripts know groups,
//! and grant the lock to them. The scripts, and their keys. Pure.

use super::mutex::write_lock_keys;
use crate::{
    backend::redis::{
        fields::write_bulk,
        script::{Script, script},
    },
    core::key::LockKey,
};

pub(crate) static ACQUIRE: Script = script!(
    32,
    "prelude.lua",
    "token.lua",
    "group/acquire_alone.lua",
    "notify.lua",
    "group/members.lua",
    "group/grant.lua",
    "group/acquire.lua",
    "report.lua"
);
pub(crate) static RELEASE: Script = script!(
    64,
    "prelude.lua",
    "free.lua",
    "group/release_alone.lua",
    "token.lua",
    "notify.lua",
    "group/members.lua",
    "group/grant.lua",
    "group/release.lua",
    "report.lua"
);

pub(super) fn write_keys(out: &mut Vec<u8>, key: &LockKey) {
    write_lock_keys(out, key);
    write_bulk(out, &key.fence_key().map(str::as_bytes));
    write_bulk(out, &key.members_key().map(str::as_bytes));
}

#[cfg(test)]
mod tests;
