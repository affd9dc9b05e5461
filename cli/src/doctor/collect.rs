//! The one place that asks the servers; what comes back is judged elsewhere.

use std::{
    thread,
    time::{Duration, UNIX_EPOCH},
};

use distlock::{Config, LockError, PooledConnection, RedisMgr};
use redis::{RedisError, Value};

use super::{
    attempts,
    facts::{Aims, Clock, Contact, Facts, Info, Node, Rights, Told},
    trial,
};
use crate::{clock, scratch::Scratch, secrets::Secrets};

const SAMPLES: usize = 20;
/// For the scratch lock: longer than anything that is waited for here.
const TRIAL_TTL: Duration = Duration::from_secs(30);

/// Fails only where the configuration cannot work.
pub(super) fn facts(config: &Config, aims: Aims, secrets: &Secrets) -> Result<Facts, LockError> {
    // Nobody but us knows the scratch name, so that nodes which have just started may vote on it.
    let config = config.clone().ttl(TRIAL_TTL).quarantine(Duration::ZERO);
    let managers = config.each_node().into_iter().map(RedisMgr::new).collect::<Result<Vec<_>, _>>()?;
    let scratch = Scratch::new(&aims.prefix);
    let nodes = thread::scope(|threads| {
        let ask = |mgr| node(mgr, &scratch, &aims.prefix, secrets);
        let asking: Vec<_> = managers.iter().map(|mgr| threads.spawn(move || ask(mgr))).collect();
        let gone = |mgr: &RedisMgr| Node::new(mgr.server(), Contact::Away("looking at it failed".into()));
        asking.into_iter().zip(&managers).map(|(thread, mgr)| thread.join().unwrap_or_else(|_| gone(mgr))).collect()
    });
    let mut facts = Facts { aims, nodes, trial: None };
    let answering = facts.nodes.iter().filter(|node| node.contact == Contact::Answers).count();
    if answering > facts.nodes.len() / 2 {
        let trial = RedisMgr::new(config).map_err(|error| error.to_string());
        facts.trial = Some(trial.and_then(|mgr| trial::hand_over(&mgr, &scratch.name)));
        for mgr in &managers {
            scratch.clean(mgr);
        }
    }
    Ok(facts)
}

impl Node {
    /// Of which nothing is known yet.
    pub(super) fn new(server: &str, contact: Contact) -> Node {
        let untold = || Told::No("it was not asked".into());
        Node {
            server: server.to_owned(),
            contact,
            round_trips: Vec::new(),
            clock: None,
            info: Told::No("it was not asked".into()),
            appendfsync: untold(),
            no_fsync_on_rewrite: untold(),
            timeout: untold(),
            rights: Rights::default(),
        }
    }
}

fn node(mgr: &RedisMgr, scratch: &Scratch, prefix: &str, secrets: &Secrets) -> Node {
    let mut node = Node::new(mgr.server(), contact(mgr));
    if node.contact == Contact::Answers
        && let Err(away) = look(mgr, &mut node, scratch, prefix, secrets)
    {
        node.contact = Contact::Away(away);
    }
    node
}

/// Connecting signs in and asks for the time.
fn contact(mgr: &RedisMgr) -> Contact {
    match mgr.ping() {
        Ok(_) => Contact::Answers,
        // That is found out again among the rights.
        Err(LockError::Refused { code, message, .. }) if code == "NOPERM" && message.contains("'ping'") => {
            Contact::Answers
        }
        Err(LockError::Refused { code, message, .. }) => Contact::Refuses { code, message },
        Err(LockError::Unavailable { cause, .. }) => Contact::Away(cause.to_string()),
        Err(error) => Contact::Away(error.to_string()),
    }
}

fn look(mgr: &RedisMgr, node: &mut Node, scratch: &Scratch, prefix: &str, secrets: &Secrets) -> Result<(), String> {
    let mut connection = mgr.connection().map_err(|error| error.to_string())?;
    let away = |error: RedisError| secrets.quote(&error.to_string());
    (node.round_trips, node.clock) = clock_and_round_trips(&mut connection).map_err(away)?;
    let info = |value: &Value| match value {
        Value::BulkString(text) => Some(Info::parse(&String::from_utf8_lossy(text), secrets)),
        _ => None,
    };
    node.info = told(ask(&mut connection, &["INFO"]), secrets, info).map_err(away)?;
    let mut setting = |name| told(ask(&mut connection, &["CONFIG", "GET", name]), secrets, second);
    node.appendfsync = setting("appendfsync").map_err(away)?;
    node.no_fsync_on_rewrite = setting("no-appendfsync-on-rewrite").map_err(away)?;
    node.timeout = setting("timeout").map_err(away)?;
    let pattern = attempts::key_pattern(prefix);
    node.rights = attempts::rights(scratch, &pattern, |words| ask(&mut connection, words)).map_err(away)?;
    if node.info == Told::Denied {
        node.rights.missing.push("+info".into());
    }
    if node.appendfsync == Told::Denied {
        node.rights.missing.push("+config|get".into());
    }
    Ok(())
}

fn ask(connection: &mut PooledConnection, words: &[&str]) -> Result<Value, RedisError> {
    let mut command = redis::Cmd::new();
    command.arg(words).query(connection)
}

/// Fails when the connection did.
fn told<T>(
    reply: Result<Value, RedisError>,
    secrets: &Secrets,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Told<T>, RedisError> {
    match reply {
        Ok(value) => Ok(read(&value).map_or_else(|| Told::No("its answer has another form".into()), Told::Yes)),
        Err(error) if error.is_io_error() => Err(error),
        Err(error) if error.code() == Some("NOPERM") => Ok(Told::Denied),
        Err(error) => Ok(Told::No(secrets.quote(&error.to_string()))),
    }
}

/// Of a setting and its value.
fn second(pair: &Value) -> Option<String> {
    let Value::Array(pair) = pair else { return None };
    match pair.get(1) {
        Some(Value::BulkString(text)) => Some(String::from_utf8_lossy(text).into_owned()),
        _ => None,
    }
}

/// One question tells both. The quickest answer tells the clock best.
fn clock_and_round_trips(connection: &mut PooledConnection) -> Result<(Vec<Duration>, Option<Clock>), RedisError> {
    let mut round_trips = Vec::with_capacity(SAMPLES);
    let mut best: Option<Clock> = None;
    for _ in 0..SAMPLES {
        let (wall, asked) = (clock::wall(), clock::now());
        let reply = ask(connection, &["TIME"])?;
        let took = clock::now() - asked;
        round_trips.push(took);
        let half = micros(took / 2);
        let ours = wall.duration_since(UNIX_EPOCH).map(micros).unwrap_or(0).saturating_add(half);
        if let Some(theirs) = server_time(&reply)
            && best.is_none_or(|best| half < best.unsure_us)
        {
            best = Some(Clock { ahead_us: theirs.saturating_sub(ours), unsure_us: half });
        }
    }
    round_trips.sort_unstable();
    Ok((round_trips, best))
}

fn server_time(reply: &Value) -> Option<i64> {
    let Value::Array(parts) = reply else { return None };
    let number = |part: &Value| match part {
        Value::BulkString(text) => std::str::from_utf8(text).ok()?.parse::<i64>().ok(),
        _ => None,
    };
    let [seconds, micros] = parts.as_slice() else { return None };
    number(seconds)?.checked_mul(1_000_000)?.checked_add(number(micros)?)
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}
