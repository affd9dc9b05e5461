//! The statements of docs/fencing.md, run as they stand there.

use std::{
    fs,
    io::{Write, stderr},
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::process::getuid;

const RECIPES: &str = include_str!("../../docs/fencing.md");

/// Tokens as large as real ones: they need 64 bits.
const TOKEN: i64 = 1_790_000_000_000_000;

/// `nobody`: PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

trait Database {
    /// Runs a statement. Returns whether it returned a row.
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
    let mut accepts = |statement, state, token| db.execute(&filled(statement, state, token));
    accepts(create, "", 0);
    assert!(!accepts(update, "early", TOKEN), "there is no row yet");
    assert!(accepts(upsert, "new", TOKEN), "creates the row");
    assert!(accepts(update, "packed", TOKEN + 2), "a later holder");
    assert!(accepts(update, "sent", TOKEN + 2), "a holder may write several times");
    assert!(!accepts(update, "late", TOKEN + 1), "an earlier holder");
    assert!(!accepts(upsert, "late", TOKEN + 1), "an earlier holder");
    let stored = "SELECT id FROM orders WHERE state = :state AND fence = :token";
    assert!(accepts(stored, "sent", TOKEN + 2), "rejected writes change nothing");
    assert!(accepts(upsert, "paid", TOKEN + 3), "a later holder");
    assert!(accepts(stored, "paid", TOKEN + 3));

    let [create, advance] = statements("A table of fences")[..] else {
        panic!("the section has two statements");
    };
    accepts(create, "", 0);
    assert!(accepts(advance, "", TOKEN + 1), "the first holder");
    assert!(accepts(advance, "", TOKEN + 1), "the same holder");
    assert!(accepts(advance, "", TOKEN + 2), "a later holder");
    assert!(!accepts(advance, "", TOKEN + 1), "an earlier holder");
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
