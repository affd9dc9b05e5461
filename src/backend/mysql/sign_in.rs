//! Signing in: the server's greeting, our reply to it, and the proof that we know the password.
//! Bytes in, bytes out.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use mysql_common::{
    crypto::rsa::{GetRandom, Pkcs1OaepPadding, PublicKey},
    io::ParseBuf,
    num_bigint::BigUint,
    scramble::{scramble_native, scramble_sha256},
};

use super::packet::{Malformed, ServerError};

/// What both sides can do, as bits.
mod capabilities {
    pub(super) const CONNECT_WITH_DB: u32 = 1 << 3;
    pub(super) const PROTOCOL_41: u32 = 1 << 9;
    pub(super) const TLS: u32 = 1 << 11;
    pub(super) const TRANSACTIONS: u32 = 1 << 13;
    pub(super) const SECURE_CONNECTION: u32 = 1 << 15;
    pub(super) const MULTI_STATEMENTS: u32 = 1 << 16;
    pub(super) const MULTI_RESULTS: u32 = 1 << 17;
    pub(super) const PLUGIN_AUTH: u32 = 1 << 19;
    /// Without these we cannot sign in.
    pub(super) const NEEDED: u32 = PROTOCOL_41 | SECURE_CONNECTION | PLUGIN_AUTH | CONNECT_WITH_DB;
    pub(super) const OURS: u32 = NEEDED | TRANSACTIONS | MULTI_STATEMENTS | MULTI_RESULTS;
}

/// utf8mb4, in all servers.
const CHARACTER_SET: u8 = 45;
const CLIENT_PACKET_BYTES_MAX: u32 = 1 << 24;
const CHALLENGE_BYTES: usize = 20;
const NATIVE: &[u8] = b"mysql_native_password";
const CACHING_SHA2: &[u8] = b"caching_sha2_password";
const CLEAR: &[u8] = b"mysql_clear_password";
/// The codes that the servers' own clients use.
const UNSUPPORTED_PLUGIN: u16 = 2059;
const PLUGIN_FAILED: u16 = 2061;

/// The first packet of a server.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) connection_id: u64,
    pub(super) version: String,
    pub(super) is_mariadb: bool,
    /// Whether the server offers TLS.
    pub(super) has_tls: bool,
    challenge: Vec<u8>,
    plugin: Vec<u8>,
}

impl Greeting {
    pub(super) fn parse(
        payload: &[u8],
        quote: impl Fn(&str) -> String,
    ) -> Result<Greeting, Malformed> {
        let mut fields = ParseBuf(payload);
        if fields.checked_eat_u8() != Some(10) {
            return Err(Malformed("its greeting has an unknown version"));
        }
        let mut parse = || {
            let version = fields.eat_null_str();
            let connection_id = u64::from(fields.checked_eat_u32_le()?);
            let mut challenge = fields.checked_eat(8)?.to_vec();
            fields.checked_eat(1)?;
            let low = u32::from(fields.checked_eat_u16_le()?);
            // The character set and the status.
            fields.checked_eat(3)?;
            let capabilities = low | u32::from(fields.checked_eat_u16_le()?) << 16;
            let challenge_bytes = usize::from(fields.checked_eat_u8()?);
            fields.checked_eat(10)?;
            challenge.extend(fields.checked_eat(challenge_bytes.saturating_sub(8).max(13))?);
            // The challenge ends with a NUL that does not belong to it.
            challenge.pop();
            // Some old servers do not end the name with a NUL.
            let plugin = fields.eat_null_str().to_vec();
            Some((version, connection_id, challenge, capabilities, plugin))
        };
        let (version, connection_id, challenge, capabilities, plugin) =
            parse().ok_or(Malformed("its greeting is too short"))?;
        if capabilities & capabilities::NEEDED != capabilities::NEEDED {
            return Err(Malformed("it does not speak the protocol of MySQL 5.5 or later"));
        }
        let version = quote(&String::from_utf8_lossy(version));
        // MariaDB's prefix keeps old replicas from refusing a version above 5.
        let is_mariadb = version.to_ascii_lowercase().contains("mariadb");
        let version = version.strip_prefix("5.5.5-").unwrap_or(&version).to_owned();
        let has_tls = capabilities & capabilities::TLS != 0;
        Ok(Greeting { connection_id, version, is_mariadb, has_tls, challenge, plugin })
    }
}

