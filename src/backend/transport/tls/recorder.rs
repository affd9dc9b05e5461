//! `ServerCertificates`: what a server shows in a handshake, also if it is not accepted.

use std::sync::Arc;

use parking_lot::Mutex;
use rustls::{
    DigitallySignedStruct, Error, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    pki_types::{CertificateDer, ServerName, UnixTime},
};

use super::TlsClient;
use crate::{
    backend::{discovery::Discovery, transport},
    sys::clock::Moment,
};

/// The certificates that a server shows, for diagnosis. With the feature `tls`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerCertificates {
    /// Server as named in messages.
    pub server: String,
    /// Certificates in the DER format, that of the server first; or why it shows none.
    pub chain: Result<Vec<Vec<u8>>, String>,
}

/// The certificates that the last server showed, its own first.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShownCertificates(Arc<Mutex<Vec<Vec<u8>>>>);

impl ShownCertificates {
    /// Returns what `server` showed in an attempt to connect, which may have failed.
    pub(crate) fn of(&self, server: &str, failure: Option<String>) -> ServerCertificates {
        let chain = std::mem::take(&mut *self.0.lock());
        let chain = if chain.is_empty() {
            Err(failure.unwrap_or_else(|| "it showed no certificate".into()))
        } else {
            Ok(chain)
        };
        ServerCertificates { server: server.to_owned(), chain }
    }
}

impl TlsClient {
    /// Returns a client whose connections also record what the server shows. It accepts no more
    /// certificates than this one, and resumes no session, because that shows none.
    pub(crate) fn recording(&self) -> (TlsClient, ShownCertificates) {
        let shown = ShownCertificates::default();
        let recording = shown.clone();
        let client =
            self.verifying_anew(|verifier| Arc::new(Recorder { verifier, shown: recording }));
        (client, shown)
    }

    /// Connects to a server only to see its certificates.
    pub(crate) fn certificates_of(
        &self,
        server: &str,
        discovery: &dyn Discovery,
        deadline: Moment,
    ) -> ServerCertificates {
        let (client, shown) = self.recording();
        let failure = match discovery.resolve(deadline) {
            Err(error) => Some(error.kind.to_string()),
            Ok(addresses) => match transport::connect(&addresses, Some(&client), deadline) {
                Err(error) => Some(error.to_string()),
                Ok(_) => None,
            },
        };
        shown.of(server, failure)
    }
}

/// Verifies as usual, after recording.
#[derive(Debug)]
struct Recorder {
    verifier: Arc<WebPkiServerVerifier>,
    shown: ShownCertificates,
}

impl ServerCertVerifier for Recorder {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let all = [own].into_iter().chain(others);
        *self.shown.0.lock() = all.map(|certificate| certificate.to_vec()).collect();
        self.verifier.verify_server_cert(own, others, name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        own: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, own, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        own: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, own, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
