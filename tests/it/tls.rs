//! TLS between the library and a real server.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    thread,
    time::Duration,
};

use crate::{
    contention::pause,
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, completes_within, config_long_timeouts,
        config_medium_timeout, config_short_timeout, expect_loss, get, spawn_call, with_ttl,
    },
    support::{
        Certificates, Cluster, Fault, FaultProxy, RedisServer, RedisServerBuilder, SentinelGroup,
        TEST_TIMEOUT, any_request, eventually, eventually_some, rcgen,
    },
};
use distlock::{Config, LockError, RedisMgr, Tls};

fn server_with(certificates: &Certificates) -> RedisServer {
    RedisServer::builder().tls(certificates.folder(), false).start()
}

pub(crate) fn trusted(certificates: &Certificates) -> Tls {
    Tls::new().ca_file(certificates.path("ca.crt"))
}

fn url(server: &RedisServer) -> String {
    format!("rediss://{}", server.tls_addr())
}

fn manager(server: &RedisServer, tls: Tls) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(url(server)).tls(tls)).unwrap()
}

/// The sentence for a lock that TLS makes impossible.
#[track_caller]
fn refusal(config: Config) -> String {
    let mgr = RedisMgr::new(config).unwrap();
    let error = completes_within(CALL_LIMIT, "a lock", || mgr.lock("x").unwrap_err());
    assert!(matches!(error, LockError::Tls { .. }) && error.is_unavailable(), "{error:?}");
    error.to_string()
}

#[test]
fn locks_work_as_without_tls() {
    let certificates = Certificates::new();
    let server = server_with(&certificates);
    let (here, there) =
        (manager(&server, trusted(&certificates)), manager(&server, trusted(&certificates)));
    let guard = here.lock_with("x", &with_ttl(SECOND)).unwrap();
    let waiting = spawn_call(&there, "x", |mgr, name| mgr.lock(name).unwrap());
    eventually("it waits", TEST_TIMEOUT, || {
        here.holder("x").unwrap().unwrap().waiters() == Some(1)
    });
    // Several renewals.
    let renewed = here.metrics().renewals() + 4;
    eventually("it is renewed", TEST_TIMEOUT, || here.metrics().renewals() >= renewed);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap();
    assert_eq!(here.locks("*").unwrap().len(), 1);
    assert!(here.force_release("x").unwrap());
    expect_loss(&next);
    for round in 0..200 {
        here.lock(&format!("y{}", round % 7)).unwrap().release().unwrap().unwrap_released();
    }
}

#[test]
fn quorum_of_nodes_works_with_tls() {
    let certificates = Certificates::new();
    let servers =
        [server_with(&certificates), server_with(&certificates), server_with(&certificates)];
    let config = Config::nodes(servers.iter().map(url))
        .operation_timeout(CALL_LIMIT)
        .quarantine(Duration::ZERO)
        .tls(trusted(&certificates));
    let managers = [RedisMgr::new(config.clone()).unwrap(), RedisMgr::new(config).unwrap()];
    let mut last = 0;
    for round in 0..40 {
        let guard = managers[round % 2].lock("x").unwrap();
        assert!(guard.fencing_token().as_u64() > last);
        last = guard.fencing_token().as_u64();
    }
}

/// Session tickets lie in the socket of a new connection. They are no reason to close it.
#[test]
fn connections_are_reused() {
    let certificates = Certificates::new();
    let server = server_with(&certificates);
    let mgr = manager(&server, trusted(&certificates));
    drop(mgr.lock("x").unwrap());
    let accepted = || -> u64 {
        let info: String = server.query(&["INFO", "stats"]);
        let line = info.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        line.unwrap().trim().parse().unwrap()
    };
    let before = accepted();
    for _ in 0..20 {
        drop(mgr.lock("x").unwrap());
    }
    // A connection that was idle for 100 ms is checked before it is used.
    pause(120);
    drop(mgr.lock("x").unwrap());
    // Each look at the server is a connection too.
    assert_eq!(accepted(), before + 1);
}

