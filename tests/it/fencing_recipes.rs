//! The statements of docs/fencing.md, run as they stand there.

use std::{
    fs,
    io::{Write, stderr},
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::process::getuid;

use crate::support::{
    MySqlServer,
    mysql::{Conn, Opts, OptsBuilder, consts::CapabilityFlags, from_value, prelude::Queryable},
    mysql_servers,
};

const RECIPES: &str = include_str!("../../docs/fencing.md");

/// Tokens as large as real ones: they need 64 bits.
const TOKEN: i64 = 1_790_000_000_000_000;

/// `nobody`: PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

trait Database {
    /// Runs a statement. Returns whether it returned a row, or accepted a write in another way.
    fn execute(&mut self, statement: &str) -> bool;
}

impl Database for rusqlite::Connection {
    fn execute(&mut self, statement: &str) -> bool {
        let mut statement = self.prepare(statement).unwrap();
        let mut rows = statement.query([]).unwrap();
        let returned = rows.next().unwrap().is_some();
        while rows.next().unwrap().is_some() {}
        returned
    }
}

/// PostgreSQL without a server process: each statement is run by a process of its own, which ends
/// with it.
struct Postgres {
    program: PathBuf,
    folder: tempfile::TempDir,
}

impl Postgres {
    /// Returns `None` if PostgreSQL is not installed.
    fn create() -> Option<Postgres> {
        let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
        let folders = versions.map(|version| version.path().join("bin"));
        let bin = folders.filter(|bin| bin.join("initdb").is_file()).max()?;
        let folder = tempfile::tempdir().unwrap();
        if getuid().is_root() {
            chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let mut create = unprivileged(&bin.join("initdb"));
        create.args(["--no-sync", "--username=test", "-D"]).arg(folder.path().join("data"));
        let created = create.output().unwrap();
        assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
        Some(Postgres { program: bin.join("postgres"), folder })
    }
}

impl Database for Postgres {
    fn execute(&mut self, statement: &str) -> bool {
        let mut command = unprivileged(&self.program);
        command.args(["--single", "-j", "-F", "-D"]).arg(self.folder.path().join("data"));
        let streams = command.arg("postgres").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut session = streams.stderr(Stdio::piped()).spawn().unwrap();
        // With `-j`, a statement ends with a semicolon and an empty line.
        writeln!(session.stdin.take().unwrap(), "{};\n", statement.trim_end_matches(';')).unwrap();
        let output = session.wait_with_output().unwrap();
        let [rows, errors] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(!errors.contains("ERROR"), "{statement}\n{errors}");
        // A row is printed as `\t 1: id = "42"\t(typeid = 20, …)`.
        rows.contains(" = \"")
    }
}

struct MySql {
    connection: Conn,
}

impl MySql {
    fn connect(server: &MySqlServer) -> MySql {
        let options = OptsBuilder::from_opts(Opts::from_url(&server.url()).unwrap());
        let found_rows = CapabilityFlags::CLIENT_FOUND_ROWS;
        let options = options.additional_capabilities(found_rows);
        MySql { connection: Conn::new(options).unwrap() }
    }
}

impl Database for MySql {
    /// If a statement returns no row, it is accepted if it has matched a row. If it returns one,
    /// it is accepted if its value is not zero.
    fn execute(&mut self, statements: &str) -> bool {
        let mut accepted = false;
        let mut answers = self.connection.query_iter(statements).unwrap();
        while let Some(answer) = answers.iter() {
            accepted = answer.affected_rows() > 0;
            for row in answer {
                accepted = from_value::<i64>(row.unwrap()[0].clone()) != 0;
            }
        }
        accepted
    }
}

/// A command that does not run as root.
fn unprivileged(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/");
    if getuid().is_root() {
        command.gid(NOBODY).uid(NOBODY);
    }
    command
}

/// The statements of a section of the document.
fn statements(section: &str) -> Vec<&'static str> {
    let text = RECIPES.split("\n## ").find(|text| text.starts_with(section)).unwrap();
    let blocks = text.split("```sql\n").skip(1);
    blocks.map(|block| block.split("```").next().unwrap().trim()).collect()
}

/// Fills in the parameters of a statement.
fn filled(statement: &str, state: &str, token: i64) -> String {
    let statement = statement.replace(":name", "'orders:42'").replace(":id", "42");
    let statement = statement.replace(":state", &format!("'{state}'"));
    statement.replace(":token", &token.to_string())
}

fn check_recipes(db: &mut dyn Database) {
    let [create, update, upsert] = statements("PostgreSQL and SQLite")[..] else {
        panic!("the section has three statements");
    };
    check_rows(db, create, update, upsert);
    let [create, advance, _mysql] = statements("A table of fences")[..] else {
        panic!("the section has three statements");
    };
    check_fences(db, create, advance);
}

fn check_rows(db: &mut dyn Database, create: &str, update: &str, upsert: &str) {
    let mut accepts = |statement, state, token| db.execute(&filled(statement, state, token));
    accepts(create, "", 0);
    assert!(!accepts(update, "early", TOKEN), "there is no row yet");
    assert!(accepts(upsert, "new", TOKEN), "creates the row");
    assert!(accepts(update, "packed", TOKEN + 2), "a later holder");
    assert!(accepts(update, "sent", TOKEN + 2), "a holder may write several times");
    assert!(accepts(update, "sent", TOKEN + 2), "a holder may repeat a write");
    assert!(!accepts(update, "late", TOKEN + 1), "an earlier holder");
    assert!(!accepts(upsert, "late", TOKEN + 1), "an earlier holder");
    let stored = "SELECT id FROM orders WHERE state = :state AND fence = :token";
    assert!(accepts(stored, "sent", TOKEN + 2), "rejected writes change nothing");
    assert!(accepts(upsert, "paid", TOKEN + 3), "a later holder");
    assert!(accepts(upsert, "paid", TOKEN + 3), "a holder may repeat a write");
    assert!(accepts(stored, "paid", TOKEN + 3));
}

fn check_fences(db: &mut dyn Database, create: &str, advance: &str) {
    let mut accepts = |statement, token| db.execute(&filled(statement, "", token));
    accepts(create, 0);
    assert!(accepts(advance, TOKEN + 1), "the first holder");
    assert!(accepts(advance, TOKEN + 1), "the same holder");
    assert!(accepts(advance, TOKEN + 2), "a later holder");
    assert!(!accepts(advance, TOKEN + 1), "an earlier holder");
}

#[test]
fn sqlite_rejects_writes_of_earlier_holders() {
    check_recipes(&mut rusqlite::Connection::open_in_memory().unwrap());
}

#[test]
fn postgresql_rejects_writes_of_earlier_holders() {
    let Some(mut db) = Postgres::create() else {
        // The test harness captures the output of `eprintln!` and drops it if the test passes.
        let _ = writeln!(
            stderr(),
            "NOT SHOWN: fencing recipes of PostgreSQL: it is not in /usr/lib/postgresql"
        );
        return;
    };
    check_recipes(&mut db);
}

#[test]
fn mysql_and_mariadb_reject_writes_of_earlier_holders() {
    let [create, ..] = statements("PostgreSQL and SQLite")[..] else { panic!("no table") };
    let create = create.replace("TEXT", "VARCHAR(20)");
    let [update, upsert] = statements("MySQL and MariaDB")[..] else {
        panic!("the section has two blocks");
    };
    let [create_fences, _, advance] = statements("A table of fences")[..] else {
        panic!("the section has three blocks");
    };
    let create_fences = create_fences.replace("VARCHAR", "VARBINARY");
    for server in mysql_servers() {
        let server = server.start();
        let mut db = MySql::connect(&server);
        check_rows(&mut db, &create, update, upsert);

        let mut late = MySql::connect(&server);
        late.execute("BEGIN");
        assert!(late.execute("SELECT fence FROM orders"), "remembers the row as it is now");
        assert!(db.execute(&filled(upsert, "shipped", TOKEN + 4)), "a later holder");
        assert!(!late.execute(&filled(upsert, "late", TOKEN + 3)), "an earlier holder");
        late.execute("ROLLBACK");

        check_fences(&mut db, &create_fences, advance);
        let other_name = filled(advance, "", TOKEN).replace("orders", "ORDERS");
        assert!(db.execute(&other_name), "names that differ in case are different");
    }
}
