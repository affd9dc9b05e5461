//! `MySqlEndpoint`: where a server is, and the credentials for it, parsed from a URL. Its password
//! never appears in any output.

use std::{fmt, sync::Arc};

use crate::{
    backend::{
        address::Address,
        discovery::{Discovery, of_host},
        transport::Security,
    },
    error::{LockError, Result},
    sys::display::quote_reply,
};

const PORT_DEFAULT: u16 = 3306;
const USABLE_URLS: &str = "supported are mysql://[user[:password]@]host[:port]/database, \
    mariadb://…, mysql://…/database?ssl-mode=REQUIRED for TLS, and \
    mysql://user@localhost/database?socket=/path";

/// Address and credentials of one server.
pub(crate) struct MySqlEndpoint {
    pub(crate) discovery: Box<dyn Discovery>,
    /// Whether the address is a Unix socket, so that nobody on a network can listen.
    pub(crate) is_unix: bool,
    pub(crate) user: String,
    pub(crate) password: Option<Arc<str>>,
    pub(crate) database: String,
    /// Name of the server in messages: host and port, or the path of its socket.
    pub(crate) label: Arc<str>,
    /// Name of the host without its port.
    #[cfg_attr(
        not(any(feature = "tls", test)),
        expect(dead_code, reason = "TLS checks this name")
    )]
    pub(crate) host: String,
    /// What the URL says about TLS.
    pub(crate) wants_tls: Option<bool>,
    /// How to secure the connection, if it must be secure.
    pub(crate) security: Option<Security>,
}

impl MySqlEndpoint {
    pub(crate) fn parse(url: &str) -> Result<MySqlEndpoint> {
        // No part of the URL is repeated, because a misplaced password may be in it.
        parse(url).map_err(|reason| LockError::InvalidConfig { reason })
    }

    /// Prepares a text from the server for messages.
    pub(crate) fn quote(&self, text: &str) -> String {
        quote_reply(text, self.password.as_deref())
    }
}

fn parse(url: &str) -> Result<MySqlEndpoint, String> {
    let invalid = |what: &str| format!("the URL of the database {what}; {USABLE_URLS}");
    let (scheme, rest) = url.split_once("://").ok_or_else(|| invalid("has no scheme"))?;
    if !["mysql", "mariadb"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) {
        return Err(invalid("has an unknown scheme"));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    if url.contains('#') || query.contains('?') {
        return Err(invalid(
            "has an unsupported part after ? or #, which are %3F and %23 in names",
        ));
    }
    let (authority, database) =
        rest.split_once('/').ok_or_else(|| invalid("names no database after the host"))?;
    let (login, place) = authority.rsplit_once('@').unwrap_or(("", authority));
    if database.contains("://") {
        return Err(invalid("must be the only one"));
    }
    if database.contains(['/', '@']) || login.contains('@') {
        return Err(invalid("has a / or @ too many, which are %2F and %40 in names and passwords"));
    }
    let decoded = |text: &str| {
        percent_decode(text)
            .filter(|text| !text.contains('\0'))
            .ok_or_else(|| invalid("has a % that does not begin a code such as %25"))
    };
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let (user, password, database) = (decoded(user)?, decoded(password)?, decoded(database)?);
    if database.is_empty() {
        return Err(invalid("names no database after the host"));
    }
    let (mut socket, mut wants_tls) = (None, None);
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        match parameter.split_once('=') {
            Some(("socket", path)) if socket.is_none() => socket = Some(decoded(path)?),
            Some(("ssl-mode", mode)) if wants_tls.is_none() => {
                wants_tls = Some(parse_ssl_mode(mode).ok_or_else(|| {
                    invalid("has an unsupported ssl-mode; use REQUIRED or DISABLED")
                })?);
            }
            _ => {
                return Err(invalid(
                    "has an unsupported parameter; remove everything after the ? but \
                     socket=/path and ssl-mode",
                ));
            }
        }
    }
    if socket.is_some() && wants_tls == Some(true) {
        return Err(invalid("asks for TLS over a Unix socket, which needs none"));
    }
    let mut host_name = "localhost".to_owned();
    let (discovery, label): (Box<dyn Discovery>, String) = match &socket {
        Some(path) if path.starts_with('/') => (Box::new(Address::Unix(path.into())), path.clone()),
        Some(_) => return Err(invalid("has a socket that is not an absolute path")),
        None => {
            let (host, port) =
                parse_host(place).ok_or_else(|| invalid("has an invalid host or port"))?;
            let host = decoded(host)?;
            let colon_safe = if host.contains(':') { format!("[{host}]") } else { host.clone() };
            let discovery = of_host(&host, port);
            host_name = host;
            (discovery, format!("{colon_safe}:{port}"))
        }
    };
    Ok(MySqlEndpoint {
        discovery,
        is_unix: socket.is_some(),
        user,
        password: (!password.is_empty()).then(|| password.into()),
        database,
        label: label.escape_debug().to_string().into(),
        host: host_name,
        wants_tls,
        security: None,
    })
}

