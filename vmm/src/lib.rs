//! The `vmm` library.
pub mod keyvalue;
pub mod size;
