//! Guards the house.
