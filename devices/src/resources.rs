//! The resources that a device occupies: address ranges and interrupt lines.

use std::ops::Range;
use std::sync::Arc;

use crate::bus::Window;
use crate::device::{Kind, Region};
use crate::line::Line;

/// Grants resources to one device: numbers go in, handles come out, and only those are kept.
///
/// Every grant is recorded: bus map, ACPI `_CRS` and `vmm inspect` are printed from that one list.
pub trait Resources {
    /// A fixed range that no other device has.
    ///
    /// # Errors
    ///
    /// When another device holds a part of it.
    fn claim(&mut self, kind: Kind, range: Range<u64>) -> anyhow::Result<Region>;
    /// A range that moves as the guest programs it; it starts out nowhere.
    fn window(&mut self, kind: Kind, size: u64) -> Arc<Window>;
    /// A wire to an interrupt controller pin. Devices share wires: the pin is the OR of all.
    ///
    /// # Errors
    ///
    /// When the host cannot connect the pin.
    fn line(&mut self, gsi: u32) -> anyhow::Result<Arc<Line>>;
}
