//! From arguments, environment and files to a manager. Passwords come from files and the environment only: what stands
//! on a command line, everybody on the machine can read.

use std::{fs, path::Path, time::Duration};

use distlock::{Config, RedisMgr};

use crate::{
    args::{Servers, Unread},
    exit::Failure,
};

/// The configuration that the arguments and the environment ask for.
pub(crate) fn config(servers: &Servers) -> Result<Config, Failure> {
    config_at(servers, &servers.url)
}

/// The same for these servers, where there are any.
pub(crate) fn config_at(servers: &Servers, urls: &[String]) -> Result<Config, Failure> {
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
    let rest = urls.split_once("://").map_or(urls, |(_, rest)| rest);
    // Behind each scheme stands a URL, up to the comma and the scheme of the next.
    rest.split("://").any(|url| {
        let (path, query) = url.split_once('?').unwrap_or((url, ""));
        let user = path.rsplit_once('@').map_or("", |(user, _)| user);
        user.contains(':') || query.split('&').any(|pair| pair.starts_with("pass"))
    })
}

pub(crate) fn read_password(path: &Path) -> Result<String, Failure> {
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("cannot read the password file {}: {error}", path.display())))?;
    let password = text.lines().next().unwrap_or_default();
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
        let several = ["redis://h:1,redis://u:x@h", "redis://u:x,y@h,redis://h", "unix:///s?pass=x,redis://h"];
        let one = ["redis://:x@h", "redis://u:x@h:1/2", "u:x@h", "unix:///s?db=1&pass=x", "redis://a:b@c@d"];
        for url in several.into_iter().chain(one) {
            assert!(has_password(url), "{url}");
        }
        for url in ["redis://h:6379", "redis://u@h", "redis://[::1]:7", "unix:///s?db=1", "", "redis://h:1,redis://u@h"]
        {
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
