//! Kills a child process after the test process has ended, for whatever reason it ended.

use std::io::{self, PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A shell that waits for the end of a pipe whose write end is open in this process.
///
/// Linux can send a signal when the parent dies, which would be simpler. But it sends the signal
/// when the *thread* ends that started the child, and tests start children on short-lived threads.
pub struct Watchdog {
    line: PipeWriter,
    shell: Child,
}

impl Watchdog {
    pub fn start() -> Self {
        Self::run(r#"read -r pid && { read -r _; kill -KILL "$pid"; }"#, Path::new(""))
    }

    /// A watchdog that also removes `folder` after it has killed the process.
    pub fn removing(folder: &Path) -> Self {
        // The process may end a little later, and create a file until then.
        let script = r#"read -r pid && { read -r _; kill -KILL "$pid"; sleep 1; rm -rf -- "$1"; }"#;
        Self::run(script, folder)
    }

    fn run(script: &str, folder: &Path) -> Self {
        let (reader, line) = io::pipe().expect("cannot create a pipe");
        let shell = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(folder)
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C must end the tests but not the watchdog, which cleans up after them.
            .process_group(0)
            .spawn()
            .expect("cannot run sh");
        Self { line, shell }
    }

    /// Sets the process to kill.
    pub fn guard(&self, pid: u32) {
        writeln!(&self.line, "{pid}").expect("the watchdog has died");
    }

    /// A command that sends its own pid to the watchdog before it executes `program`, so that the
    /// program never runs unguarded. Its standard output goes to standard error.
    pub fn guarded_command(&self, program: &str) -> Command {
        let line = self.line.try_clone().expect("cannot duplicate the pipe");
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"echo "$$" && exec "$@" >&2"#, "sh", program])
            .stdin(Stdio::null())
            .stdout(line)
            .process_group(0);
        command
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // Kill the shell before it sees the end of the pipe. The guarded process may have been
        // reaped by then, and its pid may belong to another process.
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
