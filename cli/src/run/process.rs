//! Processes and process groups: signals to them, and whether anything of them is left.

use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process_group, test_kill_process_group},
};

use crate::stat::{self, Stat};

/// The process group of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group(pub(super) Pid);

impl Group {
    /// To all in the group. There may be nobody left, or somebody who may not be sent signals; neither can be helped.
    pub(super) fn send(self, signals: &[Signal]) {
        for signal in signals {
            if let Err(error) = kill_process_group(self.0, *signal) {
                log::debug!("cannot send {signal:?} to the group {}: {error}", self.0.as_raw_nonzero());
            }
        }
    }

    /// Whether anything in it still runs.
    pub(super) fn is_alive(self) -> bool {
        match test_kill_process_group(self.0) {
            Err(Errno::SRCH) => false,
            _ => is_anybody_left(self.members().as_deref(), tells_of_others),
        }
    }

    /// Whether something in it has been stopped, but not its leader, as far as the system tells.
    pub(super) fn is_half_stopped(self) -> bool {
        let members = self.members().unwrap_or_default();
        let leads = |pid: i32| pid == self.0.as_raw_nonzero().get();
        members.iter().any(|(_, member)| member.is_stopped)
            && members.iter().any(|(pid, member)| leads(*pid) && !member.is_stopped && !member.is_dead)
    }

    /// By their numbers, as far as we may see them; `None` where the system does not tell.
    fn members(self) -> Option<Vec<(i32, Stat)>> {
        stat::tells_of_us().then_some(())?;
        let processes = std::fs::read_dir("/proc").ok()?;
        let pids = processes.flatten().filter_map(|process| process.file_name().to_str()?.parse().ok());
        let all: Vec<_> = pids.filter_map(|pid| Some((pid, stat::read(pid)?))).collect();
        let ours = |(_, stat): &(i32, Stat)| stat.group == self.0.as_raw_nonzero().get();
        (!all.is_empty()).then(|| all.into_iter().filter(ours).collect())
    }
}

/// Of a group in which there is somebody, dead or alive. The dead count there until their parents have looked at them, which
/// some never do.
fn is_anybody_left(members: Option<&[(i32, Stat)]>, tells_of_others: impl FnOnce() -> bool) -> bool {
    match members {
        // They are hidden, or have just gone.
        None | Some([]) => true,
        Some(members) => members.iter().any(|(_, member)| !member.is_dead) || !tells_of_others(),
    }
}

/// Whether those of other users can be seen. `sudo` makes some in our group.
fn tells_of_others() -> bool {
    std::fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| !hides(&mounts))
}

/// Whether one of these mounts shows everybody his own processes only.
fn hides(mounts: &str) -> bool {
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

    #[test]
    fn who_may_be_hidden_may_be_left() {
        let member = |is_dead| (7, Stat { is_dead, is_stopped: false, parent: 1, group: 7 });
        let is_left = |members: Option<&[_]>, all| is_anybody_left(members, || all);
        for all in [true, false] {
            assert!(is_left(None, all) && is_left(Some(&[]), all), "somebody is there");
            assert!(is_left(Some(&[member(true), member(false)]), all));
        }
        let dead = [member(true), member(true)];
        assert!(!is_left(Some(&dead), true) && is_left(Some(&dead), false));
    }

    #[test]
    fn a_proc_that_hides_processes_is_known() {
        let proc = "sysfs /sys sysfs rw 0 0\nproc /proc proc rw,relatime";
        for hidden in ["invisible", "noaccess", "ptraceable", "1", "2", "4"] {
            assert!(hides(&format!("{proc},hidepid={hidden} 0 0\n")), "{hidden}");
            assert!(hides(&format!("{proc},hidepid={hidden},gid=7 0 0\nproc /proc/fs proc ro 0 0\n")), "{hidden}");
        }
        for told in [proc, &format!("{proc},hidepid=off 0 0"), &format!("{proc},hidepid=0 0 0"), "", "x", "x /proc"] {
            assert!(!hides(told), "{told}");
        }
        assert!(!hides("proc /jail/proc proc rw,hidepid=2 0 0"));
    }

    #[test]
    fn a_group_is_alive_until_its_last_process_has_ended() {
        let mut child = Command::new("sleep").arg("600").process_group(0).spawn().unwrap();
        let group = Group(Pid::from_child(&child));
        assert!(group.is_alive());
        group.send(&[Signal::KILL]);
        child.wait().unwrap();
        assert!(!group.is_alive());
    }
}
