//! Queries the servers. What they reply is judged elsewhere.

use std::{
    thread,
    time::{Duration, UNIX_EPOCH},
};

use distlock::{Config, LockError, PooledConnection, RedisMgr};
use redis::{RedisError, Value};

use super::{
    facts::{ClockOffset, Contact, Facts, Info, NodeFacts, Permissions, Queried, Requirements},
    handover_probe, other_prefixes, permission_probe,
};
use crate::{clock, secrets::Secrets, temp_lock::TempLock};

/// Exchanges by which the round trip and the clock are measured.
pub(super) const ROUND_TRIP_SAMPLES: usize = 20;
/// The ttl of the temporary lock, longer than the hand-over probe can take.
pub(super) const PROBE_TTL: Duration = Duration::from_secs(30);

/// Queries all servers. Fails only if the configuration is invalid.
pub(super) fn collect_facts(
    config: &Config,
    requirements: Requirements,
    users: Vec<String>,
    secrets: &Secrets,
) -> Result<Facts, LockError> {
    // No other client uses the temporary name, so nodes that have just started can safely vote on
    // it.
    let config = config.clone().ttl(PROBE_TTL).quarantine(Duration::ZERO);
    let managers =
        config.each_node().into_iter().map(RedisMgr::new).collect::<Result<Vec<_>, _>>()?;
    let temp_lock = TempLock::new(&requirements.prefix);
    let nodes = thread::scope(|threads| {
        let query = |mgr| query_node(mgr, &temp_lock, &requirements.prefix, secrets);
        let queries: Vec<_> =
            managers.iter().map(|mgr| threads.spawn(move || query(mgr))).collect();
        let panicked = |mgr: &RedisMgr| {
            NodeFacts::new(mgr.server(), Contact::Unreachable("its check panicked".into()))
        };
        queries
            .into_iter()
            .zip(&managers)
            .map(|(thread, mgr)| thread.join().unwrap_or_else(|_| panicked(mgr)))
            .collect()
    });
    let mut facts = Facts { requirements, nodes, handover: None };
    for (node, user) in facts.nodes.iter_mut().zip(users) {
        node.user = user;
    }
    let reachable = facts.nodes.iter().filter(|node| node.contact == Contact::Reachable).count();
    if reachable > facts.nodes.len() / 2 {
        let mgr = RedisMgr::new(config).map_err(|error| error.to_string());
        facts.handover =
            Some(mgr.and_then(|mgr| {
                handover_probe::probe_handover(&mgr, &temp_lock.name, Duration::ZERO)
            }));
        for mgr in &managers {
            temp_lock.delete_keys(mgr);
        }
    }
    Ok(facts)
}

impl NodeFacts {
    /// A server of which nothing else is known yet.
    pub(super) fn new(server: &str, contact: Contact) -> NodeFacts {
        let not_queried = || Queried::Unsupported("not queried".into());
        NodeFacts {
            server: server.to_owned(),
            user: String::new(),
            contact,
            round_trips: Vec::new(),
            clock_offset: None,
            info: Queried::Unsupported("not queried".into()),
            declared_new: false,
            appendfsync: not_queried(),
            no_fsync_on_rewrite: not_queried(),
            timeout: not_queried(),
            locks_elsewhere: Vec::new(),
            permissions: Permissions::default(),
        }
    }
}

fn query_node(mgr: &RedisMgr, temp_lock: &TempLock, prefix: &str, secrets: &Secrets) -> NodeFacts {
    let mut node = NodeFacts::new(mgr.server(), try_contact(mgr));
    if node.contact == Contact::Reachable
        && let Err(error) = query_details(mgr, &mut node, temp_lock, prefix, secrets)
    {
        node.contact = Contact::Unreachable(error);
    }
    node
}

/// Connects, which includes the login and `TIME`, and sends `PING`.
pub(super) fn try_contact(mgr: &RedisMgr) -> Contact {
    let result = mgr.ping();
    let advice = result.as_ref().map_or_else(LockError::advice, |_| "");
    match result {
        Ok(_) => Contact::Reachable,
        // The permission probe will report it.
        Err(LockError::Refused { code, message, .. })
            if code == "NOPERM" && message.contains("'ping'") =>
        {
            Contact::Reachable
        }
        Err(LockError::Refused { code, message, .. }) => Contact::Refused { code, message, advice },
        Err(LockError::Unavailable { cause, .. }) => Contact::Unreachable(cause.to_string()),
        Err(error) => Contact::Unreachable(error.to_string()),
    }
}

