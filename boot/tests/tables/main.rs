//! Tests the bytes that guests receive, against golden files, a model of firmware, and the ACPI
//! compiler.

mod firmware;
mod golden;
mod iasl;
mod sample;
