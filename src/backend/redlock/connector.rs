//! Threads that connect to nodes for a caller that polls, and the socket by which they wake it.

use std::{io, sync::Arc};

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::{
    backend::redis::{Connection, NodeError, RedisNode, Socket},
    sys::{
        clock::{self, Moment},
        threads,
    },
};

/// Connects on other threads, because connecting can take long, and several nodes are connected at
/// once.
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

    /// Connects in the background. If the caller has stopped waiting by the time the connection is
    /// ready, the node keeps the connection.
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
                // The caller has stopped waiting.
                match undelivered.0 {
                    Connected { outcome: Err(_), .. } => node.record_failure(clock::now()),
                    Connected { connection, .. } => node.put_spare(connection),
                }
            }
            // If the socket is full, a wakeup is pending already.
            let _ = wakeup.write(&[1]);
        };
        threads::spawn("distlock-connect", connect).map(drop)
    }

    /// Returns the attempts that have ended since the last call, successful or not.
    pub(super) fn take_connected(&mut self) -> Vec<Connected> {
        let mut bytes = [0; 64];
        let _ = self.wakeup_rx.try_read(&mut bytes);
        self.receiver.try_iter().collect()
    }
}
