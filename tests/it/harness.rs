//! Tests of the test harness: the fault proxy, where other tests do not show what it does.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    time::Duration,
};

use crate::support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, any_request};

/// A client that writes and reads the raw protocol.
struct Client(TcpStream);

impl Client {
    fn connect(proxy: &FaultProxy) -> Client {
        Client(TcpStream::connect(proxy.addr()).unwrap())
    }

    fn send(&mut self, line: &str) {
        self.0.write_all(format!("{line}\r\n").as_bytes()).unwrap();
    }

    /// Reads as many bytes as `wanted` has, and compares them.
    #[track_caller]
    fn expect(&mut self, wanted: &str) {
        self.0.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let mut received = vec![0; wanted.len()];
        self.0.read_exact(&mut received).unwrap();
        assert_eq!(String::from_utf8_lossy(&received), wanted);
    }

    #[track_caller]
    fn expect_nothing(&mut self) {
        self.0.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let error = self.0.read(&mut [0; 64]).expect_err("the proxy sent something or closed");
        assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
    }

    #[track_caller]
    fn expect_end(&mut self) {
        self.0.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        assert!(!matches!(self.0.read(&mut [0; 64]), Ok(1..)), "the proxy sent something");
    }
}

fn server_and_proxy() -> (RedisServer, FaultProxy) {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    (server, proxy)
}

const PING: &str = "*1\r\n$4\r\nPING";
const PONG: &str = "+PONG\r\n";

#[test]
fn deaf_proxy_drops_requests_and_forwards_messages() {
    let (server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    client.send("*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nc");
    client.expect("*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n");
    proxy.deaf();
    client.send(PING);
    client.expect_nothing();
    assert_eq!(server.query::<i64>(&["PUBLISH", "c", "x"]), 1);
    client.expect("*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n");
}

#[test]
fn mute_proxy_serves_only_connections_that_exist() {
    let (_server, proxy) = server_and_proxy();
    let mut old = Client::connect(&proxy);
    old.send(PING);
    old.expect(PONG);
    proxy.mute_new();
    let mut new = Client::connect(&proxy);
    new.send(PING);
    new.expect_nothing();
    old.send(PING);
    old.expect(PONG);
    proxy.heal();
    new.expect_end();
    let mut new = Client::connect(&proxy);
    new.send(PING);
    new.expect(PONG);
}

#[test]
fn client_does_not_notice_a_lost_server() {
    let (server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    client.send(PING);
    client.expect(PONG);
    proxy.lose_server();
    server.await_clients(0..=0);
    client.send(PING);
    client.expect_nothing();
    proxy.heal();
    client.expect_end();
}

#[test]
fn server_does_not_notice_lost_clients() {
    let (server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    client.send("*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nc");
    client.expect("*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n");
    proxy.lose_clients();
    client.expect_end();
    assert_eq!(server.query::<i64>(&["PUBLISH", "c", "x"]), 1, "the server still has a subscriber");
    proxy.heal();
    server.await_clients(0..=0);
}

#[test]
fn duplicate_request_gets_two_replies() {
    let (server, proxy) = server_and_proxy();
    let twice = proxy.on_request(any_request, Fault::DuplicateRequest);
    let mut client = Client::connect(&proxy);
    client.send("*2\r\n$4\r\nINCR\r\n$1\r\nn");
    client.expect(":1\r\n:2\r\n");
    twice.wait_fired();
    assert_eq!(server.query::<i64>(&["GET", "n"]), 2);
}

#[test]
fn fault_can_wait_for_the_nth_request() {
    let (_server, proxy) = server_and_proxy();
    let third = proxy.on_request(any_request, Fault::DropReply).after(2);
    let mut client = Client::connect(&proxy);
    for _ in 0..2 {
        client.send(PING);
        client.expect(PONG);
    }
    assert_eq!(third.fired(), 0);
    client.send(PING);
    third.wait_fired();
    client.send("*2\r\n$4\r\nECHO\r\n$1\r\nx");
    client.expect("$1\r\nx\r\n");
}
