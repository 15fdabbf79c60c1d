//! The tests.
#![forbid(unsafe_code)]

pub mod flash;
pub mod program;
