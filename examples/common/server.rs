//! The Redis server of an example: the one that the environment names, or a private one.

use std::{
    env, fs, io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener},
    path::PathBuf,
    process::Child,
    time::Duration,
};

use distlock::{Config, RedisMgr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use super::{Cleanup, Result, nanos, now, sleep};

const START_TIMEOUT: Duration = Duration::from_secs(15);

/// A server for locks. A private server ends when this value is dropped.
pub(crate) struct Server<'a> {
    /// Several URLs, separated by commas, if the environment names several.
    url: String,
    mgr: RedisMgr,
    private: Option<PrivateServer<'a>>,
}

struct PrivateServer<'a> {
    program: &'static str,
    addr: SocketAddr,
    log: PathBuf,
    /// `None` while the server is down.
    child: Option<Child>,
    cleanup: &'a Cleanup,
    /// Reserves the port; never listens.
    _port: TcpListener,
}

impl<'a> Server<'a> {
    /// The server, or servers, in `DISTLOCK_URL` or `REDIS_URL`; else a private server on a free
    /// port.
    pub(crate) fn from_env_or_start(cleanup: &'a Cleanup) -> Result<Server<'a>> {
        let variables = ["DISTLOCK_URL", "REDIS_URL"];
        match variables.iter().find_map(|name| env::var(name).ok().filter(|url| !url.is_empty())) {
            Some(url) => Server::at(url),
            None => Server::start(cleanup),
        }
    }

    /// Starts a private server and waits until it responds.
    pub(crate) fn start(cleanup: &'a Cleanup) -> Result<Server<'a>> {
        let mut server = Server::spawn(cleanup)?;
        server.wait_until_up()?;
        Ok(server)
    }

    /// Starts several private servers.
    pub(crate) fn start_many(cleanup: &'a Cleanup, count: usize) -> Result<Vec<Server<'a>>> {
        let mut servers = (0..count).map(|_| Server::spawn(cleanup)).collect::<Result<Vec<_>>>()?;
        servers.iter_mut().try_for_each(Server::wait_until_up)?;
        Ok(servers)
    }

    fn spawn(cleanup: &'a Cleanup) -> Result<Server<'a>> {
        let program =
            ["redis-server", "valkey-server"].into_iter().find(|name| is_in_path(name)).ok_or(
                "neither redis-server nor valkey-server is in PATH.\n\
             `make demo` installs one and runs the demo. Or set DISTLOCK_URL to a running server,\n\
             for example DISTLOCK_URL=redis://127.0.0.1:6379",
            )?;
        let (port, addr) = reserve_port()?;
        let log = cleanup.folder().join(format!("server-{}.log", addr.port()));
        let url = format!("redis://{addr}");
        let mgr = RedisMgr::new(Config::new(&url))?;
        let mut private = PrivateServer { program, addr, log, child: None, cleanup, _port: port };
        private.spawn()?;
        Ok(Server { url, mgr, private: Some(private) })
    }

    /// A server that somebody else runs. Fails with a clear message if it does not respond.
    pub(crate) fn at(url: String) -> Result<Server<'a>> {
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

    /// A manager for inspecting this server.
    pub(crate) fn mgr(&self) -> &RedisMgr {
        &self.mgr
    }

    /// The server's address, without a password.
    pub(crate) fn label(&self) -> &str {
        self.mgr.server()
    }

    /// Which server this is, to be printed after "Server: ".
    pub(crate) fn description(&self) -> String {
        let label = self.label();
        match &self.private {
            Some(private) => format!("a private {} on {label}", private.program),
            None if label.contains(", ") => format!("{label} (a quorum, from the environment)"),
            None => format!("{label} (from the environment)"),
        }
    }

    /// The pid of a private server that is running.
    pub(crate) fn pid(&self) -> Option<u32> {
        Some(self.private.as_ref()?.child.as_ref()?.id())
    }

    /// Kills a private server. Its data is lost.
    pub(crate) fn kill(&mut self) {
        if let Some(private) = &mut self.private {
            private.kill();
        }
    }

    /// Starts a killed private server again, without waiting until it responds.
    pub(crate) fn restart(&mut self) -> Result {
        self.private.as_mut().map_or(Ok(()), PrivateServer::spawn)
    }

    /// Whether the server responds. Fails if the process of a private server has ended.
    pub(crate) fn is_up(&mut self) -> Result<bool> {
        if self.mgr.ping().is_ok() {
            return Ok(true);
        }
        if let Some(private) = &mut self.private
            && let Some(child) = &mut private.child
            && let Some(status) = child.try_wait()?
        {
            return Err(private.start_error(&format!("it ended with {status}")).into());
        }
        Ok(false)
    }

    fn wait_until_up(&mut self) -> Result {
        let deadline = now() + nanos(START_TIMEOUT);
        while !self.is_up()? {
            if let Some(private) = &self.private
                && now() > deadline
            {
                return Err(private
                    .start_error(&format!("no reply within {START_TIMEOUT:?}"))
                    .into());
            }
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl PrivateServer<'_> {
    fn spawn(&mut self) -> Result {
        self.child = Some(
            self.cleanup
                .registered_command(self.program)?
                .args(["--bind", "127.0.0.1", "--port", &self.addr.port().to_string()])
                .args(["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir"])
                .arg(self.cleanup.folder())
                .arg("--logfile")
                .arg(&self.log)
                .spawn()?,
        );
        Ok(())
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = self.cleanup.unregister(child.id());
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn start_error(&self, reason: &str) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        format!("{} did not start on {}: {reason}\n{log}", self.program, self.addr)
    }
}

impl Drop for PrivateServer<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns a socket that is bound and never listens. The kernel does not give its port to programs
/// that ask for any free one. A server can still bind the port, because both set `SO_REUSEADDR`.
fn reserve_port() -> io::Result<(TcpListener, SocketAddr)> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    // The standard library has no other type for a bound socket.
    let socket = TcpListener::from(socket);
    let addr = socket.local_addr()?;
    Ok((socket, addr))
}

fn is_in_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).is_file())
}
