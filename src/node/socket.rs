//! `Socket`: a TCP or Unix stream that connects within a deadline and never waits longer than it is told to.

use std::{
    io::{self, Read as _},
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags, recv, send, sockopt},
};

use super::{endpoint::Address, resolve::resolve};
use crate::clock::{self, Moment};

#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    pub(crate) fn connect(address: &Address, deadline: Moment) -> io::Result<Socket> {
        match address {
            Address::Tcp(host, port) => connect_tcp(host, *port, deadline).map(Socket::Tcp),
            Address::Unix(path) => connect_unix(path, deadline).map(Socket::Unix),
        }
    }

    pub(crate) fn try_clone(&self) -> io::Result<Socket> {
        match self {
            Socket::Tcp(stream) => stream.try_clone().map(Socket::Tcp),
            Socket::Unix(stream) => stream.try_clone().map(Socket::Unix),
        }
    }

    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.shutdown(how),
            Socket::Unix(stream) => stream.shutdown(how),
        }
    }

    /// Open, and nothing to read: what an idle connection between two requests has to be.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut byte = [0_u8; 1];
        let peeked = recv(self, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        matches!(peeked, Err(rustix::io::Errno::AGAIN))
    }

    /// Closed or broken by the other side, and nothing left to read.
    pub(crate) fn is_closed(&self) -> bool {
        let mut byte = [0_u8; 1];
        match recv(self, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, length)) => length == 0,
            Err(error) => error != rustix::io::Errno::AGAIN && error != rustix::io::Errno::INTR,
        }
    }

    /// Reads what has come, without blocking.
    pub(crate) fn try_read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(recv(&*self, buffer, RecvFlags::DONTWAIT)?.0)
    }

    /// Blocks for at most the read timeout.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => stream.read(buffer),
            Socket::Unix(stream) => stream.read(buffer),
        }
    }

    pub(crate) fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        // The kernel counts in microseconds and takes zero for "for ever".
        let timeout = timeout.clamp(Duration::from_micros(1), Duration::from_secs(24 * 60 * 60));
        match self {
            Socket::Tcp(stream) => stream.set_read_timeout(Some(timeout)),
            Socket::Unix(stream) => stream.set_read_timeout(Some(timeout)),
        }
    }

    /// Writes what there is room for, without blocking.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self, bytes, SEND)?)
    }

    /// Waits until there is room to write, or the time is over.
    pub(crate) fn await_room(&self, longest: Duration) -> io::Result<()> {
        let timeout = Timespec {
            tv_sec: i64::try_from(longest.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: longest.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(self, PollFlags::OUT)], Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

#[cfg(not(target_vendor = "apple"))]
const SEND: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);
/// There the standard library's sockets raise no signal to begin with.
#[cfg(target_vendor = "apple")]
const SEND: SendFlags = SendFlags::DONTWAIT;

fn connect_tcp(host: &str, port: u16, deadline: Moment) -> io::Result<TcpStream> {
    let addresses = resolve(host, port, deadline)?;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for (index, address) in addresses.iter().enumerate() {
        let left = deadline.after(clock::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // The first address must not use up the time of the others.
        let share = left / u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
        match TcpStream::connect_timeout(address, share.max(Duration::from_micros(1))) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                keep_watch(&stream)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Lets the kernel find out that a peer has gone without a word; its own defaults are hours.
fn keep_watch(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    #[cfg(target_os = "linux")]
    {
        sockopt::set_tcp_keepidle(stream, Duration::from_secs(15))?;
        sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
        sockopt::set_tcp_keepcnt(stream, 3)?;
        sockopt::set_tcp_user_timeout(stream, 15_000)?;
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn connect_unix(path: &Path, deadline: Moment) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        let left = deadline.after(clock::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A connect to a server that does not accept blocks once its backlog is full; the send timeout bounds it.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left.max(Duration::from_micros(1))))?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            // A signal, after which it can be asked again.
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Elsewhere a full backlog is not bounded by the deadline.
#[cfg(not(target_os = "linux"))]
fn connect_unix(path: &Path, _: Moment) -> io::Result<UnixStream> {
    UnixStream::connect(path)
}
