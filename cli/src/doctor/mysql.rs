//! Asks a MySQL or MariaDB server. What it replies is judged elsewhere.

use std::time::Duration;

use distlock::{LockError, MySqlConfig, MySqlMgr, MySqlServerInfo};

use super::{
    Examination,
    collect::PROBE_TTL,
    cross_checks::{NOT_TRIED, judge_handover},
    facts::{ClockOffset, Contact, NodeFacts, Requirements},
    finding::{Finding, Level},
    handover_probe::{STEP_TIMEOUT, probe_handover},
    mysql_checks, node_checks,
};

/// The test lock. Its name is fixed, because its row stays in the table.
const PROBE_NAME: &str = "distlock-doctor";

/// Examines the server. Fails only if the configuration is invalid.
pub(super) fn examine(
    config: MySqlConfig,
    requirements: &Requirements,
) -> Result<Examination, LockError> {
    let statement = config.table_statement()?;
    let (node, info) = match config.examine_server() {
        Ok(info) => (reached(&info), Ok(info)),
        Err(LockError::Unavailable { server, cause, .. }) => {
            let contact = Contact::Unreachable(cause.to_string());
            (NodeFacts::new(&server, contact), Err(None))
        }
        Err(LockError::Tls { server, reason, .. }) => {
            (NodeFacts::new(&server, Contact::Unreachable(reason)), Err(None))
        }
        Err(LockError::Refused { server, code, message, .. }) => {
            let refusal = mysql_checks::check_refusal(&code, &message);
            let contact = Contact::Refused { code, message, advice: "" };
            (NodeFacts::new(&server, contact), Err(Some(refusal)))
        }
        Err(error) => return Err(error),
    };
    let own: Vec<Finding> = match &info {
        Err(Some(refusal)) => vec![refusal.clone()],
        Err(None) => node_checks::check_reach(&node, requirements).into_iter().collect(),
        Ok(info) => node_checks::check_reach(&node, requirements)
            .into_iter()
            .chain(mysql_checks::check_server(info, &statement))
            .chain(node_checks::check_latency(&node, requirements))
            .chain(node_checks::check_clock(node.clock_offset))
            .collect(),
    };
    let is_fit = !own.iter().any(|finding| finding.level == Level::Problem);
    let handover = (info.is_ok() && is_fit).then(|| {
        let mgr = MySqlMgr::new(config.ttl(PROBE_TTL)).map_err(|error| error.to_string())?;
        probe_handover(&mgr, PROBE_NAME, STEP_TIMEOUT)
    });
    let own = own.into_iter().map(|finding| finding.at(&node.server));
    Ok(Examination {
        findings: own
            .chain([judge_handover(handover.as_ref(), NOT_TRIED, Duration::MAX)])
            .collect(),
        is_unreachable: matches!(node.contact, Contact::Unreachable(_)),
        servers: vec![node.server],
    })
}

/// What is measured in the same way on every server.
fn reached(info: &MySqlServerInfo) -> NodeFacts {
    let error_us = i64::try_from(info.clock_error.as_micros()).unwrap_or(i64::MAX);
    NodeFacts {
        round_trips: info.round_trips.clone(),
        clock_offset: Some(ClockOffset { ahead_us: info.clock_ahead_us, error_us }),
        ..NodeFacts::new(&info.server, Contact::Reachable)
    }
}
