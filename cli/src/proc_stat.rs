//! `ProcStat`: what `/proc/PID/stat` says about a process.

use std::path::PathBuf;

/// The fields that this program needs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProcStat {
    pub(crate) is_dead: bool,
    pub(crate) is_stopped: bool,
    pub(crate) parent: i32,
    pub(crate) group: i32,
}

/// The same as [`read_stat`], or `None` if `/proc` shows another PID namespace.
pub(crate) fn stat_of(pid: i32) -> Option<ProcStat> {
    is_own_namespace().then(|| read_stat(pid)).flatten()
}

pub(crate) fn read_stat(pid: i32) -> Option<ProcStat> {
    parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat")).ok()?))
}

/// Whether `/proc` shows our PID namespace. A container may see the host's `/proc`, where its
/// processes have other numbers.
pub(crate) fn is_own_namespace() -> bool {
    let number = |link: PathBuf| link.to_str()?.parse().ok();
    std::fs::read_link("/proc/self").ok().and_then(number) == Some(std::process::id())
}

fn parse(stat: &str) -> Option<ProcStat> {
    // The name of the program is in parentheses, and may contain parentheses itself.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let (is_dead, is_stopped) = (matches!(state, "Z" | "X" | "x"), state == "T");
    Some(ProcStat {
        is_dead,
        is_stopped,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
    })
}

#[cfg(test)]
pub(crate) fn fuzz_parse(stat: &str) -> u64 {
    u64::from(parse(stat).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_name_with_parentheses_is_skipped() {
        let stat = parse("12 (a) Z (b) S 7 9 9 0 -1").unwrap();
        assert_eq!(stat, ProcStat { is_dead: false, is_stopped: false, parent: 7, group: 9 });
        assert!(parse("12 (sh) Z 7 9 9").unwrap().is_dead);
        assert!(parse("12 (sh) T 7 9 9").unwrap().is_stopped);
        assert_eq!(parse("12 (sh"), None);
        assert_eq!(parse(""), None);
    }
}