/// Who signs in, and where.
#[derive(Clone, Copy)]
pub(super) struct Login<'a> {
    pub(super) user: &'a str,
    pub(super) password: &'a str,
    pub(super) database: &'a str,
    /// Nobody can listen on the way to the server.
    pub(super) is_private: bool,
    /// The connection is secured by TLS.
    pub(super) has_tls: bool,
}

/// Asks the server to begin TLS.
#[cfg(feature = "tls")]
pub(super) fn tls_request() -> Vec<u8> {
    client_begins(true)
}

/// How each first packet of a client begins.
fn client_begins(has_tls: bool) -> Vec<u8> {
    let tls = if has_tls { capabilities::TLS } else { 0 };
    let mut packet = Vec::with_capacity(128);
    packet.extend((capabilities::OURS | tls).to_le_bytes());
    packet.extend(CLIENT_PACKET_BYTES_MAX.to_le_bytes());
    packet.push(CHARACTER_SET);
    packet.extend([0; 23]);
    packet
}

/// What follows a packet of the server during sign-in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Send(Vec<u8>),
    /// Read the next packet.
    Wait,
    SignedIn,
    Refused(ServerError),
}

/// The exchange after the greeting.
pub(super) struct SignIn<'a> {
    login: Login<'a>,
    plugin: Vec<u8>,
    challenge: Vec<u8>,
    asked_for_key: bool,
}

impl<'a> SignIn<'a> {
    /// Begins with a reply to the greeting.
    pub(super) fn begin(
        login: Login<'a>,
        greeting: &Greeting,
    ) -> Result<(SignIn<'a>, Vec<u8>), Malformed> {
        // If the server prefers another plugin, it asks again for the plugin of the account.
        let plugin = if greeting.plugin == CACHING_SHA2 { CACHING_SHA2 } else { NATIVE };
        let (plugin, challenge) = (plugin.to_vec(), greeting.challenge.clone());
        let sign_in = SignIn { login, plugin, challenge, asked_for_key: false };
        let proof = sign_in.proof()?;
        let mut reply = client_begins(login.has_tls);
        reply.extend(login.user.as_bytes());
        reply.push(0);
        reply.push(u8::try_from(proof.len()).unwrap_or(0));
        reply.extend(proof);
        for text in [login.database.as_bytes(), &sign_in.plugin] {
            reply.extend(text);
            reply.push(0);
        }
        Ok((sign_in, reply))
    }

    /// Takes the next packet of the server.
    pub(super) fn next(
        &mut self,
        payload: &[u8],
        quote: impl Fn(&str) -> String,
    ) -> Result<Step, Malformed> {
        const OK: u8 = 0;
        const MORE_DATA: u8 = 1;
        const SWITCH: u8 = 0xfe;
        const ERROR: u8 = 0xff;
        const FAST_SUCCESS: &[u8] = &[3];
        const FULL_SIGN_IN: &[u8] = &[4];
        const ASK_FOR_KEY: u8 = 2;
        let Some((kind, data)) = payload.split_first() else {
            return Err(Malformed("an empty packet during sign-in"));
        };
        match *kind {
            OK => Ok(Step::SignedIn),
            ERROR => Ok(Step::Refused(ServerError::parse(payload, quote)?)),
            SWITCH => self.switch(data, quote),
            MORE_DATA if self.plugin == CACHING_SHA2 => match data {
                FAST_SUCCESS => Ok(Step::Wait),
                FULL_SIGN_IN if self.login.is_private => Ok(Step::Send(self.clear_password())),
                FULL_SIGN_IN => {
                    self.asked_for_key = true;
                    Ok(Step::Send(vec![ASK_FOR_KEY]))
                }
                key if std::mem::take(&mut self.asked_for_key) => self.encrypt_password(key),
                _ => Err(Malformed("unknown data during sign-in")),
            },
            _ => Err(Malformed("an unknown packet during sign-in")),
        }
    }

    /// Uses another plugin, as the server asks.
    fn switch(&mut self, data: &[u8], quote: impl Fn(&str) -> String) -> Result<Step, Malformed> {
        let mut fields = ParseBuf(data);
        // Without data it asks for the method before MySQL 4.1.
        let plugin = if data.is_empty() { b"mysql_old_password" } else { fields.eat_null_str() };
        match plugin {
            NATIVE | CACHING_SHA2 => {
                self.plugin = plugin.to_vec();
                self.challenge = fields.0.strip_suffix(&[0]).unwrap_or(fields.0).to_vec();
                Ok(Step::Send(self.proof()?))
            }
            CLEAR if self.login.is_private => Ok(Step::Send(self.clear_password())),
            CLEAR => Ok(Step::Refused(ServerError {
                code: PLUGIN_FAILED,
                message: "it asks for the password in clear (mysql_clear_password), which is \
                          sent over TLS and Unix sockets only; set ssl-mode=REQUIRED in the URL"
                    .into(),
            })),
            other => Ok(Step::Refused(ServerError {
                code: UNSUPPORTED_PLUGIN,
                message: format!(
                    "the account uses {}, which is not supported; use an account with \
                     caching_sha2_password or mysql_native_password",
                    quote(&String::from_utf8_lossy(other))
                ),
            })),
        }
    }

