//! `Socket`: a connected stream socket of the system, TCP or Unix.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    time::Duration,
};

use rustix::{
    io::fcntl_dupfd_cloexec,
    net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown, sockopt},
};

use super::{PollHandle, Transport};
use crate::backend::CancelHandle;

/// Maximum time by which the read timeout may exceed what it should be. Correcting a smaller excess
/// is not worth a system call.
const READ_TIMEOUT_SLACK: Duration = Duration::from_millis(2);
/// Timeouts from this one on are shortened, because Linux ends a read late: by up to an eighth of a
/// timeout that is longer than 64 of its ticks. A read that ends too soon is repeated.
const COARSE_TIMEOUT: Duration = Duration::from_millis(64);

#[cfg(not(target_vendor = "apple"))]
const SEND_FLAGS: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);
/// On Apple systems the standard library's sockets never raise SIGPIPE.
#[cfg(target_vendor = "apple")]
const SEND_FLAGS: SendFlags = SendFlags::DONTWAIT;

#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    /// `Duration::MAX` if none is set.
    read_timeout: Duration,
}

impl Socket {
    pub(super) fn new(fd: OwnedFd) -> io::Result<Socket> {
        Ok(Socket { fd: above_stdio(fd)?, read_timeout: Duration::MAX })
    }

    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(&self.fd, bytes, SEND_FLAGS)?)
    }
}

impl Transport for Socket {
    fn read(&mut self, buffer: &mut [u8], longest: Duration) -> io::Result<usize> {
        if longest.is_zero() {
            return Ok(recv(&self.fd, buffer, RecvFlags::DONTWAIT)?.0);
        }
        let timeout = if longest < COARSE_TIMEOUT { longest } else { longest - longest / 8 };
        // A read timeout that is too short only makes the caller read again.
        if self.read_timeout > timeout.saturating_add(READ_TIMEOUT_SLACK)
            || self.read_timeout < timeout / 8
        {
            // The kernel counts in microseconds and takes zero for "no timeout".
            let set = timeout.clamp(Duration::from_micros(1), Duration::from_secs(24 * 60 * 60));
            sockopt::set_socket_timeout(&self.fd, sockopt::Timeout::Recv, Some(set))?;
            self.read_timeout = timeout;
        }
        Ok(recv(&self.fd, buffer, RecvFlags::empty())?.0)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes)
    }

    fn has_input(&mut self) -> io::Result<bool> {
        match recv(&self.fd, &mut [0_u8], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn poll_handle(&self) -> PollHandle<'_> {
        PollHandle::Descriptor(self.fd.as_fd())
    }

    fn cancel_handle(&self) -> io::Result<CancelHandle> {
        let fd = self.fd.try_clone()?;
        Ok(CancelHandle::new(move || {
            // Fails only if the socket is already closed.
            let _ = shutdown(&fd, Shutdown::Both);
        }))
    }

    #[cfg(all(feature = "tls", feature = "mysql"))]
    fn into_socket(self: Box<Self>) -> Option<Socket> {
        Some(*self)
    }
}

/// Moves a socket above the descriptors of the standard streams. If a standard stream is closed, a
/// new socket gets its number. Everything that the process prints would then go to the server,
/// which would execute each line as a command.
fn above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    const FIRST: i32 = 3;
    if fd.as_raw_fd() >= FIRST { Ok(fd) } else { Ok(fcntl_dupfd_cloexec(&fd, FIRST)?) }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixStream};

    use super::*;

    /// Linux ends a read late by up to an eighth of its timeout.
    ///
    /// Fault: N266
    #[test]
    fn long_read_timeout_leaves_time_for_a_late_end() {
        let (one, mut other) = UnixStream::pair().unwrap();
        let mut socket = Socket::new(one.into()).unwrap();
        for seconds in [1, 2, 60, 3600] {
            let longest = Duration::from_secs(seconds);
            other.write_all(b"1").unwrap();
            assert_eq!(socket.read(&mut [0], longest).unwrap(), 1);
            let set = sockopt::socket_timeout(&socket.fd, sockopt::Timeout::Recv).unwrap().unwrap();
            assert!(set + set / 8 <= longest, "{set:?} for {longest:?}");
            assert!(set * 8 >= longest, "{set:?} for {longest:?}");
        }
    }

    #[test]
    fn read_fails_once_nothing_has_arrived() {
        let (one, _other) = UnixStream::pair().unwrap();
        let mut socket = Socket::new(one.into()).unwrap();
        for longest in [Duration::ZERO, Duration::from_micros(1), Duration::from_millis(80)] {
            let error = socket.read(&mut [0], longest).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{longest:?}");
        }
    }
}
