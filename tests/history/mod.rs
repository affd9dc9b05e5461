//! Histories of locks: the record that processes write while they use locks, a model built from it,
//! and the rules that check the model. Nothing in this folder depends on the library, and the rules
//! use nothing but the record.
#![allow(
    dead_code,
    unused_imports,
    reason = "each program that includes this folder uses a part of it"
)]

mod event;
mod html_report;
mod model;
mod record;
mod report;
mod rules;
mod sharing;

pub(crate) use event::{Change, Event, Fault, Kind, Said, Terms, UNREPORTED};
pub(crate) use html_report::{Part, draw};
pub(crate) use model::{Call, End, FaultPeriod, Hold, Story, Wait, Write};
pub(crate) use record::{Journal, Reader, Record, now};
pub(crate) use report::Verdict;
pub(crate) use rules::{
    Finding, Overlap, Rule, availability, bounds, exclusion, fence, leaks, liveness, lost_updates,
    order, server_agreement, span, unexplained_losses,
};
pub(crate) use sharing::Sharing;
