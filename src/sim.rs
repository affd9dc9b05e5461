//! Interface for simulators. Wherever the library reads a clock, waits, starts a thread, draws a
//! random number or talks to a server, a [`SimWorld`] can replace the machine. Only compiled with
//! the feature `testing`.
//!
//! After a thread has [entered](enter) a world, it does all of that through the world, and holds no
//! lock of the library meanwhile. A world may therefore run many threads of the library on one
//! thread of its own, one at a time. `tests/sim.rs` is such a world.

use std::{
    cell::RefCell,
    fmt, io,
    rc::Rc,
    sync::Arc,
    time::{Duration, SystemTime},
};

/// Replacement for the machine. Times are nanoseconds on the clock of the calling thread's process;
/// `u64::MAX` is never.
///
/// Connections are identified by a number, like file descriptors.
pub trait SimWorld {
    /// The current time; above zero and monotonic.
    fn now(&self) -> u64;

    /// The wall-clock time.
    fn wall_clock(&self) -> SystemTime;

    /// A random number.
    fn random(&self) -> u128;

    /// Sleeps until `place` is notified or `until` is reached. May wake early.
    fn park(&self, place: usize, until: u64);

    /// Wakes one thread that sleeps at `place`, or all.
    fn notify(&self, place: usize, all: bool);

    /// Starts a thread and returns its number.
    ///
    /// # Errors
    ///
    /// Fails if no thread can be started.
    fn spawn(&self, name: &str, run: Box<dyn FnOnce() + Send>) -> io::Result<u64>;

    /// Waits for a thread to end.
    fn join(&self, thread: u64);

    /// Connects to a server. For a Unix socket, `host` is the path.
    ///
    /// # Errors
    ///
    /// Those of `connect`.
    fn connect(&self, host: &str, port: u16, deadline: u64) -> io::Result<u64>;

    /// Creates a connection to itself, from which can be read what is written to it.
    ///
    /// # Errors
    ///
    /// Fails if no connection can be created.
    fn loopback(&self) -> io::Result<u64>;

    /// Waits until a connection is readable or closed, or until `until` is reached. Returns which
    /// connections are ready.
    fn poll(&self, connections: &[u64], until: u64) -> Vec<bool>;

    /// Reads the available bytes without blocking; leaves them in place if `peek` is set.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there are none, and those of a broken connection.
    fn read(&self, connection: u64, buffer: &mut [u8], peek: bool) -> io::Result<usize>;

    /// Writes as many bytes as possible without blocking.
    ///
    /// # Errors
    ///
    /// Those of a broken connection.
    fn write(&self, connection: u64, bytes: &[u8]) -> io::Result<usize>;

    /// Shuts down both directions of a connection.
    fn shutdown(&self, connection: u64);

    /// Closes a connection that is not used any more.
    fn close(&self, connection: u64);
}

thread_local! {
    static WORLD: RefCell<Option<Rc<dyn SimWorld>>> = const { RefCell::new(None) };
}

/// Moves the calling thread into a world, or back to the real machine with `None`. Returns the
/// world it was in.
pub fn enter(world: Option<Rc<dyn SimWorld>>) -> Option<Rc<dyn SimWorld>> {
    WORLD.with(|current| current.replace(world))
}

/// World of the calling thread; `None` outside a simulation.
pub(crate) fn world() -> Option<Rc<dyn SimWorld>> {
    WORLD.try_with(|world| world.borrow().clone()).ok().flatten()
}

/// A connection in a simulated world.
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

    /// Reads without blocking.
    pub(crate) fn try_read(&self, buffer: &mut [u8], peek: bool) -> io::Result<usize> {
        current()?.read(self.handle.0, buffer, peek)
    }

    /// Reads, and blocks for at most the read timeout.
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
        write!(f, "SimSocket({})", self.handle.0)
    }
}

/// World of the calling thread. A connection that was taken out of its world fails with
/// `NotConnected`.
fn current() -> io::Result<Rc<dyn SimWorld>> {
    world().ok_or_else(|| io::ErrorKind::NotConnected.into())
}
