//! TLS between the library and a real server.

use distlock::{LockError, LockLost, MySqlMgr, Tls};

use super::{await_waits, config, create_table, kill_holder};
use crate::{
    helpers::{CALL_LIMIT, SECOND, UnwrapReleased, completes_within, expect_loss, spawn_call},
    support::{Certificates, MySqlServer, TEST_TIMEOUT, eventually},
    tls::trusted,
};

/// A server with a certificate, and the URL of a user who must use TLS.
fn server(certificates: &Certificates) -> (MySqlServer, String) {
    let file =
        |option: &str, name: &str| format!("--ssl-{option}={}", certificates.path(name).display());
    let server = MySqlServer::builder()
        .arg(file("ca", "ca.crt"))
        .arg(file("cert", "server.crt"))
        .arg(file("key", "server.key"))
        .start();
    create_table(&server);
    let url = server.create_user("app", "s3cret");
    server.execute("ALTER USER 'app'@'127.0.0.1' REQUIRE SSL");
    (server, url)
}

#[test]
fn locks_work_as_without_tls() {
    let certificates = Certificates::new();
    let (server, url) = server(&certificates);
    let new = || MySqlMgr::new(config(&url).ttl(9 * SECOND).tls(trusted(&certificates))).unwrap();
    let (here, there) = (new(), new());
    let guard = here.lock("x").unwrap();
    let waiting = spawn_call(&there, "x", |mgr, name| mgr.lock(name).unwrap());
    await_waits(&server, 1);
    let renewed = here.metrics().renewals() + 2;
    eventually("it is renewed", TEST_TIMEOUT, || here.metrics().renewals() >= renewed);
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
    kill_holder(&server, "x");
    assert_eq!(expect_loss(&next), LockLost::ConnectionLost);
    for round in 0..100 {
        here.lock(&format!("y{}", round % 7)).unwrap().release().unwrap().unwrap_released();
    }
    // The connection with the lock of `here`, and one for everything else.
    let connections =
        server.execute("SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'app'");
    assert!(connections.len() <= 6, "{connections:?}");
}

/// Fault: F62
#[test]
fn untrusted_or_missing_certificates_are_refused() {
    let (certificates, others) = (Certificates::new(), Certificates::new());
    let (secure, url) = server(&certificates);
    let reason = |url: &str, tls: Tls| match MySqlMgr::new(config(url).tls(tls)).unwrap_err() {
        error @ LockError::Tls { .. } => error.to_string(),
        other => panic!("{other:?}"),
    };
    let unknown = reason(&url, trusted(&others));
    assert!(unknown.contains("not signed by an authority that is trusted here"), "{unknown}");
    let renamed = reason(&url, trusted(&certificates).server_name("db.internal"));
    assert!(renamed.contains("for another name"), "{renamed}");
    assert!(!format!("{unknown}{renamed}").contains("s3cret"));
    // The server refuses the user without TLS, so all locks above used it.
    let plain = MySqlMgr::new(config(&url)).unwrap_err();
    assert!(matches!(&plain, LockError::Refused { code, .. } if code == "1045"), "{plain:?}");
    drop(secure);
}

/// The certificates are those of the system, which do not include the test's.
///
/// Fault: F62
#[test]
fn url_asks_for_tls_or_excludes_it() {
    let certificates = Certificates::new();
    let (_server, url) = server(&certificates);
    let asked = MySqlMgr::new(config(format!("{url}?ssl-mode=REQUIRED"))).unwrap_err();
    let text = asked.to_string();
    assert!(
        text.contains("not signed") || text.contains("the system has no certificates"),
        "{text}"
    );
    let excluded = config(format!("{url}?ssl-mode=DISABLED")).tls(trusted(&certificates));
    let error = MySqlMgr::new(excluded).unwrap_err();
    assert!(error.to_string().contains("but the URL of"), "{error}");
    let both = config(format!("{url}?ssl-mode=REQUIRED")).tls(trusted(&certificates));
    MySqlMgr::new(both).unwrap().lock("x").unwrap().release().unwrap().unwrap_released();
}

/// An attacker on the way could remove the offer too. The password must not be sent then.
///
/// Fault: F62
#[test]
fn server_without_tls_is_refused() {
    let server = MySqlServer::builder().arg("--skip-ssl").start();
    create_table(&server);
    let error = MySqlMgr::new(config(server.url()).tls(trusted(&Certificates::new()))).unwrap_err();
    assert!(matches!(error, LockError::Tls { .. }), "{error:?}");
    assert!(error.to_string().contains("does not offer TLS"), "{error}");
}
