//! The job that we are a part of, as a shell sees it: our process group.

use nix::unistd::{Pid as AnyPid, getpgid, getpgrp, getppid, getsid};
use rustix::process::Pid;

use crate::stat;

/// Whether there is a shell that would notice that our group has stopped: a parent in our session, outside of our group.
pub(crate) fn somebody_could_wake_us() -> bool {
    let (group, Ok(session)) = (getpgrp(), getsid(None)) else { return false };
    let mut ancestor = pid(getppid());
    while let Some(one) = ancestor.map(|pid| AnyPid::from_raw(pid.as_raw_nonzero().get())) {
        if getsid(Some(one)) != Ok(session) {
            return false;
        }
        if getpgid(Some(one)) != Ok(group) {
            return true;
        }
        ancestor = stat::of(one.as_raw()).and_then(|stat| Pid::from_raw(stat.parent));
    }
    false
}

/// To those in a container, all outside of it have the number 0: parents, and what leads a group or a session. `rustix` does
/// not expect that of groups and sessions.
pub(crate) fn pid(number: AnyPid) -> Option<Pid> {
    Pid::from_raw(number.as_raw())
}
