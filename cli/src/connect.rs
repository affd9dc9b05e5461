//! From arguments, environment and files to a manager. Passwords come from files and the environment only: what stands
//! on a command line, everybody on the machine can read.

use std::{fs, io::Read as _, net::Ipv6Addr, path::Path, time::Duration};

use distlock::{Config, RedisMgr};

use crate::{
    args::{Servers, Unread},
    exit::Failure,
    quarantine::Quarantine,
};

/// The configuration that the arguments and the environment ask for.
pub(crate) fn config(servers: &Servers) -> Result<Config, Failure> {
    config_at(servers, &servers.url)
}

/// The same for these servers, where there are any.
pub(crate) fn config_at(servers: &Servers, urls: &[String]) -> Result<Config, Failure> {
    let quarantine = Quarantine::of(servers)?;
    if urls.iter().any(|url| has_password(url)) {
        return Err(Failure::usage(Unread::Password.to_string()));
    }
    let mut config = match urls {
        [] => Config::from_env(),
        urls => Config::new(urls.join(",")),
    };
    if let Some(path) = &servers.password_file {
        config = config.password(read_password(path)?);
    }
    // One command asks one thing at a time.
    config = config.pool_size(2).operation_timeout(servers.timeout);
    config = quarantine.set(config);
    Ok(match &servers.prefix {
        Some(prefix) => config.prefix(prefix),
        None => config,
    })
}

/// A manager; it has not talked to any server yet.
pub(crate) fn manager(servers: &Servers) -> Result<RedisMgr, Failure> {
    Ok(RedisMgr::new(config(servers)?)?)
}

/// Whether it looks as if there were one in any of the URLs; one that cannot be read may have one anywhere.
pub(crate) fn has_password(urls: &str) -> bool {
    divide(urls).any(|url| {
        let signs_in = match url.rsplit_once('@') {
            // The scheme has the one colon that says nothing of a password.
            Some((user, _)) => user.replacen("://", "", 1).contains(':'),
            None => !is_address(url.split_once("://").map_or(url, |(_, rest)| rest)),
        };
        let query = url.split_once('?').map_or("", |(_, query)| query);
        signs_in || query.split('&').any(|pair| pair.starts_with("pass"))
    })
}

/// URLs with commas between them, as the library divides them: where a scheme stands behind a comma. A password may have
/// that in it too; what is left of it is then no port, unless it is a number.
pub(crate) fn divide(urls: &str) -> impl Iterator<Item = &str> {
    let is_end = |at: &usize| {
        let next = urls[at + 1..].split(',').next().unwrap_or_default();
        next.trim_start().split_once("://").is_some_and(|(scheme, _)| {
            !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'+')
        })
    };
    let ends: Vec<usize> = urls.match_indices(',').map(|(at, _)| at).filter(is_end).chain([urls.len()]).collect();
    let begins = [0].into_iter().chain(ends.clone().into_iter().map(|end| end + 1));
    begins.zip(ends).map(|(begin, end)| &urls[begin..end])
}

/// Whether a host stands there, and behind a colon nothing but its port.
fn is_address(rest: &str) -> bool {
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let bracketed = authority.strip_prefix('[').and_then(|inner| inner.split_once(']'));
    let host_and_port = match bracketed {
        Some((host, port)) if host.parse::<Ipv6Addr>().is_ok() => port,
        _ => authority,
    };
    let port = host_and_port.split_once(':').map(|(_, port)| port);
    port.is_none_or(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()))
}

/// More is no password, and may have no end.
const PASSWORD_FILE_MAX: u64 = 64 * 1024;

pub(crate) fn read_password(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(PASSWORD_FILE_MAX).read_to_string(&mut text))
        .map_err(|error| Failure::usage(format!("cannot read the password file {}: {error}", path.display())))?;
    let password = text.lines().next().unwrap_or_default();
    if password.len() as u64 == PASSWORD_FILE_MAX {
        let kib = PASSWORD_FILE_MAX / 1024;
        return Err(Failure::usage(format!(
            "the first line of the password file {} is over {kib} KiB",
            path.display()
        )));
    }
    if password.is_empty() {
        return Err(Failure::usage(format!("the first line of the password file {} is empty", path.display())));
    }
    Ok(password.to_owned())
}

/// A span of time as people write it: `300ms`, `30s`, `1h 30m`.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it as 300ms, 30s, 5m or 1h"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_seen() {
        for url in [
            "redis://:x@h",
            "redis://u:x@h:1/2",
            "u:x@h",
            "redis://a:b@c@d",
            "unix:///s?db=1&pass=x",
            // One of several.
            "redis://h:1,redis://u:x@h",
            "redis://u:x,y@h,redis://h",
            "unix:///s?pass=x,redis://h",
            // What divides URLs, or ends a part of one, is in the password.
            "redis://u:x://u@h:6379/1,redis://i",
            "redis://u:x,s3://y@h",
            "redis://u:x,unix://y@h",
            "redis://u:1/x@h",
            "redis://u:1?x@h",
            "redis://u:1#x@h",
            // Something is missing, or too much.
            "redis:u:x@://h",
            "redis:u:x@h,redis://i",
            "redis://u:x",
            "redis://u:x:6379",
            "redis://u:/x",
            "redis://[u:x]:6379",
            "--url=redis://u:x,redis://h",
        ] {
            assert!(has_password(url), "{url}");
        }
    }

    #[test]
    fn addresses_and_users_are_no_passwords() {
        for url in [
            "",
            "h",
            "redis://h:6379",
            "--url=redis://u@h:6379/0",
            "redis://[::1]:7",
            "redis://[::1]",
            "redis://h:1?db=2#x",
            "unix:///s?db=1",
            "redis://h:1,redis://u@h",
            "redis://u@h:1/2, valkey+unix://v@h,unix:///s",
        ] {
            assert!(!has_password(url), "{url}");
        }
    }

    #[test]
    fn spans_are_read() {
        assert_eq!(span("1h 30m"), Ok(Duration::from_secs(5_400)));
        assert_eq!(span("0"), Ok(Duration::ZERO));
        assert!(span("10").unwrap_err().contains("30s"));
    }
}
