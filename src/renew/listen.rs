//! Asks nodes that reply long after the others. Renewals do not wait for these nodes, but a lock
//! that one of them has lost must be re-acquired there: otherwise the lock is lost as soon as the
//! next node loses it too.

use std::time::Duration;

use super::worker::{MissingOn, RENEWAL_BATCH_MAX, Worker, build_renewal};
use crate::{
    backend::{redis::requests_and_replies::Renew, redlock::BroadcastOptions},
    core::{node_answer::Vote, quorum::NodeSet},
    sys::clock,
};

/// Maximum wait for slow nodes; enough for a slow connection. Renewals that fall due meanwhile wait
/// too, unless their leases have less time to spare.
const LISTEN_MAX: Duration = Duration::from_millis(250);
/// At most one part in this many of the renewer's time is spent on slow nodes, however many locks
/// there are.
const SHARE: u32 = 10;

impl Worker {
    /// Asks these nodes about locks for which they have not replied during a whole lease. Returns
    /// the locks to re-acquire, and where.
    ///
    /// Nodes that reply with the others are not among these, so usually no node is asked. A node
    /// that stays silent changes nothing, because the confirmations of the quorum have been applied
    /// before.
    pub(super) fn listen_to(&mut self, slow: NodeSet) -> Vec<MissingOn> {
        let began = clock::now();
        // A node that does not vote yet is asked once it does.
        let votes =
            |node: &usize| self.context.redlock.node(*node).quarantine_left(began).is_none();
        let slow: NodeSet = slow.iter().filter(votes).collect();
        if slow.is_empty() || began < self.listens_at || self.context.shared.has_due_renewals(began)
        {
            return Vec::new();
        }
        // Limits the search through all leases as well.
        self.listens_at = began.saturating_add(LISTEN_MAX);
        let unheard = self.context.shared.state.lock().schedule.without_recent_reply(
            slow,
            began,
            RENEWAL_BATCH_MAX,
        );
        if unheard.is_empty() {
            return Vec::new();
        }
        let renewals: Vec<_> =
            unheard.iter().map(|(_, lease)| build_renewal(lease, began)).collect();
        // A reply between `wait_until` and the deadline does not cost the connection.
        let wait_until = began.saturating_add(LISTEN_MAX);
        let deadline = began.saturating_add(self.context.redlock.operation_timeout());
        let round =
            BroadcastOptions { wait_until, ..BroadcastOptions::awaiting_all(slow, deadline) };
        let ballot = self.ask(round, |_| Renew(&renewals), |_, _| Vote::Yes);
        let now = clock::now();
        self.listens_at =
            self.listens_at.max(now.saturating_add(now.duration_since(began) * (SHARE - 1)));
        let mut lacking = Vec::new();
        for (index, (generation, lease)) in unheard.iter().enumerate() {
            let barred = self.context.shared.state.lock().schedule.excluded(*generation);
            let tally = self.collect_replies(lease, &ballot, index, barred);
            let Some(validity) = self.apply_replies(*generation, lease, &tally) else { continue };
            let missing = tally.missing.difference(barred);
            // If the reply came too late, `expire` handles the lease.
            let alive = lease.update_deadline(validity, now);
            self.context.shared.state.lock().schedule.reschedule_end(*generation);
            if alive && !missing.is_empty() {
                lacking.push((*generation, lease.clone(), missing));
            }
        }
        lacking
    }
}
