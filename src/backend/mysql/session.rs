//! `Session`: a connection that is set up for locks, on a server that is fit for them.

use std::{io, sync::Arc, time::Duration};

use super::{
    connection::Connection,
    endpoint::MySqlEndpoint,
    loss_watch::LossWatch,
    outcome::{self, cluster_in, number, read_only, rows, text, unexpected},
    packet::StatementResult,
    sql::{ReadOnlyOff, Table, open_session, set_idle_seconds, set_lease_seconds},
};
use crate::{
    backend::{
        checkout_queue::Place,
        error::{NodeError, NodeErrorKind},
        transport::{SILENCE_MAX, bear_silence},
    },
    sys::clock::{self, Moment},
};

/// Oldest versions with `NOWAIT` and `SKIP LOCKED`.
const MARIADB_MIN: (u32, u32) = (10, 6);
const MYSQL_MIN: (u32, u32) = (8, 0);

/// Time after a grant for which a contended lock counts as busy. A connection that has been idle
/// for longer may be broken, and only a request without a wait shows that.
const BUSY_MEMORY: Duration = Duration::from_secs(1);

/// Dropping it closes its connection; the server then ends its transaction.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) connection: Connection,
    pub(super) read_only_off: ReadOnlyOff,
    /// Time without a request after which the server closes the connection.
    idle_seconds: u64,
    /// Time without a further byte of a request after which it does so.
    lease_seconds: u64,
    is_watched: bool,
    /// Time for which the path to the server may be broken before the system closes the connection.
    silence_max: Duration,
    /// When the renewal was sent that the server has not replied to yet.
    pub(super) renewal_sent: Option<Moment>,
    /// The lock for which this connection has waited last, and when it got it.
    waited_for: Option<(Box<str>, Moment)>,
    /// While somebody uses the session. The last field, so that the next thread gets the place when
    /// the connection has been closed.
    pub(super) place: Option<Arc<Place>>,
}

/// What a session needs to know.
#[derive(Debug)]
pub(crate) struct SessionSettings {
    pub(crate) endpoint: MySqlEndpoint,
    pub(crate) default_ttl: Duration,
    pub(crate) table: Table,
    /// Galera and group replication with several primaries are not refused.
    pub(crate) allow_cluster: bool,
}

impl Session {
    pub(super) fn open(settings: &SessionSettings, deadline: Moment) -> Result<Session, NodeError> {
        let mut connection = Connection::open(&settings.endpoint, deadline)?;
        if let Some(reason) = too_old(connection.version(), connection.is_mariadb()) {
            return Err(unfit(reason));
        }
        let lease_seconds = lease_seconds(settings.default_ttl);
        let setup = open_session(&settings.table, lease_seconds, connection.is_mariadb());
        let reply = connection.query(&setup, deadline)?;
        let read_only_off =
            check_server(reply, connection.id(), lease_seconds, settings.allow_cluster)?;
        Ok(Session::new(connection, lease_seconds, read_only_off))
    }

    pub(super) fn new(
        connection: Connection,
        lease_seconds: u64,
        read_only_off: ReadOnlyOff,
    ) -> Session {
        Session {
            connection,
            read_only_off,
            idle_seconds: lease_seconds,
            lease_seconds,
            is_watched: false,
            silence_max: SILENCE_MAX,
            renewal_sent: None,
            waited_for: None,
            place: None,
        }
    }

    pub(super) fn note_wait_for(&mut self, name: &str) {
        self.waited_for = Some((name.into(), clock::now()));
    }

    pub(super) fn forget_wait(&mut self) {
        self.waited_for = None;
    }

    /// Whether the lock is probably held again, and the connection works, so that the next request
    /// can wait.
    pub(super) fn has_just_waited_for(&self, name: &str) -> bool {
        self.waited_for.as_ref().is_some_and(|(last, at)| {
            **last == *name && clock::now().duration_since(*at) < BUSY_MEMORY
        })
    }

