//! The corpus of the fuzz targets (tests/fuzz/corpus) must match the replies of a real server.

use std::{env, fs, io::Write, net::TcpStream, path::Path};

use distlock::testing::servers::Script;

use crate::{
    helpers::FENCE,
    support::{Frames, RedisServer, request},
};

/// The values that src/fuzz expects.
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
            assert_ne!(self.frames.fill(&self.stream).unwrap(), 0, "the connection was closed");
        }
    }

    /// Sends a request and returns the bytes of the reply.
    fn request(&mut self, words: &[&str]) -> Vec<u8> {
        self.stream.write_all(&request(words)).unwrap();
        self.frame()
    }

    fn script(&mut self, script: Script, name: &str, args: &[&str]) -> Vec<u8> {
        let keys = ["", "distlock:queue:{", "distlock:token:{"]
            .map(|kind| format!("{kind}lock:{name}{}", if kind.is_empty() { "" } else { "}" }));
        let mut words =
            vec!["EVAL", script.text(), "4", &keys[0], &keys[1], &keys[2], FENCE, NONCE];
        words.extend(args);
        words.push("1");
        self.request(&words)
    }

    fn acquire(&mut self, name: &str, id: &str, mode: &str) -> Vec<u8> {
        let entry = format!("1000 distlock:client:x {id}");
        let never = "9999999999999999";
        let from = "0000000000000000";
        self.script(
            Script::Acquire,
            name,
            &[id, "30000", never, "1", mode, &entry, from, "3630000"],
        )
    }

    fn acquire_short(&mut self, name: &str, id: &str) -> Vec<u8> {
        let args = [id, "30000", "9999999999999999", "1", "3630000"];
        self.script(Script::Acquire, name, &args)
    }

    fn release(&mut self, name: &str, id: &str) -> Vec<u8> {
        self.script(Script::Release, name, &[id, "", ""])
    }
}

fn recorder(server: &RedisServer) -> Recorder {
    Recorder { stream: TcpStream::connect(server.addr()).unwrap(), frames: Frames::default() }
}

/// The names of all files, with what the server sends.
fn recorded(server: &RedisServer) -> Vec<(&'static str, Vec<u8>)> {
    let mut client = recorder(server);
    let mut subscriber = recorder(server);
    let subscribed = subscriber.request(&["SUBSCRIBE", "distlock:client:x"]);
    client.request(&["LPUSH", "lock:odd", "x"]);
    client.request(&["SET", "lock:foreign", "a client of another kind\n", "PX", "5000"]);
    let keys = |names: &[&str]| names.iter().map(|name| format!("lock:{name}")).collect::<Vec<_>>();
    let renew = |client: &mut Recorder, names: &[&str]| {
        let (keys, count) = (keys(names), names.len().to_string());
        let mut words = vec!["EVAL", Script::Renew.text(), &count];
        words.extend(keys.iter().map(String::as_str));
        words.extend([NONCE, "9999999999999999"]);
        names.iter().for_each(|_| words.extend([ID, "30000"]));
        words.push("1");
        client.request(&words)
    };
    let describe = |client: &mut Recorder, names: &[&str]| {
        let keys = keys(names);
        let other_key = |kind: &str, key: &String| format!("distlock:{kind}:{{{key}}}");
        let all: Vec<_> = keys
            .iter()
            .flat_map(|key| {
                let other = |kind| other_key(kind, key);
                [key.clone(), other("queue"), other("token"), other("members")]
            })
            .collect();
        let count = all.len().to_string();
        let mut words = vec!["EVAL", Script::Describe.text(), &count];
        words.extend(all.iter().map(String::as_str));
        words.extend([NONCE, "3", "5", "9", "9", "1"]);
        client.request(&words)
    };
    let mut files = vec![
        ("messages/subscribed", subscribed),
        ("replies/held", client.acquire("a", ID, "try")),
        ("replies/fenced", client.acquire_short("c", ID)),
        ("replies/busy", client.acquire("a", NEXT, "try")),
        ("replies/queued", client.acquire("a", NEXT, "join")),
        ("replies/looked", client.acquire("a", NEXT, "look")),
        ("replies/busy-foreign", client.acquire("foreign", ID, "try")),
        ("replies/type", client.acquire("odd", ID, "try")),
        ("replies/renewed", renew(&mut client, &["a"])),
        ("replies/renewed-three", renew(&mut client, &["a", "gone", "foreign"])),
        ("replies/surveyed", describe(&mut client, &["a"])),
        ("replies/surveyed-two", describe(&mut client, &["odd", "foreign"])),
        ("replies/other", client.release("a", NEXT)),
        ("replies/released", client.release("a", ID)),
        ("messages/grant", subscriber.frame()),
        ("replies/gone", client.release("b", ID)),
        ("replies/pong", client.request(&["PING"])),
        ("replies/time", client.request(&["TIME"])),
        (
            "replies/scanned",
            client.request(&["SCAN", "0", "MATCH", "lock:f*", "COUNT", "500", "TYPE", "string"]),
        ),
        (
            "replies/refused",
            client.request(&["EVALSHA", "0000000000000000000000000000000000000000", "0"]),
        ),
        ("replies/no-such-command", client.request(&["NO", "SUCH", "COMMAND"])),
    ];
    let past = "0000000000000000";
    let expired = [ID, "30000", past, "1", "try", "", past, "3630000"];
    files.push(("replies/late", client.script(Script::Acquire, "a", &expired)));
    let queries = [&["INFO", "server"][..], &["INFO", "replication"]];
    let introduction: Vec<u8> =
        queries.iter().flat_map(|query| public_fields(&client.request(query))).collect();
    files.push(("introductions/master", introduction));
    files
}

/// Leaves out where the server runs and on what machine, because the corpus is published.
fn public_fields(info: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(info);
    let public = ["# ", "redis_version:", "run_id:", "uptime_", "role:", "master_"];
    let is_public = |line: &&str| public.iter().any(|field| line.starts_with(field));
    let kept: String =
        text.split("\r\n").filter(is_public).map(|line| format!("{line}\r\n")).collect();
    format!("${}\r\n{kept}\r\n", kept.len()).into_bytes()
}

/// The text with each number replaced by `#`, because numbers differ from run to run.
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

/// `DISTLOCK_RECORD=1` writes the corpus.
///
/// Fault: F52
#[test]
fn corpus_matches_the_replies_of_a_server() {
    let server = RedisServer::start();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
    for (name, reply) in recorded(&server) {
        let file = folder.join(name);
        if env::var_os("DISTLOCK_RECORD").is_some() {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, &reply).unwrap();
        }
        let kept = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        match name {
            // Servers differ in their other fields.
            "introductions/master" => {
                for field in ["run_id:", "uptime_in_seconds:", "role:master", "master_replid2:"] {
                    assert!(
                        [&kept, &reply]
                            .iter()
                            .all(|text| String::from_utf8_lossy(text).contains(field)),
                        "{field}"
                    );
                }
            }
            _ => assert_eq!(shape(&reply), shape(&kept), "{name}"),
        }
    }
}
