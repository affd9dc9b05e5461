//! `Endpoint`: where a server is, and the credentials for it, parsed from a URL. Its password never
//! appears in any output.

use std::{fmt, sync::Arc};

use redis::{ConnectionAddr, IntoConnectionInfo as _};

use crate::{
    backend::{
        discovery::{Address, Discovery, of_host},
        transport::Security,
    },
    error::{LockError, Result},
    sys::display::quote_reply,
};

/// Address and credentials of one server.
pub(crate) struct Endpoint {
    pub(crate) discovery: Box<dyn Discovery>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) db: i64,
    /// The URL asks for TLS.
    #[cfg(feature = "tls")]
    pub(crate) wants_tls: bool,
    /// The host name or address; empty for a Unix socket.
    #[cfg(feature = "tls")]
    pub(crate) host: String,
    /// How to speak TLS, if the URL asks for it.
    pub(crate) security: Option<Security>,
    /// Name of the server in messages: host and port, or the path of its socket.
    pub(crate) label: Arc<str>,
}

impl Endpoint {
    pub(crate) fn parse(url: &str) -> Result<Endpoint> {
        let invalid = |reason: String| LockError::InvalidConfig { reason };
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        match scheme {
            "redis" | "valkey" | "unix" | "redis+unix" | "valkey+unix" => {}
            #[cfg(feature = "tls")]
            "rediss" | "valkeys" => {}
            #[cfg(not(feature = "tls"))]
            "rediss" | "valkeys" => {
                return Err(invalid(format!(
                    "the URL asks for TLS ({scheme}://), which is not built in; enable the \
                     feature `tls`, or use redis:// to a local TLS proxy"
                )));
            }
            "" => return Err(invalid(format!("this is not a server URL; {USABLE_URLS}"))),
            // The URL is not repeated, because a misplaced password may be part of the scheme.
            _ => return Err(invalid(format!("the URL has an unknown scheme; {USABLE_URLS}"))),
        }
        if has_unsupported_part(url, scheme.contains("unix")) {
            return Err(invalid(format!(
                "the {scheme}:// URL has an unsupported part after ? or #; write the database after \
                 a slash (redis://host/1) or as unix:///path?db=1&user=…&pass=…, and in passwords \
                 write ? as %3F and # as %23"
            )));
        }
        let is_secure = matches!(scheme, "rediss" | "valkeys");
        // The parser refuses schemes with which the redis crate itself cannot connect.
        let plain = if is_secure { url.replacen("s://", "://", 1) } else { url.to_owned() };
        let info = escape_query_plus(&plain, scheme.contains("unix"))
            .into_connection_info()
            .map_err(|error| {
                // The detail names the invalid part without quoting it.
                invalid(format!(
                    "the {scheme}:// URL is invalid: {}; {USABLE_URLS}",
                    detail_without_url(&error)
                ))
            })?;
        let (discovery, label): (Box<dyn Discovery>, String) = match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let label = if host.contains(':') {
                    format!("[{host}]:{port}")
                } else {
                    format!("{host}:{port}")
                };
                (of_host(host, *port), label)
            }
            ConnectionAddr::Unix(path) => {
                (Box::new(Address::Unix(path.clone())), path.display().to_string())
            }
            _ => {
                return Err(invalid(format!(
                    "this kind of address is not supported; {USABLE_URLS}"
                )));
            }
        };
        #[cfg(feature = "tls")]
        let host = match info.addr() {
            ConnectionAddr::Tcp(host, _) => host.clone(),
            _ => String::new(),
        };
        let settings = info.redis_settings();
        let some = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(str::to_owned);
        Ok(Endpoint {
            discovery,
            user: some(settings.username()),
            password: some(settings.password()),
            db: settings.db(),
            #[cfg(feature = "tls")]
            wants_tls: is_secure,
            #[cfg(feature = "tls")]
            host,
            security: None,
            label: label.escape_debug().to_string().into(),
        })
    }

    /// Prepares a text from the server for messages.
    pub(crate) fn quote(&self, text: &str) -> String {
        quote_reply(text, self.password.as_deref())
    }
}

#[cfg(feature = "tls")]
const USABLE_URLS: &str = "supported are redis://[user[:password]@]host[:port][/db], rediss://… \
    with TLS, valkey://…, valkeys://… and unix:///path";
#[cfg(not(feature = "tls"))]
const USABLE_URLS: &str =
    "supported are redis://[user[:password]@]host[:port][/db], valkey://… and unix:///path";

/// Whether the URL has a part that the parser would ignore. Ignoring it could select another
/// database or leave out a password.
fn has_unsupported_part(url: &str, is_unix: bool) -> bool {
    let known: &[&str] = if is_unix { &["db", "user", "pass", "protocol"] } else { &["protocol"] };
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let mut names =
        query.split('&').map(|pair| pair.split_once('=').map_or(pair, |(name, _)| name));
    url.contains('#') || names.any(|name| !name.is_empty() && !known.contains(&name))
}

