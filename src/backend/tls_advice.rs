//! Why TLS is not possible with a server, and what to do. Pure.

use std::io;

use rustls::{AlertDescription, CertificateError};

/// What makes TLS impossible with this server, and what to do; `None` for other errors.
pub(crate) fn tls_advice(error: &io::Error) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    Some(match error {
        rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => "its certificate is not signed by an authority that is trusted here; name the file \
              of the authority (Tls::ca_file, --cacert)"
            .into(),
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "its certificate is for another name; connect by a name in the certificate, or set \
              that name (Tls::server_name)"
            .into(),
        rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        ) => "its certificate has expired; renew it, and check the clock of this machine".into(),
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
        ) => "its certificate is not valid yet; check the clock of this machine".into(),
        rustls::Error::AlertReceived(
            AlertDescription::CertificateRequired | AlertDescription::HandshakeFailure,
        ) => "it asks for a certificate of the client (Tls::client_cert, --cert and --key)".into(),
        rustls::Error::AlertReceived(
            alert @ (AlertDescription::UnknownCA
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::CertificateExpired),
        ) => format!("it refuses the certificate of this client ({alert:?})"),
        rustls::Error::InvalidMessage(_) => {
            "its reply is not TLS; connect to its port for TLS, or without TLS".into()
        }
        error => format!("TLS is not possible: {error}"),
    })
}