fn query_details(
    mgr: &RedisMgr,
    node: &mut NodeFacts,
    temp_lock: &TempLock,
    prefix: &str,
    secrets: &Secrets,
) -> Result<(), String> {
    let mut connection = mgr.connection().map_err(|error| error.to_string())?;
    let failed = |error: RedisError| secrets.redact(&error.to_string());
    (node.round_trips, node.clock_offset) = measure_round_trips(&mut connection).map_err(failed)?;
    node.info = query_info(&mut connection, secrets).map_err(failed)?;
    let declared = query(&mut connection, &["GET", "distlock:new"]);
    node.declared_new = match (declared, node.info().and_then(|info| info.get("run_id"))) {
        (Ok(Value::BulkString(declared)), Some(run_id)) => declared == run_id.as_bytes(),
        _ => false,
    };
    let mut setting =
        |name| to_queried(query(&mut connection, &["CONFIG", "GET", name]), secrets, setting_value);
    node.appendfsync = setting("appendfsync").map_err(failed)?;
    node.no_fsync_on_rewrite = setting("no-appendfsync-on-rewrite").map_err(failed)?;
    node.timeout = setting("timeout").map_err(failed)?;
    node.locks_elsewhere =
        other_prefixes::find_locks_elsewhere(prefix, |words| query(&mut connection, words));
    let pattern = permission_probe::lock_key_pattern(prefix);
    node.permissions = permission_probe::probe_permissions(temp_lock, &pattern, |words| {
        query(&mut connection, words)
    })
    .map_err(failed)?;
    if node.info == Queried::Denied {
        node.permissions.missing.push("+info".into());
    }
    Ok(())
}

pub(super) fn query(
    connection: &mut PooledConnection,
    words: &[&str],
) -> Result<Value, RedisError> {
    let mut command = redis::Cmd::new();
    command.arg(words).query(connection)
}

/// Sorts a reply or error of the server into [`Queried`]. Fails if the connection failed.
pub(super) fn to_queried<T>(
    reply: Result<Value, RedisError>,
    secrets: &Secrets,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Queried<T>, RedisError> {
    match reply {
        Ok(value) => Ok(read(&value)
            .map_or_else(|| Queried::Unsupported("unexpected reply".into()), Queried::Known)),
        Err(error) if error.is_io_error() => Err(error),
        Err(error) if error.code() == Some("NOPERM") => Ok(Queried::Denied),
        Err(error) => Ok(Queried::Unsupported(secrets.redact(&error.to_string()))),
    }
}

pub(super) fn query_info(
    connection: &mut PooledConnection,
    secrets: &Secrets,
) -> Result<Queried<Info>, RedisError> {
    to_queried(query(connection, &["INFO"]), secrets, |reply| as_info(reply, secrets))
}

pub(super) fn as_info(reply: &Value, secrets: &Secrets) -> Option<Info> {
    as_text(reply).map(|text| Info::parse(&text, secrets))
}

pub(super) fn as_text(reply: &Value) -> Option<String> {
    match reply {
        Value::BulkString(text) => Some(String::from_utf8_lossy(text).into_owned()),
        Value::VerbatimString { text, .. } => Some(text.clone()),
        _ => None,
    }
}

/// The value in a reply to `CONFIG GET`, which is a name and a value.
pub(super) fn setting_value(pair: &Value) -> Option<String> {
    let Value::Array(pair) = pair else { return None };
    pair.get(1).and_then(as_text)
}

/// Measures the round trip and the server's clock by `TIME`. The fastest reply has the smallest
/// error.
fn measure_round_trips(
    connection: &mut PooledConnection,
) -> Result<(Vec<Duration>, Option<ClockOffset>), RedisError> {
    let mut round_trips = Vec::with_capacity(ROUND_TRIP_SAMPLES);
    let mut best: Option<ClockOffset> = None;
    for _ in 0..ROUND_TRIP_SAMPLES {
        let (wall, sent) = (clock::wall_clock(), clock::now());
        let reply = query(connection, &["TIME"])?;
        let took = clock::now() - sent;
        round_trips.push(took);
        let half = micros(took / 2);
        let ours = wall.duration_since(UNIX_EPOCH).map(micros).unwrap_or(0).saturating_add(half);
        if let Some(theirs) = server_time(&reply)
            && best.is_none_or(|best| half < best.error_us)
        {
            best = Some(ClockOffset { ahead_us: theirs.saturating_sub(ours), error_us: half });
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
