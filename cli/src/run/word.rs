//! `Word`: what a wrapper tells its guardian, as lines of JSON over a pipe that nobody else can read.

use std::time::Duration;

use serde::{Deserialize, Serialize};

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Word {
    /// The lock is about to be asked for.
    Asking(Box<Lock>),
    /// The process group that is about to run under it, and until when it can be believed in, as below.
    Group(i32, Duration),
    /// The lock can be believed in until then, in time since boot. Also says that the wrapper is well.
    HeldUntil(Duration),
    /// The command is stopped, and the wrapper will stop itself: its silence means nothing.
    Pausing,
    /// The wrapper itself ends the group, which it has asked to end and kills then, in time since boot.
    Ending(Duration),
    /// Nothing of the group is left.
    Over,
}

/// Where the lock is, what it is called, and under which identifier it is asked for.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Lock {
    pub(super) urls: Vec<String>,
    pub(super) password: Option<String>,
    pub(super) prefix: Option<String>,
    pub(super) timeout: Duration,
    pub(super) quarantine: Option<Duration>,
    pub(super) name: String,
    pub(super) id: String,
    pub(super) ttl: Duration,
    pub(super) grace: Duration,
}

impl Word {
    pub(super) fn line(&self) -> Option<Vec<u8>> {
        let mut line = serde_json::to_vec(self).ok()?;
        line.push(b'\n');
        Some(line)
    }

    pub(super) fn parse(line: &str) -> Option<Word> {
        serde_json::from_str(line).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_whatever_is_in_them() {
        let lock = Lock {
            urls: vec!["redis://h".into()],
            password: Some("a\"b\nc".into()),
            prefix: None,
            timeout: Duration::from_millis(1_500),
            quarantine: Some(Duration::from_secs(60)),
            name: "two\nlines \u{202e}".into(),
            id: "h|pid1".into(),
            ttl: Duration::from_secs(30),
            grace: Duration::ZERO,
        };
        let words = [
            Word::Asking(Box::new(lock)),
            Word::Group(7, Duration::new(4, 5)),
            Word::HeldUntil(Duration::new(5, 6)),
            Word::Pausing,
            Word::Ending(Duration::new(6, 7)),
            Word::Over,
        ];
        for word in words {
            let line = String::from_utf8(word.line().unwrap()).unwrap();
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(Word::parse(&line).unwrap() == word, "{line}");
        }
        assert!(Word::parse("{").is_none());
    }
}
