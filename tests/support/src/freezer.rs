//! A control group whose processes stand still without a signal, where this machine lets us have one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
};

use super::{CEILING, eventually};

/// It ends with the test, and thaws before that.
pub struct Freezer {
    folder: PathBuf,
    /// Where to write what, and what to read where when it is so.
    frozen: [&'static str; 4],
    thawed: [&'static str; 4],
}

impl Freezer {
    /// Fails where control groups cannot be frozen, or not by us.
    pub fn new() -> io::Result<Freezer> {
        let (mounts, own) = (fs::read_to_string("/proc/mounts")?, fs::read_to_string("/proc/self/cgroup")?);
        let mount = |is_it: &dyn Fn(&[&str]) -> bool| {
            let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
            mounts.find(|words| words.len() > 3 && is_it(words)).map(|words| words[1].to_owned())
        };
        let group = |kind: &str| own.lines().find_map(|line| line.split_once(kind)).map(|(_, group)| group.to_owned());
        let first = mount(&|words| words[2] == "cgroup" && words[3].split(',').any(|option| option == "freezer"));
        let (mount, group, frozen, thawed) = match (first, group(":freezer:")) {
            (Some(mount), Some(group)) => {
                let state = |state| ["freezer.state", state, "freezer.state", state];
                (mount, group, state("FROZEN"), state("THAWED"))
            }
            _ => {
                let none = || io::Error::other("there are no control groups");
                let mount = mount(&|words| words[2] == "cgroup2").ok_or_else(none)?;
                let group = group("0::").ok_or_else(none)?;
                let state = |number, state| ["cgroup.freeze", number, "cgroup.events", state];
                (mount, group, state("1", "frozen 1"), state("0", "frozen 0"))
            }
        };
        let folder = Path::new(&mount).join(group.trim_start_matches('/')).join(format!("distlock-{}", process::id()));
        fs::create_dir(&folder)?;
        let freezer = Freezer { folder, frozen, thawed };
        fs::metadata(freezer.folder.join(frozen[0])).map(|_| freezer)
    }

    pub fn take(&self, pid: u32) {
        fs::write(self.folder.join("cgroup.procs"), pid.to_string()).expect("cannot take it into the group");
    }

    pub fn freeze(&self) {
        self.set(self.frozen);
    }

    pub fn thaw(&self) {
        self.set(self.thawed);
    }

    fn set(&self, [file, word, told_by, told]: [&str; 4]) {
        fs::write(self.folder.join(file), word).expect("cannot say so to the group");
        eventually(word, CEILING, || {
            fs::read_to_string(self.folder.join(told_by)).is_ok_and(|text| text.lines().any(|line| line == told))
        });
    }
}

impl Drop for Freezer {
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
