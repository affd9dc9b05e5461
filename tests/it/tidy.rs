//! Checks of the repository itself: its structure, its words, and that documents and code agree.

mod documents;
mod faults;
mod marks;
mod modules;
mod names_and_words;
mod promises;
mod source;
mod state;
