//! Network faults: what a proxy does to a route for a while, or to single exchanges.

use std::time::Duration;

use fastrand::Rng;

use crate::{
    history::Kind,
    support::{ArmedFault, Fault, FaultProxy, any_request},
};

/// Faults that affect a route until it is healed.
pub(crate) const ROUTE_FAULTS: [Kind; 6] =
    [Kind::Blackhole, Kind::OneWay, Kind::Deaf, Kind::Mute, Kind::HalfOpen, Kind::Refuse];

/// Faults that affect single exchanges of a request and its reply.
const EXCHANGE_FAULTS: [Kind; 11] = [
    Kind::DropReply,
    Kind::DelayReply,
    Kind::HoldReply,
    Kind::HoldRequest,
    Kind::ForeignBytes,
    Kind::Slice,
    Kind::ResetAfter,
    Kind::ResetBefore,
    Kind::CloseAfter,
    Kind::DuplicateReply,
    Kind::DuplicateRequest,
];

/// A database is spared the last two: TCP duplicates nothing, and its protocol has no nonce by
/// which a client could notice.
pub(crate) fn exchange_faults(is_database: bool) -> &'static [Kind] {
    if is_database { &EXCHANGE_FAULTS[..9] } else { &EXCHANGE_FAULTS }
}

pub(crate) fn apply_route_fault(proxy: &FaultProxy, kind: Kind, rng: &mut Rng) {
    match kind {
        Kind::Blackhole => proxy.blackhole(),
        Kind::OneWay => proxy.one_way(),
        Kind::Deaf => proxy.deaf(),
        Kind::Mute => proxy.mute_new(),
        Kind::HalfOpen if rng.bool() => proxy.lose_server(),
        Kind::HalfOpen => proxy.lose_clients(),
        Kind::Refuse => proxy.refuse(),
        _ => proxy.reset_all(),
    }
}

/// Arms a fault for one of the next exchanges, or a few of them.
pub(crate) fn arm_exchange_fault(proxy: &FaultProxy, kind: Kind, rng: &mut Rng) -> ArmedFault {
    let fault = match kind {
        Kind::DropReply => Fault::DropReply,
        Kind::DelayReply => Fault::DelayReply(Duration::from_millis(rng.u64(1..800))),
        Kind::HoldReply => Fault::HoldReply,
        Kind::HoldRequest => Fault::HoldRequest,
        Kind::DuplicateReply => Fault::DuplicateReply,
        Kind::DuplicateRequest => Fault::DuplicateRequest,
        Kind::ForeignBytes => Fault::PrependBytes(foreign_bytes(rng)),
        Kind::Slice => Fault::SliceReply,
        Kind::ResetAfter => Fault::ResetAfterRequest,
        Kind::ResetBefore => Fault::ResetBeforeRequest,
        _ => Fault::CloseAfterRequest,
    };
    proxy.on_request(any_request, fault).after(rng.usize(..6)).times(rng.usize(1..4))
}

/// Bytes that belong to no request: sometimes a well-formed reply, sometimes garbage.
fn foreign_bytes(rng: &mut Rng) -> Vec<u8> {
    let known: [&[u8]; 6] = [
        b"+OK\r\n",
        b"$-1\r\n",
        b":1\r\n",
        b"-ERR no\r\n",
        b"*1\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ];
    match rng.usize(..known.len() + 1) {
        index if index < known.len() => known[index].to_vec(),
        _ => (0..rng.usize(1..40)).map(|_| rng.u8(..)).collect(),
    }
}
