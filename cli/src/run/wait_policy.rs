//! `WaitPolicy`: what the waiting options of `run` mean together. Pure.

use std::time::Duration;

use distlock::LockError;

use crate::{
    args::{OnHeld, Run},
    exit::Failure,
};

/// How long to wait for the lock, and what it means if another process keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WaitPolicy {
    /// `None` waits without limit.
    pub(super) wait: Option<Duration>,
    /// Whether a contended lock counts as success.
    skip: bool,
}

impl WaitPolicy {
    pub(super) fn from_options(options: &Run) -> Result<WaitPolicy, Failure> {
        if options.no_wait && options.on_held == Some(OnHeld::Wait) {
            return Err(Failure::usage(
                "--no-wait and --on-held wait contradict each other; leave one of them out",
            ));
        }
        if options.max_hold.is_some_and(|limit| limit.is_zero()) {
            return Err(Failure::usage(
                "--max-hold is zero, which leaves the command no time; raise it or leave it out",
            ));
        }
        let skip = options.on_held == Some(OnHeld::Skip);
        let waits_by_default = !options.no_wait && !skip && options.on_held != Some(OnHeld::Fail);
        let wait = options.wait.or((!waits_by_default).then_some(Duration::ZERO));
        Ok(WaitPolicy { wait, skip })
    }

    /// Whether this error makes the command be skipped, as the user asked.
    pub(super) fn should_skip(self, error: &LockError) -> bool {
        self.skip && error.is_contended()
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
            Ok(Command::Run(options)) => WaitPolicy::from_options(&options),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn wait_follows_from_combined_options() {
        let (none, five) = (Some(Duration::ZERO), Some(Duration::from_secs(5)));
        for (options, wait, skip) in [
            ("", None, false),
            ("--on-held wait", None, false),
            ("--wait 5s", five, false),
            ("--wait 5s --on-held wait", five, false),
            ("--wait 0", none, false),
            ("--no-wait", none, false),
            ("--on-held fail", none, false),
            ("--on-held skip", none, true),
            ("--no-wait --on-held skip", none, true),
            ("--no-wait --on-held fail", none, false),
            ("--wait 5s --on-held skip", five, true),
            ("--wait 5s --on-held fail", five, false),
        ] {
            assert_eq!(policy(options).unwrap(), WaitPolicy { wait, skip }, "{options}");
        }
    }

    #[test]
    fn contradicting_options_are_refused() {
        for options in ["--no-wait --on-held wait", "--max-hold 0"] {
            assert_eq!(policy(options).unwrap_err().exit, crate::exit::Exit::Usage, "{options}");
        }
    }
}
