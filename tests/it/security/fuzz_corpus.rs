//! Keeps the corpus of the fuzz targets (tests/fuzz/corpus) what a real server says: records it, or
//! compares.

use std::{env, fs, io::Write, net::TcpStream, path::Path};

use crate::support::{Frames, RedisServer, request};

const SHARED: &str = include_str!("../../../src/node/lua/shared.lua");
const ACQUIRE: &str = include_str!("../../../src/node/lua/acquire.lua");
const RELEASE: &str = include_str!("../../../src/node/lua/release.lua");
const INSPECT: &str = include_str!("../../../src/node/lua/inspect.lua");
const RENEW: &str = include_str!("../../../src/node/lua/renew.lua");
const SURVEY: &str = include_str!("../../../src/node/lua/describe.lua");

/// What src/fuzz expects.
const NONCE: &str = "1000";
const ID: &str = "web-3|pid7|tid9|ts1763712345678|6f1c2c4e-0f5d-4f5a-9d55-1f2a3b4c5d6e";
const NEXT: &str = "web-4|pid8|tid1|ts1763712345999|0b6c2c4e-1f5d-4f5a-8d55-1f2a3b4c5d6e";

struct Recorder {
    stream: TcpStream,
    frames: Frames,
}

impl Recorder {
    fn frame(&mut self) -> Vec<u8> {
        loop {
            if let Some(frame) = self.frames.take_frame() {
                return frame;
            }
            assert_ne!(self.frames.fill(&self.stream).unwrap(), 0, "it has closed the connection");
        }
    }

    /// The bytes of the answer.
    fn ask(&mut self, words: &[&str]) -> Vec<u8> {
        self.stream.write_all(&request(words)).unwrap();
        self.frame()
    }

    fn script(&mut self, text: &str, name: &str, args: &[&str]) -> Vec<u8> {
        let keys = ["", "distlock:queue:{", "distlock:fence:{"]
            .map(|kind| format!("{kind}lock:{name}{}", if kind.is_empty() { "" } else { "}" }));
        let mut words = vec!["EVAL", text, "3", &keys[0], &keys[1], &keys[2], NONCE];
        words.extend(args);
        self.ask(&words)
    }

    fn acquire(&mut self, name: &str, id: &str, mode: &str) -> Vec<u8> {
        let entry = format!("1000 distlock:client:x {id}");
        let (text, far) = ([SHARED, ACQUIRE].concat(), "9999999999999999");
        self.script(&text, name, &[id, "30000", mode, &entry, far, "1", "0000000000000000"])
    }

    fn release(&mut self, name: &str, id: &str) -> Vec<u8> {
        self.script(&[SHARED, RELEASE].concat(), name, &[id, "", ""])
    }

    fn inspect(&mut self, name: &str) -> Vec<u8> {
        self.script(&[SHARED, INSPECT].concat(), name, &[])
    }
}

fn recorder(server: &RedisServer) -> Recorder {
    Recorder { stream: TcpStream::connect(server.addr()).unwrap(), frames: Frames::default() }
}

