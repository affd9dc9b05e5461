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

/// Maximum time by which the read timeout may exceed the time left. Correcting a smaller excess is
/// not worth a system call.
const READ_TIMEOUT_SLACK: Duration = Duration::from_millis(2);

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
        // A read timeout that is too short only makes the caller read again.
        if self.read_timeout > longest.saturating_add(READ_TIMEOUT_SLACK)
            || self.read_timeout < longest / 8
        {
            // The kernel counts in microseconds and takes zero for "no timeout".
            let timeout =
                longest.clamp(Duration::from_micros(1), Duration::from_secs(24 * 60 * 60));
            sockopt::set_socket_timeout(&self.fd, sockopt::Timeout::Recv, Some(timeout))?;
            self.read_timeout = longest;
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
