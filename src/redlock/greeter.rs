//! Threads that connect to nodes for a caller who polls, and a bell that they ring.

use std::{io, sync::Arc};

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::{
    clock::{self, Moment},
    node::{Connection, Failure, RedisNode, Socket},
    threads,
};

/// Connecting can take long, and several nodes are connected to at once.
pub(super) struct Greeter {
    done: Sender<Arrival>,
    arrivals: Receiver<Arrival>,
    ring: Arc<Socket>,
    pub(super) bell: Socket,
}

pub(super) struct Arrival {
    pub(super) node: usize,
    pub(super) link: Connection,
    pub(super) outcome: Result<(), Failure>,
}

impl Greeter {
    pub(super) fn new() -> io::Result<Greeter> {
        let (ring, bell) = Socket::pair()?;
        let (done, arrivals) = unbounded();
        Ok(Greeter { done, arrivals, ring: Arc::new(ring), bell })
    }

    /// Connects in the background. A connection that comes when nobody waits any more is kept by its node.
    pub(super) fn greet(
        &self,
        index: usize,
        node: Arc<RedisNode>,
        mut link: Connection,
        deadline: Moment,
    ) -> io::Result<()> {
        let (done, ring) = (self.done.clone(), self.ring.clone());
        let connect = move || {
            let outcome = node.connect(&mut link, deadline);
            if let Err(unheard) = done.send(Arrival { node: index, link, outcome }) {
                // Nobody waits for it any more.
                match unheard.0 {
                    Arrival { outcome: Err(_), .. } => node.failed(clock::now()),
                    Arrival { link, .. } => node.put_spare(link),
                }
            }
            // A full pipe has rung already.
            let _ = ring.write(&[1]);
        };
        threads::spawn("distlock-connect", connect).map(drop)
    }

    /// Who is there by now, or will not come.
    pub(super) fn arrived(&mut self) -> Vec<Arrival> {
        let mut rings = [0; 64];
        let _ = self.bell.try_read(&mut rings);
        self.arrivals.try_iter().collect()
    }
}
