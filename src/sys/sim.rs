//! Lets a simulator replace the machine. Wherever the library reads a clock, waits, starts a
//! thread, draws a random number or talks to a server, it can use a [`SimWorld`] instead. Only with
//! the feature `testing`; otherwise none of this is compiled.
//!
//! A thread that has [entered](enter) a world does all of that through it. The library holds no
//! lock meanwhile, so a world may run many threads of the library on one thread of its own, one at
//! a time. `tests/sim.rs` is such a world.

use std::{cell::RefCell, io, rc::Rc, time::SystemTime};

/// Replaces the machine. Moments are nanoseconds on the clock of the calling thread's process;
/// `u64::MAX` means never.
///
/// Connections are identified by numbers, as descriptors are.
pub trait SimWorld {
    /// Returns the current moment; above zero, and never before an earlier one.
    fn now(&self) -> u64;

    /// Returns the time of day.
    fn wall_clock(&self) -> SystemTime;

    /// Returns a random number that cannot be guessed.
    fn random(&self) -> u128;

    /// Blocks until `place` is notified or `until` has passed. May return early.
    fn park(&self, place: usize, until: u64);

    /// Wakes one or all of the threads that are parked at `place`.
    fn notify(&self, place: usize, all: bool);

    /// Starts a thread and returns its number.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    fn spawn(&self, name: &str, run: Box<dyn FnOnce() + Send>) -> io::Result<u64>;

    /// Waits until a thread has ended.
    fn join(&self, thread: u64);

    /// Connects to a server; for a Unix socket, `host` is the path.
    ///
    /// # Errors
    ///
    /// Those of a connect.
    fn connect(&self, host: &str, port: u16, deadline: u64) -> io::Result<u64>;

    /// Creates a connection to itself: what is written can be read.
    ///
    /// # Errors
    ///
    /// If no connection can be created.
    fn loopback(&self) -> io::Result<u64>;

    /// Waits until at least one connection is readable or closed, or `until` has passed. Returns
    /// which of them are.
    fn poll(&self, connections: &[u64], until: u64) -> Vec<bool>;

    /// Reads what has arrived, without waiting. With `peek`, the bytes can be read again.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if nothing has arrived, and those of a broken connection.
    fn read(&self, connection: u64, buffer: &mut [u8], peek: bool) -> io::Result<usize>;

    /// Writes as much as possible without waiting.
    ///
    /// # Errors
    ///
    /// Those of a broken connection.
    fn write(&self, connection: u64, bytes: &[u8]) -> io::Result<usize>;

    /// Shuts both directions down.
    fn shutdown(&self, connection: u64);

    /// Closes the connection.
    fn close(&self, connection: u64);
}

thread_local! {
    static WORLD: RefCell<Option<Rc<dyn SimWorld>>> = const { RefCell::new(None) };
}

/// Makes the calling thread use `world`, or the real machine if None. Returns what it used before.
pub fn enter(world: Option<Rc<dyn SimWorld>>) -> Option<Rc<dyn SimWorld>> {
    WORLD.with(|current| current.replace(world))
}

/// The world that the calling thread has entered, if any.
pub(crate) fn world() -> Option<Rc<dyn SimWorld>> {
    WORLD.try_with(|world| world.borrow().clone()).ok().flatten()
}
