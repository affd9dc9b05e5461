//! Histories of locks: what processes write down about themselves and others about them, what it
//! amounts to, and the rules by which it is judged. Nothing in this folder knows the library, and
//! what judges looks at nothing but the record.
#![allow(
    dead_code,
    unused_imports,
    reason = "each program that includes this folder uses a part of it"
)]

mod event;
mod picture;
mod record;
mod rules;
mod story;
mod verdict;

pub(crate) use event::{Change, Event, Fault, Kind, Said, Terms, UNTOLD};
pub(crate) use picture::{Part, draw};
pub(crate) use record::{Journal, Reader, Record, now};
pub(crate) use rules::{
    Finding, Overlap, Rule, agreement, bounds, exclusion, fence, losses, order, peace, remains,
    silence, span, updates,
};
pub(crate) use story::{Call, Done, End, Hold, Story, Wait, Write};
pub(crate) use verdict::Verdict;
