//! The Redis that an example talks to: the one the environment names, or a private one.

use std::{
    env, fs, io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener},
    process::Child,
    time::Duration,
};

use distlock::{Config, RedisMgr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use super::{Outcome, Watchdog, nanos, now, work_for};

const START_LIMIT: Duration = Duration::from_secs(15);

/// A server to take locks on; a private one ends with this value.
pub(crate) struct Server<'a> {
    url: String,
    /// Without a password.
    label: String,
    private: Option<Private<'a>>,
}

struct Private<'a> {
    program: &'static str,
    child: Child,
    watchdog: &'a Watchdog,
    /// Keeps the port ours; it never listens.
    _port: TcpListener,
}

impl<'a> Server<'a> {
    /// The server of `DISTLOCK_URL` or `REDIS_URL`, else a private one on a free port.
    pub(crate) fn find(watchdog: &'a Watchdog) -> Outcome<Server<'a>> {
        match ["DISTLOCK_URL", "REDIS_URL"].iter().find_map(|name| env::var(name).ok().filter(|url| !url.is_empty())) {
            Some(url) => Server::at(url),
            None => Server::private(watchdog),
        }
    }

    /// A private server, whatever the environment says.
    pub(crate) fn private(watchdog: &'a Watchdog) -> Outcome<Server<'a>> {
        let program = ["redis-server", "valkey-server"].into_iter().find(|name| in_path(name)).ok_or(
            "neither redis-server nor valkey-server is in PATH.\n\
             `make demo` installs one and runs the demo; or set DISTLOCK_URL to a server that is running,\n\
             for example DISTLOCK_URL=redis://127.0.0.1:6379",
        )?;
        let (port, addr) = reserve_port()?;
        let log = watchdog.folder().join("server.log");
        let child = watchdog
            .guarded_command(program)?
            .args(["--bind", "127.0.0.1", "--port", &addr.port().to_string()])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir"])
            .arg(watchdog.folder())
            .arg("--logfile")
            .arg(&log)
            .spawn()?;
        let mut private = Private { program, child, watchdog, _port: port };
        let url = format!("redis://{addr}");
        if let Err(reason) = private.wait_ready(&url) {
            let log = fs::read_to_string(&log).unwrap_or_default();
            return Err(format!("{program} did not start on {addr}: {reason}\n{log}").into());
        }
        Ok(Server { url, label: addr.to_string(), private: Some(private) })
    }

    /// A server that somebody else runs. It has to answer, so that one sentence says it if it does not.
    fn at(url: String) -> Outcome<Server<'a>> {
        let mgr = RedisMgr::new(Config::new(&url))?;
        mgr.ping()?;
        Ok(Server { url, label: mgr.server().to_owned(), private: None })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn config(&self) -> Config {
        Config::new(&self.url)
    }

    /// Which server this is, for people.
    pub(crate) fn introduction(&self) -> String {
        match &self.private {
            Some(private) => format!("a private {} on {}", private.program, self.label),
            None => format!("the one at {}, which the environment names", self.label),
        }
    }
}

impl Private<'_> {
    fn wait_ready(&mut self, url: &str) -> Outcome {
        let mgr = RedisMgr::new(Config::new(url))?;
        let deadline = now() + nanos(START_LIMIT);
        loop {
            match mgr.ping() {
                Ok(_) => return Ok(()),
                Err(error) if now() > deadline => return Err(error.into()),
                Err(_) => {}
            }
            if let Some(status) = self.child.try_wait()? {
                return Err(format!("it ended with {status}").into());
            }
            work_for(Duration::from_millis(5));
        }
    }
}

impl Drop for Private<'_> {
    fn drop(&mut self) {
        let _ = self.watchdog.forget(self.child.id());
        let _ = self.child.kill();
        let _ = self.child.wait();
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
