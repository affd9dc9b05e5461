//! Merges all events into one stream: keys, query results, signals, and the passing of time.

use std::{io, thread, time::Duration};

use crossbeam_channel::{Receiver, bounded, select};
use ratatui::crossterm::event;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP},
    iterator::Signals,
};

use crate::top::poller::{PollResult, Poller, QueryResult};

/// Time between two ticks, which update the ages that the header shows in seconds.
const TICK_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(crate) enum Event {
    Input(event::Event),
    /// The terminal is gone, so no more keys will come.
    InputClosed(io::Error),
    Poll(PollResult),
    Query(QueryResult),
    Signal(i32),
    Tick,
}

#[derive(Debug)]
pub(crate) struct Events {
    poller: Poller,
    input: Receiver<io::Result<event::Event>>,
    signals: Receiver<i32>,
}

impl Events {
    pub(crate) fn start(poller: Poller) -> io::Result<Events> {
        let (send, signals) = bounded(8);
        let mut caught = Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT, SIGTSTP])?;
        thread::Builder::new().name("distlock-signals".into()).spawn(move || {
            // If the channel is full, further signals add nothing.
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
        Ok(Events { poller, input, signals })
    }

    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    /// Waits for the next event.
    pub(crate) fn next(&self) -> Event {
        let closed = || Event::InputClosed(io::ErrorKind::BrokenPipe.into());
        // `select` takes any event that is ready, but a user who quits must not wait for a table
        // first.
        if let Ok(signal) = self.signals.try_recv() {
            return Event::Signal(signal);
        }
        select! {
            recv(self.signals) -> signal => signal.map_or_else(|_| closed(), Event::Signal),
            recv(self.input) -> input => match input {
                Ok(Ok(input)) => Event::Input(input),
                Ok(Err(error)) => Event::InputClosed(error),
                Err(_) => closed(),
            },
            recv(self.poller.query_results) -> result => {
                result.map_or_else(|_| closed(), Event::Query)
            }
            recv(self.poller.poll_results) -> result => {
                result.map_or_else(|_| closed(), Event::Poll)
            }
            default(TICK_INTERVAL) => Event::Tick,
        }
    }
}
