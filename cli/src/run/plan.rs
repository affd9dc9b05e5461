//! `Plan`: what the options mean together. Pure.

use std::time::Duration;

use distlock::LockError;

use crate::{
    args::{OnHeld, Run},
    exit::Failure,
};

/// How long to wait for the lock, and what to say when it does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// `None`: as long as it takes.
    pub(super) wait: Option<Duration>,
    /// A lock that somebody else holds is no failure.
    skip: bool,
}

impl Plan {
    pub(super) fn of(options: &Run) -> Result<Plan, Failure> {
        if options.no_wait && options.on_held == Some(OnHeld::Wait) {
            return Err(Failure::usage("--no-wait and --on-held wait contradict each other; leave one of them out"));
        }
        if options.max_hold.is_some_and(|limit| limit.is_zero()) {
            return Err(Failure::usage(
                "--max-hold is zero, which leaves the command no time; leave it out or raise it",
            ));
        }
        let skip = options.on_held == Some(OnHeld::Skip);
        let patient = !options.no_wait && !skip && options.on_held != Some(OnHeld::Fail);
        let wait = options.wait.or((!patient).then_some(Duration::ZERO));
        Ok(Plan { wait, skip })
    }

    /// Whether this error is what was asked for.
    pub(super) fn skips(self, error: &LockError) -> bool {
        self.skip && error.is_contended()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use clap::Parser as _;

    fn plan(options: &str) -> Result<Plan, Failure> {
        let words = ["distlock", "run"].into_iter().chain(options.split_whitespace()).chain(["x", "--", "true"]);
        match Args::try_parse_from(words).map(|args| args.command) {
            Ok(Command::Run(options)) => Plan::of(&options),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn waiting_follows_from_all_options_together() {
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
            assert_eq!(plan(options).unwrap(), Plan { wait, skip }, "{options}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        for options in ["--no-wait --on-held wait", "--max-hold 0"] {
            assert_eq!(plan(options).unwrap_err().exit, crate::exit::Exit::Usage, "{options}");
        }
    }
}
