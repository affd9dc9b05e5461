//! `distlock run`: every way in which it can end. Each test finally checks that nothing is left: no
//! process, no lock, no queue entry.

mod alone;
mod contended;
mod ends;
pub(crate) mod fixture;
mod hidepid;
mod killed;
mod kinds;
mod lock;
mod lost;
mod nodes;
mod several;
mod signals;
mod slow_stderr;
mod terminal;

use self::fixture::{Fixture, RunProcess};
