//! Faults of the network: what a proxy does to connections, for a while or to one exchange.

use std::time::Duration;

use fastrand::Rng;

use crate::{
    history::Kind,
    support::{Armed, Fault, FaultProxy, any_request},
};

/// What a way to a node suffers until it is healed.
pub(crate) const MODES: [Kind; 6] =
    [Kind::Blackhole, Kind::OneWay, Kind::Deaf, Kind::Mute, Kind::HalfOpen, Kind::Refuse];

/// What happens to single exchanges.
pub(crate) const SHOTS: [Kind; 11] = [
    Kind::DropReply,
    Kind::DelayReply,
    Kind::HoldReply,
    Kind::HoldRequest,
    Kind::DuplicateReply,
    Kind::DuplicateRequest,
    Kind::ForeignBytes,
    Kind::Slice,
    Kind::ResetAfter,
    Kind::ResetBefore,
    Kind::CloseAfter,
];

pub(crate) fn suffer(proxy: &FaultProxy, mode: Kind, dice: &mut Rng) {
    match mode {
        Kind::Blackhole => proxy.blackhole(),
        Kind::OneWay => proxy.one_way(),
        Kind::Deaf => proxy.deaf(),
        Kind::Mute => proxy.mute_new(),
        Kind::HalfOpen if dice.bool() => proxy.lose_server(),
        Kind::HalfOpen => proxy.lose_clients(),
        Kind::Refuse => proxy.refuse(),
        _ => proxy.reset_all(),
    }
}

/// Arms a fault for one exchange, or a few, soon.
pub(crate) fn shoot(proxy: &FaultProxy, shot: Kind, dice: &mut Rng) -> Armed {
    let fault = match shot {
        Kind::DropReply => Fault::DropReply,
        Kind::DelayReply => Fault::DelayReply(Duration::from_millis(dice.u64(1..800))),
        Kind::HoldReply => Fault::HoldReply,
        Kind::HoldRequest => Fault::HoldRequest,
        Kind::DuplicateReply => Fault::DuplicateReply,
        Kind::DuplicateRequest => Fault::DuplicateRequest,
        Kind::ForeignBytes => Fault::PrependBytes(foreign(dice)),
        Kind::Slice => Fault::SliceReply,
        Kind::ResetAfter => Fault::ResetAfterRequest,
        Kind::ResetBefore => Fault::ResetBeforeRequest,
        _ => Fault::CloseAfterRequest,
    };
    proxy.on_request(any_request, fault).after(dice.usize(..6)).times(dice.usize(1..4))
}

/// Bytes that nobody has asked for: some that are well formed, some that are not.
fn foreign(dice: &mut Rng) -> Vec<u8> {
    let known: [&[u8]; 6] =
        [b"+OK\r\n", b"$-1\r\n", b":1\r\n", b"-ERR no\r\n", b"*1\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"];
    match dice.usize(..known.len() + 1) {
        index if index < known.len() => known[index].to_vec(),
        _ => (0..dice.usize(1..40)).map(|_| dice.u8(..)).collect(),
    }
}
