//! Everything that can happen, in one place: keys, answers, signals, and that time goes by.

use std::{io, thread, time::Duration};

use crossbeam_channel::{Receiver, bounded, select};
use ratatui::crossterm::event;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP},
    iterator::Signals,
};

use crate::top::feed::{Feed, Look, Told};

/// The header tells for how many seconds something is so.
const TICK: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(crate) enum Event {
    Input(event::Event),
    /// Nobody will type anything any more.
    Unplugged(io::Error),
    Look(Look),
    Told(Told),
    Signal(i32),
    Tick,
}

#[derive(Debug)]
pub(crate) struct Events {
    feed: Feed,
    input: Receiver<io::Result<event::Event>>,
    signals: Receiver<i32>,
}

impl Events {
    pub(crate) fn start(feed: Feed) -> io::Result<Events> {
        let (send, signals) = bounded(8);
        let mut caught = Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT, SIGTSTP])?;
        thread::Builder::new().name("distlock-signals".into()).spawn(move || {
            // More signals than are waited for say nothing new.
            for signal in &mut caught {
                let _ = send.try_send(signal);
            }
        })?;
        let (send, input) = bounded(64);
        thread::Builder::new().name("distlock-keys".into()).spawn(move || {
            loop {
                let read = event::read();
                let ended = read.is_err();
                if send.send(read).is_err() || ended {
                    return;
                }
            }
        })?;
        Ok(Events { feed, input, signals })
    }

    pub(crate) fn feed(&self) -> &Feed {
        &self.feed
    }

    /// What happens next.
    pub(crate) fn next(&self) -> Event {
        let gone = || Event::Unplugged(io::ErrorKind::BrokenPipe.into());
        // Of several that are ready, `select` takes any; but nobody shall wait for a table before he can leave.
        if let Ok(signal) = self.signals.try_recv() {
            return Event::Signal(signal);
        }
        select! {
            recv(self.signals) -> signal => signal.map_or_else(|_| gone(), Event::Signal),
            recv(self.input) -> input => match input {
                Ok(Ok(input)) => Event::Input(input),
                Ok(Err(error)) => Event::Unplugged(error),
                Err(_) => gone(),
            },
            recv(self.feed.told) -> told => told.map_or_else(|_| gone(), Event::Told),
            recv(self.feed.looks) -> look => look.map_or_else(|_| gone(), Event::Look),
            default(TICK) => Event::Tick,
        }
    }
}
