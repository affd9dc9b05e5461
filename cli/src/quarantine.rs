//! `Quarantine`: how long a node that may have forgotten does not vote. One for all commands, whatever ttl each has: a lock
//! that was forgotten may be anybody's.

use std::time::Duration;

use distlock::Config;

use crate::{args::Servers, exit::Failure, text::span};

/// The ttl of a `run` that does not say otherwise.
const DEFAULT: Duration = Duration::from_secs(30);

/// What the library takes as a time to live.
pub(crate) const TTL: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(24 * 60 * 60);

/// As it was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quarantine(Option<Duration>);

impl Quarantine {
    pub(crate) fn of(servers: &Servers) -> Result<Quarantine, Failure> {
        match servers.quarantine {
            Some(asked) if !asked.is_zero() && !TTL.contains(&asked) => {
                let [least, most, asked] = [*TTL.start(), *TTL.end(), asked].map(span);
                Err(Failure::usage(format!("--quarantine is {asked}, and has to be {least} to {most}, or 0 for none")))
            }
            asked => Ok(Quarantine(asked)),
        }
    }

    /// For so many nodes. Beside a single one there is nobody to vote, and two cannot spare one unless it is asked for.
    pub(crate) fn among(self, nodes: usize) -> Duration {
        match (nodes, self.0) {
            (0 | 1, _) | (2, None) => Duration::ZERO,
            (_, asked) => asked.unwrap_or(DEFAULT),
        }
    }

    /// For commands that take no lock of others.
    pub(crate) fn set(self, config: Config) -> Config {
        match self.among(config.each_node().len()) {
            Duration::ZERO => config.quarantine(Duration::ZERO),
            // A longer ttl would be refused, whether a lock is taken with it or not.
            quarantine => config.quarantine(quarantine).ttl(quarantine),
        }
    }

    /// For locks with this ttl.
    pub(crate) fn admit(self, config: &Config, ttl: Duration) -> Result<(), Failure> {
        let quarantine = self.among(config.each_node().len());
        if quarantine.is_zero() || ttl <= quarantine {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "--ttl is {}, longer than the quarantine ({}): a node that forgot the lock in a restart would vote again \
                 before it has expired on the others; set --quarantine or DISTLOCK_QUARANTINE to the longest ttl in use, \
                 the same for all who take locks there, or shorten the ttl",
            span(ttl),
            span(quarantine)
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

    #[test]
    fn one_server_has_none_and_two_only_if_it_is_asked_for() {
        let among = |asked: Option<u64>| [1, 2, 3, 5].map(|nodes| Quarantine(asked.map(at)).among(nodes));
        assert_eq!(among(None), [at(0), at(0), at(30), at(30)]);
        assert_eq!(among(Some(60)), [at(0), at(60), at(60), at(60)]);
        assert_eq!(among(Some(0)), [at(0); 4]);
    }

    #[test]
    fn a_longer_ttl_is_refused_where_others_would_vote() {
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
            let quarantine = Quarantine(asked.map(at));
            assert_eq!(quarantine.admit(&nodes(count), at(ttl)).is_ok(), fits, "{asked:?} {count} {ttl}");
        }
    }

    /// Also one that is shorter than the ttl that nobody asked for.
    #[test]
    fn every_quarantine_makes_a_manager() {
        for asked in [None, Some(0), Some(1), Some(24 * 60 * 60)] {
            for count in [1, 2, 3] {
                distlock::RedisMgr::new(Quarantine(asked.map(at)).set(nodes(count))).unwrap();
            }
        }
    }
}
