//! Processes and process groups: signals to them, and whether anything of them is left.

use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process_group, test_kill_process_group},
};

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
            // The dead count there until their parents have looked at them, which some never do.
            _ => living_members(self.0).unwrap_or(true),
        }
    }
}

/// `None` where the system does not tell.
fn living_members(group: Pid) -> Option<bool> {
    let processes = std::fs::read_dir("/proc").ok()?;
    let mut told = false;
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Some(stat) = stat(pid) else { continue };
        told = true;
        if stat.group == group.as_raw_nonzero().get() && !stat.is_dead {
            return Some(true);
        }
    }
    told.then_some(false)
}

/// What Linux tells about a process.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stat {
    is_dead: bool,
    pub(super) parent: i32,
    group: i32,
}

pub(super) fn stat(pid: i32) -> Option<Stat> {
    parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat")).ok()?))
}

fn parse(stat: &str) -> Option<Stat> {
    // The name of the program stands in parentheses and may itself contain some.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let is_dead = matches!(fields.next()?, "Z" | "X" | "x");
    Some(Stat { is_dead, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_programs_do_not_confuse() {
        let stat = parse("12 (a) Z (b) S 7 9 9 0 -1").unwrap();
        assert_eq!(stat, Stat { is_dead: false, parent: 7, group: 9 });
        assert!(parse("12 (sh) Z 7 9 9").unwrap().is_dead);
        assert_eq!(parse("12 (sh"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn ones_own_group_is_alive() {
        assert!(Group(rustix::process::getpgrp()).is_alive());
    }
}