/// All files with what a server says.
fn recorded(server: &RedisServer) -> Vec<(&'static str, Vec<u8>)> {
    let mut on = recorder(server);
    let mut ear = recorder(server);
    let subscribed = ear.ask(&["SUBSCRIBE", "distlock:client:x"]);
    on.ask(&["LPUSH", "lock:odd", "x"]);
    on.ask(&["SET", "lock:foreign", "a client of another kind\n", "PX", "5000"]);
    let keys = |names: &[&str]| names.iter().map(|name| format!("lock:{name}")).collect::<Vec<_>>();
    let renew = |on: &mut Recorder, names: &[&str]| {
        let (keys, count) = (keys(names), names.len().to_string());
        let mut words = vec!["EVAL", RENEW, &count];
        words.extend(keys.iter().map(String::as_str));
        words.push(NONCE);
        names.iter().for_each(|_| words.extend([ID, "30000"]));
        on.ask(&words)
    };
    let survey = |on: &mut Recorder, names: &[&str]| {
        let keys = keys(names);
        let beside = |kind: &str, key: &String| format!("distlock:{kind}:{{{key}}}");
        let all: Vec<_> = keys
            .iter()
            .flat_map(|key| [key.clone(), beside("queue", key), beside("fence", key)])
            .collect();
        let count = all.len().to_string();
        let mut words = vec!["EVAL", SURVEY, &count];
        words.extend(all.iter().map(String::as_str));
        words.extend([NONCE, "3", "5"]);
        on.ask(&words)
    };
    let mut files = vec![
        ("messages/subscribed", subscribed),
        ("replies/held", on.acquire("a", ID, "try")),
        ("replies/busy", on.acquire("a", NEXT, "try")),
        ("replies/queued", on.acquire("a", NEXT, "join")),
        ("replies/looked", on.acquire("a", NEXT, "look")),
        ("replies/busy-foreign", on.acquire("foreign", ID, "try")),
        ("replies/type", on.acquire("odd", ID, "try")),
        ("replies/inspected", on.inspect("a")),
        ("replies/inspected-free", on.inspect("b")),
        ("replies/renewed", renew(&mut on, &["a"])),
        ("replies/renewed-three", renew(&mut on, &["a", "gone", "foreign"])),
        ("replies/surveyed", survey(&mut on, &["a"])),
        ("replies/surveyed-two", survey(&mut on, &["odd", "foreign"])),
        ("replies/other", on.release("a", NEXT)),
        ("replies/released", on.release("a", ID)),
        ("messages/grant", ear.frame()),
        ("replies/gone", on.release("b", ID)),
        ("replies/pong", on.ask(&["PING"])),
        ("replies/time", on.ask(&["TIME"])),
        (
            "replies/scanned",
            on.ask(&["SCAN", "0", "MATCH", "lock:f*", "COUNT", "500", "TYPE", "string"]),
        ),
        ("replies/refused", on.ask(&["EVALSHA", "0000000000000000000000000000000000000000", "0"])),
        ("replies/no-such-command", on.ask(&["NO", "SUCH", "COMMAND"])),
    ];
    let text = [SHARED, ACQUIRE].concat();
    let late = [ID, "30000", "try", "", "0000000000000000", "1", "0000000000000000"];
    files.push(("replies/late", on.script(&text, "a", &late)));
    let questions = [&["INFO", "server"][..], &["INFO", "replication"], &["INFO", "persistence"]];
    let mut introduction: Vec<u8> =
        questions.iter().flat_map(|question| without_whereabouts(&on.ask(question))).collect();
    introduction.extend(on.ask(&["CONFIG", "GET", "*appendfsync*"]));
    server.cli(&["SET", "distlock:memory", "10000"]);
    introduction.extend(on.ask(&["GET", "distlock:memory"]));
    files.push(("introductions/master", introduction));
    files
}

/// Where a server runs, and on what, is nobody's business.
fn without_whereabouts(info: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(info);
    let told = [
        "# ",
        "redis_version:",
        "run_id:",
        "uptime_",
        "role:",
        "master_",
        "aof_",
        "rdb_",
        "loading:",
    ];
    let is_told = |line: &&str| told.iter().any(|field| line.starts_with(field));
    let kept: String =
        text.split("\r\n").filter(is_told).map(|line| format!("{line}\r\n")).collect();
    format!("${}\r\n{kept}\r\n", kept.len()).into_bytes()
}

/// Without what differs from one time to the next.
fn shape(bytes: &[u8]) -> String {
    let mut shape = String::new();
    for letter in String::from_utf8_lossy(bytes).chars() {
        match letter.is_ascii_digit() {
            true if shape.ends_with('#') => {}
            true => shape.push('#'),
            false => shape.push(letter),
        }
    }
    shape
}

/// `DISTLOCK_RECORD=1` writes the files.
#[test]
fn the_corpus_is_what_a_server_says() {
    let server = RedisServer::start();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
    for (name, said) in recorded(&server) {
        let file = folder.join(name);
        if env::var_os("DISTLOCK_RECORD").is_some() {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, &said).unwrap();
        }
        let kept = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        match name {
            // Which fields there are differs between servers.
            "introductions/master" => {
                for field in [
                    "run_id:",
                    "uptime_in_seconds:",
                    "role:master",
                    "aof_enabled:",
                    "no-appendfsync-on-rewrite",
                ] {
                    assert!(
                        [&kept, &said]
                            .iter()
                            .all(|text| String::from_utf8_lossy(text).contains(field)),
                        "{field}"
                    );
                }
            }
            _ => assert_eq!(shape(&said), shape(&kept), "{name}"),
        }
    }
}
