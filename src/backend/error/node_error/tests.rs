use super::*;

#[test]
fn token_disagreement_has_its_own_message() {
    assert_eq!(
        NodeErrorKind::TokenDisagreement.to_string(),
        "the nodes do not agree on a fencing token"
    );
}

/// As reported by Redis 6.2.14.
///
/// Fault: N120
#[test]
fn redis_6_script_error_keeps_its_inner_code() {
    let wrapped = |rest: &str| {
        let message = format!(
            "Error running script (call to f_a60f99108415347c2c750b5af9b2212a81ec1d57): {rest}"
        );
        match NodeError::from_server("ERR", &message, str::to_owned) {
            NodeError { outcome_unknown: sent, kind: NodeErrorKind::Refused { code, message } } => {
                (sent, code, message)
            }
            other => panic!("{other:?}"),
        }
    };
    for (line, code, message) in [
        (
            "-READONLY You can't write against a read only replica.",
            "READONLY",
            "You can't write against a read only replica.",
        ),
        (
            "-OOM command not allowed when used memory > 'maxmemory'.",
            "OOM",
            "command not allowed when used memory > 'maxmemory'.",
        ),
        (
            "-NOREPLICAS Not enough good replicas to write.",
            "NOREPLICAS",
            "Not enough good replicas to write.",
        ),
    ] {
        let told = wrapped(&format!("@user_script:48: @user_script: 48: {line}"));
        assert_eq!(told, (false, code.to_owned(), message.to_owned()));
        // A script that catches the error returns it with its place.
        let returned =
            NodeError::from_server("@user_script:", &format!("48: {line}"), str::to_owned);
        let NodeErrorKind::Refused { code: unwrapped, .. } = &returned.kind else { panic!() };
        assert!(unwrapped == code && !returned.outcome_unknown, "{returned:?}");
    }
    let wrong = "WRONGTYPE Operation against a key holding the wrong kind of value";
    assert_eq!(wrapped(&format!("@user_script:1: {wrong}")).1, "WRONGTYPE");
    for other in [
        "@user_script:1: @user_script: 1: \
         The user executing the script can't run this command or subcommand",
        "@user_script:1: -FOO bar",
        "@user_script:1: ",
        "@user_script:",
        "READONLY is all it says",
    ] {
        let (sent, code, message) = wrapped(other);
        assert!(sent && code == "ERR" && message.ends_with(other), "{other}: {code} {message}");
    }
}

/// Fault: N122
#[test]
fn known_code_survives_password_redaction() {
    let quote = |text: &str| text.replace("SCRIPT", "<password>");
    let error = NodeError::from_server("NOSCRIPT", "No matching SCRIPT.", quote);
    assert!(error.is_unknown_script(), "{error:?}");
    assert!(!format!("{error:?}").contains("matching SCRIPT"), "{error:?}");
    let unknown = NodeError::from_server("MYSCRIPT", "no", quote);
    assert!(!format!("{unknown:?}").contains("SCRIPT"), "{unknown:?}");
}