/// Fault: F62
#[test]
fn untrusted_certificates_are_refused() {
    let (certificates, others) = (Certificates::new(), Certificates::new());
    let server = server_with(&certificates);
    let config = || config_long_timeouts(url(&server));
    let unknown = refusal(config().tls(trusted(&others)));
    assert!(unknown.contains("not signed by an authority that is trusted here"), "{unknown}");
    assert!(unknown.contains(&server.tls_addr().to_string()), "{unknown}");
    let renamed = refusal(config().tls(trusted(&certificates).server_name("redis.internal")));
    assert!(renamed.contains("for another name"), "{renamed}");

    let expired = Certificates::of_an_authority();
    expired.sign("server", &["127.0.0.1"], |params| {
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    });
    let server = server_with(&expired);
    let text = refusal(config_long_timeouts(url(&server)).tls(trusted(&expired)));
    assert!(text.contains("has expired"), "{text}");
}

/// Fault: F62
#[test]
fn client_certificate_is_shown_where_it_is_asked_for() {
    let certificates = Certificates::new();
    certificates.sign("client", &["worker"], |_| {});
    let server = RedisServer::builder().tls(certificates.folder(), true).start();
    let config = || config_long_timeouts(url(&server));
    let missing = refusal(config().tls(trusted(&certificates)));
    assert!(missing.contains("asks for a certificate of the client"), "{missing}");
    let (certificate, key) = (certificates.path("client.crt"), certificates.path("client.key"));
    let tls = trusted(&certificates).client_cert(certificate, key);
    drop(RedisMgr::new(config().tls(tls)).unwrap().lock("x").unwrap());
}

/// Fault: F62, N84
#[test]
fn wrong_kind_of_port_is_recognized() {
    let certificates = Certificates::new();
    let server = server_with(&certificates);
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    let secure = format!("rediss://{}", plain.local_addr().unwrap());
    let serving = thread::spawn(move || {
        let (mut client, _) = plain.accept().unwrap();
        client.read_exact(&mut [0; 100]).unwrap();
        client.write_all(b"-ERR unknown command\r\n").unwrap();
        let _ = client.read_to_end(&mut Vec::new());
    });
    let text = refusal(config_long_timeouts(secure).tls(trusted(&certificates)));
    assert!(text.contains("its reply is not TLS"), "{text}");
    serving.join().unwrap();
    let config = config_short_timeout(format!("redis://{}", server.tls_addr()));
    let mgr = RedisMgr::new(config).unwrap();
    let error = mgr.try_lock("x").unwrap_err();
    assert!(error.is_unavailable(), "{error}");
}

/// Fault: F62
#[test]
fn handshake_ends_at_the_operation_timeout() {
    let certificates = Certificates::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("rediss://{}", silent.local_addr().unwrap());
    let mgr = RedisMgr::new(config_short_timeout(url).tls(trusted(&certificates))).unwrap();
    let error = completes_within(20 * SHORT_TIMEOUT, "a try", || mgr.try_lock("x").unwrap_err());
    assert!(error.to_string().contains("no reply to the TLS handshake in time"), "{error}");
}

