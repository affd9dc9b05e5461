//! The seam for simulators: wherever the library reads a clock, waits, starts a thread, draws a
//! random number or talks to a server, a [`World`] can stand in for the machine. Only with the
//! feature `testing`; without it there is no trace of this.
//!
//! A thread that has [entered](enter) a world does all of that through it. No lock of the library's
//! is held meanwhile, so that a world may run many threads of the library on one of its own, one at
//! a time. `tests/sim.rs` is such a world.

use std::{
    cell::RefCell,
    fmt, io,
    rc::Rc,
    sync::Arc,
    time::{Duration, SystemTime},
};

/// What stands in for the machine. Moments are nanoseconds on the clock of the calling thread's
/// process; `u64::MAX` is never.
///
/// Connections are known by a number, like descriptors are.
pub trait SimWorld {
    /// The moment; above zero, and never before an earlier one.
    fn now(&self) -> u64;

    /// The time of day.
    fn wall_clock(&self) -> SystemTime;

    /// A number that nobody can guess.
    fn random(&self) -> u128;

    /// Sleeps until `place` is notified or the moment has come. May wake early.
    fn park(&self, place: usize, until: u64);

    /// Wakes one or all of those who sleep at `place`.
    fn notify(&self, place: usize, all: bool);

    /// Starts a thread, and gives it a number.
    ///
    /// # Errors
    ///
    /// When there is none to be had.
    fn spawn(&self, name: &str, run: Box<dyn FnOnce() + Send>) -> io::Result<u64>;

    /// Waits for the end of a thread.
    fn join(&self, thread: u64);

    /// Connects; of a socket file, `host` is the path.
    ///
    /// # Errors
    ///
    /// Those of a connect.
    fn connect(&self, host: &str, port: u16, deadline: u64) -> io::Result<u64>;

    /// A connection to itself: what is written can be read.
    ///
    /// # Errors
    ///
    /// When there is none to be had.
    fn loopback(&self) -> io::Result<u64>;

    /// Waits until one of the connections can be read, or has come to its end, or the moment has
    /// come; says which.
    fn poll(&self, connections: &[u64], until: u64) -> Vec<bool>;

    /// Takes what has come without waiting; only looks at it if `peek`.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is nothing, and those of a broken connection.
    fn read(&self, connection: u64, buffer: &mut [u8], peek: bool) -> io::Result<usize>;

    /// Sends what there is room for without waiting.
    ///
    /// # Errors
    ///
    /// Those of a broken connection.
    fn write(&self, connection: u64, bytes: &[u8]) -> io::Result<usize>;

    /// Ends both directions.
    fn shutdown(&self, connection: u64);

    /// Nobody uses this connection any more.
    fn close(&self, connection: u64);
}

thread_local! {
    static WORLD: RefCell<Option<Rc<dyn SimWorld>>> = const { RefCell::new(None) };
}

/// Has the calling thread live in a world; `None` is this one. Returns the world it was in.
pub fn enter(world: Option<Rc<dyn SimWorld>>) -> Option<Rc<dyn SimWorld>> {
    WORLD.with(|current| current.replace(world))
}

/// The world that the calling thread lives in, if it is not this one.
pub(crate) fn world() -> Option<Rc<dyn SimWorld>> {
    WORLD.try_with(|world| world.borrow().clone()).ok().flatten()
}

/// A connection in a world.
#[derive(Clone)]
pub(crate) struct SimSocket {
    handle: Arc<SimHandle>,
    read_timeout: Duration,
}

struct SimHandle(u64);

impl Drop for SimHandle {
    fn drop(&mut self) {
        if let Some(world) = world() {
            world.close(self.0);
        }
    }
}

impl SimSocket {
    pub(crate) fn new(number: u64) -> SimSocket {
        SimSocket { handle: Arc::new(SimHandle(number)), read_timeout: Duration::MAX }
    }

    pub(crate) fn number(&self) -> u64 {
        self.handle.0
    }

    pub(crate) fn set_read_timeout(&mut self, timeout: Duration) {
        self.read_timeout = timeout;
    }

    /// Reads without waiting.
    pub(crate) fn try_read(&self, buffer: &mut [u8], peek: bool) -> io::Result<usize> {
        current()?.read(self.handle.0, buffer, peek)
    }

    /// Waits for at most the read timeout.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let world = current()?;
        let nanos = u64::try_from(self.read_timeout.as_nanos()).unwrap_or(u64::MAX);
        world.poll(&[self.handle.0], world.now().saturating_add(nanos));
        world.read(self.handle.0, buffer, false)
    }

    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        current()?.write(self.handle.0, bytes)
    }

    pub(crate) fn shutdown(&self) {
        if let Some(world) = world() {
            world.shutdown(self.handle.0);
        }
    }
}

impl fmt::Debug for SimSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wire({})", self.handle.0)
    }
}

/// A connection of a world that was taken out of it leads nowhere.
fn current() -> io::Result<Rc<dyn SimWorld>> {
    world().ok_or_else(|| io::ErrorKind::NotConnected.into())
}
