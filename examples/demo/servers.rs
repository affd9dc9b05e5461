//! The servers of a demo: those of the lock, and the one of the resource.

use std::{env, time::Duration};

use distlock::{Config, LockManager, RedisMgr};

use super::{LOCK, args::Options, database::Database, node_status::LockView, resource::Resource};
use crate::common::{Cleanup, Result, Server};

pub(crate) struct Servers<'a> {
    /// Several private nodes, or one server; empty if the lock is in a database.
    locks: Vec<Server<'a>>,
    /// The server of the resource, if the nodes are killed.
    resource: Option<Server<'a>>,
    database: Option<Database>,
}

impl<'a> Servers<'a> {
    /// Starts private servers for several nodes and one for the resource. If there is one server,
    /// uses the one of the options or the environment, else a private one.
    pub(crate) fn start(options: &Options, cleanup: &'a Cleanup) -> Result<Servers<'a>> {
        if options.nodes > 0 {
            let mut locks = Server::start_many(cleanup, options.nodes + 1)?;
            let resource = locks.pop();
            return Ok(Servers { locks, resource, database: None });
        }
        let url = options.url.clone().or_else(|| env::var("DISTLOCK_URL").ok());
        let url_of_database = url.filter(|url| Database::is_url(url));
        let (mut locks, mut database) = (Vec::new(), None);
        if options.mysql || url_of_database.is_some() {
            database = Some(Database::find_or_start(url_of_database)?);
        } else if let Some(url) = &options.url {
            locks.push(Server::at(url.clone())?);
        } else {
            locks.push(Server::from_env_or_start(cleanup)?);
        }
        Ok(Servers { locks, resource: None, database })
    }

    pub(crate) fn has_database(&self) -> bool {
        self.database.is_some()
    }

    pub(crate) fn description(&self, ttl: Duration) -> String {
        if let Some(database) = &self.database {
            return format!("Server: {}\n", database.description());
        }
        if self.resource.is_none() {
            return format!("Server: {}\n", self.locks[0].description());
        }
        let nodes = self.locks.len();
        format!(
            "{nodes} private servers: a process needs the votes of {} of them to hold the lock.\n\
             Two servers are killed and come back without their data. Such a server may have\n\
             forgotten that it granted the lock, so its vote does not count until the longest ttl\n\
             has passed. At first all servers are in this quarantine: the first lock is granted\n\
             after {ttl:?}.\n",
            nodes / 2 + 1
        )
    }

    /// The nodes, if there are several.
    pub(crate) fn nodes(&mut self) -> &mut [Server<'a>] {
        if self.resource.is_some() { &mut self.locks } else { &mut [] }
    }

    /// All URLs, in the format of `DISTLOCK_URL`.
    pub(crate) fn url(&self) -> String {
        if let Some(database) = &self.database {
            return database.url().to_owned();
        }
        self.locks.iter().map(Server::url).collect::<Vec<_>>().join(",")
    }

    /// The environment variables for a child.
    pub(crate) fn environment(&self) -> impl Iterator<Item = (&'static str, String)> {
        let resource =
            self.resource.as_ref().map(|server| (Resource::URL_VARIABLE, server.url().to_owned()));
        [("DISTLOCK_URL", self.url())].into_iter().chain(resource)
    }

    pub(crate) fn resource(&self, key: &str) -> Result<Resource> {
        if let Some(database) = &self.database {
            return Resource::in_database(database.url(), key);
        }
        Ok(Resource::new(self.resource.as_ref().unwrap_or(&self.locks[0]).mgr(), key))
    }

    /// What each node reports about the lock; `None` for a node that is down.
    pub(crate) fn views(&self) -> Vec<Option<LockView>> {
        let view = |server: &Server<'_>| {
            server.pid()?;
            let holder = server.mgr().holder(LOCK).ok()?;
            let Some(holder) = holder else { return Some(LockView::default()) };
            Some(LockView { holder: holder.pid(), waiters: holder.waiters().unwrap_or(0) })
        };
        if self.resource.is_some() { self.locks.iter().map(view).collect() } else { Vec::new() }
    }

    /// The holder of the lock, for an error message.
    pub(crate) fn holder(&self) -> String {
        let holder = match &self.database {
            Some(database) => LockManager::holder(database.mgr(), LOCK),
            None => RedisMgr::new(Config::new(self.url())).and_then(|mgr| mgr.holder(LOCK)),
        };
        match holder {
            Ok(Some(holder)) => format!("the lock is held by {holder}"),
            Ok(None) => "the lock is free".to_owned(),
            Err(error) => error.to_string(),
        }
    }
}
