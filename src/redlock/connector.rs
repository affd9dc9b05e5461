//! Threads that connect to nodes for a caller who polls, and a bell that they ring.

use std::{io, sync::Arc};

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::{
    clock::{self, Moment},
    node::{Connection, NodeError, RedisNode, Socket},
    threads,
};

/// Connecting can take long, and several nodes are connected to at once.
pub(super) struct Connector {
    sender: Sender<Connected>,
    receiver: Receiver<Connected>,
    wakeup_tx: Arc<Socket>,
    pub(super) wakeup_rx: Socket,
}

pub(super) struct Connected {
    pub(super) node: usize,
    pub(super) connection: Connection,
    pub(super) outcome: Result<(), NodeError>,
}

impl Connector {
    pub(super) fn new() -> io::Result<Connector> {
        let (wakeup_tx, wakeup_rx) = Socket::pair()?;
        let (sender, receiver) = unbounded();
        Ok(Connector { sender, receiver, wakeup_tx: Arc::new(wakeup_tx), wakeup_rx })
    }

    /// Connects in the background. A connection that comes when nobody waits any more is kept by
    /// its node.
    pub(super) fn connect(
        &self,
        index: usize,
        node: Arc<RedisNode>,
        mut connection: Connection,
        deadline: Moment,
    ) -> io::Result<()> {
        let (sender, wakeup) = (self.sender.clone(), self.wakeup_tx.clone());
        let connect = move || {
            let outcome = node.connect(&mut connection, deadline);
            if let Err(undelivered) = sender.send(Connected { node: index, connection, outcome }) {
                // Nobody waits for it any more.
                match undelivered.0 {
                    Connected { outcome: Err(_), .. } => node.record_failure(clock::now()),
                    Connected { connection: link, .. } => node.put_spare(link),
                }
            }
            // A full pipe has rung already.
            let _ = wakeup.write(&[1]);
        };
        threads::spawn("distlock-connect", connect).map(drop)
    }

    /// Who is there by now, or will not come.
    pub(super) fn take_connected(&mut self) -> Vec<Connected> {
        let mut bytes = [0; 64];
        let _ = self.wakeup_rx.try_read(&mut bytes);
        self.receiver.try_iter().collect()
    }
}
