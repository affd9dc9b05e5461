//! The transports of a simulator. Only with the feature `testing`.

use std::{io, rc::Rc, sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{PollHandle, Transport};
use crate::{
    backend::{CancelHandle, address::Address},
    sys::{
        clock::Moment,
        sim::{SimWorld, world},
    },
};

/// A connection in a simulated world. It cannot be used outside of it.
#[derive(Clone, Debug)]
pub(super) struct SimSocket(Arc<SimHandle>);

#[derive(Debug)]
struct SimHandle(u64);

impl Drop for SimHandle {
    fn drop(&mut self) {
        if let Some(world) = world() {
            world.close(self.0);
        }
    }
}

pub(super) fn connect(
    world: &dyn SimWorld,
    address: &Address,
    deadline: Moment,
) -> io::Result<SimSocket> {
    let (host, port) = match address {
        Address::Tcp(address) => (address.ip().to_string(), address.port()),
        Address::Unix(path) => (path.to_string_lossy().into_owned(), 0),
    };
    let number = world.connect(&host, port, deadline.as_nanos())?;
    Ok(SimSocket(Arc::new(SimHandle(number))))
}

/// Creates a connection to itself, as two handles.
pub(super) fn loopback(world: &dyn SimWorld) -> io::Result<(SimSocket, SimSocket)> {
    let socket = SimSocket(Arc::new(SimHandle(world.loopback()?)));
    Ok((socket.clone(), socket))
}

pub(super) fn poll(
    world: &dyn SimWorld,
    transports: &[&dyn Transport],
    until: Moment,
) -> SmallVec<[bool; 8]> {
    let numbers = transports.iter().filter_map(|transport| match transport.poll_handle() {
        PollHandle::Simulated(number) => Some(number),
        PollHandle::Descriptor(_) => None,
    });
    world.poll(&numbers.collect::<Vec<_>>(), until.as_nanos()).into()
}

impl SimSocket {
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        current()?.write(self.0.0, bytes)
    }
}

impl Transport for SimSocket {
    fn read(&mut self, buffer: &mut [u8], longest: Duration) -> io::Result<usize> {
        let world = current()?;
        if !longest.is_zero() {
            let until = Moment::from_nanos(world.now()).saturating_add(longest);
            world.poll(&[self.0.0], until.as_nanos());
        }
        world.read(self.0.0, buffer, false)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes)
    }

    fn has_input(&mut self) -> io::Result<bool> {
        match current()?.read(self.0.0, &mut [0], true) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            read => read.map(|_| true),
        }
    }

    fn poll_handle(&self) -> PollHandle<'_> {
        PollHandle::Simulated(self.0.0)
    }

    fn cancel_handle(&self) -> io::Result<CancelHandle> {
        let socket = self.clone();
        Ok(CancelHandle::new(move || drop(current().map(|world| world.shutdown(socket.0.0)))))
    }
}

fn current() -> io::Result<Rc<dyn SimWorld>> {
    world().ok_or_else(|| io::ErrorKind::NotConnected.into())
}
