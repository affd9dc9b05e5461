//! `WaitPolicy`: what the options about waiting mean together. Pure.

use std::time::Duration;

use distlock::LockError;

use crate::{
    args::{Acquire, OnHeld},
    exit::{Exit, Failure},
};

/// How long to wait for the lock, and what it means if another process keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WaitPolicy {
    /// `None` waits without limit.
    pub(super) wait: Option<Duration>,
    /// How the program ends if another process keeps the lock.
    held: Exit,
}

impl WaitPolicy {
    /// For a lock that nobody can wait for.
    pub(super) const NO_WAIT: WaitPolicy =
        WaitPolicy { wait: Some(Duration::ZERO), held: Exit::NotAcquired };

    pub(super) fn from_options(options: &Acquire) -> Result<WaitPolicy, Failure> {
        if options.no_wait && options.on_held == Some(OnHeld::Wait) {
            return Err(Failure::usage(
                "--no-wait and --on-held wait contradict each other; leave one of them out",
            ));
        }
        let skip = options.on_held == Some(OnHeld::Skip);
        if skip && options.conflict_exit_code.is_some() {
            return Err(Failure::usage(
                "--on-held skip exits with 0, which contradicts --conflict-exit-code; leave one of \
                 them out",
            ));
        }
        let waits_by_default = !options.no_wait && !skip && options.on_held != Some(OnHeld::Fail);
        let wait = options.wait.or((!waits_by_default).then_some(Duration::ZERO));
        let held = match options.conflict_exit_code {
            _ if skip => Exit::Success,
            Some(code) => Exit::Code(code),
            None => Exit::NotAcquired,
        };
        Ok(WaitPolicy { wait, held })
    }

    /// How the program ends if this error means that another process holds a lock.
    pub(super) fn exit_if_held(self, error: &LockError) -> Option<Exit> {
        error.is_contended().then_some(self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use clap::Parser as _;

    fn policy(options: &str) -> Result<WaitPolicy, Failure> {
        let words = ["distlock", "run"]
            .into_iter()
            .chain(options.split_whitespace())
            .chain(["x", "--", "true"]);
        match Args::try_parse_from(words).map(|args| args.command) {
            Ok(Command::Run(options)) => WaitPolicy::from_options(&options.acquire),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn wait_follows_from_combined_options() {
        let (none, five) = (Some(Duration::ZERO), Some(Duration::from_secs(5)));
        for (options, wait, code) in [
            ("", None, 75),
            ("--on-held wait", None, 75),
            ("--wait 5s", five, 75),
            ("--wait 5s --on-held wait", five, 75),
            ("--wait 0", none, 75),
            ("--no-wait", none, 75),
            ("--on-held fail", none, 75),
            ("--on-held skip", none, 0),
            ("--no-wait --on-held skip", none, 0),
            ("--no-wait --on-held fail", none, 75),
            ("--wait 5s --on-held skip", five, 0),
            ("--wait 5s --on-held fail", five, 75),
            ("-n", none, 75),
            ("-w 5", five, 75),
            ("-n -E 9", none, 9),
            ("-w5 -E 0", five, 0),
            ("--conflict-exit-code 255", None, 255),
        ] {
            let found = policy(options).unwrap();
            assert_eq!((found.wait, found.held.code()), (wait, code), "{options}");
        }
    }

    #[test]
    fn contradicting_options_are_refused() {
        for options in ["--no-wait --on-held wait", "-E 3 --on-held skip"] {
            assert_eq!(policy(options).unwrap_err().exit, crate::exit::Exit::Usage, "{options}");
        }
    }
}
