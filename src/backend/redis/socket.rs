//! `Socket`: a TCP or Unix stream that connects within a deadline and never blocks longer than its
//! caller allows.

use std::{
    io::{self, Read as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::fcntl_dupfd_cloexec,
    net::{RecvFlags, SendFlags, recv, send, sockopt},
};
use smallvec::SmallVec;

use super::{dns::resolve, url::Address};
use crate::sys::clock::{self, Moment};
#[cfg(feature = "testing")]
use crate::sys::sim::{self, SimSocket};

#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
    #[cfg(feature = "testing")]
    Simulated(SimSocket),
}

impl Socket {
    pub(crate) fn connect(address: &Address, deadline: Moment) -> io::Result<Socket> {
        #[cfg(feature = "testing")]
        if let Some(world) = sim::world() {
            let path = |path: &Path| path.to_string_lossy().into_owned();
            let (host, port) = match address {
                Address::Tcp(host, port) => (host.clone(), *port),
                Address::Unix(socket) => (path(socket), 0),
            };
            return world
                .connect(&host, port, deadline.as_nanos())
                .map(|number| Socket::Simulated(SimSocket::new(number)));
        }
        match address {
            Address::Tcp(host, port) => {
                Ok(Socket::Tcp(above_stdio(connect_tcp(host, *port, deadline)?.into())?.into()))
            }
            Address::Unix(path) => {
                Ok(Socket::Unix(above_stdio(connect_unix(path, deadline)?.into())?.into()))
            }
        }
    }

    /// Creates two connected sockets for threads of this process. Neither blocks.
    pub(crate) fn pair() -> io::Result<(Socket, Socket)> {
        #[cfg(feature = "testing")]
        if let Some(world) = sim::world() {
            let wire = SimSocket::new(world.loopback()?);
            return Ok((Socket::Simulated(wire.clone()), Socket::Simulated(wire)));
        }
        let (one, other) = UnixStream::pair()?;
        Ok((
            Socket::Unix(above_stdio(one.into())?.into()),
            Socket::Unix(above_stdio(other.into())?.into()),
        ))
    }

    pub(crate) fn try_clone(&self) -> io::Result<Socket> {
        match self {
            Socket::Tcp(stream) => stream.try_clone().map(Socket::Tcp),
            Socket::Unix(stream) => stream.try_clone().map(Socket::Unix),
            #[cfg(feature = "testing")]
            Socket::Simulated(wire) => Ok(Socket::Simulated(wire.clone())),
        }
    }

