//! Sentinels that watch a master and its replicas.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{FromRedisValue, IntoConnectionInfo};
use tempfile::TempDir;

use super::ports::ReservedPort;
use super::redis_server::{RedisServer, program};
use super::server_process::ServerProcess;
use super::watchdog::Watchdog;
use super::{TEST_TIMEOUT, eventually};

/// Time without a reply after which a sentinel considers the master down.
const DOWN_AFTER_MS: u32 = 1_000;

/// A master with replicas, and sentinels that watch them as `main`. They end when this is dropped.
pub struct SentinelGroup {
    sentinels: Vec<Sentinel>,
    /// The first one is the first master.
    pub servers: Vec<RedisServer>,
    /// All of them use TLS among each other, and announce their ports with TLS.
    is_secure: bool,
}

struct Sentinel {
    process: Mutex<Option<ServerProcess>>,
    /// Declared, and so dropped, after the process that uses it.
    _folder: TempDir,
    port: ReservedPort,
    tls_port: ReservedPort,
}

impl SentinelGroup {
    /// Starts a master with `replicas`, and three sentinels, and waits until they know each other.
    pub fn start(replicas: usize) -> SentinelGroup {
        SentinelGroup::start_with(replicas, None)
    }

    /// The same with TLS, with the files `ca.crt`, `server.crt` and `server.key` of this folder.
    pub fn start_with_tls(replicas: usize, folder: &Path) -> SentinelGroup {
        SentinelGroup::start_with(replicas, Some(folder))
    }

    fn start_with(replicas: usize, tls: Option<&Path>) -> SentinelGroup {
        let server = || match tls {
            None => RedisServer::start(),
            Some(folder) => {
                let server = RedisServer::builder().tls(folder, false);
                server.arg("--tls-replication").arg("yes").start()
            }
        };
        let servers: Vec<_> = (0..=replicas).map(|_| server()).collect();
        let master = announced_port(&servers[0], tls.is_some());
        for replica in &servers[1..] {
            replica.cli(&["REPLICAOF", "127.0.0.1", &master]);
        }
        for replica in &servers[1..] {
            eventually("the replica is in sync", TEST_TIMEOUT, || {
                replica.query::<String>(&["INFO", "replication"]).contains("master_link_status:up")
            });
        }
        let sentinels = (0..3).map(|_| Sentinel::start(&master, tls)).collect();
        let group = SentinelGroup { sentinels, servers, is_secure: tls.is_some() };
        for index in 0..group.sentinels.len() {
            eventually("the sentinels know each other", TEST_TIMEOUT, || {
                let state = group.state(index);
                state["num-other-sentinels"] == "2" && state["num-slaves"] == replicas.to_string()
            });
        }
        group
    }

    pub fn url(&self) -> String {
        let address = |sentinel: &Sentinel| {
            let port = if self.is_secure { &sentinel.tls_port } else { &sentinel.port };
            port.addr().to_string()
        };
        let hosts: Vec<_> = self.sentinels.iter().map(address).collect();
        let scheme = if self.is_secure { "rediss" } else { "redis" };
        format!("{scheme}+sentinel://{}/main", hosts.join(","))
    }

    /// What a sentinel knows about the master.
    pub fn state(&self, index: usize) -> HashMap<String, String> {
        self.query(index, &["SENTINEL", "MASTER", "main"])
    }

    /// The server that most sentinels name.
    pub fn master(&self) -> Option<&RedisServer> {
        let named = |server: &&RedisServer| {
            let port = announced_port(server, self.is_secure);
            let running = (0..self.sentinels.len()).filter(|index| self.is_running(*index));
            2 * running.clone().filter(|index| self.state(*index)["port"] == port).count()
                > running.count()
        };
        self.servers.iter().find(named)
    }

    /// Whether any sentinel names another master than this one. The leader of a failover does so
    /// first.
    pub fn names_other_than(&self, former: &RedisServer) -> bool {
        let port = announced_port(former, self.is_secure);
        let names_other = |index: &usize| {
            let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main"];
            let address: Vec<String> = self.query(*index, &words);
            address[1] != port
        };
        (0..self.sentinels.len()).filter(|index| self.is_running(*index)).any(|at| names_other(&at))
    }

    /// Waits until most sentinels name another master than this one.
    pub fn await_other_master(&self, former: &RedisServer) -> &RedisServer {
        let other = || self.master().filter(|master| master.port() != former.port());
        eventually("another master is named", TEST_TIMEOUT, || other().is_some());
        other().expect("it was named just now")
    }

    pub fn stop_sentinel(&self, index: usize) {
        self.sentinels[index].process.lock().as_ref().expect("it runs").stop();
    }

    pub fn kill_sentinel(&self, index: usize) {
        *self.sentinels[index].process.lock() = None;
    }

    fn is_running(&self, index: usize) -> bool {
        self.sentinels[index].process.lock().is_some()
    }

    /// Runs one command on a sentinel.
    pub fn query<T: FromRedisValue>(&self, index: usize, words: &[&str]) -> T {
        let url = format!("redis://{}", self.sentinels[index].port.addr());
        let info = url.into_connection_info().expect("a valid URL");
        // A sentinel knows only a few commands.
        let settings = info.redis_settings().clone().set_skip_set_lib_name();
        let client = redis::Client::open(info.set_redis_settings(settings)).expect("a client");
        let mut result = None;
        eventually("the sentinel answers", TEST_TIMEOUT, || {
            let connection = client.get_connection_with_timeout(Duration::from_secs(20));
            result = connection.ok().and_then(|mut connection| {
                redis::Cmd::new().arg(words).query(&mut connection).ok()
            });
            result.is_some()
        });
        result.expect("it answered")
    }
}

fn announced_port(server: &RedisServer, is_secure: bool) -> String {
    if is_secure { server.tls_addr().port() } else { server.port() }.to_string()
}

impl Sentinel {
    fn start(master_port: &str, tls: Option<&Path>) -> Sentinel {
        let folder = TempDir::with_prefix("distlock-").expect("cannot create a temporary folder");
        let (port, tls_port) = (ReservedPort::new(), ReservedPort::new());
        let path = folder.path().join("sentinel.conf");
        let secured = tls.map_or_else(String::new, |tls| {
            let (port, tls) = (tls_port.addr().port(), tls.display());
            format!(
                "tls-port {port}\ntls-replication yes\ntls-auth-clients no\n\
                 tls-ca-cert-file {tls}/ca.crt\ntls-cert-file {tls}/server.crt\n\
                 tls-key-file {tls}/server.key\n"
            )
        });
        let settings = format!(
            "bind 127.0.0.1\nport {}\ndir {}\n\
             sentinel monitor main 127.0.0.1 {master_port} 2\n\
             sentinel down-after-milliseconds main {DOWN_AFTER_MS}\n\
             sentinel failover-timeout main 10000\n{secured}",
            port.addr().port(),
            folder.path().display(),
        );
        fs::write(&path, settings).expect("cannot write the settings");
        let watchdog = Watchdog::removing(folder.path());
        let mut command = watchdog.guarded_command(&program().0);
        let log = File::create(folder.path().join("log")).expect("cannot create the log");
        command.arg(&path).arg("--sentinel").stdout(log);
        let process = Mutex::new(Some(ServerProcess::spawn(&mut command, watchdog)));
        Sentinel { process, _folder: folder, port, tls_port }
    }
}
