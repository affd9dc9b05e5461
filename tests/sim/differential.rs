//! Compares `FakeNode` with a real server: runs the same random sequences of script calls and
//! foreign writes on both. Replies, published messages and stored keys must be equal.

use std::iter;

use distlock::testing::servers::{Bytes, Data, Script};
use redis::{Connection, Value};

use super::{
    node::{FakeNode, Mode, take_request},
    support::RedisServer,
};

const KEYS: [&str; 9] = [
    "lock:a",
    "distlock:queue:{lock:a}",
    "distlock:token:{lock:a}",
    "lock:b",
    "distlock:queue:{lock:b}",
    "distlock:token:{lock:b}",
    "distlock:fence",
    "distlock:members:{lock:a}",
    "distlock:members:{lock:b}",
];
const CHANNEL: &str = "distlock:client:heard";
/// Maximum difference between two remaining times, in milliseconds, because a busy machine can take
/// long between two commands.
const PTTL_SLACK: i64 = 5_000;

struct Pair {
    server: RedisServer,
    real: Connection,
    subscriber: Connection,
    fake: FakeNode,
    rng: fastrand::Rng,
    nonce: u64,
}

fn start_pair(seed: u64) -> Pair {
    let server = RedisServer::start();
    let connect = || redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let (real, mut subscriber) = (connect(), connect());
    redis::cmd("SUBSCRIBE").arg(CHANNEL).exec(&mut subscriber).unwrap();
    // Waiters do both. A server before Redis 7 has no sharded channels, and replies with an error.
    drop(redis::cmd("SSUBSCRIBE").arg(CHANNEL).exec(&mut subscriber));
    let mut fake = FakeNode::default();
    fake.execute(1, &words(&["SUBSCRIBE", CHANNEL]), 0);
    Pair { server, real, subscriber, fake, rng: fastrand::Rng::with_seed(seed), nonce: 0 }
}

fn words(words: &[&str]) -> Vec<Bytes> {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

fn parse(bytes: &[u8]) -> Value {
    redis::parse_redis_value(bytes).unwrap()
}

fn text(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::Array(items) => items.first().map(text).unwrap_or_default(),
        _ => String::new(),
    }
}

/// Compares two replies. Remaining times may differ a little, and errors after their code.
fn is_same(real: &Value, fake: &Value) -> bool {
    match (real, fake) {
        (Value::Array(real), Value::Array(fake)) => {
            real.len() == fake.len()
                && real.iter().zip(fake).all(|(real, fake)| is_same(real, fake))
        }
        (Value::BulkString(_), Value::BulkString(_)) => {
            let (real, fake) = (text(real), text(fake));
            let fields = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
            let (real, fake) = (fields(&real), fields(&fake));
            let close = |real: &str, fake: &str| match (real.parse::<i64>(), fake.parse::<i64>()) {
                // Only remaining times are numbers of this size.
                (Ok(real), Ok(fake)) if (10_000..100_000_000).contains(&real) => {
                    (real - fake).abs() < PTTL_SLACK
                }
                _ => real == fake,
            };
            real.len() == fake.len() && real.iter().zip(&fake).all(|(real, fake)| close(real, fake))
        }
        (Value::ServerError(real), Value::ServerError(fake)) => real.code() == fake.code(),
        _ => real == fake,
    }
}