    pub(crate) fn shutdown(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Socket::Unix(stream) => stream.shutdown(Shutdown::Both),
            #[cfg(feature = "testing")]
            Socket::Simulated(wire) => {
                wire.shutdown();
                Ok(())
            }
        }
    }

    /// Whether the socket is open and has nothing to read, as an idle connection must be.
    pub(crate) fn is_idle(&self) -> bool {
        self.receive(&mut [0], RecvFlags::PEEK)
            .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Whether the peer has closed or reset the connection and nothing is left to read.
    pub(crate) fn is_closed(&self) -> bool {
        match self.receive(&mut [0], RecvFlags::PEEK) {
            Ok(length) => length == 0,
            Err(error) => {
                !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
            }
        }
    }

    /// Reads the bytes that have arrived, without blocking.
    pub(crate) fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.receive(buffer, RecvFlags::empty())
    }

    fn receive(&self, buffer: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
        let flags = flags | RecvFlags::DONTWAIT;
        match self {
            Socket::Tcp(stream) => Ok(recv(stream, buffer, flags)?.0),
            Socket::Unix(stream) => Ok(recv(stream, buffer, flags)?.0),
            #[cfg(feature = "testing")]
            Socket::Simulated(wire) => wire.try_read(buffer, flags.contains(RecvFlags::PEEK)),
        }
    }

    /// Reads, blocking for at most the read timeout.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.read(buffer),
            Socket::Unix(stream) => stream.read(buffer),
            #[cfg(feature = "testing")]
            Socket::Simulated(wire) => wire.read(buffer),
        }
    }

    pub(crate) fn set_read_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        // The kernel counts in microseconds and takes zero for "no timeout".
        let timeout = timeout.clamp(Duration::from_micros(1), Duration::from_secs(24 * 60 * 60));
        match self {
            Socket::Tcp(stream) => stream.set_read_timeout(Some(timeout)),
            Socket::Unix(stream) => stream.set_read_timeout(Some(timeout)),
            #[cfg(feature = "testing")]
            Socket::Simulated(wire) => {
                wire.set_read_timeout(timeout);
                Ok(())
            }
        }
    }

    /// Writes as many bytes as fit, without blocking.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => Ok(send(stream, bytes, SEND_FLAGS)?),
            Socket::Unix(stream) => Ok(send(stream, bytes, SEND_FLAGS)?),
            #[cfg(feature = "testing")]
            Socket::Simulated(wire) => wire.write(bytes),
        }
    }

    /// Whether a write would not block.
    pub(crate) fn is_writable(&self) -> bool {
        let Some(polled) = self.poll_fd(PollFlags::OUT) else { return true };
        poll(&mut [polled], Some(&timespec(Duration::ZERO))).is_ok_and(|ready| ready > 0)
    }

    /// Waits until a write would not block, or for `longest`.
    pub(crate) fn poll_writable(&self, longest: Duration) -> io::Result<()> {
        let Some(polled) = self.poll_fd(PollFlags::OUT) else { return Ok(()) };
        match poll(&mut [polled], Some(&timespec(longest))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until a socket is readable, closed or broken, or until a deadline. Returns the state
    /// of each socket. Busy-waits for up to `spin` before it sleeps.
    pub(crate) fn poll_readable(
        sockets: &[&Socket],
        until: Moment,
        spin: Duration,
    ) -> SmallVec<[bool; 8]> {
        #[cfg(feature = "testing")]
        if let Some(world) = sim::world() {
            let wires = sockets.iter().filter_map(|socket| match socket {
                Socket::Simulated(wire) => Some(wire.number()),
                Socket::Tcp(_) | Socket::Unix(_) => None,
            });
            return world.poll(&wires.collect::<Vec<_>>(), until.as_nanos()).into();
        }
        let mut polled: SmallVec<[PollFd<'_>; 8]> =
            sockets.iter().filter_map(|socket| socket.poll_fd(PollFlags::IN)).collect();
        let spin_until = clock::now().saturating_add(spin).min(until);
        loop {
            let now = clock::now();
            let spinning = now < spin_until;
            let longest = if spinning { Duration::ZERO } else { until.duration_since(now) };
            match poll(&mut polled, Some(&timespec(longest))) {
                Ok(0) if spinning => thread::yield_now(),
                // An interrupted call ends the wait early; callers wait again.
                _ => break,
            }
        }
        polled.iter().map(|socket| !socket.revents().is_empty()).collect()
    }

    /// Returns the descriptor to poll; `None` in a simulation, which has no descriptors.
    fn poll_fd(&self, flags: PollFlags) -> Option<PollFd<'_>> {
        match self {
            Socket::Tcp(stream) => Some(PollFd::new(stream, flags)),
            Socket::Unix(stream) => Some(PollFd::new(stream, flags)),
            #[cfg(feature = "testing")]
            Socket::Simulated(_) => None,
        }
    }
}

/// Moves a socket above the descriptors of the standard streams. If a standard stream is closed, a
/// new socket gets its number. Everything that the process prints would then go to the server,
/// which would execute each line as a command.
fn above_stdio(socket: OwnedFd) -> io::Result<OwnedFd> {
    const FIRST: i32 = 3;
    if socket.as_raw_fd() >= FIRST { Ok(socket) } else { Ok(fcntl_dupfd_cloexec(&socket, FIRST)?) }
}

fn timespec(longest: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(longest.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: longest.subsec_nanos().into(),
    }
}

#[cfg(not(target_vendor = "apple"))]
const SEND_FLAGS: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);
/// On Apple systems the standard library's sockets never raise SIGPIPE.
#[cfg(target_vendor = "apple")]
const SEND_FLAGS: SendFlags = SendFlags::DONTWAIT;