    /// Watches the connection until the server closes it.
    pub(super) fn watch(&mut self, watch: &LossWatch) -> io::Result<()> {
        if let Some(transport) = self.connection.transport() {
            watch.add(self.connection.id(), transport, self.is_watched)?;
            self.is_watched = true;
        }
        Ok(())
    }

    /// Reads the replies that are outstanding, and sends one more request, unless the server has
    /// closed the connection.
    pub(super) fn query_after_owed(
        &mut self,
        statement: &str,
        deadline: Moment,
    ) -> Result<Vec<StatementResult>, NodeError> {
        while self.connection.owed() > 0 {
            self.connection.receive(deadline)?;
        }
        // Closes our side too, so that the request is known not to be sent.
        self.connection.is_idle();
        self.connection.query(statement, deadline)
    }

    /// Lets the connection last while the server keeps the lock of a lease with this ttl, because
    /// the end of the connection would end the lock.
    pub(super) fn bear_silence(&mut self, ttl: Duration) {
        let longest = ttl.max(SILENCE_MAX);
        if longest != self.silence_max
            && let Some(transport) = self.connection.transport()
        {
            bear_silence(transport, longest);
            self.silence_max = longest;
        }
    }

    /// What to send before anything else so that the server keeps a lock for `ttl`; or nothing.
    pub(super) fn prepare_lease(&mut self, ttl: Duration) -> String {
        let needed = lease_seconds(ttl);
        if needed == self.lease_seconds {
            return self.prepare_wait(ttl);
        }
        (self.lease_seconds, self.idle_seconds) = (needed, needed);
        set_lease_seconds(needed) + ";"
    }

    /// What to send before a wait so that the server keeps the lock for `window` after its grant.
    pub(super) fn prepare_wait(&mut self, window: Duration) -> String {
        let needed = lease_seconds(window);
        if needed == self.idle_seconds {
            return String::new();
        }
        self.idle_seconds = needed;
        set_idle_seconds(needed) + ";"
    }
}

/// Fails if a server is not fit for locks, by its reply to the setup of a session. Pure.
fn check_server(
    mut reply: Vec<StatementResult>,
    connection: u64,
    lease_seconds: u64,
    allow_cluster: bool,
) -> Result<ReadOnlyOff, NodeError> {
    outcome::check(&reply)?;
    let (Some(StatementResult::Rows { rows: variables, .. }), Some(engine)) =
        (reply.pop(), reply.pop())
    else {
        return Err(unexpected("it does not list its variables"));
    };
    // There is none if there is no table.
    if let Some(engine) = text(&rows(vec![engine])?, 0, 0)
        && !engine.eq_ignore_ascii_case("InnoDB")
    {
        return Err(unfit(format!(
            "the table of the locks uses the engine {engine}, which does not lock rows; change it \
             with ALTER TABLE … ENGINE=InnoDB"
        )));
    }
    let reported = rows(reply)?;
    if number(&reported, 0, 0) != Some(connection) {
        return Err(unfit(
            "a proxy between here and the server shares its connections among clients, so they \
             cannot hold locks; connect to the server itself"
                .into(),
        ));
    }
    if number(&reported, 0, 1) != Some(lease_seconds) {
        return Err(unfit(
            "a proxy between here and the server ignores SET SESSION wait_timeout, so a lock would \
             outlast its holder; connect to the server itself"
                .into(),
        ));
    }
    let read_only_off = ReadOnlyOff::of(text(&reported, 0, 3)).ok_or_else(read_only)?;
    if let Some(cluster) = cluster_in(&variables)
        && !allow_cluster
    {
        return Err(unfit(format!(
            "the server runs {cluster}, where each member keeps locks of its own, so two clients \
             could hold the same one; if all programs use the same member, set \
             MySqlConfig::allow_cluster"
        )));
    }
    Ok(read_only_off)
}

/// The server counts in whole seconds.
fn lease_seconds(ttl: Duration) -> u64 {
    ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)
}

fn unfit(reason: String) -> NodeError {
    NodeError::not_applied(NodeErrorKind::Ineligible(reason))
}

