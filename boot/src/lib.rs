//! boot
#![forbid(unsafe_code)]
