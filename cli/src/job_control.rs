//! The shell job this process belongs to, which is its process group.

use nix::unistd::{Pid as AnyPid, getpgid, getpgrp, getppid, getsid};
use rustix::process::Pid;

use crate::proc_stat;

/// Whether a shell would notice that our process group has stopped: an ancestor in our session, but
/// outside of our group.
pub(crate) fn has_job_control_parent() -> bool {
    let (group, Ok(session)) = (getpgrp(), getsid(None)) else { return false };
    let mut ancestor = nonzero_pid(getppid());
    while let Some(one) = ancestor.map(|pid| AnyPid::from_raw(pid.as_raw_nonzero().get())) {
        if getsid(Some(one)) != Ok(session) {
            return false;
        }
        if getpgid(Some(one)) != Ok(group) {
            return true;
        }
        ancestor = proc_stat::stat_of(one.as_raw()).and_then(|stat| Pid::from_raw(stat.parent));
    }
    false
}

/// The process, unless it is outside of our container: there, parents and leaders of groups and
/// sessions have the number 0, which `rustix` does not expect of groups and sessions.
pub(crate) fn nonzero_pid(number: AnyPid) -> Option<Pid> {
    Pid::from_raw(number.as_raw())
}
