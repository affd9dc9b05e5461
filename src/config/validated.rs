//! Validation of a `Config`: ranges of single settings, and relations between settings.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use super::{Config, LockOptions};
use crate::{
    backend::redis::Endpoint,
    core::cancel::CancelToken,
    error::{LockError, Result},
    sys::display::HumanDuration,
};

/// Minimum ttl; below it, one round trip on a good day is most of the lease.
const TTL_MIN: Duration = Duration::from_millis(10);
/// Maximum ttl. It bounds how long a crashed holder blocks a lock. A living holder keeps its lock
/// by renewal, not by a longer ttl.
pub(super) const TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

const OPERATION_TIMEOUT_MIN: Duration = Duration::from_millis(1);
const OPERATION_TIMEOUT_MAX: Duration = Duration::from_secs(60);
const SPIN_MAX: Duration = Duration::from_millis(10);
/// A queue must outlast it.
const YIELD_MAX: Duration = Duration::from_secs(10);
/// Maximum time for which a lock stays within a process, because clients elsewhere wait for it.
const LOCAL_HANDOVER_MAX: Duration = Duration::from_secs(1);
const POOL_SIZE_MAX: u32 = 10_000;
const NODES_MAX: usize = 15;

/// A validated configuration.
#[derive(Debug)]
pub(crate) struct ValidatedConfig {
    pub(crate) endpoints: Vec<Arc<Endpoint>>,
    /// Zero for none.
    pub(crate) quarantine: Duration,
    /// Without URLs and secrets.
    pub(crate) settings: Config,
}

impl ValidatedConfig {
    /// The validated options of one lock, with defaults filled in.
    pub(crate) fn resolve(&self, options: &LockOptions) -> Result<LockParams> {
        let terms = LockParams {
            ttl: options.ttl.unwrap_or(self.settings.ttl),
            wait: options.wait_limit(),
            cancel: options.cancel.clone(),
            renew: options.renew,
            release_in_background: options.release_in_background,
            hold_at_least: options.hold_at_least,
            max_hold: options.max_hold.or(self.settings.max_hold),
        };
        self.check_ttl(terms.ttl)?;
        let period = HumanDuration(terms.hold_at_least);
        if terms.hold_at_least > TTL_MAX {
            let reason =
                out_of_limits("hold_at_least", terms.hold_at_least, Duration::ZERO, TTL_MAX);
            return Err(LockError::InvalidOptions { reason });
        }
        if !self.quarantine.is_zero() && terms.hold_at_least > self.quarantine {
            let reason = format!(
                "hold_at_least is {period}, longer than Config::quarantine ({}): a new master that \
                 lacks the lock would grant it to others within this period; raise the quarantine \
                 in every program, or shorten the period",
                HumanDuration(self.quarantine)
            );
            return Err(LockError::InvalidOptions { reason });
        }
        if terms.max_hold.is_some_and(|limit| limit.is_zero()) {
            let reason = "max_hold is zero, but must be longer: the lock would be lost at once";
            return Err(LockError::InvalidOptions { reason: reason.into() });
        }
        Ok(terms)
    }

    /// Checks the ttl of a lock.
    pub(crate) fn check_ttl(&self, ttl: Duration) -> Result<()> {
        let invalid = |reason| Err(LockError::InvalidOptions { reason });
        let shown = HumanDuration(ttl);
        if ttl < TTL_MIN || ttl > TTL_MAX {
            let mut reason = out_of_limits("ttl", ttl, TTL_MIN, TTL_MAX);
            if ttl > TTL_MAX {
                reason += " (a held lock is renewed, so it needs no longer ttl)";
            }
            return invalid(reason);
        }
        if !self.quarantine.is_zero() && ttl > self.quarantine {
            return invalid(format!(
                "ttl is {shown}, longer than Config::quarantine ({}): a server that lost the \
                 lock in a restart could grant it again before this lease ends; raise the \
                 quarantine in every program, or shorten the ttl",
                HumanDuration(self.quarantine)
            ));
        }
        Ok(())
    }
}

/// The options of one lock, with defaults filled in.
#[derive(Clone, Debug)]
pub(crate) struct LockParams {
    pub(crate) ttl: Duration,
    pub(crate) wait: Option<Duration>,
    pub(crate) cancel: Option<CancelToken>,
    pub(crate) renew: bool,
    pub(crate) release_in_background: bool,
    pub(crate) hold_at_least: Duration,
    pub(crate) max_hold: Option<Duration>,
}

