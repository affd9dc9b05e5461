//! Cleans up behind a process, however that process ends.

use std::{
    io::{self, PipeWriter, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// A shell at the other end of a pipe. When the pipe ends, because we have finished, failed, or been killed with
/// Ctrl-C or worse, it kills what is still guarded and removes the folder.
pub(crate) struct Watchdog {
    /// Empty only while it is being dropped.
    line: Option<PipeWriter>,
    shell: Child,
    folder: PathBuf,
}

const SCRIPT: &str = r#"
pids=' '
while read -r what pid; do
    case $what in
        guard) pids="$pids$pid " ;;
        forget) case $pids in *" $pid "*) pids="${pids%% "$pid" *} ${pids#* "$pid" }" ;; esac ;;
    esac
done
kill -KILL $pids
exec rm -rf -- "$1"
"#;

impl Watchdog {
    pub(crate) fn start() -> io::Result<Watchdog> {
        let folder = tempfile::Builder::new().prefix("distlock-example-").tempdir()?;
        let (reader, line) = io::pipe()?;
        let shell = Command::new("sh")
            .args(["-c", SCRIPT, "sh"])
            .arg(folder.path())
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C goes to the whole group of the terminal: not to the one who cleans up.
            .process_group(0)
            .spawn()?;
        Ok(Watchdog { line: Some(line), shell, folder: folder.keep() })
    }

    /// A folder that is there for as long as the watchdog is.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Has this process killed when we are gone.
    pub(crate) fn guard(&self, pid: u32) -> io::Result<()> {
        self.line().and_then(|mut line| writeln!(line, "guard {pid}"))
    }

    /// Leaves this process alone from now on. To be called before it is waited for: later, its number may be another's.
    pub(crate) fn forget(&self, pid: u32) -> io::Result<()> {
        self.line().and_then(|mut line| writeln!(line, "forget {pid}"))
    }

    /// A command whose process names itself to the watchdog before it becomes `program`, so that it never runs
    /// unguarded. Nothing of what it prints is seen.
    pub(crate) fn guarded_command(&self, program: &str) -> io::Result<Command> {
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"echo "guard $$" && exec "$@" >/dev/null 2>&1"#, "sh", program])
            .stdin(Stdio::null())
            .stdout(self.line()?.try_clone()?)
            .process_group(0);
        Ok(command)
    }

    fn line(&self) -> io::Result<&PipeWriter> {
        self.line.as_ref().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.line = None;
        let _ = self.shell.wait();
    }
}
