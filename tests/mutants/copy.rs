//! A copy of the code, in which a patch is applied, built and tested. The working tree is only
//! read.

use std::{
    env, fs, io,
    os::unix::process::CommandExt as _,
    path::{self, Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    change::{Change, Test},
    outcome::{self, Outcome},
};

pub(crate) struct Copy {
    tree: PathBuf,
    target: PathBuf,
}

impl Copy {
    /// Copies the code without its build output.
    pub(crate) fn make(home: &Path) -> Result<Copy, String> {
        let built =
            env::var_os("CARGO_TARGET_DIR").map_or_else(|| home.join("target"), PathBuf::from);
        // A relative path would mean another folder inside the copy.
        let target = path::absolute(built)
            .map_err(|error| format!("CARGO_TARGET_DIR: {error}"))?
            .join("mutants");
        let tree = target.join("tree");
        let made = || -> io::Result<()> {
            if tree.exists() {
                fs::remove_dir_all(&tree)?;
            }
            copy_folder(home, &tree)
        };
        made().map_err(|error| format!("cannot copy the code to {}: {error}", tree.display()))?;
        Ok(Copy { tree, target })
    }

    /// Runs `act` while a patch is applied, and reverts the patch afterwards.
    pub(crate) fn with<T>(
        &self,
        change: &Change,
        act: impl FnOnce(&Copy) -> Result<T, String>,
    ) -> Result<T, String> {
        let files = change.applied(&self.tree)?;
        let write = |file: &str, text: &str| {
            fs::write(self.tree.join(file), text)
                .map_err(|error| format!("{file} in the copy: {error}"))
        };
        files.iter().try_for_each(|file| write(&file.file, &file.after))?;
        let done = act(self);
        files.iter().try_for_each(|file| write(&file.file, &file.before))?;
        done
    }

    /// Builds one target and runs tests of it together. Returns those that were not seen to be
    /// green: all of them, unless the summary accounts for each.
    pub(crate) fn doubtful<'a>(
        &self,
        tests: &[&'a Test],
        longest_each: Duration,
    ) -> Result<Vec<&'a Test>, String> {
        let paths: Vec<&str> = tests.iter().map(|test| test.path.as_str()).collect();
        let longest = longest_each.saturating_mul(u32::try_from(tests.len()).unwrap_or(u32::MAX));
        let output = match self.run(tests[0], &paths, longest)? {
            Some((Some(_), output)) => output,
            _ => return Ok(tests.to_vec()),
        };
        let failed: Vec<&Test> = tests
            .iter()
            .filter(|test| outcome::names_failure(&output, &test.path))
            .copied()
            .collect();
        let passed = format!(" {} passed; {} failed;", tests.len() - failed.len(), failed.len());
        Ok(if output.contains(&passed) { failed } else { tests.to_vec() })
    }

    /// Builds and runs one test alone. If `fails_with` is given, the failing test must print it.
    pub(crate) fn test(
        &self,
        test: &Test,
        fails_with: Option<&str>,
        longest: Duration,
    ) -> Result<Outcome, String> {
        let run = self.run(test, &[&test.path], longest)?;
        Ok(run.map_or(Outcome::Broken, |(ended, output)| {
            Outcome::of(ended, &output, &test.path, fails_with)
        }))
    }

    /// Returns whether the tests succeeded, None if they had to be killed, and what they printed.
    /// Returns nothing if the target cannot be built.
    fn run(
        &self,
        target_of: &Test,
        paths: &[&str],
        longest: Duration,
    ) -> Result<Option<(Option<bool>, String)>, String> {
        let failed = |error: io::Error| format!("cargo: {error}");
        let built = self.cargo(target_of).arg("--no-run").output().map_err(failed)?;
        if !built.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&built.stderr));
            return Ok(None);
        }
        let log = self.target.join("test.log");
        let mut run = self.cargo(target_of);
        run.args(["--", "--exact"])
            .args(paths)
            .stdout(fs::File::create(&log).map_err(failed)?)
            .stderr(Stdio::null());
        // In a process group of its own, so that everything that a hanging test started can be
        // killed.
        let ended = wait(run.process_group(0).spawn().map_err(failed)?, longest);
        Ok(Some((ended, fs::read_to_string(&log).unwrap_or_default())))
    }

    fn cargo(&self, test: &Test) -> Command {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.tree).args(["test", "--quiet", "--all-features"]);
        match test.target.as_str() {
            "lib" => cargo.args(["-p", "distlock", "--lib"]),
            "cli-bin" => cargo.args(["-p", "distlock-cli", "--bin", "distlock"]),
            "cli" => cargo.args(["-p", "distlock-cli", "--test", "cli"]),
            target => cargo.args(["-p", "distlock", "--test", target]),
        };
        cargo
            .env("CARGO_TARGET_DIR", self.target.join("built"))
            // Debug information makes linking slower, and nobody debugs these. A patch may leave
            // unused code.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("RUSTFLAGS", "-Awarnings")
            .stdin(Stdio::null());
        cargo
    }
}

/// Returns whether the process succeeded; None if it had to be killed.
#[expect(clippy::disallowed_methods, reason = "only limits a test that hangs")]
fn wait(mut child: Child, longest: Duration) -> Option<bool> {
    let deadline = Instant::now() + longest;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status.success()),
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(20)),
            _ => break,
        }
    }
    let group = rustix::process::Pid::from_child(&child);
    // Fails if the process has just ended.
    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    let _ = child.wait();
    None
}

/// Copies a folder without the git history and without build folders. Those are recognised by their
/// tag, because the copy itself may be in one that is not called `target`.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (name, kind) = (entry.file_name(), entry.file_type()?);
        if name == ".git" || name == "target" || entry.path().join("CACHEDIR.TAG").exists() {
            continue;
        }
        if kind.is_dir() {
            copy_folder(&entry.path(), &to.join(&name))?;
        } else if kind.is_file() {
            fs::copy(entry.path(), to.join(&name))?;
        }
    }
    Ok(())
}
