//! Runs a real MariaDB or MySQL server for one test, in its own folder and on its own port.

use std::env;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use mysql::prelude::Queryable;
use mysql::{Conn, OptsBuilder, Value};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::process::getuid;
use tempfile::TempDir;

use super::ports::ReservedPort;
use super::server_process::ServerProcess;
use super::watchdog::Watchdog;
use super::{POLL, TEST_TIMEOUT, eventually, eventually_some};

/// The database of the tests. It exists on every server.
const DATABASE: &str = "distlock_test";

/// The time limit for one answer in this module, which fails on a stopped server.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MySqlKind {
    MariaDb,
    MySql,
}

/// The kinds of server on which a test runs: always MariaDB, and MySQL if `MYSQLD` names one.
pub fn mysql_servers() -> Vec<MySqlServerBuilder> {
    let mysql = env::var_os("MYSQLD").map(|_| MySqlServer::builder_of(MySqlKind::MySql));
    [MySqlServer::builder()].into_iter().chain(mysql).collect()
}

/// The settings of a server to start; created by [`MySqlServer::builder`].
pub struct MySqlServerBuilder {
    kind: MySqlKind,
    args: Vec<String>,
}

impl MySqlServerBuilder {
    /// Adds one argument to the server's command line.
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn start(self) -> MySqlServer {
        let folder = TempDir::with_prefix("distlock-").expect("cannot create a temporary folder");
        let server = MySqlServer {
            settings: self,
            folder,
            port: ReservedPort::new(),
            running: Mutex::new(None),
        };
        server.launch();
        server
    }
}

/// A running server. It ends when this is dropped, and also when the test process dies.
pub struct MySqlServer {
    settings: MySqlServerBuilder,
    /// Declared, and so dropped, before the folder and the port that the server uses.
    running: Mutex<Option<ServerProcess>>,
    folder: TempDir,
    port: ReservedPort,
}

impl MySqlServer {
    /// Starts a MariaDB.
    pub fn start() -> Self {
        Self::builder().start()
    }

    pub fn builder() -> MySqlServerBuilder {
        Self::builder_of(MySqlKind::MariaDb)
    }

    fn builder_of(kind: MySqlKind) -> MySqlServerBuilder {
        MySqlServerBuilder { kind, args: Vec::new() }
    }

    pub fn kind(&self) -> MySqlKind {
        self.settings.kind
    }

    /// The URL for root, who may do everything and has no password.
    pub fn url(&self) -> String {
        url(self.addr())
    }

    /// Creates a user who may do everything in the database of the tests, and returns the URL for
    /// that user. Name and password must need no escapes.
    pub fn create_user(&self, name: &str, password: &str) -> String {
        self.execute(&format!(
            "CREATE USER '{name}'@'127.0.0.1' IDENTIFIED BY '{password}';
             GRANT ALL ON {DATABASE}.* TO '{name}'@'127.0.0.1'"
        ));
        format!("mysql://{name}:{password}@{}/{DATABASE}", self.addr())
    }

    pub fn port(&self) -> u16 {
        self.addr().port()
    }

    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    pub fn pid(&self) -> u32 {
        self.with_process(ServerProcess::id)
    }

    /// Freezes the server: its connections stay open, and it answers nothing.
    pub fn stop(&self) {
        self.with_process(ServerProcess::stop);
    }

    pub fn cont(&self) {
        self.with_process(ServerProcess::cont);
    }

    /// Kills the server, which has no chance to close connections, and waits until it has ended.
    pub fn kill(&self) {
        *self.running.lock() = None;
    }

    /// Lets the server shut down in order, and waits until it has ended.
    pub fn shut_down(&self) {
        self.running.lock().take().expect("the server was killed").terminate();
    }

    /// Kills the server, unless it has been shut down, and starts it again on the same port, with
    /// all data that was committed.
    pub fn restart(&self) {
        self.kill();
        self.launch();
    }

    /// Opens a connection of root. Each answer has a time limit.
    #[track_caller]
    pub fn connect(&self) -> Conn {
        self.try_connect().unwrap_or_else(|error| panic!("{error}\n{}", self.log()))
    }

