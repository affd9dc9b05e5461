//! `ProcessGroup`: sends signals to a process group, and finds out whether anything of it is left.

use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process_group, test_kill_process_group},
};

use crate::proc_stat::{self, ProcStat};

/// The process group of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::run) struct ProcessGroup(pub(in crate::run) Pid);

impl ProcessGroup {
    /// Sends the signals to all members. Errors are only logged: there may be no member left, or
    /// one that this process may not send signals to.
    pub(in crate::run) fn send(self, signals: &[Signal]) {
        for signal in signals {
            if let Err(error) = kill_process_group(self.0, *signal) {
                log::debug!(
                    "cannot send {signal:?} to the group {}: {error}",
                    self.0.as_raw_nonzero()
                );
            }
        }
    }

    /// Whether all members belong to other users, so that the system permits no signal to them.
    pub(in crate::run) fn is_out_of_reach(self) -> bool {
        matches!(test_kill_process_group(self.0), Err(Errno::PERM))
    }

    /// Whether any member still runs.
    pub(in crate::run) fn is_alive(self) -> bool {
        match test_kill_process_group(self.0) {
            Err(Errno::SRCH) => false,
            _ => has_live_member(self.members().as_deref(), can_see_other_users),
        }
    }

    /// The pids of members that run, as far as `/proc` shows them.
    pub(in crate::run) fn live_members(self) -> Vec<i32> {
        let members = self.members().unwrap_or_default().into_iter();
        members.filter(|(_, member)| !member.is_dead).map(|(pid, _)| pid).collect()
    }

    /// Whether some member is stopped, but the leader is not, as far as `/proc` shows.
    pub(in crate::run) fn is_partly_stopped(self) -> bool {
        let members = self.members().unwrap_or_default();
        let leads = |pid: i32| pid == self.0.as_raw_nonzero().get();
        members.iter().any(|(_, member)| member.is_stopped)
            && members
                .iter()
                .any(|(pid, member)| leads(*pid) && !member.is_stopped && !member.is_dead)
    }

    /// The members with their pids, as far as this process may see them. `None` if there is no
    /// usable `/proc`.
    fn members(self) -> Option<Vec<(i32, ProcStat)>> {
        proc_stat::is_own_namespace().then_some(())?;
        let processes = std::fs::read_dir("/proc").ok()?;
        let pids =
            processes.flatten().filter_map(|process| process.file_name().to_str()?.parse().ok());
        let all: Vec<_> = pids.filter_map(|pid| Some((pid, proc_stat::read_stat(pid)?))).collect();
        let ours = |(_, stat): &(i32, ProcStat)| stat.group == self.0.as_raw_nonzero().get();
        (!all.is_empty()).then(|| all.into_iter().filter(ours).collect())
    }
}

/// Whether a group that still exists has a live member. Dead members keep a group in existence
/// until their parents reap them, which some never do.
fn has_live_member(members: Option<&[(i32, ProcStat)]>, sees_all: impl FnOnce() -> bool) -> bool {
    match members {
        // The members are hidden, or have just ended.
        None | Some([]) => true,
        Some(members) => members.iter().any(|(_, member)| !member.is_dead) || !sees_all(),
    }
}

/// Whether `/proc` shows processes of other users too. `sudo`, for example, puts such processes
/// into our group.
fn can_see_other_users() -> bool {
    std::fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| !hides_processes(&mounts))
}

/// Whether one of these mounts shows each user only their own processes.
fn hides_processes(mounts: &str) -> bool {
    mounts.lines().any(|mount| {
        let mut fields = mount.split(' ').skip(1);
        let (place, options) = (fields.next(), fields.nth(1).unwrap_or_default());
        let hidden = options.split(',').find_map(|option| option.strip_prefix("hidepid="));
        place == Some("/proc") && hidden.is_some_and(|hidden| !["0", "off"].contains(&hidden))
    })
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::CommandExt as _, process::Command};

    use super::*;

    /// Fault: N94
    #[test]
    fn hidden_member_counts_as_alive() {
        let member = |is_dead| (7, ProcStat { is_dead, is_stopped: false, parent: 1, group: 7 });
        let has_live = |members: Option<&[_]>, all| has_live_member(members, || all);
        for all in [true, false] {
            assert!(has_live(None, all) && has_live(Some(&[]), all), "the group exists");
            assert!(has_live(Some(&[member(true), member(false)]), all));
        }
        let dead = [member(true), member(true)];
        assert!(!has_live(Some(&dead), true) && has_live(Some(&dead), false));
    }

    #[test]
    fn hidepid_mount_is_detected() {
        let proc = "sysfs /sys sysfs rw 0 0\nproc /proc proc rw,relatime";
        for hidden in ["invisible", "noaccess", "ptraceable", "1", "2", "4"] {
            assert!(hides_processes(&format!("{proc},hidepid={hidden} 0 0\n")), "{hidden}");
            assert!(
                hides_processes(&format!(
                    "{proc},hidepid={hidden},gid=7 0 0\nproc /proc/fs proc ro 0 0\n"
                )),
                "{hidden}"
            );
        }
        for mounts in [
            proc,
            &format!("{proc},hidepid=off 0 0"),
            &format!("{proc},hidepid=0 0 0"),
            "",
            "x",
            "x /proc",
        ] {
            assert!(!hides_processes(mounts), "{mounts}");
        }
        assert!(!hides_processes("proc /jail/proc proc rw,hidepid=2 0 0"));
    }

    #[test]
    fn group_is_alive_until_last_member_ends() {
        let mut child = Command::new("sleep").arg("600").process_group(0).spawn().unwrap();
        let group = ProcessGroup(Pid::from_child(&child));
        assert!(group.is_alive());
        group.send(&[Signal::KILL]);
        child.wait().unwrap();
        assert!(!group.is_alive());
    }
}
