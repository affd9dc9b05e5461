//! The fenced resource: a number for each lock. A holder reads it and writes it back increased by
//! one. The resource remembers the largest token that it has seen and refuses smaller ones. It runs
//! in the parent process, which is never stopped.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use crate::{
    Outcome,
    history::{Event, Journal, Record, now},
};

#[derive(Default)]
struct Value {
    value: u64,
    token: u64,
}

struct State {
    values: HashMap<u32, Value>,
    journal: Journal,
}

/// Starts to serve; ends with the process.
pub(crate) fn start(path: &Path, record: &Path) -> Outcome {
    let listener = UnixListener::bind(path)?;
    let state =
        Arc::new(Mutex::new(State { values: HashMap::new(), journal: Journal::open(record)? }));
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let state = state.clone();
            // Ends when the client disconnects.
            thread::spawn(move || drop(serve(&state, client)));
        }
    });
    Ok(())
}

fn serve(state: &Mutex<State>, client: UnixStream) -> Outcome {
    let (mut input, mut line) = (BufReader::new(client.try_clone()?), String::new());
    while input.read_line(&mut line)? > 0 {
        let mut words = line.split_whitespace().map(str::parse::<u64>);
        let mut number = || words.next().ok_or("a number is missing")?.map_err(|_| "not a number");
        let (seat, pid, lock, token) =
            (number()? as u32, number()? as u32, number()? as u32, number()?);
        let written = number().ok();
        let reply = {
            // The mutex also keeps the record in the order in which all of this happens.
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            let State { values, journal } = &mut *state;
            let value = values.entry(lock).or_default();
            let accepted = token >= value.token;
            if accepted {
                (value.token, value.value) = (token, written.unwrap_or(value.value));
            }
            let event = match written {
                Some(value) => Some(Event::Write { token, value, accepted }),
                None => accepted.then_some(Event::Met { token }),
            };
            if let Some(event) = event {
                journal.write(&Record { at: now(), seat, lock, pid, event })?;
            }
            if accepted { format!("{}\n", value.value) } else { "stale\n".to_owned() }
        };
        (&client).write_all(reply.as_bytes())?;
        line.clear();
    }
    Ok(())
}

/// A holder's connection to the resource.
pub(crate) struct Resource {
    stream: UnixStream,
    input: BufReader<UnixStream>,
    seat: u32,
}

impl Resource {
    pub(crate) fn connect(path: &Path, seat: u32) -> Outcome<Resource> {
        let stream = UnixStream::connect(path)?;
        Ok(Resource { input: BufReader::new(stream.try_clone()?), stream, seat })
    }

    /// Returns the value, or None if the resource has seen a larger token.
    pub(crate) fn read(&mut self, lock: u32, token: u64) -> Outcome<Option<u64>> {
        self.ask(lock, token, String::new())
    }

    /// Writes a value; returns whether it was accepted.
    pub(crate) fn write(&mut self, lock: u32, token: u64, value: u64) -> Outcome<bool> {
        Ok(self.ask(lock, token, value.to_string())?.is_some())
    }

    fn ask(&mut self, lock: u32, token: u64, value: String) -> Outcome<Option<u64>> {
        let (seat, pid) = (self.seat, std::process::id());
        self.stream.write_all(format!("{seat} {pid} {lock} {token} {value}\n").as_bytes())?;
        let mut reply = String::new();
        self.input.read_line(&mut reply)?;
        match reply.trim_end() {
            "stale" => Ok(None),
            value => Ok(Some(
                value
                    .parse()
                    .map_err(|_| format!("unexpected reply of the resource: {value:?}"))?,
            )),
        }
    }
}
