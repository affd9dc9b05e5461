//! The private servers of the tests start, run statements and end.

use std::{fs, thread, time::Duration};

use distlock_test_support::mysql::{Conn, Opts, OptsBuilder, prelude::Queryable};
use distlock_test_support::{
    Fault, FaultProxy, MySqlServer, TEST_TIMEOUT, Worker, WorkerSide, contains, eventually,
    mysql_servers, process_state,
};

/// The time that a client waits for a greeting that does not come.
const SILENCE: Duration = Duration::from_millis(300);

#[test]
fn servers_are_separate_and_restart_with_their_data() {
    for (first, second) in mysql_servers().into_iter().zip(mysql_servers()) {
        let [first, second] = [first.start(), second.start()];
        assert_ne!(first.port(), second.port());
        first.execute(
            "CREATE TABLE t (id INT PRIMARY KEY, word TEXT); INSERT INTO t VALUES (1, NULL)",
        );
        assert_eq!(first.execute("SELECT * FROM t"), [["1", "NULL"]]);
        assert_eq!(second.execute("SHOW TABLES").len(), 0);

        let mut connection = first.connect();
        let pid = first.pid();
        first.kill();
        assert!(connection.ping().is_err(), "{:?}", first.kind());
        assert_eq!(process_state(pid), None);
        first.restart();
        assert_eq!(first.execute("SELECT id FROM t; SELECT 2"), [["1"], ["2"]]);

        first.stop();
        first.cont();
        first.shut_down();
        assert!(first.log().to_lowercase().contains("shutdown complete"), "{}", first.log());
        first.restart();
        assert_eq!(first.execute("SELECT id FROM t"), [["1"]]);
    }
}

#[test]
fn users_sign_in_with_a_password() {
    for builder in mysql_servers() {
        let server = builder.arg("--max-connections=12").start();
        let url = server.create_user("alice", "secret");
        let mut alice = Conn::new(Opts::from_url(&url).unwrap()).unwrap();
        let user: Option<(String, String)> =
            alice.query_first("SELECT CURRENT_USER(), DATABASE()").unwrap();
        assert_eq!(user, Some(("alice@127.0.0.1".to_owned(), "distlock_test".to_owned())));
        assert_eq!(server.execute("SELECT @@max_connections"), [["12"]]);
        let wrong = url.replace("secret", "wrong");
        assert!(Conn::new(Opts::from_url(&wrong).unwrap()).is_err());
        assert!(Conn::new(Opts::from_url(&server.url()).unwrap()).is_ok());
    }
}

#[test]
fn server_and_folder_disappear_with_a_killed_test() {
    let mut test = Worker::spawn("test", &[]);
    let pid = test.expect("pid").parse().unwrap();
    let folder = test.expect("folder");
    assert!(fs::exists(&folder).unwrap());
    test.kill();
    eventually("the server has ended", TEST_TIMEOUT, || {
        process_state(pid).is_none_or(|state| state == 'Z')
    });
    eventually("its folder is gone", TEST_TIMEOUT, || !fs::exists(&folder).unwrap());
}

#[test]
fn proxy_breaks_connections_at_exact_statements() {
    for builder in mysql_servers() {
        let server = builder.start();
        server.execute("CREATE TABLE t (id INT)");
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let connect = |limit| {
            let options = OptsBuilder::from_opts(Opts::from_url(&proxy.url()).unwrap());
            let options = options.prefer_socket(false).read_timeout(Some(limit));
            Conn::new(options.tcp_connect_timeout(Some(limit)))
        };
        let ask =
            |sql: &str| connect(TEST_TIMEOUT).unwrap().query::<i64, _>(sql).map(|rows| rows[0]);
        assert_eq!(ask("SELECT 41").unwrap(), 41);

        let before = proxy.on_request(contains("(1)"), Fault::ResetBeforeRequest);
        let after = proxy.on_request(contains("(2)"), Fault::ResetAfterRequest);
        ask("INSERT INTO t VALUES (1); SELECT 1; SELECT 2").unwrap_err();
        ask("INSERT INTO t VALUES (2); SELECT 1; SELECT 2").unwrap_err();
        assert_eq!([before.fired(), after.fired()], [1, 1]);

        let dropped = proxy.on_request(contains("(3)"), Fault::DropReply);
        thread::scope(|threads| {
            let answer = threads.spawn(|| ask("INSERT INTO t VALUES (3); SELECT 1; SELECT 2"));
            dropped.wait_fired();
            proxy.reset_all();
            answer.join().unwrap().unwrap_err();
        });
        eventually("two rows are stored", TEST_TIMEOUT, || {
            server.execute("SELECT id FROM t ORDER BY id") == [["2"], ["3"]]
        });

        let held = proxy.on_request(contains("42"), Fault::HoldReply);
        thread::scope(|threads| {
            let answer = threads.spawn(|| ask("SELECT 42"));
            held.wait_fired();
            held.release();
            assert_eq!(answer.join().unwrap().unwrap(), 42);
        });

        let mut connection = connect(TEST_TIMEOUT).unwrap();
        proxy.blackhole();
        connect(SILENCE).unwrap_err();
        thread::scope(|threads| {
            let answer = threads.spawn(|| connection.ping());
            proxy.reset_all();
            answer.join().unwrap().unwrap_err();
        });
        proxy.refuse();
        connect(TEST_TIMEOUT).unwrap_err();
        proxy.heal();
        assert_eq!(ask("SELECT 43").unwrap(), 43);
    }
}

mod worker {
    use super::{MySqlServer, WorkerSide};

    #[test]
    fn entry() {
        let Some(side) = WorkerSide::from_env() else { return };
        let server = MySqlServer::start();
        side.say(format!("pid {}", server.pid()));
        let data = &server.execute("SELECT @@datadir")[0][0];
        side.say(format!("folder {}", data.trim_end_matches("/data/")));
        side.hear();
    }
}