    /// Runs statements, separated by semicolons, on a new connection. Returns the rows of all
    /// answers as text, with `NULL` for null.
    #[track_caller]
    pub fn execute(&self, sql: &str) -> Vec<Vec<String>> {
        let rows = self.try_connect().and_then(|mut connection| {
            let mut answers = connection.query_iter(sql)?;
            let mut rows = Vec::new();
            while let Some(answer) = answers.iter() {
                for row in answer {
                    rows.push(row?.unwrap().into_iter().map(text).collect());
                }
            }
            Ok(rows)
        });
        rows.unwrap_or_else(|error: mysql::Error| panic!("{sql}: {error}\n{}", self.log()))
    }

    /// The number of statements in the queues for rows. A statement that the server lists as
    /// running may not be in its queue yet.
    #[track_caller]
    pub fn row_waits(&self) -> usize {
        let status = self.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'");
        status[0][1].parse().expect("not a number")
    }

    /// The server's log, from its first start on.
    pub fn log(&self) -> String {
        read(&self.folder.path().join("server.log"))
    }

    fn with_process<T>(&self, act: impl Fn(&ServerProcess) -> T) -> T {
        act(self.running.lock().as_ref().expect("the server was killed"))
    }

    fn launch(&self) {
        let data = self.folder.path().join("data");
        if !data.exists() {
            copy(template(self.kind()), &data);
        }
        let mut running = self.running.lock();
        let running = running.insert(self.spawn(&data));
        if let Err(reason) = self.wait_ready(running) {
            panic!("the server did not start: {reason}\n{}", self.log());
        }
    }

