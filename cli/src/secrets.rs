//! `Secrets`: the passwords this program logs in with, which a server knows and could repeat in its
//! replies.
//!
//! The library removes passwords from its own errors. Replies on a connection that the program
//! borrows from the pool arrive as the server sent them.

use std::env;

use crate::{
    format,
    urls::{login_of, split_urls},
};

/// Maximum length of a server's text that is shown; the same as in the library's errors.
const TEXT_CHARS_MAX: usize = 256;
/// Maximum length of a password in whose place all of a text is hidden; the same as in the
/// library's errors.
const SHORT_BYTES_MAX: usize = 3;

#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    /// Collects all passwords, whichever server they are for: those in the URLs of the environment,
    /// and the one from the password file.
    pub(crate) fn collect(from_file: Option<String>) -> Secrets {
        let urls = ["DISTLOCK_URL", "REDIS_URL"].into_iter().filter_map(|name| env::var(name).ok());
        Secrets::from_urls(urls, from_file)
    }

    fn from_urls(urls: impl Iterator<Item = String>, from_file: Option<String>) -> Secrets {
        let from_urls = urls.flat_map(|urls| {
            split_urls(&urls).flat_map(|url| login_of(url).passwords).collect::<Vec<_>>()
        });
        let mut all: Vec<String> =
            from_urls.chain(from_file).filter(|secret| !secret.is_empty()).collect();
        // Longest first, so that a password that begins with another one is removed as a whole.
        all.sort_unstable_by_key(|secret| std::cmp::Reverse(secret.len()));
        Secrets(all)
    }

    /// A server's text made fit for a message: passwords removed, cut to size, control characters
    /// escaped.
    pub(crate) fn redact(&self, text: &str) -> String {
        let is_revealing =
            |secret: &String| secret.len() <= SHORT_BYTES_MAX && text.contains(&**secret);
        if self.0.iter().any(is_revealing) {
            return "(text hidden, because it could reveal a short password)".to_owned();
        }
        let text =
            self.0.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "<password>"));
        format::escape(&text.chars().take(TEXT_CHARS_MAX).collect::<String>())
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

    /// Fault: N52, N207
    #[test]
    fn passwords_of_all_sources_are_redacted() {
        let urls =
            "redis://:aa,b@h1:1, redis://u:cc%2Cd@h2:2,valkey://:long-e@h,redis://h".to_owned();
        let urls = [urls, "unix:///s?pass=e222".into()];
        let secrets = Secrets::from_urls(urls.into_iter(), Some("long".into()));
        let redacted = secrets.redact("aa,b cc,d long-e long e222 \u{1b} h1");
        assert_eq!(redacted, "<password> <password> <password> <password> <password> \\u{1b} h1");
        assert_eq!(format!("{secrets:?}"), "Secrets(5)");
        let secure = "rediss://u:four@h1:1,valkeys://:five@h2, mysql://u:seven@h/shop".to_owned();
        let secrets = Secrets::from_urls([secure].into_iter(), None);
        assert_eq!(secrets.redact("four five seven"), "<password> <password> <password>");
        let several = "redis+cluster://u:four@h1:1,h2,rediss+sentinel://u:five@h1:1,h2/main/0\
                       ?sentinel_pass=a%2Fb";
        let several = Secrets::from_urls([several.into()].into_iter(), None);
        assert_eq!(several.redact("four five h1"), "<password> <password> h1");
        assert!(several.redact("four a/b").starts_with("(text hidden, "));
        assert_eq!(
            Secrets::from_urls(["nonsense".into(), String::new()].into_iter(), None),
            Secrets::default()
        );
    }

    #[test]
    fn short_password_hides_the_whole_text() {
        let secrets = Secrets(vec!["p".into()]);
        assert!(secrets.redact("no password").starts_with("(text hidden, "));
        assert_eq!(secrets.redact("none"), "none");
    }

    /// Fault: N52
    #[test]
    fn password_at_cut_leaves_no_part() {
        let password = "0123456789abcdefghijklmnopqrstuvwxyz";
        let secrets = Secrets(vec![password.into()]);
        for before in TEXT_CHARS_MAX - password.len()..TEXT_CHARS_MAX {
            let redacted = secrets.redact(&format!("{}{password} {password}", " ".repeat(before)));
            assert!(!redacted.contains('0') && redacted.len() <= TEXT_CHARS_MAX, "{redacted:?}");
        }
    }
}
