//! Connecting over a Unix socket.

use std::{io, os::fd::OwnedFd, path::Path};

use crate::sys::clock::Moment;

#[cfg(target_os = "linux")]
pub(super) fn connect(path: &Path, deadline: Moment) -> io::Result<OwnedFd> {
    use std::time::Duration;

    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
    };

    use crate::sys::clock;

    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        let left = deadline.duration_since(clock::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // If the server does not accept and its backlog is full, connecting blocks. The send
        // timeout bounds that.
        let timeout = Some(left.max(Duration::from_micros(1)));
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, timeout)?;
        match connect(&fd, &address) {
            Ok(()) => return Ok(fd),
            // A signal interrupted the call; connect again.
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// On other systems the deadline does not bound the wait for a full backlog.
#[cfg(not(target_os = "linux"))]
pub(super) fn connect(path: &Path, _: Moment) -> io::Result<OwnedFd> {
    Ok(std::os::unix::net::UnixStream::connect(path)?.into())
}
