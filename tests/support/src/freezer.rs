//! A control group whose processes can be frozen without a signal, if this machine allows it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
};

use super::{TEST_TIMEOUT, eventually};

/// A control group that can be frozen. Dropping it thaws the processes and removes the group.
pub struct CgroupFreezer {
    folder: PathBuf,
    /// How to freeze the group: the file and the text to write to it, then the file and the line in
    /// it that confirms the change.
    frozen: [&'static str; 4],
    /// The same to thaw the group.
    thawed: [&'static str; 4],
}

impl CgroupFreezer {
    /// Fails if control groups cannot be frozen on this machine, or this user may not do so.
    pub fn new() -> io::Result<CgroupFreezer> {
        let (mounts, own) =
            (fs::read_to_string("/proc/mounts")?, fs::read_to_string("/proc/self/cgroup")?);
        let mount = |is_it: &dyn Fn(&[&str]) -> bool| {
            let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
            mounts.find(|words| words.len() > 3 && is_it(words)).map(|words| words[1].to_owned())
        };
        let group = |kind: &str| {
            own.lines().find_map(|line| line.split_once(kind)).map(|(_, group)| group.to_owned())
        };
        let first = mount(&|words| {
            words[2] == "cgroup" && words[3].split(',').any(|option| option == "freezer")
        });
        let (mount, group, frozen, thawed) = match (first, group(":freezer:")) {
            (Some(mount), Some(group)) => {
                let state = |state| ["freezer.state", state, "freezer.state", state];
                (mount, group, state("FROZEN"), state("THAWED"))
            }
            _ => {
                let none = || io::Error::other("no control groups found");
                let mount = mount(&|words| words[2] == "cgroup2").ok_or_else(none)?;
                let group = group("0::").ok_or_else(none)?;
                let state = |number, state| ["cgroup.freeze", number, "cgroup.events", state];
                (mount, group, state("1", "frozen 1"), state("0", "frozen 0"))
            }
        };
        let folder = Path::new(&mount)
            .join(group.trim_start_matches('/'))
            .join(format!("distlock-{}", process::id()));
        fs::create_dir(&folder)?;
        let freezer = CgroupFreezer { folder, frozen, thawed };
        fs::metadata(freezer.folder.join(frozen[0])).map(|_| freezer)
    }

    pub fn take(&self, pid: u32) {
        fs::write(self.folder.join("cgroup.procs"), pid.to_string())
            .expect("cannot move the process to the control group");
    }

    pub fn freeze(&self) {
        self.set(self.frozen);
    }

    pub fn thaw(&self) {
        self.set(self.thawed);
    }

    fn set(&self, [file, word, state_file, state]: [&str; 4]) {
        fs::write(self.folder.join(file), word).expect("cannot write to the control group");
        eventually(word, TEST_TIMEOUT, || {
            fs::read_to_string(self.folder.join(state_file))
                .is_ok_and(|text| text.lines().any(|line| line == state))
        });
    }
}

impl Drop for CgroupFreezer {
    fn drop(&mut self) {
        let [file, word, ..] = self.thawed;
        let _ = fs::write(self.folder.join(file), word);
        let members = fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
        for pid in members.lines() {
            let _ = fs::write(self.folder.join("../cgroup.procs"), pid);
        }
        let _ = fs::remove_dir(&self.folder);
    }
}
