//! The servers of a demo: those of the lock, and that of what the lock protects.

use std::time::Duration;

use distlock::{Config, RedisMgr};

use super::{LOCK, nodes::View, resource::Resource};
use crate::common::{Outcome, Server, Watchdog};

pub(crate) struct Servers<'a> {
    /// Those of several private nodes, or one.
    locks: Vec<Server<'a>>,
    /// Where the nodes are killed, what the lock protects lives elsewhere.
    resource: Option<Server<'a>>,
}

impl<'a> Servers<'a> {
    /// So many private ones and one more, or else the one that is there.
    pub(crate) fn start(nodes: usize, watchdog: &'a Watchdog) -> Outcome<Servers<'a>> {
        if nodes == 0 {
            return Ok(Servers { locks: vec![Server::find(watchdog)?], resource: None });
        }
        let mut locks = Server::several(watchdog, nodes + 1)?;
        let resource = locks.pop();
        Ok(Servers { locks, resource })
    }

    pub(crate) fn introduction(&self, ttl: Duration) -> String {
        if self.resource.is_none() {
            return format!("The server is {}.\n", self.locks[0].introduction());
        }
        let nodes = self.locks.len();
        format!(
            "{nodes} private servers decide: whoever has the votes of {} of them holds the lock. Two are killed on the way, and\n\
             come back. A server without memory may have forgotten to whom it gave the lock, so it does not vote before\n\
             the longest lease has passed. All are in this quarantine at first: the first lock is given after {ttl:?}.\n",
            nodes / 2 + 1
        )
    }

    /// The nodes, as long as they are several.
    pub(crate) fn nodes(&mut self) -> &mut [Server<'a>] {
        if self.resource.is_some() { &mut self.locks } else { &mut [] }
    }

    /// All URLs, as `DISTLOCK_URL` takes them.
    pub(crate) fn url(&self) -> String {
        self.locks.iter().map(Server::url).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn config(&self) -> Config {
        Config::new(self.url())
    }

    /// What a child finds in its environment.
    pub(crate) fn environment(&self) -> impl Iterator<Item = (&'static str, String)> {
        let resource = self.resource.as_ref().map(|server| (Resource::SERVER, server.url().to_owned()));
        [("DISTLOCK_URL", self.url())].into_iter().chain(resource)
    }

    pub(crate) fn resource(&self, key: &str) -> Resource {
        Resource::new(self.resource.as_ref().unwrap_or(&self.locks[0]).mgr(), key)
    }

    /// What each node says about the lock. Those that are down are not asked.
    pub(crate) fn views(&self) -> Vec<Option<View>> {
        let view = |server: &Server<'_>| {
            server.pid()?;
            let holder = server.mgr().holder(LOCK).ok()?;
            let Some(holder) = holder else { return Some(View::default()) };
            Some(View { holder: holder.pid(), waiters: holder.waiters().unwrap_or(0) })
        };
        if self.resource.is_some() { self.locks.iter().map(view).collect() } else { Vec::new() }
    }

    /// Who holds the lock, as a sentence.
    pub(crate) fn holder(&self) -> String {
        match RedisMgr::new(self.config()).and_then(|mgr| mgr.holder(LOCK)) {
            Ok(Some(holder)) => format!("the lock is held by {holder}"),
            Ok(None) => "the lock is free".to_owned(),
            Err(error) => error.to_string(),
        }
    }
}
