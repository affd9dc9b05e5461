//! Runs a real Redis or Valkey server for one test, in its own folder and on its own port.

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{ErrorKind, FromRedisValue, IntoConnectionInfo, ProtocolVersion, ServerErrorKind};
use tempfile::TempDir;

use super::monitor::Monitor;
use super::ports::ReservedPort;
use super::server_process::ServerProcess;
use super::watchdog::Watchdog;
use super::{POLL, TEST_TIMEOUT, eventually, resp};

/// The time limit for one command of this module, which fails on a stopped server.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(20);

/// The server program, and whether it disables `DEBUG` and protected settings by default.
pub(crate) fn program() -> &'static (String, bool) {
    &program_and_version().0
}

/// The version of Redis that the server program is compatible with, and at least 7.2 for Valkey.
pub(crate) fn version() -> (u32, u32) {
    program_and_version().1
}

fn program_and_version() -> &'static ((String, bool), (u32, u32)) {
    static PROGRAM: OnceLock<((String, bool), (u32, u32))> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = env::var("DISTLOCK_TEST_SERVER").ok().or_else(|| {
            let path = env::var_os("PATH").unwrap_or_default();
            ["redis-server", "valkey-server"]
                .into_iter()
                .find(|name| env::split_paths(&path).any(|dir| dir.join(name).is_file()))
                .map(str::to_owned)
        });
        let program = program
            .expect("neither redis-server nor valkey-server is in PATH; `make test` installs one");
        let output = Command::new(&program).arg("--version").output();
        let output = output.unwrap_or_else(|error| {
            panic!("cannot run {program} ({error}); `make test` installs a server")
        });
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        let numbers = version.split_once("v=").and_then(|(_, rest)| {
            let mut numbers = rest.split('.').map(|number| number.parse::<u32>().ok());
            Some((numbers.next()??, numbers.next()??))
        });
        let numbers =
            numbers.unwrap_or_else(|| panic!("unknown version of {program}: {version:?}"));
        let protects = version.starts_with("Valkey") || numbers >= (7, 0);
        ((program, protects), numbers)
    })
}

/// The settings of a server to start; created by [`RedisServer::builder`].
#[derive(Default)]
pub struct RedisServerBuilder {
    args: Vec<String>,
    password: Option<String>,
    append_only: bool,
    unix_socket: bool,
    tls_port: Option<ReservedPort>,
    is_node: bool,
    /// Port for the other nodes of its cluster, if it can be chosen.
    bus_port: Option<ReservedPort>,
}

impl RedisServerBuilder {
    /// Makes the server a node of a cluster, which has no slots yet.
    pub fn cluster(mut self, node_timeout_ms: &str) -> Self {
        let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", node_timeout_ms];
        self.args.extend(args.map(str::to_owned));
        // Before Redis 7, it is the port of the server plus 10,000.
        if version() >= (7, 0) {
            let port = ReservedPort::new();
            self.args.extend(["--cluster-port".to_owned(), port.addr().port().to_string()]);
            self.bus_port = Some(port);
        }
        self.is_node = true;
        self
    }

    /// Adds one argument to the server's command line.
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Makes the server write every change to disk before it replies.
    pub fn durable(self) -> Self {
        self.append_only(true).arg("--appendfsync").arg("always")
    }

    pub fn append_only(mut self, on: bool) -> Self {
        self.append_only = on;
        self
    }

    /// Makes the server listen on a socket file too; see [`RedisServer::unix_url`].
    pub fn unix_socket(mut self) -> Self {
        self.unix_socket = true;
        self
    }

    /// Makes the server listen on a port with TLS too, with the files `ca.crt`, `server.crt` and
    /// `server.key` of this folder; see [`RedisServer::tls_addr`].
    pub fn tls(mut self, folder: &Path, asks_clients: bool) -> Self {
        let port = ReservedPort::new();
        let file = |name: &str| folder.join(name).display().to_string();
        let args = [
            ["--tls-port", &port.addr().port().to_string()],
            ["--tls-ca-cert-file", &file("ca.crt")],
            ["--tls-cert-file", &file("server.crt")],
            ["--tls-key-file", &file("server.key")],
            ["--tls-auth-clients", if asks_clients { "yes" } else { "no" }],
        ];
        self.args.extend(args.concat().into_iter().map(str::to_owned));
        self.tls_port = Some(port);
        self
    }

