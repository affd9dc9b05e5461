//! Kills a child process when this process is gone, however it ended.

use std::io::{self, PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// A shell that waits for the end of a pipe whose other end lives in this process.
///
/// The parent-death signal of Linux would be simpler, but it fires at the end of the *thread*
/// that started the child, and tests start their children on short-lived threads.
pub struct Watchdog {
    line: PipeWriter,
    shell: Child,
}

impl Watchdog {
    pub fn start() -> Self {
        let (reader, line) = io::pipe().expect("no pipe for the watchdog");
        let shell = Command::new("sh")
            .args(["-c", r#"read -r pid && { read -r _; kill -KILL "$pid"; }"#])
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A Ctrl-C must end the tests and not the one who cleans up behind them.
            .process_group(0)
            .spawn()
            .expect("cannot run sh");
        Self { line, shell }
    }

    /// Names the process to kill.
    pub fn guard(&self, pid: u32) {
        writeln!(&self.line, "{pid}").expect("the watchdog has died");
    }

    /// A command whose process names itself before it becomes `program`, so that there is not
    /// even an instant at which it runs unguarded. Its output goes to standard error.
    pub fn guarded_command(&self, program: &str) -> Command {
        let line = self.line.try_clone().expect("cannot share the pipe");
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
        // It is killed before it can see the end of the pipe: by then the guarded process may
        // have been reaped and its pid have a new owner.
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
