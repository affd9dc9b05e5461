//! The command, as a process against real servers.

mod pty;

mod bench;
mod command;
mod connection;
mod doctor;
mod list;
mod paper;
mod release;
mod run;
mod screenshot;
mod show;
mod top;
