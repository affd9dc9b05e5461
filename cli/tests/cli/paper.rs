//! What is printed to be read later: help, the manual page, completions.

use std::{fs, process::Command};

use tempfile::TempDir;

use super::command::{distlock, run};

const COMMANDS: [&str; 9] = ["run", "ls", "show", "release", "top", "doctor", "bench", "completions", "man"];

#[test]
fn help_and_the_version_are_no_errors() {
    let help = run(distlock(&["--help"])).with(0);
    assert!(help.err.is_empty());
    for command in COMMANDS {
        assert!(help.out.contains(&format!("\n  {command}")), "{command}: {}", help.out);
        let own = run(distlock(&[command, "--help"])).with(0).out;
        assert!(own.contains("Usage: distlock"), "{own}");
        // Long help is wrapped, and says something.
        assert!(own.lines().next().is_some_and(|line| line.len() > 10), "{own}");
    }
    let version = run(distlock(&["--version"])).with(0).out;
    assert_eq!(version, format!("distlock {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn help_that_cannot_be_written_is_an_error() {
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
fn every_exit_code_is_in_the_help_and_in_the_manual() {
    let help = run(distlock(&["--help"])).with(0).out;
    let page = run(distlock(&["man"])).with(0).out;
    for code in ["0", "1", "64", "69", "75", "76", "124", "126", "127", "128+"] {
        let line = format!("\n  {code} ");
        assert!(help.contains(&line), "{code}: {help}");
        assert!(page.contains(&line), "{code}: {page}");
    }
}

#[test]
fn the_manual_page_tells_of_all_commands_and_options() {
    let ended = run(distlock(&["man"])).with(0);
    assert!(ended.out.starts_with(".ie") || ended.out.starts_with(".TH"), "{}", &ended.out[..80]);
    assert!(ended.out.contains(".TH distlock 1") && ended.out.contains(".SH NAME"), "{}", ended.out);
    for command in COMMANDS {
        let heading = format!("\n.SS distlock {command}\n");
        assert!(ended.out.contains(&heading), "{command} is not in the manual");
    }
    assert!(!ended.out.contains("distlock-help"));
    let plain = ended.out.replace('\\', "");
    for option in ["--password-file", "--max-hold", "--if-id", "--interval", "--json", "--time", "DISTLOCK_URL"] {
        assert!(plain.contains(option), "{option} is not in the manual");
    }
    for variable in ["DISTLOCK_PASSWORD_FILE", "DISTLOCK_PREFIX", "DISTLOCK_QUARANTINE", "DISTLOCK_LOG"] {
        assert!(plain.contains(variable), "{variable} is not in the manual");
    }
    // Without what stands between them it would be an error.
    assert!(plain.contains("<NAME> -- <COMMAND>..."), "{plain}");
}

#[test]
fn completions_are_for_the_shells_that_there_are() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(distlock(&["completions", shell])).with(0).out;
        for word in ["doctor", "--no-wait", "--if-id"].map(|word| word.trim_start_matches('-')) {
            assert!(script.contains(word), "{word} is not in the completions for {shell}");
        }
    }
    assert!(run(distlock(&["completions", "tcsh"])).with(64).err.contains("tcsh"));
}

/// Not only printed: where the shell is there, it takes the script and completes by it.
#[test]
fn bash_completes_by_its_script() {
    let script = run(distlock(&["completions", "bash"])).with(0).out;
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
    // Nothing in here installs it.
    let Ok(output) = shell else { return };
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said.trim(), "release\n--if-id", "{}", String::from_utf8_lossy(&output.stderr));
}
