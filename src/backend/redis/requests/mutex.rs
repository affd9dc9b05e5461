//! A mutex: one holder at a time. Its scripts and their keys. Pure.

use crate::{
    backend::redis::{
        fields::write_bulk,
        script::{Script, script},
    },
    core::key::LockKey,
};

pub(crate) static ACQUIRE: Script = script!(
    1,
    "mutex/acquire.lua",
    "prelude.lua",
    "token.lua",
    "notify.lua",
    "mutex/grant.lua",
    "mutex/acquire_contended.lua",
    "report.lua"
);
pub(crate) static RELEASE: Script = script!(
    2,
    "mutex/release.lua",
    "mutex/hand_over.lua",
    "prelude.lua",
    "free.lua",
    "token.lua",
    "notify.lua",
    "mutex/grant.lua",
    "mutex/release_contended.lua",
    "report.lua"
);

/// How much longer than its lock a token key is kept. If a lock expires, nothing raises the fence
/// to its token. notify.lua has the same value for grants.
const TOKEN_EXTRA_MS: u64 = 3_600_000;

pub(super) fn write_lock_keys(out: &mut Vec<u8>, key: &LockKey) {
    write_bulk(out, &[key.lock_key().as_bytes()]);
    write_bulk(out, &key.queue_key().map(str::as_bytes));
    write_bulk(out, &key.token_key().map(str::as_bytes));
}

/// TTL of a token key whose lock has this TTL.
pub(super) fn token_ttl_ms(ttl_ms: u64) -> u64 {
    ttl_ms.saturating_add(TOKEN_EXTRA_MS)
}
