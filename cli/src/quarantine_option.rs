//! `QuarantineOption`: how long a node that may have lost its data must not vote. All commands
//! share one setting, whatever ttl each uses, because the lost data may include any client's locks.

use std::time::Duration;

use distlock::Config;

use crate::{args::Servers, exit::Failure, format::duration, ranges};

/// The default ttl of `run`.
const DEFAULT_QUARANTINE: Duration = Duration::from_secs(30);

/// The value of `--quarantine`, if given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuarantineOption(Option<Duration>);

impl QuarantineOption {
    pub(crate) fn from_args(servers: &Servers) -> Result<QuarantineOption, Failure> {
        match servers.quarantine {
            Some(asked) if !asked.is_zero() => {
                ranges::check("--quarantine", asked, &ranges::TTL).map_err(
                    |Failure { exit, message }| {
                        Failure::new(exit, message + ", or 0 to turn it off")
                    },
                )?;
            }
            _ => {}
        }
        Ok(QuarantineOption(servers.quarantine))
    }

    /// The quarantine for a set of `nodes`. A single server does not vote. Two nodes cannot do
    /// without one of them, so for two it is off unless the user asks for it.
    pub(crate) fn for_nodes(self, nodes: usize) -> Duration {
        match (nodes, self.0) {
            (0 | 1, _) | (2, None) => Duration::ZERO,
            (_, asked) => asked.unwrap_or(DEFAULT_QUARANTINE),
        }
    }

    /// Sets the quarantine for commands that take no lock of the user's.
    pub(crate) fn apply(self, config: Config) -> Config {
        match self.for_nodes(config.each_node().len()) {
            Duration::ZERO => config.quarantine(Duration::ZERO),
            // The library refuses a default ttl longer than the quarantine, even if no lock uses
            // it.
            quarantine => config.quarantine(quarantine).ttl(quarantine),
        }
    }

    /// Fails if a lock with this ttl could outlive the quarantine of a node that forgot it.
    pub(crate) fn check_ttl(self, nodes: usize, ttl: Duration) -> Result<(), Failure> {
        let quarantine = self.for_nodes(nodes);
        if quarantine.is_zero() || ttl <= quarantine {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "--ttl is {}, longer than the quarantine ({}): a node that lost the lock in a restart \
             would vote again before the lock has expired on the other nodes; set --quarantine or \
             DISTLOCK_QUARANTINE to the longest ttl in use, the same for all clients of these \
             nodes, or shorten --ttl",
            duration(ttl),
            duration(quarantine)
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn nodes(count: usize) -> Config {
        Config::nodes((0..count).map(|host| format!("redis://h{host}")))
    }

    /// Fault: N49
    #[test]
    fn quarantine_is_off_for_one_node_and_by_default_for_two() {
        let among = |asked: Option<u64>| {
            [1, 2, 3, 5].map(|nodes| QuarantineOption(asked.map(at)).for_nodes(nodes))
        };
        assert_eq!(among(None), [at(0), at(0), at(30), at(30)]);
        assert_eq!(among(Some(60)), [at(0), at(60), at(60), at(60)]);
        assert_eq!(among(Some(0)), [at(0); 4]);
    }

    #[test]
    fn ttl_longer_than_quarantine_is_refused() {
        for (asked, count, ttl, fits) in [
            (None, 1, 31, true),
            (Some(5), 1, 31, true),
            (None, 2, 31, true),
            (Some(5), 2, 6, false),
            (None, 3, 30, true),
            (None, 3, 31, false),
            (Some(60), 3, 31, true),
            (Some(0), 3, 31, true),
        ] {
            let quarantine = QuarantineOption(asked.map(at));
            assert_eq!(
                quarantine.check_ttl(count, at(ttl)).is_ok(),
                fits,
                "{asked:?} {count} {ttl}"
            );
        }
    }

    /// Also a quarantine shorter than the library's default ttl.
    #[test]
    fn manager_accepts_every_quarantine() {
        for asked in [None, Some(0), Some(1), Some(24 * 60 * 60)] {
            for count in [1, 2, 3] {
                distlock::RedisMgr::new(QuarantineOption(asked.map(at)).apply(nodes(count)))
                    .unwrap();
            }
        }
    }
}
