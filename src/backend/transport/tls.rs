//! TLS over a socket. With the feature `tls`.

mod recorder;

use std::{
    fmt, fs,
    io::{self, ErrorKind, Read, Write},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore,
    client::{Resumption, WebPkiServerVerifier, danger::ServerCertVerifier},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};

pub use self::recorder::ServerCertificates;
use super::{PollHandle, Transport, poll_readable, poll_writable, socket::Socket};
use crate::{
    backend::CancelHandle,
    sys::clock::{self, Moment},
};

/// Where certificates and keys are, in files of the PEM format.
#[derive(Clone, Debug, Default)]
pub(crate) struct TlsFiles {
    /// The authorities that sign servers' certificates; those of the system if there is none.
    pub(crate) ca_file: Option<PathBuf>,
    /// Our certificate and its key.
    pub(crate) client: Option<(PathBuf, PathBuf)>,
}

/// How to speak TLS with servers. Connections that share this resume each other's sessions.
#[derive(Clone)]
pub(crate) struct TlsClient {
    config: Arc<ClientConfig>,
    /// What verifies servers' certificates in `config`.
    verifier: Arc<WebPkiServerVerifier>,
    /// Name in the certificate; `None` for the address that is connected to.
    server_name: Option<ServerName<'static>>,
}

impl TlsClient {
    /// Reads the files. An error is a part of a sentence.
    pub(crate) fn new(files: &TlsFiles, server_name: Option<&str>) -> Result<TlsClient, String> {
        let mut authorities = RootCertStore::empty();
        if let Some(file) = &files.ca_file {
            for certificate in certificates(file)? {
                authorities.add(certificate).map_err(|error| not_usable(file, &error))?;
            }
        } else {
            // Those that cannot be read are left out, as other clients do.
            let found = rustls_native_certs::load_native_certs();
            authorities.add_parsable_certificates(found.certs);
            if authorities.is_empty() {
                return Err("the system has no certificates of authorities; name a file with \
                            Tls::ca_file"
                    .into());
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let authorities = Arc::new(authorities);
        let verifier = WebPkiServerVerifier::builder_with_provider(authorities, provider.clone())
            .build()
            .map_err(|error| error.to_string())?;
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_webpki_verifier(verifier.clone());
        let config = match &files.client {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let private =
                    PrivateKeyDer::from_pem_file(key).map_err(|error| not_usable(key, &error))?;
                builder
                    .with_client_auth_cert(certificates(certificate)?, private)
                    .map_err(|error| not_usable(certificate, &error))?
            }
        };
        let parse = |name: &str| {
            ServerName::try_from(name.to_owned())
                .map_err(|_| "the server name for TLS is neither a host name nor an address")
        };
        let server_name = server_name.map(parse).transpose()?;
        Ok(TlsClient { config: Arc::new(config), verifier, server_name })
    }

    /// Expects this host in the certificate, unless another name is.
    pub(crate) fn for_host(&self, host: &str) -> TlsClient {
        let of_host = || ServerName::try_from(host.to_owned()).ok();
        let server_name = self.server_name.clone().or_else(of_host);
        TlsClient { server_name, ..self.clone() }
    }

    /// Returns a client that resumes no session, and verifies certificates with what `wrap` makes
    /// of this client's verifier.
    fn verifying_anew(
        &self,
        wrap: impl FnOnce(Arc<WebPkiServerVerifier>) -> Arc<dyn ServerCertVerifier>,
    ) -> TlsClient {
        let mut config = (*self.config).clone();
        config.resumption = Resumption::disabled();
        config.dangerous().set_certificate_verifier(wrap(self.verifier.clone()));
        TlsClient { config: Arc::new(config), ..self.clone() }
    }

    /// Performs the handshake on a socket that is connected.
    pub(super) fn connect(
        &self,
        socket: Socket,
        peer: Option<IpAddr>,
        deadline: Moment,
    ) -> io::Result<Box<dyn Transport>> {
        let name = match (&self.server_name, peer) {
            (Some(name), _) => name.clone(),
            (None, Some(address)) => ServerName::IpAddress(address.into()),
            (None, None) => return Err(io::Error::other("the server has no name for TLS")),
        };
        let session = ClientConnection::new(self.config.clone(), name).map_err(invalid)?;
        let mut transport = Box::new(TlsSocket { socket, session, buffered: 0 });
        while transport.session.is_handshaking() {
            match transport.flush() {
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
            let left = deadline.duration_since(clock::now());
            if left.is_zero() {
                return Err(io::Error::new(
                    ErrorKind::TimedOut,
                    "no reply to the TLS handshake in time; a port without TLS gives none either",
                ));
            }
            if transport.session.wants_write() {
                poll_writable(&*transport, left)?;
            } else if transport.fill(Duration::ZERO)? == Filled::Nothing {
                poll_readable(&[&*transport], deadline, Duration::ZERO);
            }
        }
        Ok(transport)
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = |error| format!("{} cannot be read: {error}", file.display());
    let pem = fs::read(file).map_err(read)?;
    let found = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{} contains no certificate in the PEM format", file.display())),
        Err(error) => Err(not_usable(file, &error)),
    }
}

fn not_usable(file: &Path, error: &dyn fmt::Display) -> String {
    format!("{} cannot be used: {error}", file.display())
}

fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

struct TlsSocket {
    socket: Socket,
    session: ClientConnection,
    /// Number of bytes that are decrypted and not read.
    buffered: usize,
}

/// Maximum number of reads from the socket in which an idle server may send what is not for the
/// reader, such as session tickets.
const QUIET_FILLS_MAX: u32 = 8;

/// What has arrived.
#[derive(PartialEq, Eq)]
enum Filled {
    Nothing,
    Bytes,
}

/// Reads from the socket, waiting for at most `longest`.
struct Input<'a> {
    socket: &'a mut Socket,
    longest: Duration,
}

impl Read for Input<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.read(buffer, self.longest)
    }
}

