//! `Redirect`: what an error of a node says about where to ask, and when. Pure.

use std::io;

use crate::backend::{
    discovery::ServerName,
    error::{NodeError, NodeErrorKind},
};

/// What to do if slots are not served.
pub(super) const SEE_DOCTOR: &str = "; distlock doctor shows which slots no node serves";

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// Another node serves this slot.
    Moved { slot: u16, to: ServerName },
    /// The keys of this request may have gone to another node, which must be asked about it once.
    Ask(ServerName),
    /// Some keys of the request have gone to another node already: ask again in a moment.
    Wait,
    /// The node cannot serve the request now, so another one may have taken over its slots.
    Unavailable,
    /// The error has nothing to do with the cluster.
    None,
}

impl Redirect {
    /// `asked` is the node that replied.
    pub(super) fn of(failure: &NodeError, asked: &ServerName) -> Redirect {
        let NodeErrorKind::Refused { code, message } = &failure.kind else {
            let is_here = matches!(
                failure.kind,
                NodeErrorKind::PoolExhausted { .. } | NodeErrorKind::Protocol(_)
            );
            return if failure.is_transient() && !is_here {
                Redirect::Unavailable
            } else {
                Redirect::None
            };
        };
        match code.as_str() {
            "MOVED" => match parse(message, asked) {
                Some((slot, to)) => Redirect::Moved { slot, to },
                None => Redirect::Unavailable,
            },
            "ASK" => parse(message, asked).map_or(Redirect::Wait, |(_, to)| Redirect::Ask(to)),
            "TRYAGAIN" => Redirect::Wait,
            "READONLY" | "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" => Redirect::Unavailable,
            _ => Redirect::None,
        }
    }
}

/// Reads `slot host:port`. Without a host, it is that of the node that replied.
fn parse(message: &str, asked: &ServerName) -> Option<(u16, ServerName)> {
    let (slot, address) = message.split_once(' ')?;
    let (host, port) = address.trim_end().rsplit_once(':')?;
    let host = if host.is_empty() { &asked.host } else { host };
    let to = ServerName { host: host.to_owned(), port: port.parse().ok()? };
    (host != "?").then_some((slot.parse().ok()?, to))
}

/// The error of a request that no node served in its time. It may succeed later, unlike one that a
/// single server refuses in this way.
pub(super) fn passing(failure: NodeError) -> NodeError {
    match &failure.kind {
        NodeErrorKind::Refused { code, message }
            if matches!(code.as_str(), "MOVED" | "ASK" | "CLUSTERDOWN") =>
        {
            let what_to_do = if code == "CLUSTERDOWN" { SEE_DOCTOR } else { "" };
            NodeError::not_applied(io::Error::other(format!(
                "it replied {code} {message}{what_to_do}"
            )))
        }
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn of(code: &str, message: &str) -> Redirect {
        let asked = ServerName { host: "asked".into(), port: 9 };
        Redirect::of(&NodeError::refused(code.into(), message.into()), &asked)
    }

    fn name(host: &str, port: u16) -> ServerName {
        ServerName { host: host.into(), port }
    }

    #[test]
    fn errors_say_where_to_ask() {
        let moved = |slot, to| Redirect::Moved { slot, to };
        assert_eq!(of("MOVED", "3999 10.0.0.1:6381"), moved(3999, name("10.0.0.1", 6381)));
        assert_eq!(of("MOVED", "1 ::1:6381"), moved(1, name("::1", 6381)));
        assert_eq!(of("MOVED", "1 :6381"), moved(1, name("asked", 6381)));
        assert_eq!(of("ASK", "1 h.example:7"), Redirect::Ask(name("h.example", 7)));
        for bad in ["", "1", "1 h", "x h:1", "1 h:x", "1 ?:7", "70000 h:1"] {
            assert_eq!(of("MOVED", bad), Redirect::Unavailable, "{bad}");
            assert_eq!(of("ASK", bad), Redirect::Wait, "{bad}");
        }
        assert_eq!(of("TRYAGAIN", "Multiple keys"), Redirect::Wait);
        assert_eq!(of("CLUSTERDOWN", "Hash slot not served"), Redirect::Unavailable);
        assert_eq!(of("OOM", "no"), Redirect::None);
        let asked = name("asked", 9);
        let refused = NodeError::not_applied(io::ErrorKind::ConnectionRefused);
        assert_eq!(Redirect::of(&refused, &asked), Redirect::Unavailable);
        let full = NodeErrorKind::PoolExhausted { pool_size: 1 };
        let full = NodeError::not_applied(full);
        assert_eq!(Redirect::of(&full, &asked), Redirect::None);
    }
}
