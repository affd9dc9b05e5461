//! Listening to nodes that answer long after the others. No renewal waits for them; but what they
//! have lost has to be taken anew some time, or it is lost with what the next node forgets.

use std::time::Duration;

use super::worker::{MissingOn, RENEWAL_BATCH_MAX, Worker, build_renewal};
use crate::{
    clock,
    node::requests::Renew,
    redlock::{BroadcastOptions, NodeSet, Vote},
};

/// So long they are waited for, and renewals that fall due meanwhile with them, unless their leases
/// have less to spare: enough for a long way.
const LISTEN_MAX: Duration = Duration::from_millis(250);
/// Of the time, one part in so many: others have the rest, however slow a node is and however many
/// locks there are.
const SHARE: u32 = 10;

impl Worker {
    /// Asks those of these nodes about locks of which they have said nothing for a whole lease.
    /// Returns which are lacking where.
    ///
    /// Nodes that answer with the others are not among these, so usually nobody is asked. One that
    /// stays silent changes nothing: what a quorum has confirmed has been taken down before.
    pub(super) fn listen_to(&mut self, slow: NodeSet) -> Vec<MissingOn> {
        let began = clock::now();
        // Whose vote does not count yet is heard when it does.
        let votes = |node: &usize| self.desk.redlock.node(*node).quarantine_left(began).is_none();
        let slow: NodeSet = slow.iter().filter(votes).collect();
        if slow.is_empty() || began < self.listens_at || self.desk.is_wanted(began) {
            return Vec::new();
        }
        // Going through all leases costs something too.
        self.listens_at = began.saturating_add(LISTEN_MAX);
        let unheard = self.desk.shared.state.lock().schedule.without_recent_reply(
            slow,
            began,
            RENEWAL_BATCH_MAX,
        );
        if unheard.is_empty() {
            return Vec::new();
        }
        let renewals: Vec<_> =
            unheard.iter().map(|(_, lease)| build_renewal(lease, began)).collect();
        // An answer that comes later than that keeps its connection.
        let wait_until = began.saturating_add(LISTEN_MAX);
        let deadline = began.saturating_add(self.desk.redlock.operation_timeout());
        let round =
            BroadcastOptions { wait_until, ..BroadcastOptions::awaiting_all(slow, deadline) };
        let ballot = self.ask(round, LISTEN_MAX, |_| Renew(&renewals), |_, _| Vote::Yes);
        let now = clock::now();
        self.listens_at =
            self.listens_at.max(now.saturating_add(now.duration_since(began) * (SHARE - 1)));
        let mut lacking = Vec::new();
        for (index, (generation, lease)) in unheard.iter().enumerate() {
            let barred = self.desk.shared.state.lock().schedule.excluded(*generation);
            let tally = self.collect_replies(lease, &ballot, index, barred);
            let Some(validity) = self.apply_replies(*generation, lease, &tally) else { continue };
            let missing = tally.missing.difference(barred);
            // One that came too late is for `bury`.
            let alive = lease.update_deadline(validity, now);
            self.desk.shared.state.lock().schedule.reschedule_end(*generation);
            if alive && !missing.is_empty() {
                lacking.push((*generation, lease.clone(), missing));
            }
        }
        lacking
    }
}
