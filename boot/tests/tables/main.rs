//! The bytes that guests get: as checked in, as firmware reads them, as the ACPI compiler does.

mod firmware;
mod golden;
mod iasl;
mod sample;
