//! Commands that users send over a pooled connection. Each exchange has the manager's operation
//! timeout.

use std::time::Duration;

use redis::{RedisResult, Value};

use super::Connection;
use crate::{backend::error::NodeError, sys::clock};

impl redis::ConnectionLike for Connection {
    fn req_packed_command(&mut self, command: &[u8]) -> RedisResult<Value> {
        let mut values = self.req_packed_commands(command, 0, 1)?;
        values.pop().unwrap_or(Value::Nil).extract_error()
    }

    fn req_packed_commands(
        &mut self,
        commands: &[u8],
        offset: usize,
        count: usize,
    ) -> RedisResult<Vec<Value>> {
        if !self.mark_used_by_caller() {
            // Nobody repeats the first command if a server that has just been restarted has closed
            // the socket. Later ones may depend on its state.
            self.is_ready_checking_idle(Duration::ZERO);
        }
        let deadline = clock::now().saturating_add(self.timeout());
        self.connect(deadline).map_err(NodeError::into_redis_error)?;
        self.send(deadline, |out| out.extend_from_slice(commands))
            .map_err(NodeError::into_redis_error)?;
        let mut values = Vec::with_capacity(count.min(1024));
        for index in 0..offset.saturating_add(count) {
            let value = self.receive(deadline).map_err(NodeError::into_redis_error)?;
            if index >= offset {
                values.push(value);
            }
        }
        Ok(values)
    }

    fn get_db(&self) -> i64 {
        self.db()
    }

    fn check_connection(&mut self) -> bool {
        redis::cmd("PING").query::<redis::Value>(self).is_ok()
    }

    fn is_open(&self) -> bool {
        // A closed connection reconnects at its next use.
        true
    }
}
