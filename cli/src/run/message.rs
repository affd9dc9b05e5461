//! `GuardianMessage`: what a wrapper sends to its guardian, as lines of JSON over a pipe between
//! the two.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::args::TlsFiles;

/// Times are since boot, which is the same for both processes.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum GuardianMessage {
    /// The lock will be requested next.
    Acquiring(Box<LockSpec>),
    /// The process group that will run the command, and until when the lock is held.
    Started(i32, Duration),
    /// The wrapper runs, and the lock is held until this time.
    HeldUntil(Duration),
    /// The command is stopped and the wrapper will stop itself, so its silence means nothing.
    Paused,
    /// The wrapper has sent SIGTERM to the group itself, and will send SIGKILL at this time.
    Terminating(Duration),
    /// Nothing of the group is left.
    Done,
}

/// Everything that is needed to release the lock and to end the command in time.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LockSpec {
    pub(super) urls: Vec<String>,
    pub(super) password: Option<String>,
    pub(super) prefix: Option<String>,
    pub(super) table: Option<String>,
    pub(super) timeout: Option<Duration>,
    pub(super) quarantine: Option<Duration>,
    pub(super) tls: TlsFiles,
    pub(super) name: String,
    pub(super) id: String,
    pub(super) ttl: Duration,
    pub(super) grace: Duration,
    /// The lock must stay taken after the command: it is left to expire.
    #[serde(default)]
    pub(super) is_kept: bool,
}

impl GuardianMessage {
    pub(super) fn to_line(&self) -> Option<Vec<u8>> {
        let mut line = serde_json::to_vec(self).ok()?;
        line.push(b'\n');
        Some(line)
    }

    pub(super) fn parse(line: &str) -> Option<GuardianMessage> {
        serde_json::from_str(line).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_serialization() {
        let lock = LockSpec {
            urls: vec!["redis://h".into()],
            password: Some("a\"b\nc".into()),
            prefix: None,
            table: Some("locks".into()),
            timeout: Some(Duration::from_millis(1_500)),
            quarantine: Some(Duration::from_secs(60)),
            tls: TlsFiles { cacert: Some("/etc/redis/ca.crt".into()), ..TlsFiles::default() },
            name: "two\nlines \u{202e}".into(),
            id: "h|pid1".into(),
            ttl: Duration::from_secs(30),
            grace: Duration::ZERO,
            is_kept: true,
        };
        let messages = [
            GuardianMessage::Acquiring(Box::new(lock)),
            GuardianMessage::Started(7, Duration::new(4, 5)),
            GuardianMessage::HeldUntil(Duration::new(5, 6)),
            GuardianMessage::Paused,
            GuardianMessage::Terminating(Duration::new(6, 7)),
            GuardianMessage::Done,
        ];
        for message in messages {
            let line = String::from_utf8(message.to_line().unwrap()).unwrap();
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(GuardianMessage::parse(&line).unwrap() == message, "{line}");
        }
        assert!(GuardianMessage::parse("{").is_none());
    }
}
