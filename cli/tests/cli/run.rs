//! `distlock run`: every way in which it can end. Each test ends by looking that nothing is left: no process, no lock, nobody
//! in line.

mod alone;
mod contended;
mod ends;
mod hidden;
mod killed;
mod lost;
mod nodes;
mod scene;
mod signals;
mod terminal;
mod unread;

use self::scene::{Job, Scene};
