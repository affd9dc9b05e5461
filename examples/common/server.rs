//! The Redis that an example talks to: the one the environment names, or private ones.

use std::{
    env, fs, io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener},
    path::PathBuf,
    process::Child,
    time::Duration,
};

use distlock::{Config, RedisMgr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use super::{Outcome, Watchdog, nanos, now, work_for};

const START_LIMIT: Duration = Duration::from_secs(15);

/// A server to take locks on; a private one ends with this value.
pub(crate) struct Server<'a> {
    /// Several, with commas in between, where the environment names several.
    url: String,
    mgr: RedisMgr,
    private: Option<Private<'a>>,
}

struct Private<'a> {
    program: &'static str,
    addr: SocketAddr,
    log: PathBuf,
    /// Empty while it is down.
    child: Option<Child>,
    watchdog: &'a Watchdog,
    /// Keeps the port ours; it never listens.
    _port: TcpListener,
}

impl<'a> Server<'a> {
    /// The server, or servers, of `DISTLOCK_URL` or `REDIS_URL`, else a private one on a free port.
    pub(crate) fn find(watchdog: &'a Watchdog) -> Outcome<Server<'a>> {
        match ["DISTLOCK_URL", "REDIS_URL"].iter().find_map(|name| env::var(name).ok().filter(|url| !url.is_empty())) {
            Some(url) => Server::at(url),
            None => Server::private(watchdog),
        }
    }

    /// A private server, whatever the environment says.
    pub(crate) fn private(watchdog: &'a Watchdog) -> Outcome<Server<'a>> {
        let mut server = Server::launch(watchdog)?;
        server.wait_ready()?;
        Ok(server)
    }

    /// So many private servers.
    pub(crate) fn several(watchdog: &'a Watchdog, count: usize) -> Outcome<Vec<Server<'a>>> {
        let mut servers = (0..count).map(|_| Server::launch(watchdog)).collect::<Outcome<Vec<_>>>()?;
        servers.iter_mut().try_for_each(Server::wait_ready)?;
        Ok(servers)
    }

    fn launch(watchdog: &'a Watchdog) -> Outcome<Server<'a>> {
        let program = ["redis-server", "valkey-server"].into_iter().find(|name| in_path(name)).ok_or(
            "neither redis-server nor valkey-server is in PATH.\n\
             `make demo` installs one and runs the demo; or set DISTLOCK_URL to a server that is running,\n\
             for example DISTLOCK_URL=redis://127.0.0.1:6379",
        )?;
        let (port, addr) = reserve_port()?;
        let log = watchdog.folder().join(format!("server-{}.log", addr.port()));
        let url = format!("redis://{addr}");
        let mgr = RedisMgr::new(Config::new(&url))?;
        let mut private = Private { program, addr, log, child: None, watchdog, _port: port };
        private.start()?;
        Ok(Server { url, mgr, private: Some(private) })
    }

    /// A server that somebody else runs. It has to answer, so that one sentence says it if it does not.
    fn at(url: String) -> Outcome<Server<'a>> {
        let mgr = RedisMgr::new(Config::new(&url))?;
        mgr.ping()?;
        Ok(Server { url, mgr, private: None })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn config(&self) -> Config {
        Config::new(&self.url)
    }

    /// For looks at this server.
    pub(crate) fn mgr(&self) -> &RedisMgr {
        &self.mgr
    }

    /// Its address, without a password.
    pub(crate) fn label(&self) -> &str {
        self.mgr.server()
    }

    /// Which server this is, for people.
    pub(crate) fn introduction(&self) -> String {
        let label = self.label();
        match &self.private {
            Some(private) => format!("a private {} on {label}", private.program),
            None if label.contains(", ") => format!("a quorum of {label}, which the environment names"),
            None => format!("the one at {label}, which the environment names"),
        }
    }

    /// The process of a private one that is running.
    pub(crate) fn pid(&self) -> Option<u32> {
        Some(self.private.as_ref()?.child.as_ref()?.id())
    }

    /// Ends a private one, which forgets all it knew.
    pub(crate) fn kill(&mut self) {
        if let Some(private) = &mut self.private {
            private.kill();
        }
    }

    /// Starts a private one that has been killed, without waiting until it answers.
    pub(crate) fn restart(&mut self) -> Outcome {
        self.private.as_mut().map_or(Ok(()), Private::start)
    }

    /// Whether it answers.
    pub(crate) fn is_up(&mut self) -> Outcome<bool> {
        if self.mgr.ping().is_ok() {
            return Ok(true);
        }
        if let Some(private) = &mut self.private
            && let Some(child) = &mut private.child
            && let Some(status) = child.try_wait()?
        {
            return Err(private.failure(&format!("it ended with {status}")).into());
        }
        Ok(false)
    }

    fn wait_ready(&mut self) -> Outcome {
        let deadline = now() + nanos(START_LIMIT);
        while !self.is_up()? {
            if let Some(private) = &self.private
                && now() > deadline
            {
                return Err(private.failure(&format!("no answer within {START_LIMIT:?}")).into());
            }
            work_for(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Private<'_> {
    fn start(&mut self) -> Outcome {
        self.child = Some(
            self.watchdog
                .guarded_command(self.program)?
                .args(["--bind", "127.0.0.1", "--port", &self.addr.port().to_string()])
                .args(["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir"])
                .arg(self.watchdog.folder())
                .arg("--logfile")
                .arg(&self.log)
                .spawn()?,
        );
        Ok(())
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = self.watchdog.forget(child.id());
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn failure(&self, reason: &str) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        format!("{} did not start on {}: {reason}\n{log}", self.program, self.addr)
    }
}

impl Drop for Private<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A socket that is bound and never listens. The kernel gives its port to nobody who asks for any free one, but lets
/// a server bind it, since both set `SO_REUSEADDR`.
fn reserve_port() -> io::Result<(TcpListener, SocketAddr)> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    // Only the type that the standard library has for a bound socket.
    let socket = TcpListener::from(socket);
    let addr = socket.local_addr()?;
    Ok((socket, addr))
}

fn in_path(program: &str) -> bool {
    env::split_paths(&env::var_os("PATH").unwrap_or_default()).any(|folder| folder.join(program).is_file())
}
