//! The `vmm` library.
