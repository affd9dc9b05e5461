//! `Secrets`: the passwords that this command signs in with. A server knows them, and may say them.
//!
//! The library keeps them out of its own errors. What is asked over a borrowed connection comes as the server has it.

use std::env;

use redis::IntoConnectionInfo as _;

use crate::{connect, text};

/// As much of a text of a server's as the library tells of one.
const SHOWN: usize = 256;

#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    /// All that there are, whichever of them the server in question knows: those of URLs in the environment, and the one
    /// that was read from a file.
    pub(crate) fn find(from_file: Option<String>) -> Secrets {
        let of_environment = ["DISTLOCK_URL", "REDIS_URL"].into_iter().filter_map(|name| env::var(name).ok());
        Secrets::of(of_environment, from_file)
    }

    fn of(urls: impl Iterator<Item = String>, from_file: Option<String>) -> Secrets {
        let password = |url: &str| url.into_connection_info().ok()?.redis_settings().password().map(str::to_owned);
        let of_urls =
            urls.flat_map(|urls| connect::divide(&urls).filter_map(|url| password(url.trim())).collect::<Vec<_>>());
        let mut all: Vec<String> = of_urls.chain(from_file).filter(|secret| !secret.is_empty()).collect();
        // One that begins with another one is to go as a whole.
        all.sort_unstable_by_key(|secret| std::cmp::Reverse(secret.len()));
        Secrets(all)
    }

    /// A text of a server's, fit for a sentence: without a password, cut, and without anything that a terminal would obey.
    pub(crate) fn quote(&self, text: &str) -> String {
        let text = self.0.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "<password>"));
        text::clean(&text.chars().take(SHOWN).collect::<String>())
    }
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secrets({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_found_wherever_they_come_from() {
        let urls = "redis://:a,b@h1:1, redis://u:c%2Cd@h2:2,valkey://:long-e@h,redis://h".to_owned();
        let secrets = Secrets::of([urls, "unix:///s?pass=e2".into()].into_iter(), Some("long".into()));
        let said = secrets.quote("a,b c,d long-e long e2 \u{1b} h1");
        assert_eq!(said, "<password> <password> <password> <password> <password> \\u{1b} h1");
        assert_eq!(format!("{secrets:?}"), "Secrets(5)");
        assert_eq!(Secrets::of(["nonsense".into(), String::new()].into_iter(), None), Secrets::default());
    }

    #[test]
    fn no_part_of_a_password_is_left_where_a_text_is_cut() {
        let password = "0123456789abcdefghijklmnopqrstuvwxyz";
        let secrets = Secrets(vec![password.into()]);
        for before in SHOWN - password.len()..SHOWN {
            let quoted = secrets.quote(&format!("{}{password} {password}", " ".repeat(before)));
            assert!(!quoted.contains('0') && quoted.len() <= SHOWN, "{quoted:?}");
        }
    }
}