    pub fn start(mut self) -> RedisServer {
        // The port for other nodes must exist, and no other program may have it.
        let mut port = ReservedPort::new();
        while self.is_node && self.bus_port.is_none() {
            self.bus_port = port.addr().port().checked_add(10_000).and_then(ReservedPort::at);
            if self.bus_port.is_none() {
                port = ReservedPort::new();
            }
        }
        let server = RedisServer {
            settings: self,
            folder: TempDir::with_prefix("distlock-").expect("cannot create a temporary folder"),
            port,
            running: Mutex::new(None),
            own_commands: AtomicU64::new(0),
        };
        server.launch();
        server
    }
}

/// A running server. It ends when this is dropped, and also when the test process dies.
pub struct RedisServer {
    settings: RedisServerBuilder,
    /// Declared, and so dropped, before the folder and the port that the server uses.
    running: Mutex<Option<ServerProcess>>,
    folder: TempDir,
    port: ReservedPort,
    /// The number of commands that this type has sent, which tests do not want to count.
    own_commands: AtomicU64,
}

impl RedisServer {
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// Whether servers have sharded channels.
    pub fn has_sharded_channels() -> bool {
        version() >= (7, 0)
    }

    pub fn builder() -> RedisServerBuilder {
        RedisServerBuilder::default()
    }

    pub fn url(&self) -> String {
        let login = self.password().map(|password| format!(":{password}@"));
        format!("redis://{}{}", login.unwrap_or_default(), self.addr())
    }

    /// The URL of the socket file. The server must have been built with `unix_socket`.
    pub fn unix_url(&self) -> String {
        let login = self.password().map(|password| format!("?pass={password}"));
        let path = self.socket_path();
        format!("unix://{}{}", path.display(), login.unwrap_or_default())
    }

    pub fn socket_path(&self) -> PathBuf {
        assert!(self.settings.unix_socket, "built without a socket file");
        self.folder.path().join("redis.sock")
    }

    /// The address of the port with TLS.
    pub fn tls_addr(&self) -> SocketAddr {
        self.settings.tls_port.as_ref().expect("a server with TLS").addr()
    }

    pub fn port(&self) -> u16 {
        self.addr().port()
    }

    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// The command that makes another node meet this one.
    pub(crate) fn meet(&self) -> Vec<String> {
        let mut words = ["CLUSTER", "MEET", "127.0.0.1"].map(str::to_owned).to_vec();
        words.push(self.port().to_string());
        words.extend(self.settings.bus_port.iter().map(|bus| bus.addr().port().to_string()));
        words
    }

    pub fn is_running(&self) -> bool {
        self.running.lock().is_some()
    }

    pub fn pid(&self) -> u32 {
        self.with_process(|process| process.id())
    }

    /// Freezes the server: its connections stay open, and it answers nothing.
    pub fn stop(&self) {
        self.with_process(ServerProcess::stop);
    }

    pub fn cont(&self) {
        self.with_process(ServerProcess::cont);
    }

    /// Kills the server, which has no chance to save data or close connections, and waits until it
    /// has ended.
    pub fn kill(&self) {
        *self.running.lock() = None;
    }

    /// Kills the server and starts it again on the same port, with the data that it had on disk.
    pub fn restart(&self) {
        self.kill();
        self.launch();
    }

    /// Kills the server and starts it again on the same port, without any data.
    pub fn restart_empty(&self) {
        self.kill();
        fs::remove_dir_all(self.data()).expect("cannot delete the data");
        self.launch();
    }

    pub fn config_set(&self, name: &str, value: &str) {
        self.query::<()>(&["CONFIG", "SET", name, value]);
    }

    /// Runs one command on a new connection.
    #[track_caller]
    pub fn cli(&self, words: &[&str]) -> redis::Value {
        self.query(words)
    }

