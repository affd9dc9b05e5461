//! Several processes and one lock.
