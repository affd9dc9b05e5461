//! `HeardSubscription`: whether the server is known to have our subscription, so that a waiter need
//! not ask for that when it joins the queue. Pure.
//!
//! An open connection leads to one server. So what one request has learned about the subscription
//! holds for the next ones, until a connection is opened: for more requests, after one has broken,
//! or for another subscription. It also ends after a short time: a subscription can end without a
//! trace on this side, and connections that were opened earlier can lead to different servers.

use std::time::Duration;

use parking_lot::Mutex;

use crate::sys::clock::Moment;

/// How long what a reply says about this holds. A hot lock then asks rarely.
const KNOWN_FOR: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(crate) struct HeardSubscription {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    connections_opened: u64,
    /// When a request was sent that found the subscription, and the number of connections then.
    found: Option<(Moment, u64)>,
}

impl HeardSubscription {
    pub(crate) fn on_connection_opened(&self) {
        self.state.lock().connections_opened += 1;
    }

    /// Returns what [`record`](Self::record) needs. Call this before sending the request.
    pub(crate) fn connections_opened(&self) -> u64 {
        self.state.lock().connections_opened
    }

    /// Whether a request would find the subscription.
    pub(crate) fn is_known(&self, now: Moment) -> bool {
        let state = self.state.lock();
        state.found.is_some_and(|(sent, opened)| {
            opened == state.connections_opened && now < sent.saturating_add(KNOWN_FOR)
        })
    }

    /// Records whether a request that was sent at `sent` found the subscription.
    /// `connections_opened` is the number of connections just before that.
    pub(crate) fn record(&self, sent: Moment, connections_opened: u64, is_found: bool) {
        self.state.lock().found = is_found.then_some((sent, connections_opened));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn each_new_connection_may_lead_elsewhere() {
        let heard = HeardSubscription::default();
        assert!(!heard.is_known(at(1)));
        heard.record(at(1), heard.connections_opened(), true);
        assert!(heard.is_known(at(2)));
        heard.record(at(1), heard.connections_opened(), false);
        assert!(!heard.is_known(at(2)), "the subscription has ended");
        let before = heard.connections_opened();
        heard.on_connection_opened();
        heard.record(at(1), before, true);
        assert!(!heard.is_known(at(2)), "the request was sent over an older connection");
        heard.record(at(1), heard.connections_opened(), true);
        assert!(heard.is_known(at(2)));
        heard.on_connection_opened();
        assert!(!heard.is_known(at(2)));
    }

    #[test]
    fn subscription_may_have_ended_meanwhile() {
        let heard = HeardSubscription::default();
        heard.record(at(1), heard.connections_opened(), true);
        assert!(heard.is_known(at(2)) && !heard.is_known(at(3)));
    }
}
