//! Calm: since when nothing has been wrong between a process and a node. Who loses a lock meanwhile has lost it for nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    net::{Link, Server},
    node::Mode,
    world::{Life, MS, NEVER, SEC, Sim, Time, US},
};

/// So many one-way trips fit into what a renewal has: to connect, to sign in, to teach a script, twice.
const TRIPS: Time = 20;
/// A lease may be held up for this part of it: nobody can renew who does not run.
const STALLED: Time = 10;
/// A node that is silent, or one to which a connection is yet to be made, may hold up others for a moment, which is longer
/// than a shorter lease can spare.
pub(crate) const SILENCE: Time = 100 * MS;
/// A node tells its age in whole seconds, of which both ends are cut.
const AGE_SLACK: Time = 2 * SEC;

/// When something was last wrong, and with whom.
#[derive(Debug, Default)]
pub(crate) struct Calm {
    /// The longest that a packet takes where nothing is wrong.
    pub(crate) usual: Time,
    /// For how long a node that may have forgotten does not vote.
    pub(crate) quarantine: Time,
    /// By process and node.
    trouble: BTreeMap<(usize, usize), Time>,
    /// Where something was wrong when it was looked last.
    bad: BTreeSet<(usize, usize)>,
    /// Process, end and length.
    stalls: Vec<(usize, Time, Time)>,
}

impl Calm {
    /// Something is wrong between them, until then.
    pub(crate) fn trouble(&mut self, process: usize, node: usize, until: Time) {
        let last = self.trouble.entry((process, node)).or_default();
        *last = until.max(*last);
    }

    /// A thread of a process is kept from running.
    pub(crate) fn stalled(&mut self, process: usize, until: Time, span: Time) {
        self.stalls.push((process, until, span));
    }

    /// The world as a process has it at a moment.
    fn seen_by(&self, process: usize, nodes: usize, at: Time, ttl: Time) -> Weather {
        let last = |node| self.trouble.get(&(process, node)).copied().unwrap_or(0);
        let recent = |(of, until, _): &&(usize, Time, Time)| *of == process && *until + ttl >= at;
        let stalled = self.stalls.iter().filter(recent).map(|(_, _, span)| span).sum();
        let ever_stalled = self.stalls.iter().any(|(of, _, _)| *of == process);
        Weather { at, usual: self.usual, trouble: (0..nodes).map(last).collect(), stalled, ever_stalled }
    }
}

/// From when until when a node kept a lock for its holder, the last time that it did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kept {
    from: Time,
    until: Time,
}

impl Kept {
    pub(crate) fn seen(&mut self, kept: bool, now: Time) {
        match (kept, self.until == NEVER) {
            (true, false) => *self = Kept { from: now, until: NEVER },
            (false, true) => self.until = now,
            _ => {}
        }
    }
}

/// What was wrong for a process, as of a moment.
#[derive(Clone, Debug)]
pub(crate) struct Weather {
    pub(crate) at: Time,
    usual: Time,
    /// For each node, when something was last wrong with it or with the way to it.
    trouble: Vec<Time>,
    /// For how long, in all, threads of the process were kept from running within the longest lease.
    stalled: Time,
    ever_stalled: bool,
}

impl Weather {
    /// Whether a lease that was wanted until `end` could have been renewed at any time of its length: nothing was wrong
    /// with any node, or with a quorum that had the lock and would have renewed it.
    ///
    /// `patience` is the shortest time for which anything is given.
    pub(crate) fn was_fine(&self, lease: Time, end: Time, patience: Time, kept: &[Kept]) -> bool {
        let quick = TRIPS * self.usual <= lease.min(patience) && STALLED * self.stalled <= lease.min(patience);
        let well = |node: &usize| self.trouble[*node] + lease < end;
        // A renewal is due two thirds of a lease before its end.
        let had = |node: &usize| {
            let Kept { from, until } = kept.get(*node).copied().unwrap_or_default();
            from + lease * 2 / 3 < end && end <= until.saturating_add(lease / 10)
        };
        let nodes = self.trouble.len();
        let quorum = lease >= SILENCE && (0..nodes).filter(well).filter(had).count() > nodes / 2;
        quick && (quorum || (0..nodes).all(|node| well(&node)))
    }

    /// Whether nothing was ever wrong, and nobody late: who was is owed answers, and does not ask for more where others do.
    pub(crate) fn was_always_fine(&self) -> bool {
        !self.ever_stalled && self.trouble.iter().all(|last| *last == 0)
    }
}

impl Sim {
    /// Takes down what is wrong at this moment.
    pub(crate) fn watch(&self) {
        let (now, net, mut calm) = (self.now.get(), self.net.borrow(), self.calm.borrow_mut());
        for (process, links) in net.links.iter().enumerate() {
            let stands_still = self.life(process) != Life::Runs;
            for (node, (link, server)) in links.iter().zip(&net.servers).enumerate() {
                let bad = stands_still || is_bad(link, calm.usual) || is_away(server, now, calm.quarantine);
                let way = (process, node);
                // Until just now, where it has ceased since: nobody looks while nothing happens.
                let was_bad = if bad { !calm.bad.insert(way) } else { calm.bad.remove(&way) };
                if bad || was_bad {
                    calm.trouble(process, node, now);
                }
            }
        }
    }

    pub(crate) fn weather(&self, process: usize, ttl: Time) -> Weather {
        let nodes = self.net.borrow().servers.len();
        self.calm.borrow().seen_by(process, nodes, self.now.get(), ttl)
    }
}

fn is_bad(link: &Link, usual: Time) -> bool {
    link.out_blocked || link.back_blocked || link.most > usual
}

fn is_away(server: &Server, now: Time, quarantine: Time) -> bool {
    let votes_from = server.began + quarantine + AGE_SLACK;
    let waits = quarantine > 0 && server.began > 0 && now < votes_from;
    !server.up || server.stopped || server.fake.mode != Mode::Well || waits
}

/// A lease of 600 ms that was wanted until 1,000 ms, a network that takes up to 300 µs.
#[test]
fn an_excuse_is_what_was_wrong_within_the_lease() {
    let (at, usual) = (SEC, 300 * US);
    let weather = |trouble: &[Time]| Weather { at, usual, trouble: trouble.to_vec(), stalled: 0, ever_stalled: false };
    let always = Kept { from: 0, until: NEVER };
    let fine = |weather: &Weather, kept: &[Kept]| weather.was_fine(600 * MS, at, 50 * MS, kept);
    assert!(fine(&weather(&[399 * MS]), &[]));
    assert!(!fine(&weather(&[400 * MS]), &[always]), "one node, and too late");
    assert!(!fine(&Weather { usual: 3 * MS, ..weather(&[0]) }, &[always]), "too far away");
    assert!(!fine(&Weather { stalled: 61 * MS, ..weather(&[0]) }, &[always]), "it did not run");
    let one_away = weather(&[0, 0, at]);
    assert!(!fine(&one_away, &[always, Kept::default(), always]), "the one that is away was needed");
    assert!(fine(&one_away, &[always, always, Kept::default()]));
    assert!(!fine(&one_away, &[always, Kept { from: 700 * MS, until: NEVER }, always]), "not long enough");
    assert!(!fine(&one_away, &[always, Kept { from: 0, until: 900 * MS }, always]), "it was taken away");
    assert!(!fine(&weather(&[0, at, at]), &[always; 3]), "no quorum");
}
