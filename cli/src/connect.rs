//! Builds a manager from arguments, environment variables and files. Passwords are accepted from
//! files and the environment only, because every user of the machine can read a command line.

use std::{fs, io::Read as _, path::Path};

use distlock::{Config, RedisMgr, Tls};

use crate::{
    args::{ArgError, Servers, TlsFiles},
    exit::Failure,
    quarantine_option::QuarantineOption,
    ranges,
    urls::has_password,
};

/// The configuration that the arguments and the environment describe.
pub(crate) fn config(servers: &Servers) -> Result<Config, Failure> {
    config_for(servers, &servers.url)
}

/// The same, for `urls` instead of `--url`. If there are none, the environment names the servers.
pub(crate) fn config_for(servers: &Servers, urls: &[String]) -> Result<Config, Failure> {
    let quarantine = QuarantineOption::from_args(servers)?;
    ranges::check("--timeout", servers.timeout, &ranges::TIMEOUT)?;
    if urls.iter().any(|url| has_password(url)) {
        return Err(Failure::usage(ArgError::Password.to_string()));
    }
    let mut config = match urls {
        [] => Config::from_env(),
        urls => Config::new(urls.join(",")),
    };
    if let Some(path) = &servers.password_file {
        config = config.password(read_password(path)?);
    }
    // A command sends one request at a time, so it needs few connections.
    config = config.pool_size(2).operation_timeout(servers.timeout);
    config = quarantine.apply(config);
    if let Some(tls) = tls(&servers.tls)? {
        config = config.tls(tls);
    }
    Ok(match &servers.prefix {
        Some(prefix) => config.prefix(prefix),
        None => config,
    })
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

/// Creates a manager. Does not connect if there is a single server.
pub(crate) fn manager(servers: &Servers) -> Result<RedisMgr, Failure> {
    Ok(RedisMgr::new(config(servers)?)?)
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