    fn spawn(&self, data: &Path) -> ServerProcess {
        let folder = self.folder.path();
        let log = File::options().create(true).append(true).open(folder.join("server.log"));
        let setup = folder.join("setup.sql");
        let mut statements = format!("CREATE DATABASE IF NOT EXISTS {DATABASE};\n");
        if self.kind() == MySqlKind::MySql {
            // Without name resolution, root@localhost cannot sign in over TCP.
            statements += "CREATE USER IF NOT EXISTS root@127.0.0.1;\n\
                 GRANT ALL ON *.* TO root@127.0.0.1 WITH GRANT OPTION;\n";
        }
        fs::write(&setup, statements).expect("cannot write the statements");
        let watchdog = Watchdog::removing(folder);
        let mut command = watchdog.guarded_command(&program(self.kind()).display().to_string());
        command
            .args(common_args(self.kind(), data))
            .args(["--bind-address=127.0.0.1", "--innodb-buffer-pool-size=32M"])
            .arg(format!("--port={}", self.port()))
            .arg(format!("--socket={}", folder.join("socket").display()))
            .arg(format!("--pid-file={}", folder.join("pid").display()))
            // When a server starts, it deletes the temporary tables of others in a shared folder.
            .arg(format!("--tmpdir={}", folder.display()))
            .arg(format!("--init-file={}", setup.display()));
        if self.kind() == MySqlKind::MySql {
            command.args(["--loose-mysqlx=OFF", "--secure-file-priv=", "--skip-log-bin"]);
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
            let data = self.try_connect().and_then(|mut admin| {
                let data = admin.query_first::<String, _>("SELECT @@datadir")?;
                Ok(PathBuf::from(data.unwrap_or_default()))
            });
            match data {
                Ok(data) if data == self.folder.path().join("data") => return Ok(()),
                Ok(data) => return Err(format!("another server answers on the port: {data:?}")),
                Err(mysql::Error::MySqlError(error)) => return Err(error.to_string()),
                Err(error) if Instant::now() > deadline => return Err(error.to_string()),
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    fn try_connect(&self) -> mysql::Result<Conn> {
        let options = OptsBuilder::new()
            .ip_or_hostname(Some(self.addr().ip().to_string()))
            .tcp_port(self.port())
            .user(Some("root"))
            .db_name(Some(DATABASE))
            .prefer_socket(false)
            .tcp_connect_timeout(Some(ADMIN_TIMEOUT))
            .read_timeout(Some(ADMIN_TIMEOUT))
            .write_timeout(Some(ADMIN_TIMEOUT));
        Conn::new(options)
    }
}

/// The URL for root of a server at `addr`.
pub(crate) fn url(addr: SocketAddr) -> String {
    format!("mysql://root@{addr}/{DATABASE}")
}

/// The server program.
fn program(kind: MySqlKind) -> PathBuf {
    match kind {
        MySqlKind::MariaDb => find("mariadbd"),
        MySqlKind::MySql => env::var_os("MYSQLD").expect("MYSQLD names no server").into(),
    }
}

/// Finds a program of MariaDB. Many systems keep servers out of the PATH of ordinary users.
fn find(name: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/local/sbin", "/usr/sbin", "/usr/libexec"].map(PathBuf::from);
    let mut programs = env::split_paths(&path).chain(more).map(|folder| folder.join(name));
    let found = programs.find(|program| program.is_file());
    found.unwrap_or_else(|| panic!("{name} is missing; tools/need-mariadb.sh installs it"))
}

/// The arguments that install a database, and those with which the server runs.
fn common_args(kind: MySqlKind, data: &Path) -> Vec<String> {
    let log_size = match kind {
        MySqlKind::MariaDb => "--innodb-log-file-size=8M",
        MySqlKind::MySql => "--loose-innodb-redo-log-capacity=8M",
    };
    // This argument must be the first.
    let mut args = vec!["--no-defaults".to_owned(), format!("--datadir={}", data.display())];
    args.extend(["--skip-name-resolve", log_size].map(str::to_owned));
    if getuid().is_root() {
        args.push("--user=root".to_owned());
    }
    args
}

/// A folder with the data of a new server. It is made once, because that takes seconds, and then
/// copied.
fn template(kind: MySqlKind) -> &'static Path {
    static TEMPLATES: [OnceLock<PathBuf>; 2] = [OnceLock::new(), OnceLock::new()];
    TEMPLATES[kind as usize].get_or_init(|| make_template(kind))
}

fn make_template(kind: MySqlKind) -> PathBuf {
    let version = Command::new(program(kind)).args(["--no-defaults", "--version"]).output();
    let version = version.expect("cannot run the server").stdout;
    let mut hasher = DefaultHasher::new();
    (&version, common_args(kind, Path::new(""))).hash(&mut hasher);
    let name = format!("distlock-{kind:?}-{:016x}", hasher.finish());

    // The folder `target` if there is one: each user has their own, and its contents may be lost.
    let test = env::current_exe().expect("cannot find the test binary");
    let target = test.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file());
    let parent = target.map_or_else(env::temp_dir, Path::to_owned);
    let [template, unfinished, lock, log] =
        ["", ".new", ".lock", ".log"].map(|end| parent.join(format!("{name}{end}")));

    // Other test processes may need the template at the same time.
    let file = File::create(&lock).expect("cannot create a lock file");
    eventually(&format!("{} is free", lock.display()), 2 * TEST_TIMEOUT, || {
        flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
    });
    if !template.exists() {
        // A killed process can have left it.
        let _ = fs::remove_dir_all(&unfinished);
        install(kind, &unfinished, &log);
        fs::rename(&unfinished, &template).expect("cannot rename the template");
    }
    template
}

fn install(kind: MySqlKind, data: &Path, log: &Path) {
    let mut command = match kind {
        MySqlKind::MariaDb => Command::new(find("mariadb-install-db")),
        MySqlKind::MySql => Command::new(program(kind)),
    };
    command.args(common_args(kind, data));
    match kind {
        MySqlKind::MariaDb => {
            command.args(["--auth-root-authentication-method=normal", "--skip-test-db"])
        }
        MySqlKind::MySql => command.arg("--initialize-insecure"),
    };
    let output = File::create(log).expect("cannot create a log file");
    let errors = output.try_clone().expect("cannot duplicate a file");
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    let mut installer = command.spawn().expect("cannot run the installer");
    let deadline = Instant::now() + TEST_TIMEOUT;
    let status = eventually_some("the installer has ended", 2 * TEST_TIMEOUT, || {
        if Instant::now() > deadline {
            let _ = installer.kill();
        }
        installer.try_wait().expect("cannot wait for a child")
    });
    assert!(status.success(), "{command:?} ended with {status}\n{}", read(log));
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).expect("cannot create a folder");
    for entry in fs::read_dir(from).expect("cannot read the template") {
        let entry = entry.expect("cannot read the template");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("cannot read the template").is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).expect("cannot copy the template");
        }
    }
}

fn read(file: &Path) -> String {
    String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned()
}

fn text(value: Value) -> String {
    match value {
        Value::Bytes(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Value::NULL => "NULL".to_owned(),
        // The text protocol has nothing else.
        other => other.as_sql(true),
    }
}
