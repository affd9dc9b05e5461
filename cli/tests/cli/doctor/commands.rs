//! Missing permissions and unfit settings, and the commands that `doctor` prints for them.

use std::process::Command;

use super::{acl_user, all_but, examine, report, report_at};
use crate::{
    command::{distlock_at_url, run_to_end},
    helpers::FENCE,
    permissions::{INSPECT_PERMISSIONS, LOCK_PERMISSIONS, SHARED_PERMISSIONS},
    support::{Certificates, RedisServer, TEST_TIMEOUT, eventually},
};

#[test]
fn missing_permission_is_named_with_grant_command() {
    let server = RedisServer::start();
    let report = report_at(&acl_user(&server, &all_but("")));
    report.says("permissions", "ok", "all").problems(&[]);
    for missing in LOCK_PERMISSIONS {
        let report = report_at(&acl_user(&server, &all_but(missing)));
        report.says("permissions", "problem", missing).advises("permissions", missing);
        let says = report.finding("permissions")["message"].as_str().unwrap();
        let says = says.split("; cannot be tested").next().unwrap();
        for right in
            LOCK_PERMISSIONS.iter().chain(&INSPECT_PERMISSIONS).filter(|right| **right != missing)
        {
            assert!(
                !says.split([' ', ',']).any(|word| word == *right),
                "{missing}: also {right}: {says}"
            );
        }
        assert_eq!(report.ended.code, Some(1));
    }
    for missing in INSPECT_PERMISSIONS {
        let report = report_at(&acl_user(&server, &all_but(missing)));
        report
            .says("permissions", "warning", missing)
            .advises("permissions", missing)
            .problems(&[]);
    }
    for missing in SHARED_PERMISSIONS {
        let report = report_at(&acl_user(&server, &all_but(missing)));
        let says = format!("read-write locks and semaphores also need {missing}");
        report.says("permissions", "warning", &says).advises("permissions", missing).problems(&[]);
    }
    let mutexes = [&LOCK_PERMISSIONS[..], &INSPECT_PERMISSIONS].concat();
    let report = report_at(&acl_user(&server, &mutexes));
    report.advises("permissions", &SHARED_PERMISSIONS.join(" "));
    eventually("only the fence is left", TEST_TIMEOUT, || server.keys() == [FENCE]);
}

#[test]
fn several_missing_permissions_are_named_at_once() {
    let server = RedisServer::start();
    let permissions: Vec<&str> = all_but("")
        .into_iter()
        .filter(|right| !["+lpos", "+pttl", "+set"].contains(right))
        .collect();
    let report = report_at(&acl_user(&server, &permissions));
    report
        .says("permissions", "problem", "+set +pttl +lpos")
        .advises("permissions", "ACL SETUSER app +set +pttl +lpos +rpush +lpush");
    let bare = report_at(&acl_user(&server, &["+time", "~*", "&*"]));
    for right in
        LOCK_PERMISSIONS.into_iter().filter(|right| right.starts_with('+') && *right != "+time")
    {
        bare.advises("permissions", right);
    }
    assert_eq!(server.keys(), [""; 0]);
}

#[test]
fn missing_key_permission_includes_prefix() {
    let server = RedisServer::start();
    let url = acl_user(&server, &all_but(""));
    let report = report(distlock_at_url(&url, &["doctor", "--json", "--prefix", "mine:"]));
    report.says("permissions", "problem", "~mine:*").advises("permissions", "~mine:*");
}

