//! The time that `distlock run` adds to a command.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use crate::{
    Result, Scale,
    measure::{Times, now},
    report::{Figure, micros},
    support::RedisServer,
};

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let Some(program) = program()? else { return Ok(Vec::new()) };
    let server = RedisServer::start();
    let url = server.url();
    let bare = || time(&mut Command::new("true"));
    let ours = || {
        time(Command::new(&program).args(["run", "bench", "--", "true"]).env("DISTLOCK_URL", &url))
    };
    let (mut alone, mut locked, mut more) = (Times::new(), Times::new(), Times::new());
    bare()?;
    ours()?;
    for pair in 0..scale.pick(300, 2) {
        // The order alternates.
        let (bare, ours) = if pair % 2 == 0 {
            (bare()?, ours()?)
        } else {
            let ours = ours()?;
            (bare()?, ours)
        };
        alone.add(bare);
        locked.add(ours);
        more.add(ours.saturating_sub(bare));
    }
    Ok(vec![
        Figure::new("distlock run -- true: added to true alone, p50", micros(more.p50()))
            .at_most(10_000.0),
        Figure::new("  the same, p99", micros(more.p99())),
        Figure::new("  total, p50", micros(locked.p50())).compare(micros(alone.p50()), "true"),
    ])
}

/// The path of the command, if the package `distlock-cli` has been built with this profile.
fn program() -> Result<Option<PathBuf>> {
    let this = env::current_exe()?;
    let folder =
        this.parent().and_then(Path::parent).ok_or("a benchmark is in target/<profile>/deps")?;
    let program = folder.join("distlock");
    Ok(program.is_file().then_some(program))
}

fn time(command: &mut Command) -> Result<Duration> {
    let started = now();
    let status = command.stdin(Stdio::null()).status()?;
    let took = now() - started;
    if status.success() { Ok(took) } else { Err(format!("{command:?} ended with {status}").into()) }
}
