//! `MemoryGrantStream`: a subscription to a channel of a server in memory.

use std::sync::Arc;

use super::server::{Inbox, Server};
use crate::{
    backend::{
        CancelHandle, GrantStream, QueuePlace, StreamEvent, WakeFn,
        error::NodeError,
        redis::{PLACE, parse_grant},
    },
    sys::clock::Moment,
};

#[derive(Debug)]
pub(super) struct MemoryGrantStream {
    server: Arc<Server>,
    label: Arc<str>,
    channel: String,
    inbox: Arc<Inbox>,
}

impl MemoryGrantStream {
    pub(super) fn open(
        server: &Arc<Server>,
        label: &Arc<str>,
        channel: &str,
    ) -> Result<MemoryGrantStream, NodeError> {
        let inbox = server.subscribe(channel)?;
        let (server, label) = (server.clone(), label.clone());
        Ok(MemoryGrantStream { server, label, channel: channel.to_owned(), inbox })
    }
}

impl GrantStream for MemoryGrantStream {
    fn place(&self) -> QueuePlace {
        PLACE
    }

    fn label(&self) -> &Arc<str> {
        &self.label
    }

    fn is_open(&mut self) -> bool {
        self.inbox.is_open()
    }

    fn cancel_handle(&self) -> Result<CancelHandle, NodeError> {
        let inbox = self.inbox.clone();
        Ok(CancelHandle::new(move || inbox.close()))
    }

    fn wake_handle(&mut self) -> Result<WakeFn, NodeError> {
        let inbox = self.inbox.clone();
        Ok(Arc::new(move || inbox.wake()))
    }

    fn receive(&mut self, until: Moment) -> Result<Option<StreamEvent>, NodeError> {
        let Some(payload) = self.inbox.receive(until)? else { return Ok(None) };
        Ok(parse_grant(&payload).map(|(id, notice)| StreamEvent::Grant(id.into(), notice)))
    }
}

impl Drop for MemoryGrantStream {
    fn drop(&mut self) {
        self.server.unsubscribe(&self.channel, &self.inbox);
    }
}
