//! Ports of the loopback address that stay ours even while nothing listens on them.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

/// A port that no one gets by chance, because a socket that never listens is bound to it.
///
/// The kernel lets another socket bind the same port when both have set `SO_REUSEADDR`, as
/// servers do, but gives a reserved port to nobody who asks for any free one.
pub(crate) struct ReservedPort {
    _socket: TcpListener,
    addr: SocketAddr,
}

impl ReservedPort {
    pub(crate) fn new() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)
            .expect("no socket to reserve a port with");
        sockopt::set_socket_reuseaddr(&socket, true).expect("SO_REUSEADDR was refused");
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("no free port");
        // Only the type that std has for a bound socket; it is never asked to accept.
        let socket = TcpListener::from(socket);
        let addr = socket.local_addr().expect("a bound socket has an address");
        Self { _socket: socket, addr }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn listen(&self) -> TcpListener {
        TcpListener::bind(self.addr).expect("the reserved port was taken")
    }
}
