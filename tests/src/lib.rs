//! The tests.
#![forbid(unsafe_code)]