/// Escapes plus signs in a query, where the parser would read them as spaces.
fn escape_query_plus(url: &str, is_unix: bool) -> String {
    match url.split_once('?') {
        Some((path, query)) if is_unix => format!("{path}?{}", query.replace('+', "%2B")),
        _ => url.to_owned(),
    }
}

fn detail_without_url(error: &redis::RedisError) -> String {
    error
        .detail()
        .filter(|detail| !detail.contains("://"))
        .unwrap_or("some part is malformed")
        .to_owned()
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("server", &self.label)
            .field("db", &self.db)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::Moment;
    use proptest::prelude::*;

    fn reason(url: &str) -> String {
        match Endpoint::parse(url) {
            Err(LockError::InvalidConfig { reason }) => reason,
            other => panic!("expected {url:?} to be rejected, got {other:?}"),
        }
    }

    /// Fault: N122
    #[test]
    fn url_of_every_kind_is_parsed() {
        let endpoint = Endpoint::parse("redis://us%20er:p%40ss@[::1]:7000/3").unwrap();
        let addresses = |endpoint: &Endpoint| endpoint.discovery.resolve(Moment::NEVER).unwrap();
        assert_eq!(addresses(&endpoint), [Address::Tcp("[::1]:7000".parse().unwrap())]);
        assert_eq!(
            (endpoint.user.as_deref(), endpoint.password.as_deref(), endpoint.db),
            (Some("us er"), Some("p@ss"), 3)
        );
        assert_eq!(&*endpoint.label, "[::1]:7000");
        let endpoint = Endpoint::parse("valkey://example.org").unwrap();
        assert_eq!(&*endpoint.label, "example.org:6379");
        let endpoint = Endpoint::parse("unix:///run/redis.sock?db=2&pass=x").unwrap();
        assert_eq!(addresses(&endpoint), [Address::Unix("/run/redis.sock".into())]);
        assert_eq!((endpoint.password.as_deref(), endpoint.db), (Some("x"), 2));
        for url in ["unix:///run/a+b?pass=a+b%2Fc%20d", "redis://:a+b%2Fc%20d@h"] {
            assert_eq!(Endpoint::parse(url).unwrap().password.as_deref(), Some("a+b/c d"), "{url}");
        }
    }

    #[test]
    fn unsupported_url_error_lists_usable_urls() {
        #[cfg(not(feature = "tls"))]
        assert!(reason("rediss://h").contains("feature `tls`"));
        #[cfg(feature = "tls")]
        assert!(Endpoint::parse("rediss://h").unwrap().wants_tls);
        assert!(reason("http://h").contains("unknown scheme"));
        for url in [
            "",
            "localhost",
            "redis://",
            "redis://h:port",
            "redis://h:99999",
            "redis://h/notadb",
            ":pw@x://",
        ] {
            assert!(reason(url).contains("supported are"), "{url}");
        }
    }

    #[test]
    fn unsupported_url_part_is_rejected() {
        for url in [
            "redis://h/?db=1",
            "redis://h?password=x",
            "redis://h#insecure",
            "redis://:pa?ss@h",
            "redis://:pa#ss@h",
            "unix:///s?database=1",
            "unix:///s?db=1&password=x",
            "unix:///s?db=1#2",
        ] {
            let reason = reason(url);
            assert!(
                reason.contains("an unsupported part") && !reason.contains("ss@"),
                "{url}: {reason}"
            );
        }
        for url in
            ["redis://h/1?protocol=resp3", "redis://h?", "unix:///s?db=1&user=a&pass=b&protocol=2"]
        {
            assert!(Endpoint::parse(url).is_ok(), "{url}");
        }
    }

    /// Fault: F74
    #[test]
    fn password_at_the_cut_is_fully_redacted() {
        let password = "0123456789abcdefghijklmnopqrstuvwxyz";
        let endpoint = Endpoint::parse(&format!("redis://:{password}@h")).unwrap();
        for before in 256 - password.len()..256 {
            let quoted = endpoint.quote(&format!("{}{password} {password}", " ".repeat(before)));
            assert!(!quoted.contains('0') && quoted.chars().count() <= 256, "{quoted:?}");
        }
    }

    proptest! {
        /// Fault: F74
        #[test]
        fn output_never_contains_the_password(
            password in "[A-Za-z0-9]{12,24}",
            rest in "[a-z:/,0-9]{0,12}",
        ) {
            for url in [
                format!("redis://:{password}@h{rest}"),
                format!("redis://{password}"),
                format!("{password}://h{rest}"),
                format!("unix:///s?pass={password}&db={rest}"),
                format!("rediss://:{password}@h{rest}"),
            ] {
                let shown = match Endpoint::parse(&url) {
                    // A host name is not secret, even if it looks like a password.
                    Ok(endpoint) if endpoint.password.is_none() => continue,
                    Ok(endpoint) => format!(
                        "{endpoint:?} {}",
                        endpoint.quote(&format!("no {password} here"))
                    ),
                    Err(error) => format!("{error} {error:?}"),
                };
                prop_assert!(!shown.contains(&password), "{shown}");
            }
        }
    }
}
