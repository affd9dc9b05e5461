use proptest::prelude::*;

use super::*;

/// A greeting with these capabilities and this plugin.
fn greeting(version: &str, capabilities: u32, plugin: &str) -> Vec<u8> {
    let [a, b, c, d] = capabilities.to_le_bytes();
    let mut payload = vec![10];
    payload.extend(version.as_bytes());
    payload.extend([0, 42, 1, 0, 0]);
    payload.extend(b"12345678");
    payload.extend([0, a, b, 45, 2, 0, c, d, 21]);
    payload.extend([0; 10]);
    payload.extend(b"abcdefghijkl\0");
    payload.extend(plugin.as_bytes());
    payload.push(0);
    payload
}

fn parse(payload: &[u8]) -> Result<Greeting, Malformed> {
    Greeting::parse(payload, str::to_owned)
}

fn login(is_private: bool) -> Login<'static> {
    Login { user: "app", password: "secret", database: "shop", is_private, has_tls: false }
}

fn begin(plugin: &str, is_private: bool) -> (SignIn<'static>, Vec<u8>) {
    let greeting = parse(&greeting("8.0.36", u32::MAX, plugin)).unwrap();
    SignIn::begin(login(is_private), &greeting).unwrap()
}

fn next(sign_in: &mut SignIn<'_>, payload: &[u8]) -> Result<Step, Malformed> {
    sign_in.next(payload, str::to_owned)
}

#[test]
fn greeting_tells_the_server() {
    let read = parse(&greeting("5.5.5-10.11.6-MariaDB", u32::MAX, "mysql_native_password"));
    let read = read.unwrap();
    assert_eq!((read.connection_id, read.version.as_str()), (298, "10.11.6-MariaDB"));
    assert!(read.is_mariadb);
    assert_eq!(read.challenge, b"12345678abcdefghijkl");
    assert!(!parse(&greeting("9.7.4", u32::MAX, "caching_sha2_password")).unwrap().is_mariadb);
}

#[test]
fn old_or_short_greetings_are_refused() {
    let old = parse(&greeting("4.0", 0, "")).unwrap_err();
    assert!(old.0.contains("5.5 or later"), "{old:?}");
    assert!(parse(&[9, b'x', 0]).is_err());
    let whole = greeting("8.0.36", u32::MAX, "");
    for end in 0..whole.len() - 2 {
        assert!(parse(&whole[..end]).is_err(), "{end}");
    }
}

#[test]
fn password_is_never_sent_as_it_is() {
    for plugin in ["mysql_native_password", "caching_sha2_password", "unknown"] {
        let (mut sign_in, reply) = begin(plugin, false);
        assert!(!reply.windows(6).any(|bytes| bytes == b"secret"), "{plugin}");
        let asked = next(&mut sign_in, b"\xfemysql_clear_password\0").unwrap();
        let Step::Refused(error) = asked else { panic!("{asked:?}") };
        assert!(error.message.contains("Unix sockets only"), "{error:?}");
    }
}

#[test]
fn whole_password_goes_over_private_connections_only() {
    let (mut private, _) = begin("caching_sha2_password", true);
    assert_eq!(next(&mut private, &[1, 4]).unwrap(), Step::Send(b"secret\0".to_vec()));
    let (mut public, _) = begin("caching_sha2_password", false);
    assert_eq!(next(&mut public, &[1, 4]).unwrap(), Step::Send(vec![2]), "asks for the key");
    let invalid = next(&mut public, b"\x01-----BEGIN PUBLIC KEY-----\nAAAA");
    assert_eq!(invalid, Err(Malformed("its public key is invalid")));
    // A key that was not asked for is not used.
    assert!(next(&mut public, b"\x01-----BEGIN PUBLIC KEY-----").is_err());
}

#[test]
fn server_can_switch_the_plugin() {
    let (mut sign_in, _) = begin("mysql_native_password", false);
    let switch = b"\xfecaching_sha2_password\0abcdefghijklmnopqrst\0";
    let Step::Send(proof) = next(&mut sign_in, switch).unwrap() else { panic!("no proof") };
    assert_eq!(proof.len(), 32);
    assert_eq!(next(&mut sign_in, &[1, 3]).unwrap(), Step::Wait);
    assert_eq!(next(&mut sign_in, &[0, 0, 0]).unwrap(), Step::SignedIn);
    let short = next(&mut sign_in, b"\xfemysql_native_password\0abc\0");
    assert_eq!(short, Err(Malformed("its challenge is not 20 bytes long")));
    let Step::Refused(error) = next(&mut sign_in, b"\xfeauth_gssapi_client\0x").unwrap() else {
        panic!("accepted")
    };
    assert!(error.message.contains("auth_gssapi_client, which is not supported"), "{error:?}");
}

#[test]
fn refusal_has_the_code_of_the_server() {
    let (mut sign_in, _) = begin("mysql_native_password", false);
    let refused = next(&mut sign_in, b"\xff\x15\x04#28000Access denied").unwrap();
    let expected = ServerError { code: 1045, message: "Access denied".into() };
    assert_eq!(refused, Step::Refused(expected));
}

proptest! {
    /// Fault: N148
    #[test]
    fn no_bytes_make_the_sign_in_panic(
        payload in proptest::collection::vec(any::<u8>(), 0..120),
        asks_for_key in any::<bool>(),
    ) {
        let _ = parse(&payload);
        let (mut sign_in, _) = begin("caching_sha2_password", false);
        if asks_for_key {
            let _ = next(&mut sign_in, &[1, 4]);
        }
        let _ = next(&mut sign_in, &payload);
        let _ = parse_key(&payload);
        let pem = format!(
            "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----",
            STANDARD.encode(&payload)
        );
        prop_assert!(parse_key(pem.as_bytes()).is_none());
    }
}
