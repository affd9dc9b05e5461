//! Help, the manual page, completions.

use std::{fs, process::Command};

use tempfile::TempDir;

use super::command::{distlock, run_to_end};

const COMMANDS: [&str; 14] = [
    "run",
    "lock",
    "adopt",
    "ls",
    "show",
    "release",
    "top",
    "init",
    "doctor",
    "bench",
    "mysql-schema",
    "prune",
    "completions",
    "man",
];

#[test]
fn help_and_version_exit_with_0() {
    let help = run_to_end(distlock(&["--help"])).expect_code(0);
    assert!(help.err.is_empty());
    for command in COMMANDS {
        assert!(help.out.contains(&format!("\n  {command}")), "{command}: {}", help.out);
        let own = run_to_end(distlock(&[command, "--help"])).expect_code(0).out;
        assert!(own.contains("Usage: distlock"), "{own}");
        // The long help begins with a description.
        assert!(own.lines().next().is_some_and(|line| line.len() > 10), "{own}");
    }
    let version = run_to_end(distlock(&["--version"])).expect_code(0).out;
    assert_eq!(version, format!("distlock {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn usage_errors_begin_like_other_messages() {
    for (args, message) in [
        (&["run", "--nonsense"][..], "distlock: unexpected argument '--nonsense' found\n"),
        (&["ls", "a\u{1b}", "b"], "distlock: unexpected argument 'b' found\n"),
        (&["run", "-E", "foo", "a"], "distlock: invalid value 'foo' for "),
        (&["bogus"], "distlock: unrecognized subcommand 'bogus'\n"),
        (&[], "distlock: the command is missing\n\nDistributed locks"),
    ] {
        let ended = run_to_end(distlock(args)).expect_code(64);
        assert!(ended.err.starts_with(message) && ended.out.is_empty(), "{ended:?}");
        assert!(!ended.err.contains("\nerror:") && ended.err.contains("--help"), "{ended:?}");
    }
    let ended = run_to_end(distlock(&["show", "a", "b\u{202e}"])).expect_code(64);
    assert!(ended.err.starts_with("distlock: unexpected argument 'b\\u{202e}'"), "{ended:?}");
}

#[test]
fn help_of_lock_is_about_locks() {
    let help = run_to_end(distlock(&["lock", "--help"])).expect_code(0).out;
    let text = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("Several names are acquired in sorted order, whatever"), "{text}");
    assert!(!text.contains("run the command"), "{text}");
}

#[test]
fn unwritable_help_exits_with_126() {
    for arg in ["--help", "--version"] {
        let mut command = distlock(&[arg]);
        command.stdout(fs::File::create("/dev/full").unwrap());
        let ended = command.output().unwrap();
        assert_eq!(ended.status.code(), Some(126), "{arg}");
        let err = String::from_utf8_lossy(&ended.stderr);
        assert!(err.starts_with("distlock: cannot write to standard output: "), "{err}");
    }
}

#[test]
fn help_and_manual_list_every_exit_code() {
    let help = run_to_end(distlock(&["--help"])).expect_code(0).out;
    let page = run_to_end(distlock(&["man"])).expect_code(0).out;
    for code in ["0", "1", "64", "69", "75", "76", "124", "126", "127", "128+N"] {
        assert!(help.contains(&format!("\n  {code} ")), "{code}: {help}");
        assert!(page.contains(&format!("\n.TP\n\\fB{code}\\fR\n")), "{code}: {page}");
    }
}

#[test]
fn manual_covers_all_commands_and_options() {
    let ended = run_to_end(distlock(&["man"])).expect_code(0);
    assert!(ended.out.starts_with(".ie") || ended.out.starts_with(".TH"), "{}", &ended.out[..80]);
    assert!(
        ended.out.contains(".TH distlock 1") && ended.out.contains(".SH NAME"),
        "{}",
        ended.out
    );
    for command in COMMANDS {
        let heading = format!("\n.SS distlock {command}\n");
        assert!(ended.out.contains(&heading), "{command} is not in the manual");
    }
    assert!(!ended.out.contains("distlock-help"));
    let plain = ended.out.replace('\\', "");
    for option in [
        "--password-file",
        "--max-hold",
        "--older-than",
        "--table",
        "--if-id",
        "--interval",
        "--json",
        "--time",
        "DISTLOCK_URL",
    ] {
        assert!(plain.contains(option), "{option} is not in the manual");
    }
    for variable in
        ["DISTLOCK_PASSWORD_FILE", "DISTLOCK_PREFIX", "DISTLOCK_QUARANTINE", "DISTLOCK_LOG"]
    {
        assert!(plain.contains(variable), "{variable} is not in the manual");
    }
    // The `--` is part of the usage.
    assert!(plain.contains("<NAME>... -- <COMMAND>..."), "{plain}");
    assert!(plain.contains("<NAME>... --command <TEXT>"), "{plain}");
}

#[test]
fn completions_exist_for_all_shells() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run_to_end(distlock(&["completions", shell])).expect_code(0).out;
        for word in ["doctor", "--no-wait", "--if-id"].map(|word| word.trim_start_matches('-')) {
            assert!(script.contains(word), "{word} is not in the completions for {shell}");
        }
    }
    assert!(run_to_end(distlock(&["completions", "tcsh"])).expect_code(64).err.contains("tcsh"));
}

/// Sources the script in a shell and completes with it.
#[test]
fn bash_completion_script_works() {
    let script = run_to_end(distlock(&["completions", "bash"])).expect_code(0).out;
    let folder = TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("distlock.bash");
    fs::write(&file, script).unwrap();
    let complete = r#"
        . "$1"
        COMP_WORDS=(distlock re); COMP_CWORD=1; _distlock distlock re distlock
        echo "${COMPREPLY[*]}"
        COMP_WORDS=(distlock release x --if); COMP_CWORD=3; _distlock distlock --if x
        echo "${COMPREPLY[*]}""#;
    let shell = Command::new("bash").args(["-c", complete, "bash"]).arg(&file).output();
    // Bash may not be installed.
    let Ok(output) = shell else { return };
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(stdout.trim(), "release\n--if-id", "{}", String::from_utf8_lossy(&output.stderr));
}
