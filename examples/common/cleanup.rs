//! Cleans up when a process ends, even if it is killed.

use std::{
    io::{self, PipeWriter, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// A shell that reads from a pipe. The pipe is closed when this process finishes, fails, or is
/// killed by Ctrl-C or SIGKILL. The shell then kills all registered processes and removes the
/// folder.
pub(crate) struct Cleanup {
    /// `None` only while this value is being dropped.
    pipe: Option<PipeWriter>,
    shell: Child,
    folder: PathBuf,
}

const SCRIPT: &str = r#"
pids=' '
while read -r action pid; do
    case $action in
        add) pids="$pids$pid " ;;
        remove) case $pids in *" $pid "*) pids="${pids%% "$pid" *} ${pids#* "$pid" }" ;; esac ;;
    esac
done
kill -KILL $pids
exec rm -rf -- "$1"
"#;

impl Cleanup {
    pub(crate) fn start() -> io::Result<Cleanup> {
        let folder = tempfile::Builder::new().prefix("distlock-example-").tempdir()?;
        let (reader, pipe) = io::pipe()?;
        let shell = Command::new("sh")
            .args(["-c", SCRIPT, "sh"])
            .arg(folder.path())
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C signals the whole process group of the terminal. The shell must survive it.
            .process_group(0)
            .spawn()?;
        Ok(Cleanup { pipe: Some(pipe), shell, folder: folder.keep() })
    }

    /// A temporary folder, which is removed at the end.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Kills this process at the end.
    pub(crate) fn register(&self, pid: u32) -> io::Result<()> {
        self.pipe().and_then(|mut pipe| writeln!(pipe, "add {pid}"))
    }

    /// Does not kill this process any more. Call this before waiting for the process: once it has
    /// been waited for, another process can have its pid.
    pub(crate) fn unregister(&self, pid: u32) -> io::Result<()> {
        self.pipe().and_then(|mut pipe| writeln!(pipe, "remove {pid}"))
    }

    /// A command that registers its own process before it executes `program`, so that the process
    /// never runs unregistered. Its output is discarded.
    pub(crate) fn registered_command(&self, program: &str) -> io::Result<Command> {
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"echo "add $$" && exec "$@" >/dev/null 2>&1"#, "sh", program])
            .stdin(Stdio::null())
            .stdout(self.pipe()?.try_clone()?)
            .process_group(0);
        Ok(command)
    }

    fn pipe(&self) -> io::Result<&PipeWriter> {
        self.pipe.as_ref().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        self.pipe = None;
        let _ = self.shell.wait();
    }
}