impl Pair {
    fn pick<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.rng.usize(..list.len())]
    }

    fn entry(&mut self) -> String {
        let id = self.pick(&["one", "two", "three four", "five"]);
        if self.rng.bool() {
            let group = self.pick(&[
                "distlock:read/0/1,",
                "distlock:permits/3/1,",
                "distlock:permits/3/2,",
                "distlock:odd/3/2,",
                "distlock:permits/3/0,",
            ]);
            return format!("{group}30000 {CHANNEL} {id}");
        }
        match self.rng.u32(..10) {
            0 => "not an entry".into(),
            8 => format!("0 {CHANNEL} {id}"),
            9 => format!("9999999999999999 {CHANNEL} {id}"),
            1 | 2 => format!("30000 distlock:client:gone {id}"),
            _ => format!("30000 {CHANNEL} {id}"),
        }
    }

    /// What a claim needs of a group: its name, its limit, and the number of members.
    fn membership(&mut self) -> [&'static str; 3] {
        [
            ["", "0", "1"],
            ["distlock:read", "0", "1"],
            ["distlock:permits", "3", "1"],
            ["distlock:permits", "3", "2"],
        ][self.rng.usize(..4)]
    }

    /// A call of a random script, as the library sends it.
    fn call(&mut self) -> Vec<Bytes> {
        const WEIGHTED: [usize; 23] =
            [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8, 8];
        let script = Script::ALL[WEIGHTED[self.rng.usize(..WEIGHTED.len())]];
        self.nonce += 1;
        let nonce = self.nonce.to_string();
        let (mut renewed, mut renewals) = (Vec::new(), Vec::<String>::new());
        for at in [0, 3] {
            let count = self.pick(&["0", "0", "1", "2"]);
            let token_ttl = self.pick(&["0", "3630000"]);
            renewed.push(KEYS[at]);
            renewed.extend((count != "0").then_some(KEYS[7 + at / 3]));
            renewed.extend((token_ttl != "0").then_some(KEYS[at + 2]));
            let id = self.pick(&["one", "two", "three four", "five"]);
            let ttl = self.pick(&["20000", "40000", "-10000", "-50000"]);
            let is_usual = count == "0" && token_ttl == "0" && self.rng.bool();
            let more = format!("+{ttl} {count} {token_ttl}");
            renewals.extend([id.into(), if is_usual { ttl.into() } else { more }]);
        }
        let keys: Vec<&str> = match (script, self.rng.bool()) {
            (Script::Renew, _) => renewed,
            (Script::Describe, _) => [&KEYS[..3], &[KEYS[7]], &KEYS[3..6], &[KEYS[8]]].concat(),
            (Script::AcquireAll, _) => KEYS[..7].to_vec(),
            (Script::Acquire | Script::Release, first) => {
                [&KEYS[if first { 0..3 } else { 3..6 }], &KEYS[6..7]].concat()
            }
            (_, first) => {
                let members = if first { KEYS[7] } else { KEYS[8] };
                [&KEYS[if first { 0..3 } else { 3..6 }], &[KEYS[6], members]].concat()
            }
        };
        let id = self.pick(&["one", "two", "three four", "five"]);
        let late = self.pick(&[
            "0000000000000000",
            "9999999999999999",
            "9999999999999999",
            "9999999999999999",
        ]);
        let entry = self.entry();
        let ahead = self.pick(&["0000000000000000", "0000000000000001", "8800000000000000"]);
        let mode = self.pick(&["try", "join", "join-heard", "look", "leave"]);
        let heal = self.pick(&["0", "60000", "90000"]);
        let each = self.pick(&["0", "2", "100"]);
        let ttl = self.pick(&["20000", "40000"]);
        let args = match script {
            Script::Acquire if self.rng.bool() => vec![id, ttl, late, heal, "3620000"],
            Script::Acquire => vec![id, ttl, late, heal, mode, &entry, ahead, "3620000"],
            Script::Release if self.rng.bool() => {
                vec![id, self.pick(&["", "1700000000000000", "1800000000000000"])]
            }
            Script::Release if self.rng.bool() => vec![id, "", ""],
            Script::Release => vec![id, &entry, if self.rng.bool() { "" } else { late }],
            Script::Renew => iter::once(late).chain(renewals.iter().map(String::as_str)).collect(),
            Script::Describe => vec![each, "3", self.pick(&["0", "1", "100"]), "3"],
            Script::AcquireGroup => {
                let decided = [ahead, self.pick(&["0", "1"])];
                let mode = self.pick(&[mode, mode, mode, "downgrade"]);
                [&[id, ttl, late, heal, mode, &entry], &self.membership()[..], &decided].concat()
            }
            Script::ReleaseGroup if self.rng.bool() => {
                vec![id, "", "", self.pick(&["1", "2", "-1"])]
            }
            Script::ReleaseGroup => {
                let id = self.pick(&[id, id, "distlock:read", "distlock:permits"]);
                vec![id, &entry, if self.rng.bool() { "" } else { late }, self.pick(&["0", "1"])]
            }
            Script::Adopt => vec![id, "six", ttl, self.pick(&["1", "2"]), late],
            Script::AcquireAll => {
                vec![ttl, late, heal, "3620000", id, self.pick(&["one", "six", "seven"])]
            }
            Script::Keep => {
                let entry = if self.rng.bool() { &entry } else { "" };
                vec![id, entry, self.pick(&["1", "2"]), ttl]
            }
        };
        let count = keys.len().to_string();
        words(&[&["EVAL", script.text(), &count], &keys[..], &[&nonce], &args[..], &["1"]].concat())
    }

    /// Changes a key as another program might, or fills the server's memory.
    fn change_keys(&mut self) {
        let key = KEYS[self.rng.usize(..KEYS.len())];
        let value = self.pick(&[
            "one",
            "foreign",
            "12",
            "abc",
            "9000000000000000",
            "1700000000000000",
            "",
            "v2 12",
            "v1 12",
            "distlock:read",
            "distlock:permits",
            "distlock:kept one",
        ]);
        let data = match self.rng.u32(..5) {
            0 => None,
            1 | 2 => Some(Data::Text(value.into())),
            3 => Some(Data::List([b"20000 distlock:client:heard five".to_vec()].into())),
            _ => {
                let full = self.fake.mode == Mode::Normal;
                self.server.config_set("maxmemory", if full { "1" } else { "0" });
                self.fake.mode = if full { Mode::Full } else { Mode::Normal };
                return;
            }
        };
        if self.fake.mode == Mode::Normal || data.is_none() {
            self.put(key, data);
        }
    }

    /// Stores a text or a list in both servers, or deletes the key.
    fn put(&mut self, key: &str, data: Option<Data>) {
        redis::cmd("DEL").arg(key).exec(&mut self.real).unwrap();
        match &data {
            Some(Data::Text(text)) => redis::cmd("SET").arg(key).arg(text).exec(&mut self.real),
            Some(Data::List(list)) => {
                let entries: Vec<_> = list.iter().cloned().collect();
                redis::cmd("RPUSH").arg(key).arg(entries).exec(&mut self.real)
            }
            Some(Data::Sorted(_)) | None => Ok(()),
        }
        .unwrap();
        self.fake.keys.put(key.as_bytes(), data, None);
    }

    /// Stores a held lock for which others wait, and returns the usual release by its holder.
    fn prepare_hand_over(&mut self) -> Vec<Bytes> {
        let number = |text: &str| Some(Data::Text(text.into()));
        let waiters = [self.entry(), self.entry()].map(String::into_bytes);
        self.put(KEYS[0], number("one"));
        self.put(KEYS[1], Some(Data::List(waiters.into())));
        // Most of these are of the same ten seconds as the hand-over, which then reads no fence.
        let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut self.real).unwrap();
        let recent = ((seconds - 1) * 1_000_000).to_string();
        for key in [KEYS[2], KEYS[6]] {
            let data = match self.rng.u32(..8) {
                0 => None,
                1 => number("1800000000000000"),
                2 => number("abc"),
                3 => number("v2 12"),
                4 => Some(Data::List([b"one".to_vec()].into())),
                5 => number(&recent),
                _ => number("1700000000000000"),
            };
            self.put(key, data);
        }
        let token = ["", "1800000000000000", "1700000000000000", "1700000000000000"];
        let token = token[self.rng.usize(..4)];
        let keys = [&KEYS[..3], &KEYS[6..7]].concat();
        let args = ["1", "one", token, "1"];
        words(&[&["EVAL", Script::Release.text(), "4"], &keys[..], &args].concat())
    }

    /// The values of all keys.
    fn values(&mut self) -> Vec<Option<Data>> {
        let mut all = Vec::new();
        for key in KEYS {
            let list =
                redis::cmd("LRANGE").arg(key).arg(0).arg(-1).query::<Vec<Bytes>>(&mut self.real);
            let text = redis::cmd("GET").arg(key).query::<Option<Bytes>>(&mut self.real);
            let mut sorted = redis::cmd("ZRANGE");
            sorted.arg(key).arg(0).arg(-1).arg("WITHSCORES");
            if let (Err(_), Err(_), Ok(sorted)) =
                (&text, &list, sorted.query::<Vec<(Bytes, u64)>>(&mut self.real))
            {
                all.push(Some(Data::Sorted(sorted.into_iter().collect())));
                continue;
            }
            all.push(match (text, list) {
                (Ok(text), _) => text.map(Data::Text),
                (Err(_), list) => Some(Data::List(list.unwrap().into())),
            });
        }
        all
    }

    /// For each key the remaining time in milliseconds, if it expires.
    fn times_left(&mut self) -> Vec<Option<i64>> {
        let pttl = |key| redis::cmd("PTTL").arg(key).query::<i64>(&mut self.real).unwrap();
        KEYS.into_iter().map(pttl).map(|left| (left >= 0).then_some(left)).collect()
    }

    /// Whether the keys of the fake expire when those of the real server do. A hand-over that
    /// cannot be made may leave the token another time.
    fn expires_alike(fake: &FakeNode, now_us: u64, times_left: &[Option<i64>]) -> bool {
        let expiry_of = |key: &str| {
            let mut entries = fake.keys.live_entries(now_us);
            let at = entries.find(|(other, ..)| *other == key.as_bytes())?.2?;
            Some(at.cast_signed() - (now_us / 1_000).cast_signed())
        };
        let mut keys = KEYS.into_iter().zip(times_left).filter(|(key, _)| !key.contains(":token:"));
        keys.all(|(key, real)| match (expiry_of(key), real) {
            (Some(fake), Some(real)) => (fake - real).abs() < PTTL_SLACK,
            (fake, real) => fake.is_some() == real.is_some(),
        })
    }

    fn values_of_fake(&self, fake: &FakeNode, now_us: u64) -> Vec<Option<Data>> {
        let live: Vec<_> = fake
            .keys
            .live_entries(now_us)
            .map(|(key, data, _)| (key.to_vec(), data.clone()))
            .collect();
        let find = |key: &str| {
            live.iter().find(|(other, _)| other == key.as_bytes()).map(|(_, data)| data.clone())
        };
        KEYS.into_iter().map(find).collect()
    }

    fn step(&mut self) -> Result<(), String> {
        let is_hand_over = self.fake.mode == Mode::Normal && self.rng.u32(..10) == 0;
        let request = if is_hand_over { self.prepare_hand_over() } else { self.call() };
        let (seconds, micros): (u64, u64) = redis::cmd("TIME").query(&mut self.real).unwrap();
        let mut packed = Vec::new();
        packed.extend(format!("*{}\r\n", request.len()).into_bytes());
        for word in &request {
            packed.extend(format!("${}\r\n", word.len()).into_bytes());
            packed.extend(word);
            packed.extend(b"\r\n");
        }
        let mut copy = packed.clone();
        assert_eq!(
            take_request(&mut copy).as_ref(),
            Some(&request),
            "a request is read as it was written"
        );
        let reply = redis::ConnectionLike::req_packed_commands(&mut self.real, &packed, 0, 1)
            .unwrap()
            .remove(0);
        let (values, times_left) = (self.values(), self.times_left());
        // The simulated server needs the same time as the real one. Most replies report it, and it
        // can be computed from a new token. Otherwise nothing depends on it.
        let published = self.published();
        let granted = published.iter().map(|message| match message {
            Value::Array(parts) => parts.last().map(text).unwrap_or_default(),
            _ => String::new(),
        });
        let texts: Vec<String> = granted.chain([text(&reply)]).collect();
        let numbers = texts
            .iter()
            .flat_map(|text| text.split(' '))
            .filter_map(|field| field.parse::<u64>().ok());
        let tokens = values.iter().filter_map(|data| match data {
            Some(Data::Text(text)) => std::str::from_utf8(text).ok()?.parse().ok(),
            _ => None,
        });
        let plausible = |us: &u64| (seconds * 1_000_000..(seconds + 100) * 1_000_000).contains(us);
        let mut moments: Vec<u64> = numbers.filter(plausible).collect();
        for token in tokens.filter(plausible) {
            moments.extend((0..6).map(|step| token - step));
        }
        moments.push(seconds * 1_000_000 + micros);
        let mut last = None;
        for now_us in moments {
            let mut fake = self.fake.clone();
            let outcome = fake.execute(2, &request, now_us);
            let fake_reply = parse(&outcome.reply);
            let messages: Vec<_> =
                outcome.messages.iter().map(|(_, message)| parse(message)).collect();
            if is_same(&reply, &fake_reply)
                && self.values_of_fake(&fake, now_us) == values
                && messages == published
                && Self::expires_alike(&fake, now_us, &times_left)
            {
                self.fake = fake;
                return Ok(());
            }
            last.get_or_insert((fake_reply, self.values_of_fake(&fake, now_us), messages));
        }
        let shown: Vec<_> =
            request.iter().skip(2).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        Err(format!(
            "{shown:?}\n real: {reply:?}\n       {values:?}\n       {published:?} {times_left:?}\n \
             fake: {last:?}\nbefore: {:?}",
            self.fake.keys
        ))
    }

    /// The messages that were published since the last call.
    fn published(&mut self) -> Vec<Value> {
        redis::cmd("PUBLISH").arg(CHANNEL).arg("all").exec(&mut self.real).unwrap();
        let mut messages = Vec::new();
        loop {
            let mut message = self.subscriber.recv_response().unwrap();
            if let Value::Array(parts) = &mut message
                && parts.first() == Some(&Value::BulkString(b"smessage".to_vec()))
            {
                parts[0] = Value::BulkString(b"message".to_vec());
            }
            let end = Value::BulkString(b"all".to_vec());
            if matches!(&message, Value::Array(parts) if parts.last() == Some(&end)) {
                return messages;
            }
            messages.push(message);
        }
    }
}

#[test]
fn fake_node_replies_like_real_server() {
    let seed = super::env_number("SIM_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!(
        "replay: SIM_SEED={seed} cargo test --features testing --test sim fake_node -- --nocapture"
    );
    let mut pair = start_pair(seed);
    pair.subscriber.set_read_timeout(Some(super::support::TEST_TIMEOUT)).unwrap();
    for step in 0..4_000 {
        if pair.rng.u32(..5) == 0 {
            pair.change_keys();
        }
        if let Err(difference) = pair.step() {
            panic!("seed {seed}, step {step}: {difference}");
        }
    }
}
