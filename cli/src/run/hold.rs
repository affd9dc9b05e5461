//! `distlock lock`: holds locks until a signal arrives.

use std::{thread, time::Duration};

use crossbeam_channel::{Receiver, bounded, select};
use distlock::{CancelToken, LockOptions, MultiGuard, Released};

use super::{
    signals::{SignalListener, is_forwarded},
    system_failure, to_u8,
};
use crate::{
    args::{Lock, Servers},
    connect,
    exit::{Exit, Outcome},
    format, output,
    quarantine_option::QuarantineOption,
    ranges,
};

pub(crate) fn hold(servers: &Servers, options: &Lock) -> Outcome {
    ranges::check("--ttl", options.ttl, &ranges::TTL)?;
    let config = connect::config(servers)?;
    QuarantineOption::from_args(servers)?.check_ttl(config.each_node().len(), options.ttl)?;
    let signals = SignalListener::start().map_err(system_failure)?;
    let mgr = config.ttl(options.ttl).manager()?;
    let token = CancelToken::new();
    let ended = cancel_at_signal(&signals, &token)?;
    let mut lock_options = LockOptions::new().cancel(&token);
    if let Some(wait) = options.wait.or(options.no_wait.then_some(Duration::ZERO)) {
        lock_options = lock_options.wait(wait);
    }
    let names: Vec<&str> = options.names.iter().map(String::as_str).collect();
    let guard = match mgr.lock_all_with(&names, &lock_options) {
        Ok(guard) => guard,
        Err(error) if error.is_cancelled() => {
            return Ok(ended.recv().map_or(Exit::No, |signal| Exit::Signal(to_u8(signal))));
        }
        Err(error) if error.is_contended() => {
            output::print_message(&format::escape(&error.to_string()));
            return Ok(options.conflict_exit_code.map_or(Exit::NotAcquired, Exit::Code));
        }
        Err(error) => return Err(error.into()),
    };
    let lines = guard.names().filter_map(|name| {
        let token = guard.token(name)?;
        Some(format!("{token} {}\n", format::escape(name)))
    });
    output::print(&lines.collect::<String>())?;
    hold_until_signal(guard, &ended)
}

/// Returns a channel with the first signal that ends the program.
fn cancel_at_signal(
    signals: &SignalListener,
    token: &CancelToken,
) -> Result<Receiver<i32>, crate::exit::Failure> {
    let (sender, ended) = bounded(1);
    let (received, token) = (signals.received.clone(), token.clone());
    let watch = move || {
        if let Some(signal) = received.iter().find(|signal| is_forwarded(*signal)) {
            // The channel has room for the one signal.
            let _ = sender.try_send(signal);
            token.cancel();
        }
    };
    let thread = thread::Builder::new().name("cancel".into()).spawn(watch);
    thread.map(|_| ended).map_err(system_failure)
}

fn hold_until_signal(guard: MultiGuard, ended: &Receiver<i32>) -> Outcome {
    let lost = |why: &str| {
        output::print_message(&format!("a lock was lost: {}", format::escape(why)));
        Ok(Exit::Lost)
    };
    select! {
        recv(guard.lost()) -> why => {
            return lost(&why.map_or_else(|_| "it was released".into(), |why| why.to_string()));
        }
        recv(ended) -> _ => {}
    }
    match guard.release()? {
        Released::Released => Ok(Exit::Success),
        other => lost(&format!("{other:?}")),
    }
}
