//! Certificates for TLS, made for one test.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use tempfile::TempDir;

/// An authority, and certificates that it has signed, as files.
pub struct Certificates {
    folder: TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Default for Certificates {
    fn default() -> Self {
        Self::new()
    }
}

impl Certificates {
    /// With a certificate for servers on this machine.
    pub fn new() -> Certificates {
        let certificates = Certificates::of_an_authority();
        certificates.sign("server", &["127.0.0.1", "localhost"], |_| {});
        certificates
    }

    pub fn of_an_authority() -> Certificates {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let folder = TempDir::with_prefix("distlock-").unwrap();
        fs::write(folder.path().join("ca.crt"), authority.pem()).unwrap();
        Certificates { folder, authority }
    }

    /// Writes `NAME.crt` and `NAME.key`.
    pub fn sign(&self, name: &str, hosts: &[&str], change: impl FnOnce(&mut CertificateParams)) {
        let key = KeyPair::generate().unwrap();
        let hosts: Vec<_> = hosts.iter().copied().map(str::to_owned).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        // OpenSSL takes a certificate with the name of its authority for its own authority.
        params.distinguished_name.push(DnType::CommonName, name);
        change(&mut params);
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        fs::write(self.path(&format!("{name}.crt")), certificate.pem()).unwrap();
        fs::write(self.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }
}