/// Why locks do not work with this version.
pub(super) fn too_old(version: &str, is_mariadb: bool) -> Option<String> {
    let (product, oldest) =
        if is_mariadb { ("MariaDB", MARIADB_MIN) } else { ("MySQL", MYSQL_MIN) };
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < oldest => Some(format!(
            "it is {product} {major}.{minor}, but at least {}.{} is needed",
            oldest.0, oldest.1
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_keeps_locks_for_whole_seconds_and_never_less() {
        assert_eq!(lease_seconds(Duration::from_millis(10)), 1);
        assert_eq!(lease_seconds(Duration::from_secs(10)), 10);
        assert_eq!(lease_seconds(Duration::from_millis(10_001)), 11);
    }

    /// What a server replies to the setup: the settings, its facts, and its variables.
    fn setup_reply(
        facts: [&str; 4],
        engine: &str,
        variables: &[(&str, &str)],
    ) -> Vec<StatementResult> {
        let value = |text: &str| Some(text.as_bytes().to_vec());
        let in_transaction = false;
        let done = StatementResult::Done { affected_rows: 0, last_insert_id: 0, in_transaction };
        let facts = vec![facts.iter().map(|fact| value(fact)).collect()];
        let variables = variables.iter().map(|(name, is)| vec![value(name), value(is)]).collect();
        let rows = |rows| StatementResult::Rows { rows, in_transaction };
        vec![done.clone(), done, rows(facts), rows(vec![vec![value(engine)]]), rows(variables)]
    }

    /// The error for a server that replies this to connection 42, with a lease of 10 s.
    fn verdict(facts: [&str; 4], variables: &[(&str, &str)], allow_cluster: bool) -> String {
        let reply = setup_reply(facts, "InnoDB", variables);
        check_server(reply, 42, 10, allow_cluster)
            .map_or_else(|error| error.kind.to_string(), |_| "fit".into())
    }

    /// Fault: N160
    #[test]
    fn cluster_with_several_primaries_is_refused_unless_allowed() {
        let facts = ["42", "10", "8.0.36", "0"];
        for (variable, refused, fits, name) in [
            ("wsrep_on", "ON", "OFF", "Galera"),
            ("group_replication_single_primary_mode", "OFF", "ON", "several primaries"),
        ] {
            assert_eq!(verdict(facts, &[(variable, fits)], false), "fit");
            let reason = verdict(facts, &[(variable, refused)], false);
            assert!(reason.contains(name) && reason.contains("allow_cluster"), "{reason}");
            assert_eq!(verdict(facts, &[(variable, refused)], true), "fit");
        }
        assert_eq!(verdict(facts, &[], false), "fit");
    }

    /// Fault: N160
    #[test]
    fn proxy_that_shares_connections_or_drops_settings_is_refused() {
        let shared = verdict(["43", "10", "8.0.36", "0"], &[], true);
        assert!(shared.contains("shares its connections"), "{shared}");
        let ignored = verdict(["42", "28800", "8.0.36", "0"], &[], true);
        assert!(ignored.contains("ignores SET SESSION wait_timeout"), "{ignored}");
        let read_only = verdict(["42", "10", "8.0.36", "1"], &[], true);
        assert!(read_only.contains("READONLY the server is read-only"), "{read_only}");
        assert!(check_server(Vec::new(), 42, 10, true).is_err());
        let reply = setup_reply(["42", "10", "8.0.36", "0"], "MyISAM", &[]);
        let engine = check_server(reply, 42, 10, true).unwrap_err().kind.to_string();
        assert!(engine.contains("MyISAM, which does not lock rows"), "{engine}");
    }

    #[test]
    fn old_servers_are_refused_by_their_version() {
        for (version, is_mariadb, fits) in [
            ("10.11.19-MariaDB-0+deb12u1", true, true),
            ("10.6.4-MariaDB", true, true),
            ("10.3.39-MariaDB", true, false),
            ("8.0.36", false, true),
            ("9.7.4-debug", false, true),
            ("5.7.44-log", false, false),
            ("unknown", false, true),
        ] {
            assert_eq!(too_old(version, is_mariadb).is_none(), fits, "{version}");
        }
    }
}
