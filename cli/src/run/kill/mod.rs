//! Ends the command: [`Termination`] decides which signals are due, [`ProcessGroup`] sends them.

mod process_group;
mod termination;

pub(super) use self::{process_group::ProcessGroup, termination::Termination};
