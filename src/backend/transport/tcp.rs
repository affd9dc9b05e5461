//! Connecting over TCP.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use rustix::{io::Errno, net::sockopt};

use crate::sys::clock::{self, Moment};

/// Time after which a connection counts as broken if the peer acknowledges nothing.
#[cfg(any(target_os = "linux", feature = "mysql"))]
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(15);

/// Sets this time for a connection. Linux then ignores the number of keep-alive probes.
#[cfg(feature = "mysql")]
pub(super) fn bear_silence(stream: impl AsFd, longest: Duration) {
    #[cfg(target_os = "linux")]
    if let Err(error) = sockopt::set_tcp_user_timeout(stream, millis(longest)) {
        log_safely!(debug, "could not set TCP_USER_TIMEOUT: {error}");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (stream, longest);
}

#[cfg(target_os = "linux")]
fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

pub(super) fn connect(address: &SocketAddr, deadline: Moment) -> io::Result<OwnedFd> {
    let left = deadline.duration_since(clock::now());
    let stream = TcpStream::connect_timeout(address, left.max(Duration::from_micros(1)))?;
    for (option, error) in set_options(&stream) {
        log_safely!(debug, "could not set {option} on the connection to {address}: {error}");
    }
    Ok(stream.into())
}

/// Sets the TCP options: no delay for small requests, and keep-alive probes, because the kernel's
/// defaults take hours to notice a dead peer. Returns the options that failed. A sandbox may refuse
/// some options, which is harmless, because every wait has a deadline.
fn set_options(stream: &impl AsFd) -> Vec<(&'static str, Errno)> {
    let asked = [
        ("TCP_NODELAY", sockopt::set_tcp_nodelay(stream, true)),
        ("SO_KEEPALIVE", sockopt::set_socket_keepalive(stream, true)),
        #[cfg(target_os = "linux")]
        ("TCP_KEEPIDLE", sockopt::set_tcp_keepidle(stream, SILENCE_MAX)),
        #[cfg(target_os = "linux")]
        ("TCP_KEEPINTVL", sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))),
        #[cfg(target_os = "linux")]
        ("TCP_KEEPCNT", sockopt::set_tcp_keepcnt(stream, 3)),
        #[cfg(target_os = "linux")]
        ("TCP_USER_TIMEOUT", sockopt::set_tcp_user_timeout(stream, millis(SILENCE_MAX))),
    ];
    asked.into_iter().filter_map(|(option, set)| Some((option, set.err()?))).collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    /// Not a TCP socket, so all TCP options fail.
    ///
    /// Fault: N83
    #[test]
    fn refused_socket_option_keeps_connection() {
        let (one, _other) = UnixStream::pair().unwrap();
        let refused = set_options(&one);
        let options: Vec<_> = refused.iter().map(|(option, _)| *option).collect();
        // All options are tried, and the one that does not need TCP succeeds.
        let of_tcp =
            ["TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"];
        assert_eq!(options, of_tcp, "{refused:?}");
    }
}