/// The first request of a connection is the first step of its handshake.
///
/// Fault: F62
#[test]
fn handshake_that_is_cut_off_is_not_a_wrong_certificate() {
    let certificates = Certificates::new();
    let server = server_with(&certificates);
    let proxy = FaultProxy::in_front_of_tls(server.tls_addr());
    let config = config_short_timeout(proxy.url()).tls(trusted(&certificates));
    for fault in [Fault::CloseAfterRequest, Fault::ResetAfterRequest, Fault::CutReply(60)] {
        let armed = proxy.on_request(any_request, fault.clone());
        let mgr = RedisMgr::new(config.clone()).unwrap();
        let error =
            completes_within(20 * SHORT_TIMEOUT, "a try", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{fault:?}: {error}");
        assert!(!matches!(error, LockError::Tls { .. }), "{fault:?}: {error}");
        armed.wait_fired();
        eventually("the lock is granted", TEST_TIMEOUT, || mgr.try_lock("x").is_ok());
    }
}

/// Half of a record cannot be decrypted.
///
/// Fault: F62
#[test]
fn silence_after_half_a_record_is_a_lost_reply() {
    let certificates = Certificates::new();
    let server = server_with(&certificates);
    let proxy = FaultProxy::in_front_of_tls(server.tls_addr());
    let config = config_short_timeout(proxy.url()).tls(trusted(&certificates));
    let mgr = RedisMgr::new(config).unwrap();
    eventually("it is connected", TEST_TIMEOUT, || mgr.try_lock("x").is_ok());
    for bytes in [3, 20] {
        let cut = proxy.on_request(any_request, Fault::CutReply(bytes));
        let error =
            completes_within(20 * SHORT_TIMEOUT, "a try", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{bytes}: {error}");
        cut.wait_fired();
        // What the request has left is cleaned up, over another connection.
        eventually("the lock is granted", TEST_TIMEOUT, || mgr.try_lock("x").is_ok());
    }
}

/// Fault: F30, F62
#[test]
fn sentinels_and_their_master_are_reached_with_tls() {
    let certificates = Certificates::new();
    let group = SentinelGroup::start_with_tls(1, certificates.folder());
    let config = Config::new(group.url()).ttl(30 * SECOND);
    let new = || RedisMgr::new(config.clone().tls(trusted(&certificates))).unwrap();
    let (holder, waiter) = (new(), new());
    let guard = holder.lock("x").unwrap();
    let waiting = spawn_call(&waiter, "x", |mgr, name| mgr.lock(name).unwrap());
    eventually("it waits", TEST_TIMEOUT, || {
        holder.holder("x").unwrap().unwrap().waiters() == Some(1)
    });
    eventually("the replica has the lock", TEST_TIMEOUT, || {
        get(&group.servers[1], "lock:x").is_some()
    });
    group.servers[0].kill();
    let master = group.await_other_master(&group.servers[0]);
    eventually("it is released", TEST_TIMEOUT, || {
        holder.force_release("x").is_ok() || get(master, "lock:x") != Some(guard.id().to_string())
    });
    let next = waiting.join().unwrap();
    assert_eq!(get(master, "lock:x").as_deref(), Some(next.id().as_str()));
    let clients = eventually_some("all connections are known", TEST_TIMEOUT, || {
        let ours = master.clients().into_iter().filter(|client| client["cmd"].contains("evalsha"));
        Some(ours.collect::<Vec<_>>()).filter(|ours| !ours.is_empty())
    });
    let secure = format!("{}", master.tls_addr());
    assert!(clients.iter().all(|client| client["laddr"] == secure), "{clients:?}");

    let untrusted = refusal(config.tls(trusted(&Certificates::new())));
    assert_eq!(untrusted.matches("not signed by an authority that is trusted here").count(), 3);
    let plain = group.url().replace("rediss", "redis");
    let mgr = RedisMgr::new(Config::new(plain)).unwrap();
    assert!(completes_within(CALL_LIMIT, "a try", || mgr.try_lock("x")).is_err());
}

/// Fault: F62
#[test]
fn certificate_names_the_host_that_the_sentinels_announce() {
    let certificates = Certificates::new();
    certificates.sign("server", &["localhost"], |_| {});
    let group = SentinelGroup::start_with_tls(0, certificates.folder());
    let port = group.servers[0].tls_addr().port().to_string();
    for sentinel in 0..3 {
        for words in [
            &["SENTINEL", "CONFIG", "SET", "resolve-hostnames", "yes"][..],
            &["SENTINEL", "CONFIG", "SET", "announce-hostnames", "yes"],
            &["SENTINEL", "REMOVE", "main"],
            &["SENTINEL", "MONITOR", "main", "localhost", &port, "2"],
        ] {
            group.query::<String>(sentinel, words);
        }
    }
    let url = group.url().replace("127.0.0.1", "localhost");
    let config = Config::new(url).tls(trusted(&certificates));
    RedisMgr::new(config).unwrap().lock("x").unwrap().release().unwrap().unwrap_released();
}

#[test]
fn locks_survive_cut_connections() {
    let certificates = Certificates::new();
    let server = server_with(&certificates);
    let proxy = FaultProxy::in_front_of_tls(server.tls_addr());
    let config = config_medium_timeout(proxy.url());
    let mgr = RedisMgr::new(config.tls(trusted(&certificates))).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    for _ in 0..5 {
        let renewed = mgr.metrics().renewals();
        proxy.reset_all();
        eventually("it is renewed", TEST_TIMEOUT, || mgr.metrics().renewals() > renewed);
    }
    guard.release().unwrap().unwrap_released();
    proxy.blackhole();
    let frozen = guard_fails(&mgr);
    assert!(frozen.is_unavailable(), "{frozen}");
    proxy.heal();
    eventually("locks are granted again", TEST_TIMEOUT, || mgr.try_lock("x").is_ok());
}

fn guard_fails(mgr: &RedisMgr) -> LockError {
    completes_within(TEST_TIMEOUT, "a try", || {
        mgr.try_lock_for("x", Duration::from_millis(100)).unwrap_err()
    })
}

/// Fault: F62
#[test]
fn unusable_files_are_refused_by_name() {
    let certificates = Certificates::new();
    let config = |tls: Tls| Config::new("rediss://127.0.0.1:1").tls(tls);
    let reason = |config: Config| match RedisMgr::new(config).unwrap_err() {
        error @ LockError::InvalidConfig { .. } => error.to_string(),
        other => panic!("{other:?}"),
    };
    let missing = reason(config(Tls::new().ca_file("/nowhere/ca.crt")));
    assert!(missing.contains("/nowhere/ca.crt cannot be read"), "{missing}");
    let key = certificates.path("server.key");
    let no_certificate = reason(config(Tls::new().ca_file(&key)));
    assert!(no_certificate.contains("contains no certificate"), "{no_certificate}");
    let swapped = trusted(&certificates).client_cert(&key, certificates.path("server.crt"));
    assert!(reason(config(swapped)).contains("cannot be used"));
    let named = reason(config(trusted(&certificates).server_name("not a name")));
    assert!(named.contains("neither a host name nor an address"), "{named}");
    let unused = reason(Config::new("redis://127.0.0.1:1").tls(trusted(&certificates)));
    assert!(unused.contains("write rediss://"), "{unused}");
}

/// The nodes report their ports with TLS to clients that use TLS.
#[test]
fn nodes_of_a_cluster_are_reached_with_tls() {
    let certificates = Certificates::new();
    let tls = |server: RedisServerBuilder| {
        server.tls(certificates.folder(), false).arg("--tls-cluster").arg("yes")
    };
    let cluster = Cluster::start_with(3, false, &tls);
    let hosts: Vec<_> = cluster.nodes.iter().map(|node| node.tls_addr().to_string()).collect();
    let url = format!("rediss+cluster://{}", hosts[0]);
    let mgr = RedisMgr::new(Config::new(&url).tls(trusted(&certificates))).unwrap();
    let other = RedisMgr::new(Config::new(&url).tls(trusted(&certificates))).unwrap();
    for name in ["a", "b", "c", "d"] {
        let first = mgr.lock(name).unwrap();
        let waiting = spawn_call(&other, name, |mgr, name| mgr.lock(name).unwrap());
        eventually("it waits", TEST_TIMEOUT, || {
            mgr.holder(name).unwrap().unwrap().waiters() == Some(1)
        });
        first.release().unwrap().unwrap_released();
        drop(completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap()));
    }
    let error = RedisMgr::new(Config::new(&url)).unwrap().lock("x").unwrap_err();
    assert!(matches!(error, LockError::Tls { .. }), "{error:?}");
}