    /// Runs one command on a new connection and converts its reply.
    #[track_caller]
    pub fn query<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let reply = self.connect().and_then(|mut admin| self.run(&mut admin, words));
        reply.unwrap_or_else(|error| panic!("{words:?} failed: {error}\n{}", self.log()))
    }

    /// Runs one command on a new connection. Its error is not a failure of the test.
    pub fn try_query<T: FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        self.connect().and_then(|mut admin| self.run(&mut admin, words))
    }

    /// The fields of `CLIENT LIST` for all connections except its own.
    pub fn clients(&self) -> Vec<HashMap<String, String>> {
        let mut admin = self.connect().expect("cannot connect");
        let own: u64 = self.run(&mut admin, &["CLIENT", "ID"]).expect("CLIENT ID");
        let list: String = self.run(&mut admin, &["CLIENT", "LIST"]).expect("CLIENT LIST");
        let pairs = |line: &str| {
            let fields = line.split(' ').filter_map(|field| field.split_once('='));
            fields.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
        };
        let clients = list.lines().map(pairs);
        clients.filter(|client: &HashMap<_, _>| client["id"] != own.to_string()).collect()
    }

    /// Waits until the number of connections, without its own, is in the range `many`.
    ///
    /// A closed connection can stay open for a moment: a child process that another test is just
    /// starting has inherited its socket, and keeps it until `exec`.
    #[track_caller]
    pub fn await_clients(&self, many: RangeInclusive<usize>) {
        eventually(&format!("{many:?} are connected"), TEST_TIMEOUT, || {
            many.contains(&self.clients().len())
        });
    }

    /// Closes the connections that match `filter`, such as `["TYPE", "pubsub"]`, or all connections
    /// if it is empty. Returns their number.
    pub fn kill_clients(&self, filter: &[&str]) -> i64 {
        self.query(&[&["CLIENT", "KILL"], filter, &["SKIPME", "yes"]].concat())
    }

    /// The number of commands run so far, including those in scripts, but without the commands that
    /// this type has sent.
    pub fn commands_processed(&self) -> u64 {
        let mut admin = self.connect().expect("cannot connect");
        let own = self.own_commands.load(Ordering::SeqCst);
        let info: String = self.run(&mut admin, &["INFO", "stats"]).expect("INFO");
        let all: u64 = field(&info, "total_commands_processed").parse().expect("a number");
        all.saturating_sub(own)
    }

    /// The number of calls of a command, including calls by this type. The name must be in lower
    /// case.
    pub fn calls(&self, command: &str) -> u64 {
        self.commandstats().get(command).copied().unwrap_or(0)
    }

    /// The number of calls of each command that has been called.
    pub fn commandstats(&self) -> BTreeMap<String, u64> {
        let info: String = self.query(&["INFO", "commandstats"]);
        let lines = info.lines().filter_map(|line| line.strip_prefix("cmdstat_"));
        lines
            .map(|line| {
                let (name, numbers) = line.split_once(":calls=").expect("no count of calls");
                let calls = numbers.split(',').next().expect("split returns at least one item");
                (name.to_owned(), calls.parse().expect("a number"))
            })
            .collect()
    }

    /// The number of errors with this code that the server has returned.
    pub fn refusals(&self, code: &str) -> u32 {
        let errors: String = self.query(&["INFO", "errorstats"]);
        let count = format!("errorstat_{code}:count=");
        errors
            .lines()
            .find_map(|line| line.strip_prefix(&count))
            .map_or(0, |count| count.parse().expect("a number"))
    }

    /// The server's run id, which changes with every start.
    pub fn run_id(&self) -> String {
        field(&self.query::<String>(&["INFO", "server"]), "run_id").to_owned()
    }

    /// The names of all keys, sorted.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.query(&["KEYS", "*"]);
        keys.sort();
        keys
    }

    /// Records every command that the server runs from now on.
    pub fn monitor(&self) -> Monitor {
        let mut greetings = 1;
        let mut hello = Vec::new();
        if let Some(password) = &self.settings.password {
            greetings += 1;
            hello.extend(resp::request(&["AUTH", password]));
        }
        hello.extend(resp::request(&["MONITOR"]));
        self.own_commands.fetch_add(greetings, Ordering::SeqCst);
        Monitor::start(self.addr(), &hello, greetings)
    }

    /// The server's log, from its first start on.
    pub fn log(&self) -> String {
        let log = fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    fn password(&self) -> Option<String> {
        self.settings.password.as_deref().map(percent_encoded)
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    fn with_process<T>(&self, act: impl Fn(&ServerProcess) -> T) -> T {
        act(self.running.lock().as_ref().expect("the server was killed"))
    }

    fn launch(&self) {
        fs::create_dir_all(self.data()).expect("cannot create the data folder");
        self.own_commands.store(0, Ordering::SeqCst);
        let mut running = self.running.lock();
        let running = running.insert(self.spawn());
        if let Err(reason) = self.wait_ready(running) {
            panic!("the server did not start: {reason}\n{}", self.log());
        }
    }

    fn spawn(&self) -> ServerProcess {
        let (program, protects) = program();
        let log = File::options().create(true).append(true).open(self.log_path());
        let watchdog = Watchdog::removing(self.folder.path());
        let mut command = watchdog.guarded_command(program);
        command
            .args(["--bind", "127.0.0.1", "--port", &self.port().to_string()])
            .args(["--save", "", "--daemonize", "no", "--dir"])
            .arg(self.data())
            .args(["--appendonly", if self.settings.append_only { "yes" } else { "no" }]);
        if *protects {
            command.args(["--enable-debug-command", "yes"]);
            command.args(["--enable-protected-configs", "yes"]);
        }
        if let Some(password) = &self.settings.password {
            command.args(["--requirepass", password]);
        }
        if self.settings.unix_socket {
            command.arg("--unixsocket").arg(self.socket_path());
        }
        command.args(&self.settings.args).stderr(log.expect("cannot open the log"));
        ServerProcess::spawn(&mut command, watchdog)
    }

    fn wait_ready(&self, process: &mut ServerProcess) -> Result<(), String> {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            if let Some(status) = process.ended() {
                return Err(format!("it ended with {status}"));
            }
            let info = self.connect().and_then(|mut admin| {
                self.run::<()>(&mut admin, &["PING"])?;
                self.run::<String>(&mut admin, &["INFO", "server"])
            });
            match info {
                Ok(info) if field(&info, "process_id") == process.id().to_string() => return Ok(()),
                Ok(info) => return Err(format!("another server answers on the port:\n{info}")),
                Err(error) if Instant::now() > deadline => return Err(error.to_string()),
                // The server checks the password even while it loads its data, so retrying here
                // cannot hide a wrong password.
                Err(error)
                    if error.is_io_error()
                        || error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading) =>
                {
                    thread::sleep(POLL);
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    fn connect(&self) -> redis::RedisResult<redis::Connection> {
        let info = self.url().into_connection_info()?;
        // By default, the client sends more commands at the start, which would change the counts.
        let settings = info.redis_settings().clone();
        let settings = settings.set_skip_set_lib_name().set_protocol(ProtocolVersion::RESP2);
        let client = redis::Client::open(info.set_redis_settings(settings))?;
        let connection = client.get_connection_with_timeout(ADMIN_TIMEOUT)?;
        connection.set_read_timeout(Some(ADMIN_TIMEOUT))?;
        connection.set_write_timeout(Some(ADMIN_TIMEOUT))?;
        let logins = u64::from(self.settings.password.is_some());
        self.own_commands.fetch_add(logins, Ordering::SeqCst);
        Ok(connection)
    }

    fn run<T: FromRedisValue>(
        &self,
        admin: &mut redis::Connection,
        words: &[&str],
    ) -> redis::RedisResult<T> {
        let mut command = redis::Cmd::new();
        command.arg(words);
        let reply = command.query(admin)?;
        self.own_commands.fetch_add(1, Ordering::SeqCst);
        Ok(reply)
    }
}

fn field<'a>(info: &'a str, name: &str) -> &'a str {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    let found = info.lines().find_map(value);
    found.unwrap_or_else(|| panic!("no field {name} in {info}"))
}

fn percent_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}
