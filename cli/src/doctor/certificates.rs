//! When the certificates of the servers, and those in our files, end.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use distlock::LockError;
use x509_parser::{parse_x509_certificate, pem::Pem};

use super::finding::Finding;
use crate::{args::TlsFiles, clock, format, manager_config::ManagerConfig};

/// Days before its end from which a certificate should be renewed.
const DAYS_LEFT_MIN: i64 = 30;
const DAY_S: i64 = 24 * 60 * 60;
const CHECK: &str = "certificate";

/// The time for which a certificate is valid, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Validity {
    from: i64,
    until: i64,
}

/// Connects to the servers, and reads the files. Finds nothing if no URL asks for TLS.
pub(super) fn examine(config: &ManagerConfig, files: &TlsFiles) -> Result<Vec<Finding>, LockError> {
    let now = since_epoch(clock::wall_clock());
    // One by one, because nodes that do not fit together are reported elsewhere.
    let servers = config.each_node().into_iter().map(|node| node.server_certificates());
    let servers = servers.collect::<Result<Vec<_>, _>>()?.concat();
    let of_servers = servers.iter().map(|one| check_chain(&one.chain, now).at(&one.server));
    let client = files.cert.iter().map(|file| check_file(file, now, "of this client", false));
    let authorities =
        files.cacert.iter().map(|file| check_file(file, now, "of the authority", true));
    let of_files = client.chain(authorities).filter(|_| !servers.is_empty());
    Ok(of_servers.chain(of_files).collect())
}

/// Judges what a server shows: its certificate, and perhaps those of authorities.
fn check_chain(chain: &Result<Vec<Vec<u8>>, String>, now: i64) -> Finding {
    let parsed: Option<Vec<_>> = match chain {
        Err(why) => return Finding::unknown(CHECK, format!("not seen: {}", format::escape(why))),
        Ok(chain) => chain.iter().map(|der| Validity::parse(der)).collect(),
    };
    let Some([own, others @ ..]) = parsed.as_deref() else {
        return Finding::unknown(CHECK, "the server's certificate cannot be read");
    };
    let first = others.iter().min_by_key(|other| other.until);
    match first.filter(|first| first.until < own.until) {
        Some(first) => first.judge("the certificate of the server's authority", now),
        None => own.judge("the server's certificate", now),
    }
}

/// `is_bundle`: one valid certificate in the file is enough.
fn check_file(file: &Path, now: i64, whose: &str, is_bundle: bool) -> Finding {
    let shown = format::escape(&file.display().to_string());
    let what = format!("the certificate {whose} ({shown})");
    let found = match fs::read(file) {
        Ok(pem) => read_pem(&pem),
        Err(error) => {
            return Finding::unknown(CHECK, format!("{what} cannot be read: {error}"));
        }
    };
    let first = |found: &[Validity]| found.iter().copied().min_by_key(|one| one.until);
    let valid: Vec<_> = found.iter().copied().filter(|one| one.includes(now)).collect();
    match first(if is_bundle && !valid.is_empty() { &valid } else { &found }) {
        Some(validity) => validity.judge(&what, now),
        None => Finding::unknown(CHECK, format!("{what} cannot be read")),
    }
}

fn read_pem(pem: &[u8]) -> Vec<Validity> {
    let blocks = Pem::iter_from_buffer(pem).map_while(Result::ok);
    blocks.filter_map(|block| Validity::parse(&block.contents)).collect()
}

impl Validity {
    fn parse(der: &[u8]) -> Option<Validity> {
        let (_, certificate) = parse_x509_certificate(der).ok()?;
        let validity = certificate.validity();
        let (from, until) = (validity.not_before.timestamp(), validity.not_after.timestamp());
        Some(Validity { from, until })
    }

    fn includes(self, now: i64) -> bool {
        (self.from..=self.until).contains(&now)
    }

    fn judge(self, what: &str, now: i64) -> Finding {
        let advice = "renew it, and restart the programs that read it from a file";
        let ends = date(self.until);
        let left = self.until.saturating_sub(now).div_euclid(DAY_S);
        if now < self.from {
            let says = format!("{what} is not valid before {}", date(self.from));
            return Finding::problem(CHECK, says)
                .advice("check the clock of this machine, and when the certificate was made");
        }
        match left {
            ..0 => {
                let since = days(now.saturating_sub(self.until) / DAY_S);
                Finding::problem(CHECK, format!("{what} expired {since} ago, on {ends}"))
                    .advice(advice)
            }
            0..DAYS_LEFT_MIN => {
                Finding::warning(CHECK, format!("{what} expires in {}, on {ends}", days(left)))
                    .advice(advice)
            }
            _ => Finding::ok(CHECK, format!("{what} is valid for {}, until {ends}", days(left))),
        }
    }
}

fn days(count: i64) -> String {
    match count {
        0 => "less than a day".into(),
        1 => "1 day".into(),
        _ => format!("{count} days"),
    }
}

/// The day in UTC.
fn date(seconds: i64) -> String {
    let since = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    let moment = UNIX_EPOCH.checked_add(since).and_then(format::rfc3339);
    moment.map_or_else(|| "a day after the year 9999".into(), |text| text[..10].to_owned())
}

fn since_epoch(now: SystemTime) -> i64 {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::{super::finding::Level, *};

    const NOW: i64 = 1_700_000_000;

    fn judged(from_days: i64, until_days: i64) -> (Level, String) {
        let [from, until] = [from_days, until_days].map(|days| NOW + days * DAY_S);
        let finding = Validity { from, until }.judge("it", NOW);
        let needs_advice = finding.level != Level::Ok;
        assert_eq!(finding.advice.is_some(), needs_advice, "{finding:?}");
        (finding.level, finding.message)
    }

    #[test]
    fn end_of_a_certificate_is_judged_by_the_days_left() {
        let says = |text: &str| text.to_owned();
        for (until, level, message) in [
            (400, Level::Ok, "it is valid for 400 days, until 2024-12-18"),
            (30, Level::Ok, "it is valid for 30 days, until 2023-12-14"),
            (29, Level::Warning, "it expires in 29 days, on 2023-12-13"),
            (1, Level::Warning, "it expires in 1 day, on 2023-11-15"),
            (0, Level::Warning, "it expires in less than a day, on 2023-11-14"),
            (-1, Level::Problem, "it expired 1 day ago, on 2023-11-13"),
        ] {
            assert_eq!(judged(-500, until), (level, says(message)));
        }
        assert_eq!(judged(1, 90), (Level::Problem, says("it is not valid before 2023-11-15")));
        let expired = Validity { from: 0, until: NOW - 1 }.judge("it", NOW);
        assert_eq!(expired.message, "it expired less than a day ago, on 2023-11-14");
        assert_eq!(date(i64::MAX), "a day after the year 9999");
    }

    #[test]
    fn what_is_no_certificate_is_unknown() {
        for chain in [Ok(vec![]), Ok(vec![vec![0x30, 0x01]]), Err("refused".to_owned())] {
            assert_eq!(check_chain(&chain, NOW).level, Level::Unknown);
        }
        let missing = check_file(Path::new("/nowhere/x.crt"), NOW, "of the authority", true);
        assert!(missing.message.contains("(/nowhere/x.crt) cannot be read"), "{missing:?}");
        assert_eq!(read_pem(b"nothing"), []);
    }
}
