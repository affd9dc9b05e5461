//! Untrusted input: permissions, limits, malicious servers, and the corpus of the fuzz targets.

mod fuzz_corpus;
pub(crate) mod limits;
mod malicious;
mod passwords;
pub(crate) mod permissions;
