//! `Transport`: a stream of bytes to a server, on which every operation ends by a deadline. This
//! module opens transports, and polls several of them at once.

#[cfg(feature = "testing")]
mod simulated;
mod socket;
mod tcp;
#[cfg(feature = "tls")]
mod tls;
mod unix;

use std::{
    fmt, io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    sync::Arc,
    thread,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;

use self::socket::Socket;
#[cfg(feature = "mysql")]
pub(crate) use self::tcp::SILENCE_MAX;
#[cfg(feature = "tls")]
pub use self::tls::ServerCertificates;
#[cfg(feature = "tls")]
pub(crate) use self::tls::{TlsClient, TlsFiles};
use super::address::Address;
#[cfg(feature = "testing")]
use crate::sys::sim;
use crate::{
    backend::{CancelHandle, WakeFn},
    sys::clock::{self, Moment},
};

/// An open connection that carries bytes. Fails if it is closed or broken.
pub(crate) trait Transport: fmt::Debug + Send {
    /// Reads what has arrived, waiting for at most `longest`. Fails with `WouldBlock` if nothing
    /// arrives; may also fail with `Interrupted`.
    fn read(&mut self, buffer: &mut [u8], longest: Duration) -> io::Result<usize>;

    /// Writes as many bytes as fit, without waiting.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Writes what earlier writes have left, without waiting.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether there is something to read that a poll does not show.
    fn has_buffered(&self) -> bool {
        false
    }

    /// Whether there is something to read, which stays there.
    fn has_input(&mut self) -> io::Result<bool>;

    /// What to poll, until the next read or write.
    fn poll_handle(&self) -> PollHandle<'_>;

    /// Returns a handle with which another thread ends a read.
    fn cancel_handle(&self) -> io::Result<CancelHandle>;

    /// Returns the socket, if it carries nothing but the bytes themselves.
    #[cfg(all(feature = "tls", feature = "mysql"))]
    fn into_socket(self: Box<Self>) -> Option<Socket> {
        None
    }
}

/// What to poll for a transport.
pub(crate) enum PollHandle<'a> {
    Descriptor(BorrowedFd<'a>),
    #[cfg(feature = "testing")]
    Simulated(u64),
}

/// `None` in a simulation, which has no descriptors.
fn poll_fd(transport: &dyn Transport, flags: PollFlags) -> Option<PollFd<'_>> {
    match transport.poll_handle() {
        PollHandle::Descriptor(descriptor) => Some(PollFd::from_borrowed_fd(descriptor, flags)),
        #[cfg(feature = "testing")]
        PollHandle::Simulated(_) => None,
    }
}

/// How to secure a connection.
#[cfg(feature = "tls")]
pub(crate) type Security = TlsClient;
/// No security is built in.
#[cfg(not(feature = "tls"))]
#[derive(Debug)]
pub(crate) enum Security {}

#[cfg(not(feature = "tls"))]
impl Security {
    pub(crate) fn for_host(&self, _: &str) -> Security {
        match *self {}
    }
}

/// Connects to the first address that accepts.
pub(crate) fn connect(
    addresses: &[Address],
    security: Option<&Security>,
    deadline: Moment,
) -> io::Result<Box<dyn Transport>> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for (index, address) in addresses.iter().enumerate() {
        let now = clock::now();
        let left = deadline.duration_since(now);
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Give each address a share of the time, so that the first one cannot use it up.
        let share = left / u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
        match open(address, security, now.saturating_add(share)) {
            Ok(transport) => return Ok(transport),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn open(
    address: &Address,
    security: Option<&Security>,
    deadline: Moment,
) -> io::Result<Box<dyn Transport>> {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return Ok(Box::new(simulated::connect(&*world, address, deadline)?));
    }
    let connected = match address {
        Address::Tcp(address) => tcp::connect(address, deadline)?,
        Address::Unix(path) => unix::connect(path, deadline)?,
    };
    let socket = Socket::new(connected)?;
    match security {
        None => Ok(Box::new(socket)),
        #[cfg(feature = "tls")]
        Some(tls) => {
            let peer = match address {
                Address::Tcp(address) => Some(address.ip()),
                Address::Unix(_) => None,
            };
            tls.connect(socket, peer, deadline)
        }
        #[cfg(not(feature = "tls"))]
        Some(never) => match *never {},
    }
}

/// Performs a TLS handshake on a connection that has carried bytes already.
#[cfg(all(feature = "tls", feature = "mysql"))]
pub(crate) fn secure(
    transport: Box<dyn Transport>,
    security: &Security,
    deadline: Moment,
) -> io::Result<Box<dyn Transport>> {
    let socket = transport.into_socket().ok_or(io::ErrorKind::Unsupported)?;
    // Its name is always known: it is part of the URL.
    security.connect(socket, None, deadline)
}

/// Lets the path to the peer be broken for this long before the system closes the connection.
#[cfg(feature = "mysql")]
pub(crate) fn bear_silence(transport: &dyn Transport, longest: Duration) {
    match transport.poll_handle() {
        PollHandle::Descriptor(descriptor) => tcp::bear_silence(descriptor, longest),
        #[cfg(feature = "testing")]
        PollHandle::Simulated(_) => {}
    }
}

/// Creates a transport for wakeups.
pub(crate) fn waker() -> io::Result<(WakeFn, Box<dyn Transport>)> {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        let (wake, wakeups) = simulated::loopback(&*world)?;
        return Ok((Arc::new(move || drop(wake.send(&[1]))), Box::new(wakeups)));
    }
    let (wake, wakeups) = UnixStream::pair()?;
    let wake = Socket::new(wake.into())?;
    // If the socket is full, a wakeup is pending already.
    Ok((Arc::new(move || drop(wake.send(&[1]))), Box::new(Socket::new(wakeups.into())?)))
}

