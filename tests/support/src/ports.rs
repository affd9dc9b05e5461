//! Ports of the loopback address that stay reserved while nothing listens on them.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

/// A port that no other program gets by chance, because a socket that never listens is bound to it.
///
/// The kernel lets a second socket bind the same port if both have set `SO_REUSEADDR`, as servers
/// do. But it never picks this port for a program that requests any free port.
pub(crate) struct ReservedPort {
    _socket: TcpListener,
    addr: SocketAddr,
}

impl ReservedPort {
    pub(crate) fn new() -> Self {
        Self::at(0).expect("no free port")
    }

    /// Reserves this port, unless another program has it.
    pub(crate) fn at(port: u16) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)
            .expect("cannot create a socket");
        sockopt::set_socket_reuseaddr(&socket, true).expect("cannot set SO_REUSEADDR");
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)).ok()?;
        // The socket never accepts; `TcpListener` is just the type that std has for a bound socket.
        let socket = TcpListener::from(socket);
        let addr = socket.local_addr().expect("a bound socket has an address");
        Some(Self { _socket: socket, addr })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn listen(&self) -> TcpListener {
        TcpListener::bind(self.addr).expect("cannot bind the reserved port")
    }
}