impl Config {
    /// Validates all settings. This is the only way from a `Config` to a manager.
    pub(crate) fn validate(&self) -> Result<ValidatedConfig> {
        let invalid = |reason: String| Err(LockError::InvalidConfig { reason });
        let source = self.variable.map(|name| format!("in {name}, ")).unwrap_or_default();
        if !self.is_utf8 {
            return invalid(format!("{source}the URL is not UTF-8; write other bytes as %XX"));
        }
        let with_source = |error| match error {
            LockError::InvalidConfig { reason } => {
                LockError::InvalidConfig { reason: format!("{source}{reason}") }
            }
            other => other,
        };
        let endpoints = self.urls.iter().map(|url| self.endpoint(url).map_err(with_source));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        check_nodes(&endpoints)?;
        self.validate_settings(endpoints, "pool_size")
    }

    /// Validates everything but where the servers are. `size_setting` is the name under which users
    /// set the size of the pool.
    pub(super) fn validate_settings(
        &self,
        endpoints: Vec<Arc<Endpoint>>,
        size_setting: &str,
    ) -> Result<ValidatedConfig> {
        let invalid = |reason: String| Err(LockError::InvalidConfig { reason });
        if self.pool_size == 0 || self.pool_size > POOL_SIZE_MAX {
            return invalid(format!(
                "{size_setting} is {}, but must be 1 to {POOL_SIZE_MAX}",
                self.pool_size
            ));
        }
        let operation_timeout = OPERATION_TIMEOUT_MIN..=OPERATION_TIMEOUT_MAX;
        check("operation_timeout", self.operation_timeout, operation_timeout)?;
        check("claim_window", self.claim_window, TTL_MIN..=TTL_MAX)?;
        check("spin", self.spin, Duration::ZERO..=SPIN_MAX)?;
        check("local_handover", self.local_handover, Duration::ZERO..=LOCAL_HANDOVER_MAX)?;
        check("yield_to_others", self.yield_to_others, Duration::ZERO..=YIELD_MAX)?;
        if self.replicas.count > 0 {
            if endpoints.len() > 1 {
                return invalid(format!(
                    "replicas({}) is set, and there are {} nodes, which need no replicas: a lock \
                     is on most of them; use either several nodes or replicas",
                    self.replicas.count,
                    endpoints.len()
                ));
            }
            let within = Duration::from_millis(1)..=self.operation_timeout / 2;
            check("the time for replicas", self.replicas.within, within)?;
        }
        if self.prefix.len() >= crate::core::key::MAX_NAME_BYTES {
            return invalid(format!(
                "the prefix has {} bytes, which leaves no room for a name",
                self.prefix.len()
            ));
        }
        let default = if endpoints.len() > 2 { self.ttl } else { Duration::ZERO };
        let quarantine = self.chosen_quarantine.unwrap_or(default);
        check("quarantine", quarantine, Duration::ZERO..=TTL_MAX)?;
        let settings = Config { urls: Vec::new(), password: None, ..self.clone() };
        let config = ValidatedConfig { endpoints, quarantine, settings };
        config.resolve(&LockOptions::new())?;
        Ok(config)
    }

    fn endpoint(&self, url: &str) -> Result<Arc<Endpoint>> {
        #[cfg(feature = "tls")]
        let mut endpoint = self.secure_endpoint(url)?;
        #[cfg(not(feature = "tls"))]
        let mut endpoint = Endpoint::parse(url)?;
        if endpoint.password.is_none() {
            endpoint.password.clone_from(&self.password);
        }
        Ok(Arc::new(endpoint))
    }

    #[cfg(feature = "tls")]
    fn secure_endpoint(&self, url: &str) -> Result<Endpoint> {
        let tls = self.tls.clone().unwrap_or_default();
        let secure = |host: Option<&str>| tls.client(host);
        let endpoint = Endpoint::parse_with(url, Some(&secure))?;
        if self.tls.is_some() && !endpoint.wants_tls {
            return Err(LockError::InvalidConfig {
                reason: format!(
                    "there are settings for TLS, but the URL of {} does not ask for it; write \
                     rediss:// or valkeys://",
                    endpoint.label
                ),
            });
        }
        Ok(endpoint)
    }
}

/// Checks that a setting is within its limits.
fn check(setting: &str, value: Duration, limits: RangeInclusive<Duration>) -> Result<()> {
    if limits.contains(&value) {
        return Ok(());
    }
    let reason = out_of_limits(setting, value, *limits.start(), *limits.end());
    Err(LockError::InvalidConfig { reason })
}

fn out_of_limits(setting: &str, value: Duration, least: Duration, most: Duration) -> String {
    let [value, min, max] = [value, least, most].map(|one| HumanDuration(one).to_string());
    // It is shown rounded.
    let is = if value == max { "is more than" } else { "is" };
    let limits = if least.is_zero() { format!("at most {max}") } else { format!("{min} to {max}") };
    format!("{setting} {is} {value}, but must be {limits}")
}

