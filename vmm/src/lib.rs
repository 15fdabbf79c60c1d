//! The `vmm` library.

pub mod probe;
