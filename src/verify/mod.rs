//! Proofs that need the inside of the library: the protocol as a model, and mutated input.

mod fuzz;
mod model;