/// What the URL contains to sign in with is also found in a URL for TLS. The server repeats the
/// password: it follows a server of that name.
///
/// Fault: N207
#[test]
fn login_in_a_url_for_tls_is_used_and_redacted() {
    let certificates = Certificates::new();
    let ca = certificates.path("ca.crt");
    let server = RedisServer::builder().tls(certificates.folder(), false).start();
    let secure = |scheme: &str, url: String| {
        let addr = server.addr().to_string();
        let url = url.replace("redis://", scheme).replace(&addr, &server.tls_addr().to_string());
        let args = ["doctor", "--json", "--cacert", ca.to_str().unwrap()];
        report(distlock_at_url(&url, &args))
    };
    for scheme in ["rediss://", "valkeys://"] {
        let report = secure(scheme, acl_user(&server, &all_but("+lpos")));
        report
            .says("permissions", "problem", "+lpos")
            .advises("permissions", "ACL SETUSER app +lpos");
    }
    let url = acl_user(&server, &["+@all", "~*", "&*"]).replace(":pw@", ":hunter2hunter2@");
    server.cli(&["ACL", "SETUSER", "app", ">hunter2hunter2"]);
    server.cli(&["REPLICAOF", "hunter2hunter2", "1"]);
    for scheme in ["rediss://", "valkeys://", "REDISS://"] {
        let report = secure(scheme, url.clone());
        report.says("role", "problem", "<password>");
        assert!(!format!("{:?}", report.ended).contains("hunter2"), "{:?}", report.ended);
    }
}

/// Runs a command of the doctor as a shell would read it, as an administrator.
#[track_caller]
fn paste(server: &RedisServer, line: &str) {
    let script = format!("redis-cli -e -h \"$0\" -p \"$1\" {line}");
    let addr = server.addr();
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, &addr.ip().to_string(), &addr.port().to_string()]);
    let output = shell.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.trim() == "OK", "{line}: {text}");
}

/// One command is right on the first try, whatever the user may do before.
#[test]
fn pasted_command_grants_everything() {
    if Command::new("redis-cli").arg("--version").output().is_err() {
        return;
    }
    let server = RedisServer::start();
    for (permissions, prefix) in [
        (&[][..], "lock:"),
        (&["+ping"], "my 'odd*' [prefix]:"),
        (&["+time"], "lock:"),
        (&["+time", "+get"], "mine:"),
        (&["+time", "~*", "+get"], "mine:"),
        (&["+time", "~*", "&*", "+get", "+publish", "+config|get"], "lock:"),
        (&["+time", "~lock:*", "~distlock:*", "+@all"], "lock:"),
        (&["+@all"], "a*b:"),
    ] {
        // A key pattern cannot contain a space.
        let prefix = prefix.replace(' ', "_");
        let url = acl_user(&server, permissions);
        let doctor = || report(distlock_at_url(&url, &["doctor", "--json", "--prefix", &prefix]));
        let first = doctor();
        let [line, save] = first.commands("permissions").try_into().unwrap();
        assert_eq!(save, "ACL SAVE");
        first.advises("permissions", "ACL SETUSER is forgotten at a restart");
        paste(&server, &line);
        let second = doctor();
        second.says("permissions", "ok", "all").problems(&[]).hands_over();
        assert_eq!(second.value["unknown"], 0, "{permissions:?} {prefix}: {:#}", second.value);
        // In the text, the command has a line of its own.
        acl_user(&server, permissions);
        let text = run_to_end(distlock_at_url(&url, &["doctor", "--prefix", &prefix])).out;
        assert!(text.lines().any(|other| other.trim() == line), "{line:?} is no line of\n{text}");
    }
}

#[test]
fn commands_for_settings_can_be_pasted() {
    let server = RedisServer::start();
    if Command::new("redis-cli").arg("--version").output().is_err() {
        return;
    }
    for (name, value) in
        [("maxmemory-policy", "allkeys-lru"), ("timeout", "2"), ("appendonly", "no")]
    {
        server.config_set(name, value);
    }
    let report = examine(&server);
    for check in ["eviction", "timeout", "persistence"] {
        report.says(check, "warning", "");
        let commands = report.commands(check);
        let Some((rewrite, settings)) = commands.split_last() else { panic!("{check}") };
        assert_eq!((rewrite.as_str(), settings.is_empty()), ("CONFIG REWRITE", false), "{check}");
        settings.iter().for_each(|line| paste(&server, line));
        report.advises(check, "CONFIG SET is forgotten at a restart unless");
    }
    // The command exists, but this server has been started without a file.
    let refused = server.try_query::<String>(&["CONFIG", "REWRITE"]).unwrap_err().to_string();
    assert!(refused.contains("without a config file"), "{refused}");
    let report = examine(&server);
    for check in ["eviction", "timeout", "persistence"] {
        report.says(check, "ok", "");
    }
}