/// Writes to the socket without waiting.
struct Output<'a>(&'a mut Socket);

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TlsSocket {
    /// Reads what has arrived from the socket, and decrypts it. A closed socket is an error, even
    /// if the server has announced it.
    fn fill(&mut self, longest: Duration) -> io::Result<Filled> {
        let mut input = Input { socket: &mut self.socket, longest };
        match self.session.read_tls(&mut input) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Filled::Nothing),
            Err(error) => return Err(error),
        }
        let processed = self.session.process_new_packets();
        // An alert with the reason, for the server, or a reply to a change of keys.
        let _ = self.flush();
        self.buffered = processed.map_err(invalid)?.plaintext_bytes_to_read();
        Ok(Filled::Bytes)
    }
}

impl Transport for TlsSocket {
    fn read(&mut self, buffer: &mut [u8], longest: Duration) -> io::Result<usize> {
        let until = clock::now().saturating_add(longest);
        let (mut left, mut has_filled) = (longest, false);
        loop {
            match self.session.reader().read(buffer) {
                Ok(read) => {
                    self.buffered = self.buffered.saturating_sub(read);
                    return Ok(read);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            // Session tickets and parts of records carry nothing for the reader. A server could
            // send them without end.
            let is_over = has_filled && left.is_zero();
            if is_over || self.fill(left)? == Filled::Nothing {
                return Err(ErrorKind::WouldBlock.into());
            }
            has_filled = true;
            left = until.duration_since(clock::now());
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.flush()?;
        let written = self.session.writer().write(bytes)?;
        match self.flush() {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(written),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.session.wants_write() {
            self.session.write_tls(&mut Output(&mut self.socket))?;
        }
        Ok(())
    }

    fn has_input(&mut self) -> io::Result<bool> {
        for _ in 0..QUIET_FILLS_MAX {
            if self.has_buffered() {
                return Ok(true);
            }
            if self.fill(Duration::ZERO)? == Filled::Nothing {
                return Ok(false);
            }
        }
        // It is not quiet.
        Ok(true)
    }

    fn has_buffered(&self) -> bool {
        self.buffered > 0
    }

    fn poll_handle(&self) -> PollHandle<'_> {
        self.socket.poll_handle()
    }

    fn cancel_handle(&self) -> io::Result<CancelHandle> {
        self.socket.cancel_handle()
    }
}

impl fmt::Debug for TlsSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSocket").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}
