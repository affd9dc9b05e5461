//! Connecting to a node, also where an earlier connection has ended: on this thread, or on threads
//! that connect for a caller that polls, and wake it by a socket.

use std::{io, sync::Arc, time::Duration};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::{connection::Connection, redis_node::RedisNode};
use crate::{
    backend::{
        WakeFn,
        error::NodeError,
        transport::{Transport, waker},
    },
    sys::{
        clock::{self, Moment},
        threads,
    },
};

/// Connects on this thread, unless the connection is open and leads to the present server of the
/// node.
pub(crate) fn connect(
    node: &RedisNode,
    connection: &mut Connection,
    deadline: Moment,
) -> Result<(), NodeError> {
    node.drop_if_replaced(connection);
    if connection.is_ready() { Ok(()) } else { node.connect(connection, deadline) }
}

/// Connects on other threads, because connecting can take long, and several nodes are connected at
/// once.
pub(crate) struct BackgroundConnects {
    sender: Sender<Connected>,
    receiver: Receiver<Connected>,
    wake: WakeFn,
    pub(crate) wakeups: Box<dyn Transport>,
}

pub(crate) struct Connected {
    pub(crate) node: usize,
    pub(crate) connection: Connection,
    pub(crate) outcome: Result<(), NodeError>,
}

impl BackgroundConnects {
    pub(crate) fn new() -> io::Result<BackgroundConnects> {
        let (wake, wakeups) = waker()?;
        let (sender, receiver) = unbounded();
        Ok(BackgroundConnects { sender, receiver, wake, wakeups })
    }

    /// Returns what makes `wakeups` readable.
    pub(crate) fn wake(&self) -> WakeFn {
        self.wake.clone()
    }

    /// Connects in the background. If the caller has stopped waiting by the time the connection is
    /// ready, the node keeps the connection.
    pub(crate) fn connect(
        &self,
        index: usize,
        node: Arc<RedisNode>,
        mut connection: Connection,
        deadline: Moment,
    ) -> io::Result<()> {
        let (sender, wake) = (self.sender.clone(), self.wake.clone());
        let connect = move || {
            let outcome = node.connect(&mut connection, deadline);
            if let Err(undelivered) = sender.send(Connected { node: index, connection, outcome }) {
                // The caller has stopped waiting.
                match undelivered.0 {
                    Connected { outcome: Err(_), .. } => node.health.record_failure(clock::now()),
                    Connected { connection, .. } => node.put_spare(connection),
                }
            }
            wake();
        };
        threads::spawn("distlock-connect", connect).map(drop)
    }

    /// Returns the attempts that have ended since the last call, successful or not.
    pub(crate) fn take_connected(&mut self) -> Vec<Connected> {
        let _ = self.wakeups.read(&mut [0; 64], Duration::ZERO);
        self.receiver.try_iter().collect()
    }
}
