//! The fenced resource: a number for each lock, which holders read and write back one larger. It knows the largest token
//! that was here, and refuses smaller ones. It is in a process that nobody stops.

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

struct Shelf {
    values: HashMap<u32, Value>,
    journal: Journal,
}

/// Serves until the process ends.
pub(crate) fn open(path: &Path, record: &Path) -> Outcome {
    let listener = UnixListener::bind(path)?;
    let shelf = Arc::new(Mutex::new(Shelf { values: HashMap::new(), journal: Journal::open(record)? }));
    thread::spawn(move || {
        for visitor in listener.incoming().flatten() {
            let shelf = shelf.clone();
            // It ends with its visitor.
            thread::spawn(move || drop(serve(&shelf, visitor)));
        }
    });
    Ok(())
}

fn serve(shelf: &Mutex<Shelf>, visitor: UnixStream) -> Outcome {
    let (mut input, mut line) = (BufReader::new(visitor.try_clone()?), String::new());
    while input.read_line(&mut line)? > 0 {
        let mut words = line.split_whitespace().map(str::parse::<u64>);
        let mut number = || words.next().ok_or("a number is missing")?.map_err(|_| "not a number");
        let (seat, pid, lock, token) = (number()? as u32, number()? as u32, number()? as u32, number()?);
        let written = number().ok();
        let answer = {
            // The lock also keeps the record in the order in which all of this happens.
            let mut shelf = shelf.lock().unwrap_or_else(PoisonError::into_inner);
            let Shelf { values, journal } = &mut *shelf;
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
            if accepted { format!("{}\n", value.value) } else { "old\n".to_owned() }
        };
        (&visitor).write_all(answer.as_bytes())?;
        line.clear();
    }
    Ok(())
}

/// A holder's way to the resource.
pub(crate) struct Resource {
    stream: UnixStream,
    input: BufReader<UnixStream>,
    seat: u32,
}

impl Resource {
    pub(crate) fn find(path: &Path, seat: u32) -> Outcome<Resource> {
        let stream = UnixStream::connect(path)?;
        Ok(Resource { input: BufReader::new(stream.try_clone()?), stream, seat })
    }

    /// The value, if no later holder has been here.
    pub(crate) fn read(&mut self, lock: u32, token: u64) -> Outcome<Option<u64>> {
        self.ask(lock, token, String::new())
    }

    /// Whether the value was taken.
    pub(crate) fn write(&mut self, lock: u32, token: u64, value: u64) -> Outcome<bool> {
        Ok(self.ask(lock, token, value.to_string())?.is_some())
    }

    fn ask(&mut self, lock: u32, token: u64, value: String) -> Outcome<Option<u64>> {
        let (seat, pid) = (self.seat, std::process::id());
        self.stream.write_all(format!("{seat} {pid} {lock} {token} {value}\n").as_bytes())?;
        let mut answer = String::new();
        self.input.read_line(&mut answer)?;
        match answer.trim_end() {
            "old" => Ok(None),
            value => Ok(Some(value.parse().map_err(|_| format!("the resource says {value:?}"))?)),
        }
    }
}
