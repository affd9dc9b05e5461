//! What the proxy of the tests itself promises, where it is not plain from the tests that use it.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use crate::support::{CEILING, Fault, FaultProxy, RedisServer, any_request};

/// A client that speaks for itself.
struct Client(TcpStream);

impl Client {
    fn of(proxy: &FaultProxy) -> Client {
        Client(TcpStream::connect(proxy.addr()).unwrap())
    }

    fn say(&mut self, line: &str) {
        self.0.write_all(format!("{line}\r\n").as_bytes()).unwrap();
    }

    /// What comes until it is as long as `wanted`.
    #[track_caller]
    fn hears(&mut self, wanted: &str) {
        self.0.set_read_timeout(Some(CEILING)).unwrap();
        let mut heard = vec![0; wanted.len()];
        self.0.read_exact(&mut heard).unwrap();
        assert_eq!(String::from_utf8_lossy(&heard), wanted);
    }

    #[track_caller]
    fn hears_nothing(&mut self) {
        self.0.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let error = self.0.read(&mut [0; 64]).expect_err("something, or the end, came");
        assert!(
            matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut),
            "{error}"
        );
    }

    #[track_caller]
    fn hears_the_end(&mut self) {
        self.0.set_read_timeout(Some(CEILING)).unwrap();
        assert!(!matches!(self.0.read(&mut [0; 64]), Ok(1..)), "something came");
    }
}

fn stage() -> (RedisServer, FaultProxy) {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    (server, proxy)
}

const PING: &str = "*1\r\n$4\r\nPING";
const PONG: &str = "+PONG\r\n";

#[test]
fn deaf_it_swallows_requests_and_passes_on_what_the_server_says() {
    let (server, proxy) = stage();
    let mut client = Client::of(&proxy);
    client.say("*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nc");
    client.hears("*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n");
    proxy.deaf();
    client.say(PING);
    client.hears_nothing();
    assert_eq!(server.query::<i64>(&["PUBLISH", "c", "x"]), 1);
    client.hears("*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n");
}

#[test]
fn mute_it_answers_no_new_connection_and_serves_the_others() {
    let (_server, proxy) = stage();
    let mut old = Client::of(&proxy);
    old.say(PING);
    old.hears(PONG);
    proxy.mute_new();
    let mut new = Client::of(&proxy);
    new.say(PING);
    new.hears_nothing();
    old.say(PING);
    old.hears(PONG);
    proxy.heal();
    new.hears_the_end();
    let mut new = Client::of(&proxy);
    new.say(PING);
    new.hears(PONG);
}

#[test]
fn a_client_whose_server_is_lost_is_not_told() {
    let (server, proxy) = stage();
    let mut client = Client::of(&proxy);
    client.say(PING);
    client.hears(PONG);
    proxy.lose_server();
    server.await_clients(0..=0);
    client.say(PING);
    client.hears_nothing();
    proxy.heal();
    client.hears_the_end();
}

#[test]
fn a_server_whose_clients_are_lost_is_not_told() {
    let (server, proxy) = stage();
    let mut client = Client::of(&proxy);
    client.say("*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nc");
    client.hears("*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n");
    proxy.lose_clients();
    client.hears_the_end();
    assert_eq!(server.query::<i64>(&["PUBLISH", "c", "x"]), 1, "it believes that somebody listens");
    proxy.heal();
    server.await_clients(0..=0);
}

#[test]
fn a_request_that_comes_twice_is_answered_twice() {
    let (server, proxy) = stage();
    let twice = proxy.on_request(any_request, Fault::DuplicateRequest);
    let mut client = Client::of(&proxy);
    client.say("*2\r\n$4\r\nINCR\r\n$1\r\nn");
    client.hears(":1\r\n:2\r\n");
    twice.wait_fired();
    assert_eq!(server.query::<i64>(&["GET", "n"]), 2);
}

#[test]
fn the_nth_request_can_be_chosen() {
    let (_server, proxy) = stage();
    let third = proxy.on_request(any_request, Fault::DropReply).after(2);
    let mut client = Client::of(&proxy);
    for _ in 0..2 {
        client.say(PING);
        client.hears(PONG);
    }
    assert_eq!(third.fired(), 0);
    client.say(PING);
    third.wait_fired();
    client.say("*2\r\n$4\r\nECHO\r\n$1\r\nx");
    client.hears("$1\r\nx\r\n");
}
