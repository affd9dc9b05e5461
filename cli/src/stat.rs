//! `Stat`: what the system tells about a process, ours or not.

use std::path::PathBuf;

/// What Linux tells about a process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) is_dead: bool,
    pub(crate) is_stopped: bool,
    pub(crate) parent: i32,
    pub(crate) group: i32,
}

pub(crate) fn of(pid: i32) -> Option<Stat> {
    tells_of_us().then(|| read(pid)).flatten()
}

pub(crate) fn read(pid: i32) -> Option<Stat> {
    parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat")).ok()?))
}

/// In a container that sees the `/proc` of those outside, the same processes have other numbers there.
pub(crate) fn tells_of_us() -> bool {
    let number = |link: PathBuf| link.to_str()?.parse().ok();
    std::fs::read_link("/proc/self").ok().and_then(number) == Some(std::process::id())
}

fn parse(stat: &str) -> Option<Stat> {
    // The name of the program stands in parentheses and may itself contain some.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let (is_dead, is_stopped) = (matches!(state, "Z" | "X" | "x"), state == "T");
    Some(Stat { is_dead, is_stopped, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? })
}

#[cfg(test)]
pub(crate) fn is_stat(told: &str) -> u64 {
    u64::from(parse(told).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_programs_do_not_confuse() {
        let stat = parse("12 (a) Z (b) S 7 9 9 0 -1").unwrap();
        assert_eq!(stat, Stat { is_dead: false, is_stopped: false, parent: 7, group: 9 });
        assert!(parse("12 (sh) Z 7 9 9").unwrap().is_dead);
        assert!(parse("12 (sh) T 7 9 9").unwrap().is_stopped);
        assert_eq!(parse("12 (sh"), None);
        assert_eq!(parse(""), None);
    }
}