/// Checks what can be checked about several nodes without connecting to them.
fn check_nodes(endpoints: &[Arc<Endpoint>]) -> Result<()> {
    let invalid = |reason: String| Err(LockError::InvalidConfig { reason });
    if endpoints.is_empty() {
        return invalid("there are no nodes; list at least one server".into());
    }
    if endpoints.len() > NODES_MAX {
        return invalid(format!(
            "there are {} nodes, but at most {NODES_MAX} are supported",
            endpoints.len()
        ));
    }
    if endpoints.len() > 1
        && let Some(cluster) = endpoints.iter().find(|one| !one.cluster.is_empty())
    {
        return invalid(format!(
            "the {} is one of several nodes, which must be independent servers; list all its nodes \
             in one URL, redis+cluster://host,host, or use several single servers",
            cluster.label
        ));
    }
    if endpoints.len() > 1
        && let Some(behind) =
            endpoints.iter().find(|one| one.discovery.refresh_interval().is_some())
    {
        return invalid(format!(
            "{} is one of several nodes, which must be independent servers; a failover would \
             replace one by a server that has forgotten locks, so use either several nodes or \
             Sentinel",
            behind.label
        ));
    }
    for (index, endpoint) in endpoints.iter().enumerate() {
        if endpoints[..index].iter().any(|other| other.label == endpoint.label) {
            return invalid(format!(
                "{} is listed twice, and would vote twice; list each server once",
                endpoint.label
            ));
        }
    }
    let nodes = endpoints.len();
    if nodes.is_multiple_of(2) {
        log_safely!(
            warn,
            "{nodes} nodes survive the loss of {}, the same as {}; use an odd number of nodes",
            (nodes - 1) / 2,
            nodes - 1
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(config: Config) -> String {
        match config.validate() {
            Err(LockError::InvalidConfig { reason } | LockError::InvalidOptions { reason }) => {
                reason
            }
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    fn local() -> Config {
        Config::new("redis://127.0.0.1")
    }

    fn hosts(count: usize) -> Config {
        Config::nodes((0..count).map(|host| format!("redis://h{host}")))
    }

    #[test]
    fn up_to_fifteen_nodes_are_accepted() {
        for count in [1, 3, 15] {
            assert_eq!(hosts(count).validate().unwrap().endpoints.len(), count);
        }
    }

    #[test]
    fn defaults_are_valid() {
        let settings = local().validate().unwrap();
        let terms = settings.resolve(&LockOptions::new()).unwrap();
        assert_eq!(
            (terms.ttl, terms.wait, terms.renew, terms.max_hold),
            (Duration::from_secs(10), None, true, None)
        );
    }

    #[test]
    fn setting_out_of_range_is_rejected_with_numbers() {
        for (config, words) in [
            (local().pool_size(0), "pool_size is 0"),
            (local().operation_timeout(Duration::ZERO), "operation_timeout is 0s"),
            (local().operation_timeout(Duration::MAX), "60s"),
            (local().spin(Duration::from_secs(1)), "spin is 1s"),
            (local().claim_window(Duration::ZERO), "claim_window is 0s"),
            (local().ttl(Duration::ZERO), "ttl is 0s"),
            (local().ttl(Duration::MAX), "to 24h (a held lock is renewed"),
            (local().ttl(TTL_MAX + Duration::from_millis(1)), "ttl is more than 24h, but must be"),
            (local().max_hold(Duration::ZERO), "max_hold is zero"),
            (local().prefix("p".repeat(5000)), "5000 bytes"),
            (hosts(0), "there are no nodes"),
            (hosts(16), "there are 16 nodes, but at most 15"),
        ] {
            let reason = reason(config);
            assert!(reason.contains(words), "{reason:?} does not say {words:?}");
        }
    }

    #[test]
    fn extreme_options_are_accepted_or_rejected() {
        let settings = local().validate().unwrap();
        let year = Duration::from_secs(365 * 24 * 60 * 60);
        for ttl in [Duration::ZERO, Duration::from_nanos(1), year * 1000, Duration::MAX] {
            assert!(matches!(
                settings.resolve(&LockOptions::new().ttl(ttl)),
                Err(LockError::InvalidOptions { .. })
            ));
        }
        let widest = LockOptions::new().wait(Duration::MAX).max_hold(Duration::MAX).ttl(TTL_MAX);
        assert_eq!(settings.resolve(&widest).unwrap().wait, Some(Duration::MAX));
    }
}