/// Creates two connected transports.
#[cfg(test)]
pub(super) fn pair() -> io::Result<(Box<dyn Transport>, Box<dyn Transport>)> {
    let (one, other) = UnixStream::pair()?;
    Ok((Box::new(Socket::new(one.into())?), Box::new(Socket::new(other.into())?)))
}

/// Writes all bytes, or fails at the deadline. Leaves the bytes that were not written.
pub(crate) fn write_all(
    transport: &mut dyn Transport,
    bytes: &mut &[u8],
    deadline: Moment,
) -> io::Result<()> {
    loop {
        let step =
            if bytes.is_empty() { transport.flush().map(|()| 0) } else { transport.write(bytes) };
        match step {
            Ok(_) if bytes.is_empty() => return Ok(()),
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => *bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = deadline.duration_since(clock::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                poll_writable(transport, left)?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Waits until a write would not block, or for `longest`. Returns whether it would not.
pub(crate) fn poll_writable(transport: &dyn Transport, longest: Duration) -> io::Result<bool> {
    let Some(polled) = poll_fd(transport, PollFlags::OUT) else { return Ok(true) };
    match poll(&mut [polled], Timespec::try_from(longest).ok().as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Waits until a transport is readable, closed or broken, or until a deadline. Returns the state of
/// each transport. Busy-waits for up to `spin` before it sleeps.
pub(crate) fn poll_readable(
    transports: &[&dyn Transport],
    until: Moment,
    spin: Duration,
) -> SmallVec<[bool; 8]> {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return simulated::poll(&*world, transports, until);
    }
    let mut polled: SmallVec<[PollFd<'_>; 8]> =
        transports.iter().filter_map(|transport| poll_fd(*transport, PollFlags::IN)).collect();
    let is_buffered: SmallVec<[bool; 8]> =
        transports.iter().map(|transport| transport.has_buffered()).collect();
    let until = if is_buffered.contains(&true) { Moment::from_nanos(0) } else { until };
    let spin_until = clock::now().saturating_add(spin).min(until);
    loop {
        let now = clock::now();
        let spinning = now < spin_until;
        let longest = if spinning { Duration::ZERO } else { until.duration_since(now) };
        match poll(&mut polled, Timespec::try_from(longest).ok().as_ref()) {
            Ok(0) if spinning => thread::yield_now(),
            // An interrupted call ends the wait early; callers wait again.
            _ => break,
        }
    }
    let is_ready = polled.iter().map(|socket| !socket.revents().is_empty());
    is_ready.zip(is_buffered).map(|(is_ready, is_buffered)| is_ready || is_buffered).collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use rustix::net::{
        AddressFamily, SocketFlags, SocketType, bind, getpeername, getsockname, listen, socket_with,
    };
    use std::net::{SocketAddr, TcpListener, TcpStream};

    /// Fault: N42
    #[test]
    fn unresponsive_address_leaves_time_for_the_others() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        // A socket with a full backlog, which accepts no connection.
        let deaf = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .unwrap();
        bind(&deaf, &any).unwrap();
        listen(&deaf, 0).unwrap();
        let silent = SocketAddr::try_from(getsockname(&deaf).unwrap()).unwrap();
        let fill = || TcpStream::connect_timeout(&silent, Duration::from_millis(300));
        let waiting: Vec<_> = std::iter::from_fn(|| fill().ok()).collect();
        let server = TcpListener::bind(any).unwrap();
        let there = server.local_addr().unwrap();
        let deadline = clock::now().saturating_add(Duration::from_secs(9));
        let transport =
            connect(&[silent, there, silent].map(Address::Tcp), None, deadline).unwrap();
        let descriptor = poll_fd(&*transport, PollFlags::IN).unwrap();
        let peer = getpeername(descriptor).unwrap().unwrap();
        assert_eq!(SocketAddr::try_from(peer).unwrap(), there);
        drop(waiting);
    }
}
