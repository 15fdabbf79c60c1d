//! The resources that a device occupies: address ranges and interrupt lines.

use std::ops::Range;
use std::sync::Arc;

use crate::bus::Window;
use crate::device::{Kind, Region};
use crate::line::Line;

/// Grants resources to one device. The device passes numbers, and keeps only the returned handles.
///
/// Every grant is recorded. The bus map, ACPI `_CRS` and `vmm inspect` use this one list.
pub trait Resources {
    /// Grants a fixed range. Fails if another device has a part of it.
    fn claim(&mut self, kind: Kind, range: Range<u64>) -> anyhow::Result<Region>;
    /// Grants a range whose address the guest programs. It is not on the bus until then.
    fn window(&mut self, kind: Kind, size: u64) -> Arc<Window>;
    /// Grants a line to a pin of the interrupt controllers. Devices share pins: a pin is the OR of
    /// its lines.
    fn line(&mut self, gsi: u32) -> anyhow::Result<Arc<Line>>;
}
