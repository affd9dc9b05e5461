//! A recording of all commands that a server receives.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::TEST_TIMEOUT;

/// The output of `MONITOR`, recorded until this is dropped.
pub struct Monitor {
    stream: TcpStream,
    lines: Arc<(Mutex<Vec<String>>, Condvar)>,
    reader: Option<JoinHandle<()>>,
}

impl Monitor {
    pub(super) fn start(addr: SocketAddr, hello: &[u8], greetings: u64) -> Self {
        let mut stream = TcpStream::connect(addr).expect("cannot connect for MONITOR");
        stream.write_all(hello).expect("cannot send MONITOR");
        let mut input = BufReader::new(stream.try_clone().expect("cannot share the socket"));
        for _ in 0..greetings {
            let mut reply = String::new();
            input.read_line(&mut reply).expect("no answer to MONITOR");
            assert_eq!(reply, "+OK\r\n", "MONITOR was refused");
        }
        let lines = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let sink = Arc::clone(&lines);
        let reader = thread::spawn(move || {
            let mut line = Vec::new();
            while input.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                let text = String::from_utf8_lossy(&line);
                sink.0.lock().push(text.trim_start_matches('+').trim_end().to_owned());
                sink.1.notify_all();
                line.clear();
            }
        });
        Self { stream, lines, reader: Some(reader) }
    }

    /// The number of commands so far that contain this text.
    pub fn count(&self, part: &str) -> usize {
        self.lines().iter().filter(|line| line.contains(part)).count()
    }

    pub fn lines(&self) -> Vec<String> {
        self.lines.0.lock().clone()
    }

    /// Returns the first line that contains `part`, and waits for one if there is none yet.
    #[track_caller]
    pub fn wait_for(&self, part: &str) -> String {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut lines = self.lines.0.lock();
        loop {
            if let Some(line) = lines.iter().find(|line| line.contains(part)) {
                return line.clone();
            }
            let late = self.lines.1.wait_until(&mut lines, deadline).timed_out();
            assert!(!late, "no command with {part:?} among {lines:#?}");
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        let _ = self.reader.take().map(JoinHandle::join);
    }
}
