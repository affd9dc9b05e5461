//! Messages about invalid command lines: those of clap, without advice that is wrong here.

use std::ffi::OsString;

use clap::{
    CommandFactory as _,
    builder::StyledStr,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::Args;
use crate::{format::escape, urls::has_password};

/// The message with usage and tips. Text of the command line in it is escaped.
pub(crate) fn text(error: &clap::Error) -> String {
    let text = error.render().to_string();
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return format!("the command is missing\n\n{text}");
    }
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    text.lines().map(|line| escape(line) + "\n").collect()
}

/// What a usage error is about, without the usage and without hints.
pub(crate) fn summary(error: &clap::Error) -> String {
    let text = text(error);
    let first = text.split("\n\n").next().unwrap_or_default();
    first.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Replaces the tips that would be wrong.
pub(super) fn with_our_tips(error: clap::Error, words: &[OsString]) -> clap::Error {
    with_variable_name(with_separator_tip(without_value_tip(error, words), words), words)
}

/// Names the variable that an invalid value comes from. Clap names the option.
fn with_variable_name(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    let Some(ContextValue::String(shown)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let Some(option) = shown.split(' ').next().and_then(|option| option.strip_prefix("--")) else {
        return error;
    };
    let command = Args::command();
    let variable = command
        .get_arguments()
        .find(|arg| arg.get_long() == Some(option))
        .and_then(|arg| arg.get_env()?.to_str().map(str::to_owned));
    let is_given = |word: &OsString| word.to_string_lossy().starts_with(&format!("--{option}"));
    if let Some(variable) = variable
        && error.kind() == ErrorKind::ValueValidation
        && !words.iter().take_while(|word| *word != "--").any(is_given)
    {
        error.insert(ContextKind::InvalidArg, ContextValue::String(variable));
    }
    error
}

/// Clap suggests to put `--` before a word that begins with a hyphen. That is wrong for the value
/// of an option, for a long option that does not exist, and for `run` and `adopt`, where a command
/// follows the `--`.
fn without_value_tip(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    let Some(ContextValue::StyledStrs(tips)) = error.get(ContextKind::Suggested) else {
        return error;
    };
    let is_value_tip = |tip: &StyledStr| tip.to_string().contains("as a value, use ");
    let runs_command = words.iter().any(|word| word == "run" || word == "adopt");
    let option = option_before(&error, words);
    let is_long = matches!(
        error.get(ContextKind::InvalidArg),
        Some(ContextValue::String(invalid)) if invalid.starts_with("--")
    );
    if !tips.iter().any(is_value_tip) || !(runs_command || is_long || option.is_some()) {
        return error;
    }
    let mut tips: Vec<StyledStr> = tips.iter().filter(|tip| !is_value_tip(tip)).cloned().collect();
    if let Some(option) = option {
        let option = escape(&option);
        tips.push(format!("if it is the value of {option}, write {option}=VALUE").into());
    }
    error.remove(ContextKind::Suggested);
    if !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

/// The option, if any, that is the word before the invalid one.
fn option_before(error: &clap::Error, words: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(invalid)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    // Clap names the first letter of several short options: -5 of -5s.
    let at = words.iter().position(|word| word.to_string_lossy().starts_with(invalid.as_str()))?;
    let before = words.get(at.checked_sub(1)?)?.to_string_lossy();
    let takes_value =
        Args::command().get_subcommands().flat_map(clap::Command::get_arguments).any(|arg| {
            let long = arg.get_long().is_some_and(|long| before == format!("--{long}"));
            let short = arg.get_short().is_some_and(|short| before == format!("-{short}"));
            (long || short) && arg.get_action().takes_values()
        });
    takes_value.then(|| before.into_owned())
}

/// Adds a tip if the words would be accepted with a `--` before the command.
fn with_separator_tip(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    let lacks_separator =
        matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::MissingRequiredArgument)
            && words.iter().all(|word| word != "--");
    if !lacks_separator {
        return error;
    }
    let is_option = |word: &OsString| word.to_string_lossy().starts_with('-');
    let separated = (1..words.len()).filter(|at| !is_option(&words[*at])).find_map(|at| {
        let (before, after) = words.split_at(at);
        let separated = before.iter().cloned().chain(["--".into()]).chain(after.iter().cloned());
        let separated: Vec<OsString> = separated.collect();
        Args::command().try_get_matches_from(&separated).is_ok().then_some(separated)
    });
    if let Some(separated) = separated {
        let shown = separated.iter().map(|word| escape(&word.to_string_lossy()));
        let line = shown.collect::<Vec<_>>().join(" ");
        let tip = StyledStr::from(format!("write -- before the command: {line}"));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// The command line of `lock` with a command, as one of `run`. Passwords in it are not shown.
pub(super) fn as_run(words: &[OsString]) -> String {
    let is_for_lock_only = |word: &OsString| word == "--detach" || word == "--json";
    let separator = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let as_run_at = |at: usize| {
        let changed = |(place, word): (usize, &OsString)| match place {
            _ if place == at => Some("run".into()),
            _ if place < separator && is_for_lock_only(word) => None,
            _ => Some(word.clone()),
        };
        let mut line: Vec<OsString> = words.iter().enumerate().filter_map(changed).collect();
        // The first word is the path of this program.
        *line.first_mut()? = "distlock".into();
        let matches = Args::command().try_get_matches_from(&line).ok()?;
        (matches.subcommand_name() == Some("run")).then_some(line)
    };
    // `lock` may also be the value of an option.
    let places = (1..separator).filter(|at| words[*at] == "lock");
    let Some(line) = places.into_iter().find_map(as_run_at) else {
        return "distlock run NAME -- COMMAND".into();
    };
    line.iter().map(|word| shown_word(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

/// The word as a shell reads it, or a placeholder if it seems to contain a password.
fn shown_word(word: &str) -> String {
    let is_plain = |c: char| !c.is_whitespace() && !"'\"\\$`&|;<>()*?[]{}#~!".contains(c);
    if word.contains("://") && has_password(word) {
        "…".into()
    } else if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    fn error(line: &str) -> String {
        let words = line.split(' ').map(OsString::from);
        parse(words).unwrap_err().to_string()
    }

    #[test]
    fn missing_separator_gets_a_hint() {
        for (line, hint) in [
            ("distlock run a echo hi", "distlock run a -- echo hi"),
            ("distlock run -w 3 a ls -l", "distlock run -w 3 a -- ls -l"),
            ("distlock --timeout 1 run a ls", "distlock --timeout 1 run a -- ls"),
            ("distlock run a ls", "distlock run a -- ls"),
            ("distlock run a --verbos", ""),
            ("distlock ls a b", ""),
            ("distlock run a -x -- ls", ""),
        ] {
            let message = error(line);
            let expected = format!("tip: write -- before the command: {hint}\n");
            assert_eq!(message.contains(&expected), !hint.is_empty(), "{message}");
            assert_eq!(message.contains("before the command"), !hint.is_empty(), "{message}");
        }
    }

    /// The arguments of the command are secret only if the message would repeat them.
    #[test]
    fn password_for_the_command_does_not_hide_the_error() {
        let url = "postgres://app:pw@db/shop";
        let message = error(&format!("distlock run --tll 5s job -- pg_dump {url}"));
        assert!(message.contains("'--tll'") && !message.contains("pw"), "{message}");
        for (line, lacks_separator) in [
            (format!("distlock --url {url} run --tll 5s job -- ls"), false),
            (format!("distlock run job pg_dump {url}"), true),
            (format!("distlock ls -- a {url}"), false),
            (format!("distlock ls -- a {url}\u{202e}"), false),
        ] {
            let message = error(&line);
            assert!(message.contains("to contain a password, which every"), "{message}");
            assert_eq!(message.ends_with("write -- before it"), lacks_separator, "{message}");
        }
    }

    #[test]
    fn command_after_lock_is_refused_with_its_run() {
        for (line, instead) in [
            ("distlock lock deploy:shop -- ./deploy.sh", "run deploy:shop -- ./deploy.sh"),
            (
                "/usr/bin/distlock lock --json --ttl 9s lock -- a --json",
                "run --ttl 9s lock -- a --json",
            ),
            ("distlock --prefix lock lock --detach a -- b", "--prefix lock run a -- b"),
            ("distlock lock a -- sh -c a;b", "run a -- sh -c 'a;b'"),
            ("distlock lock a -- psql postgres://app:pw@db/shop", "run a -- psql …"),
            ("distlock lock --permits 2 a b -- c", "run --permits 2 a b -- c"),
        ] {
            let expected = format!("lock runs no command; use: distlock {instead}");
            assert_eq!(error(line), expected, "{line}");
        }
        let words = ["distlock", "lock", "a", "--"].map(OsString::from);
        assert!(parse(words).is_ok(), "there is no command");
    }

    #[test]
    fn tips_are_right_for_values_and_commands() {
        for (line, contains, lacks) in [
            ("distlock run --ttl -5 a -- ls", "a duration cannot be negative", "tip:"),
            ("distlock lock -E -1 a", "write a number from 0 to 255", "tip:"),
            ("distlock run --permits -1 a -- ls", "write LIMIT or COUNT/LIMIT", "tip:"),
            ("distlock run --permits 4294967296 a -- ls", "is too large; write at most 4", "tip:"),
            ("distlock run --ttl 99999999999999999999 a -- ls", "it is too long", "write it"),
            ("distlock run --ttl -5s a -- ls", "value of --ttl, write --ttl=VALUE", "use '-- "),
            ("distlock lock -w -5s a", "value of -w, write -w=VALUE", "use '-- "),
            ("distlock run -x -- ls", "unexpected argument '-x'", "tip:"),
            ("distlock run a --verbos -- ls", "a similar argument exists: '--verbose'", "use '-- "),
            ("distlock lock a --max-hold 3", "unexpected argument '--max-hold'", "tip:"),
            ("distlock show -x", "use '-- -x'", "VALUE"),
        ] {
            let message = error(line);
            assert!(message.contains(contains) && !message.contains(lacks), "{line}: {message}");
        }
    }
}
