//! The remote frame buffer protocol (RFC 6143, and what its community added since).

pub mod encode;
pub mod format;
pub mod picture;