/// Whether a mode of the servers' own clients asks for TLS. The modes that check less are no less
/// strict here. `PREFERRED` is not supported, because an attacker could choose.
fn parse_ssl_mode(mode: &str) -> Option<bool> {
    let is = |names: &[&str]| names.iter().any(|name| mode.eq_ignore_ascii_case(name));
    if is(&["REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY"]) {
        Some(true)
    } else {
        is(&["DISABLED"]).then_some(false)
    }
}

/// Splits a host from its port.
fn parse_host(place: &str) -> Option<(&str, u16)> {
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
        }
        None => place.split_once(':').map_or((place, None), |(host, port)| (host, Some(port))),
    };
    let is_number = |port: &&str| port.bytes().all(|byte| byte.is_ascii_digit());
    let port = match port {
        Some(port) => Some(port).filter(is_number)?.parse().ok().filter(|port| *port > 0)?,
        None => PORT_DEFAULT,
    };
    (!host.is_empty()).then_some((host, port))
}

/// Replaces codes such as `%2F`. Returns `None` if one is invalid.
fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let digit = |bytes: &mut std::str::Bytes<'_>| char::from(bytes.next()?).to_digit(16);
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => u8::try_from(digit(&mut bytes)? << 4 | digit(&mut bytes)?).ok()?,
            byte => byte,
        });
    }
    String::from_utf8(decoded).ok()
}

impl fmt::Debug for MySqlEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlEndpoint")
            .field("server", &self.label)
            .field("database", &self.database)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_url_are_found() {
        let endpoint = MySqlEndpoint::parse("mysql://app:s%40cret@db.internal/shop").unwrap();
        assert_eq!((&*endpoint.label, &*endpoint.user), ("db.internal:3306", "app"));
        assert_eq!((endpoint.password.as_deref(), &*endpoint.database), (Some("s@cret"), "shop"));
        assert!(!endpoint.is_unix);
        let endpoint = MySqlEndpoint::parse("mariadb://root@[::1]:3307/my%2Fshop").unwrap();
        assert_eq!((&*endpoint.label, &*endpoint.database), ("[::1]:3307", "my/shop"));
        assert_eq!(endpoint.password, None);
        assert!(MySqlEndpoint::parse("MySQL://root@h/shop").is_ok());
        let socket = "mysql://me@localhost/shop?socket=/run/mysqld/mysqld.sock";
        let endpoint = MySqlEndpoint::parse(socket).unwrap();
        assert_eq!((&*endpoint.label, endpoint.is_unix), ("/run/mysqld/mysqld.sock", true));
    }

    #[test]
    fn ssl_mode_asks_for_tls() {
        for (query, expected) in [
            ("", None),
            ("?ssl-mode=DISABLED", Some(false)),
            ("?ssl-mode=required", Some(true)),
            ("?ssl-mode=VERIFY_CA", Some(true)),
            ("?ssl-mode=VERIFY_IDENTITY", Some(true)),
        ] {
            let endpoint = MySqlEndpoint::parse(&format!("mysql://u@[::1]:1/d{query}")).unwrap();
            assert_eq!((endpoint.wants_tls, &*endpoint.host), (expected, "::1"), "{query}");
        }
    }

    /// Fault: N148
    #[test]
    fn invalid_url_is_refused_without_its_secrets() {
        for (url, words) in [
            ("secret", "has no scheme"),
            ("redis://h/secret", "unknown scheme"),
            ("mysql://h", "names no database"),
            ("mysql://h/", "names no database"),
            ("mysql://u:se/cret@h/shop", "%2F and %40"),
            ("mysql://u:secret@h/shop,mysql://b/c", "must be the only one"),
            ("mysql://u:se#cret@h/shop", "%3F and %23"),
            ("mysql://u:se?cret@h/shop", "names no database"),
            ("mysql://u:%zz@h/shop", "does not begin a code"),
            ("mysql://u:secret@h:0/shop", "invalid host or port"),
            ("mysql://u:secret@h:port/shop", "invalid host or port"),
            ("mysql://u:secret@/shop", "invalid host or port"),
            ("mysql://u:secret@[::1/shop", "invalid host or port"),
            ("mysql://u:secret@h/shop?tls=true", "unsupported parameter"),
            ("mysql://u:secret@h/shop?ssl-mode=PREFERRED", "unsupported ssl-mode"),
            ("mysql://u:secret@h/shop?ssl-mode=REQUIRED&socket=/s", "over a Unix socket"),
            ("mysql://u@h/shop?socket=secret", "not an absolute path"),
        ] {
            let error = MySqlEndpoint::parse(url).unwrap_err().to_string();
            assert!(error.contains(words), "{url}: {error}");
            assert!(!error.contains("cret"), "{error}");
            assert!(error.contains("supported are mysql://"), "{error}");
        }
    }

    #[test]
    fn debug_output_has_no_password() {
        let endpoint = MySqlEndpoint::parse("mysql://app:secret@h/shop").unwrap();
        assert!(!format!("{endpoint:?}").contains("secret"));
        assert_eq!(endpoint.quote("no secret here"), "no <password> here");
    }
}