    /// The proof that we know the password; empty if there is none.
    fn proof(&self) -> Result<Vec<u8>, Malformed> {
        let challenge: &[u8; CHALLENGE_BYTES] = self
            .challenge
            .as_slice()
            .try_into()
            .map_err(|_| Malformed("its challenge is not 20 bytes long"))?;
        let password = self.login.password.as_bytes();
        Ok(if self.plugin == CACHING_SHA2 {
            scramble_sha256(challenge, password).map(Vec::from)
        } else {
            scramble_native(challenge, password).map(Vec::from)
        }
        .unwrap_or_default())
    }

    fn clear_password(&self) -> Vec<u8> {
        [self.login.password.as_bytes(), &[0]].concat()
    }

    /// Encrypts the password with a key from the server. This keeps it from listeners, but not from
    /// an attacker who poses as the server: only TLS does.
    fn encrypt_password(&self, key: &[u8]) -> Result<Step, Malformed> {
        let key = parse_key(key).ok_or(Malformed("its public key is invalid"))?;
        let mut block = self.clear_password();
        block.iter_mut().zip(self.challenge.iter().cycle()).for_each(|(byte, with)| *byte ^= with);
        // The padding takes two hashes and two bytes.
        const PADDING_BYTES: usize = 2 * 20 + 2;
        if block.len() > key.num_octets().saturating_sub(PADDING_BYTES) {
            return Ok(Step::Refused(ServerError {
                code: PLUGIN_FAILED,
                message: "the password is too long for the server's public key".into(),
            }));
        }
        Ok(Step::Send(key.encrypt_block(&block, Pkcs1OaepPadding::new(GetRandom))))
    }
}

/// Parses a public RSA key in the PEM format. The parser of `mysql_common` panics if it is invalid.
fn parse_key(pem: &[u8]) -> Option<PublicKey> {
    const SEQUENCE: u8 = 0x30;
    const BIT_STRING: u8 = 3;
    const INTEGER: u8 = 2;
    const MODULUS_BITS: std::ops::RangeInclusive<u64> = 1024..=16384;
    let text = str::from_utf8(pem).ok()?;
    let (_, text) = text.split_once("-----BEGIN PUBLIC KEY-----")?;
    let (text, _) = text.split_once("-----END PUBLIC KEY-----")?;
    let der = STANDARD.decode(text.split_ascii_whitespace().collect::<String>()).ok()?;
    let mut key = ParseBuf(der_value(&mut ParseBuf(&der), SEQUENCE)?);
    let _algorithm = der_value(&mut key, SEQUENCE)?;
    let bits = der_value(&mut key, BIT_STRING)?.strip_prefix(&[0])?;
    let mut numbers = ParseBuf(der_value(&mut ParseBuf(bits), SEQUENCE)?);
    let mut number = || Some(BigUint::from_bytes_be(der_value(&mut numbers, INTEGER)?));
    let (modulus, exponent) = (number()?, number()?);
    // A key of another size would be misread, or take long to compute with.
    let fits = MODULUS_BITS.contains(&modulus.bits())
        && modulus.bits() % 8 == 0
        && modulus.bit(0)
        && (2..=32).contains(&exponent.bits());
    fits.then(|| PublicKey::new(modulus, exponent))
}

/// Reads one value of the DER format, which begins with its kind and length.
fn der_value<'a>(fields: &mut ParseBuf<'a>, kind: u8) -> Option<&'a [u8]> {
    if fields.checked_eat_u8()? != kind {
        return None;
    }
    let length = match fields.checked_eat_u8()? {
        short @ 0..=0x7f => usize::from(short),
        count @ 0x81..=0x84 => {
            // At most four bytes.
            let bytes = fields.checked_eat(usize::from(count & 0x7f))?;
            bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte))
        }
        _ => return None,
    };
    fields.checked_eat(length)
}

#[cfg(test)]
mod tests;
