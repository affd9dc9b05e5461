//! The faults of a database.

use super::{Nemesis, Undo};
use crate::{Outcome, database::Database, history::Kind};

const FAULTS: [Kind; 5] =
    [Kind::Freeze, Kind::Restart, Kind::Restart, Kind::Delete, Kind::CutClients];

impl Nemesis<'_> {
    pub(super) fn inject_database_fault(&mut self, database: &Database) -> Outcome {
        if !self.may_inject(0) {
            return Ok(());
        }
        let kind = FAULTS[self.rng.usize(..FAULTS.len())];
        match kind {
            Kind::Freeze => {
                let length = self.random_length(20, 2500);
                let number = self.record_start(0, 0, kind, length.as_millis() as u64)?;
                self.cluster.pause(0);
                self.keep_until(number, Some(0), None, length, Undo::Resume(0));
            }
            Kind::Restart => {
                let length = self.random_length(0, 1500);
                let number = self.record_start(0, 0, kind, length.as_millis() as u64)?;
                if self.rng.bool() {
                    database.server.shut_down();
                }
                self.cluster.kill(0);
                let undo = Undo::Start { node: 0, with_data: true };
                self.keep_until(number, Some(0), None, length, undo);
            }
            Kind::Delete => {
                let lock = self.rng.u32(1..=self.locks);
                self.kill_holder(database, lock)?;
            }
            _ => {
                let number = self.record_start(0, 0, kind, 0)?;
                database.kill_connections()?;
                self.record_end(number)?;
            }
        }
        Ok(())
    }

    /// As [`delete_held_key`](Nemesis::delete_held_key): kills the connection of such a holder.
    pub(super) fn kill_settled_holder(&mut self, database: &Database) -> Outcome<bool> {
        for lock in 1..=self.locks {
            if database.is_held_since(lock, self.ttl * 2 / 5)? {
                self.kill_holder(database, lock)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn kill_holder(&mut self, database: &Database, lock: u32) -> Outcome {
        let number = self.record_start(0, lock, Kind::Delete, 0)?;
        database.kill_holder(lock)?;
        self.record_end(number)
    }
}