fn connect_tcp(host: &str, port: u16, deadline: Moment) -> io::Result<TcpStream> {
    connect_first(&resolve(host, port, deadline)?, deadline)
}

/// Connects to the first address that accepts.
fn connect_first(addresses: &[SocketAddr], deadline: Moment) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for (index, address) in addresses.iter().enumerate() {
        let left = deadline.duration_since(clock::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Give each address a share of the time, so that the first one cannot use it up.
        let share = left / u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
        match TcpStream::connect_timeout(address, share.max(Duration::from_micros(1))) {
            Ok(stream) => {
                for (option, error) in set_options(&stream) {
                    log_safely!(
                        debug,
                        "could not set {option} on the connection to {address}: {error}"
                    );
                }
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Sets the TCP options: no delay for small requests, and keep-alive probes, because the kernel's
/// defaults take hours to notice a dead peer. Returns the options that failed. A sandbox may refuse
/// some options, which is harmless, because every wait has a deadline.
fn set_options(stream: &TcpStream) -> Vec<(&'static str, io::Error)> {
    let asked = [
        ("TCP_NODELAY", stream.set_nodelay(true)),
        ("SO_KEEPALIVE", sockopt::set_socket_keepalive(stream, true).map_err(io::Error::from)),
        #[cfg(target_os = "linux")]
        (
            "TCP_KEEPIDLE",
            sockopt::set_tcp_keepidle(stream, Duration::from_secs(15)).map_err(io::Error::from),
        ),
        #[cfg(target_os = "linux")]
        (
            "TCP_KEEPINTVL",
            sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5)).map_err(io::Error::from),
        ),
        #[cfg(target_os = "linux")]
        ("TCP_KEEPCNT", sockopt::set_tcp_keepcnt(stream, 3).map_err(io::Error::from)),
        #[cfg(target_os = "linux")]
        (
            "TCP_USER_TIMEOUT",
            sockopt::set_tcp_user_timeout(stream, 15_000).map_err(io::Error::from),
        ),
    ];
    asked.into_iter().filter_map(|(option, set)| Some((option, set.err()?))).collect()
}

#[cfg(target_os = "linux")]
fn connect_unix(path: &Path, deadline: Moment) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        let left = deadline.duration_since(clock::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // If the server does not accept and its backlog is full, connecting blocks. The send
        // timeout bounds that.
        sockopt::set_socket_timeout(
            &socket,
            sockopt::Timeout::Send,
            Some(left.max(Duration::from_micros(1))),
        )?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            // A signal interrupted the call; connect again.
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// On other systems the deadline does not bound the wait for a full backlog.
#[cfg(not(target_os = "linux"))]
fn connect_unix(path: &Path, _: Moment) -> io::Result<UnixStream> {
    UnixStream::connect(path)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use rustix::net::{
        AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with,
    };
    use std::net::TcpListener;

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
        let connect = || TcpStream::connect_timeout(&silent, Duration::from_millis(300));
        let waiting: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
        let server = TcpListener::bind(any).unwrap();
        let there = server.local_addr().unwrap();
        let deadline = clock::now().saturating_add(Duration::from_secs(9));
        let stream = connect_first(&[silent, there, silent], deadline).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), there);
        drop(waiting);
    }

    /// Not a TCP socket, so all TCP options fail.
    ///
    /// Fault: N83
    #[test]
    fn refused_socket_option_keeps_connection() {
        let (one, _other) = UnixStream::pair().unwrap();
        let refused = set_options(&TcpStream::from(OwnedFd::from(one)));
        let options: Vec<_> = refused.iter().map(|(option, _)| *option).collect();
        // All options are tried, and the one that does not need TCP succeeds.
        let of_tcp =
            ["TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"];
        assert_eq!(options, of_tcp, "{refused:?}");
    }
}
