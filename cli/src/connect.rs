//! Builds a manager from arguments, environment variables and files. Passwords are accepted from
//! files and the environment only, because every user of the machine can read a command line.

use std::{env, fs, io::Read as _, path::Path};

use distlock::{Config, LockManager, MySqlConfig, Tls};

use crate::{
    args::{ArgError, Servers, TlsFiles},
    exit::Failure,
    manager_config::{CONNECTIONS_MAX, ManagerConfig},
    quarantine_option::QuarantineOption,
    ranges,
    urls::{has_password, is_mysql, split_urls},
};

/// The configuration that the arguments and the environment describe.
pub(crate) fn config(servers: &Servers) -> Result<ManagerConfig, Failure> {
    config_for(servers, &servers.url)
}

/// The same, for `urls` instead of `--url`. If there are none, the environment names the servers.
pub(crate) fn config_for(servers: &Servers, urls: &[String]) -> Result<ManagerConfig, Failure> {
    let quarantine = QuarantineOption::from_args(servers)?;
    if let Some(timeout) = servers.timeout {
        ranges::check("--timeout", timeout, &ranges::TIMEOUT)?;
    }
    if urls.iter().any(|url| has_password(url)) {
        return Err(Failure::usage(ArgError::Password { lacks_separator: false }.to_string()));
    }
    let listed = if urls.is_empty() { urls_in_environment() } else { Some(urls.join(",")) };
    let mut config = match listed {
        Some(listed) if split_urls(&listed).any(is_mysql) => {
            ManagerConfig::MySql(mysql_config(servers, &listed)?)
        }
        _ => ManagerConfig::Redis(redis_config(servers, urls, quarantine)?),
    };
    if let Some(path) = &servers.password_file {
        config = config.password(&read_password(path)?);
    }
    Ok(match &servers.prefix {
        Some(prefix) => config.prefix(prefix),
        None => config,
    })
}

/// The URLs that [`Config::from_env`] would use, unless it would report them as invalid.
fn urls_in_environment() -> Option<String> {
    let set = |name| env::var_os(name).filter(|urls| !urls.is_empty());
    ["DISTLOCK_URL", "REDIS_URL"].into_iter().find_map(set)?.into_string().ok()
}

fn redis_config(
    servers: &Servers,
    urls: &[String],
    quarantine: QuarantineOption,
) -> Result<Config, Failure> {
    if servers.table.is_some() {
        return Err(Failure::usage(
            "--table and DISTLOCK_TABLE are for mysql:// URLs; leave them out for Redis and Valkey",
        ));
    }
    let config = match urls {
        [] => Config::from_env(),
        urls => Config::new(urls.join(",")),
    };
    let config = config.pool_size(CONNECTIONS_MAX);
    let config = match servers.timeout {
        Some(timeout) => config.operation_timeout(timeout),
        None => config,
    };
    let config = quarantine.apply(config);
    Ok(match tls(&servers.tls)? {
        Some(tls) => config.tls(tls),
        None => config,
    })
}

fn mysql_config(servers: &Servers, urls: &str) -> Result<MySqlConfig, Failure> {
    if split_urls(urls).count() > 1 {
        return Err(Failure::usage(
            "a mysql:// URL must be the only one, because locks in MySQL are kept by one server",
        ));
    }
    let config = MySqlConfig::new(urls.trim()).max_connections(CONNECTIONS_MAX);
    let config = match servers.timeout {
        Some(timeout) => config.operation_timeout(timeout),
        None => config,
    };
    let config = with_table(config, servers);
    Ok(match tls(&servers.tls)? {
        Some(tls) => config.tls(tls),
        None => config,
    })
}

/// The table that is named, or else the library's default.
pub(crate) fn with_table(config: MySqlConfig, servers: &Servers) -> MySqlConfig {
    match &servers.table {
        Some(table) => config.table(table),
        None => config,
    }
}

/// The certificates, if any are named.
fn tls(files: &TlsFiles) -> Result<Option<Tls>, Failure> {
    let mut tls = Tls::new();
    if let Some(file) = &files.cacert {
        tls = tls.ca_file(file);
    }
    match (&files.cert, &files.key) {
        (Some(certificate), Some(key)) => tls = tls.client_cert(certificate, key),
        (None, None) if files.cacert.is_none() => return Ok(None),
        (None, None) => {}
        _ => return Err(Failure::usage("--cert and --key belong together; name both")),
    }
    Ok(Some(tls))
}

/// Creates a manager. Does not connect to a single Redis server.
pub(crate) fn manager(servers: &Servers) -> Result<Box<dyn LockManager>, Failure> {
    Ok(config(servers)?.manager()?)
}

/// Maximum size of a password file that is read; otherwise an endless one such as `/dev/zero` would
/// fill the memory.
const PASSWORD_FILE_BYTES_MAX: u64 = 64 * 1024;

pub(crate) fn read_password(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(PASSWORD_FILE_BYTES_MAX).read_to_string(&mut text))
        .map_err(|error| {
            Failure::usage(format!("cannot read the password file {}: {error}", path.display()))
        })?;
    let password = text.lines().next().unwrap_or_default();
    if password.len() as u64 == PASSWORD_FILE_BYTES_MAX {
        let kib = PASSWORD_FILE_BYTES_MAX / 1024;
        return Err(Failure::usage(format!(
            "the first line of the password file {} is longer than {kib} KiB",
            path.display()
        )));
    }
    if password.is_empty() {
        return Err(Failure::usage(format!(
            "the first line of the password file {} is empty",
            path.display()
        )));
    }
    Ok(password.to_owned())
}
