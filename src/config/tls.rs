//! `Tls`: certificates for secure connections.

use std::path::PathBuf;

use crate::backend::transport::{TlsClient, TlsFiles};

/// Certificates for `rediss://` and `valkeys://`, and for MySQL. All files are in the PEM format,
/// and are read when a manager is created. With the feature `tls`.
///
/// ```no_run
/// use distlock::{Config, RedisMgr, Tls};
///
/// # fn main() -> distlock::Result<()> {
/// let tls = Tls::new().ca_file("/etc/redis/ca.crt").client_cert("me.crt", "me.key");
/// let mgr = RedisMgr::new(Config::new("rediss://redis.internal:6379").tls(tls))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Tls {
    files: TlsFiles,
    server_name: Option<String>,
}

impl Tls {
    /// Trusts the authorities that the system trusts, and has no certificate of its own.
    pub fn new() -> Tls {
        Tls::default()
    }

    /// Trusts the authorities in this file, and no others.
    pub fn ca_file(mut self, file: impl Into<PathBuf>) -> Tls {
        self.files.ca_file = Some(file.into());
        self
    }

    /// Shows this certificate to servers that ask for one.
    pub fn client_cert(mut self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Tls {
        self.files.client = Some((certificate.into(), key.into()));
        self
    }

    /// Expects this name in the certificates of the servers. Defaults to the host in the URL, and
    /// for a master that Sentinel names, to its address.
    pub fn server_name(mut self, name: impl Into<String>) -> Tls {
        self.server_name = Some(name.into());
        self
    }

    /// Reads the files. Without a host, the server's address must be in its certificate.
    pub(super) fn client(&self, host: Option<&str>) -> Result<TlsClient, String> {
        TlsClient::new(&self.files, self.server_name.as_deref().or(host))
    }
}
