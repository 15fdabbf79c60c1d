//! The display 1234:1111, like QEMU's bochs-display (docs/specs/standard-vga.rst): a linear frame
//! buffer in BAR 0, and in BAR 2 the registers of Bochs' VBE extension, the monitor's EDID and the
//! VGA registers that drivers use to switch the screen off. UEFI firmware and Linux have drivers.
//! Windows draws into the frame buffer that the firmware reports.
//!
//! Differences to QEMU's device: only modes with pixels of 32 bits, little-endian, are shown. The
//! VGA registers exist. The EDID offers sizes above 4095 pixels in an extension.
//!
//! Threats: the guest chooses sizes and offsets, and changes them while viewers watch. The whole
//! mode is checked each time a viewer needs it, and nothing is shown unless all of it is inside the
//! frame buffer. The frame buffer is not RAM, so the guest's writes reach nothing else. The guest
//! may move it at any rate, which costs its own time. The pixels it draws are data for viewers, and
//! never used as a size.

use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::{Resolution, edid};
use crate::bus::Window;
use crate::device::{Access, Device, Region, Saved};
use crate::grants::{Build, Grants};
use crate::hypervisor::{Backing, GuestAccess};
use crate::pci::{Address, Bar, Id, Identity, Slot};
use host::display::{Mode, Scanout};
use host::fnv;
use host::size::Size;

/// `--device display,mode=1920x1080`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Preferred resolution of the monitor, which firmware uses at first.
    pub mode: Resolution,
    /// Size of the frame buffer: a power of two from 4M to 256M. Unused parts take no memory of the
    /// host.
    pub memory: Size,
    /// PCI slot. Defaults to the first free slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
}

impl Default for Config {
    fn default() -> Self {
        Self { mode: Resolution::new(1280, 800), memory: Size(64 << 20), slot: None }
    }
}

const MIN_MEMORY: u64 = 4 << 20;
const MAX_MEMORY: Size = Size(256 << 20);

/// The numbers of the BARs.
const FRAME_BUFFER: u8 = 0;
const REGISTERS: u8 = 2;
/// The size of BAR 2 in bytes.
const BAR_SIZE: u64 = 4096;
const EDID: u64 = 0x000;
const EDID_END: u64 = 0x400;
/// The VGA ports 0x3c0 to 0x3df, one byte each.
const VGA: u64 = 0x400;
const VGA_END: u64 = 0x420;
/// The DISPI registers, 16 bits each.
const DISPI: u64 = 0x500;
const DISPI_END: u64 = DISPI + 2 * DISPI_COUNT;
/// QEMU's own registers, 32 bits each: their total size in bytes, and the byte order.
const EXTENDED: u64 = 0x600;
const EXTENDED_END: u64 = EXTENDED + 8;
const EXTENDED_SIZE: u32 = 8;
const LITTLE_ENDIAN: u32 = 0x1e1e_1e1e;

// VGA: the attribute controller, miscellaneous output (write, read), input status 1.
const ATTRIBUTE: u64 = VGA;
const MISC_WRITE: u64 = VGA + 0x02;
const MISC_READ: u64 = VGA + 0x0c;
const STATUS_1: u64 = VGA + 0x1a;
/// In an index written to ATTRIBUTE: the screen uses the palette, so it is on.
const SCREEN_ON: u8 = 1 << 5;
/// STATUS_1: vertical retrace, and display disabled.
const RETRACE: u8 = 1 << 3 | 1 << 0;

// Indexes of the DISPI registers.
const ID: usize = 0;
const X_RES: usize = 1;
const Y_RES: usize = 2;
const BPP: usize = 3;
const ENABLE: usize = 4;
const VIRTUAL_WIDTH: usize = 6;
const X_OFFSET: usize = 8;
const Y_OFFSET: usize = 9;
const MEMORY_64K: usize = 10;
const DISPI_COUNT: u64 = 11;
/// Version 5, which has the memory register.
const ID_5: u16 = 0xb0c5;
const ENABLED: u16 = 1;
/// Minimum width and height of a mode in pixels.
const MIN_SIZE: u32 = 64;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let Self { mode, memory, slot } = self;
        check(mode, memory, MAX_MEMORY)?;
        let id = Id {
            vendor: 0x1234,
            device: 0x1111,
            class: 0x03_8000,
            revision: 2,
            subsystem: (0x1af4, 0x1100),
        };
        let identity = Identity { at: slot, bars: bars(memory), ..Identity::new(id) };
        let slot = grants.pci(identity)?;
        let describe = |mode, memory, serial| Some(edid::edid(mode, memory, serial));
        let bochs = Bochs::new(&slot, grants, Monitor { describe, mode })?;
        grants.shared().screens.register(bochs.screen.clone());
        Ok(slot.wrap(Box::new(bochs)))
    }
}

/// Checks the options of a linear frame buffer. `max` is the maximum of `memory`.
pub(crate) fn check(mode: Resolution, memory: Size, max: Size) -> anyhow::Result<()> {
    ensure!(
        memory.0.is_power_of_two() && (MIN_MEMORY..=max.0).contains(&memory.0),
        "memory={memory}: the frame buffer must be a power of two, from 4M to {max}"
    );
    ensure!(
        mode.bytes() <= memory.0,
        "mode={mode}: this needs memory={}, but the configured value is memory={memory}",
        Size(mode.bytes().next_power_of_two())
    );
    Ok(())
}

/// The frame buffer and the registers.
pub(crate) fn bars(memory: Size) -> Vec<(u8, Bar)> {
    vec![(FRAME_BUFFER, Bar::Prefetchable32(memory.0)), (REGISTERS, Bar::Memory32(BAR_SIZE))]
}

/// The monitor at power-on.
#[derive(Clone, Copy)]
pub(crate) struct Monitor {
    /// Makes the EDID for a preferred size, memory and serial number, if there is one.
    pub(crate) describe: fn(Resolution, u64, u32) -> Option<Vec<u8>>,
    /// The preferred size.
    pub(crate) mode: Resolution,
}

impl Bochs {
    /// The slot has the BARs of [`bars`].
    pub(crate) fn new(
        slot: &Slot,
        grants: &mut dyn Grants,
        monitor: Monitor,
    ) -> anyhow::Result<Self> {
        let [one, two, three, four, ..] = fnv::hash(grants.name().as_bytes(), 0).to_le_bytes();
        let serial = u32::from_le_bytes([one, two, three, four]);
        let window = slot.bar(FRAME_BUFFER).clone();
        let Monitor { describe, mode } = monitor;
        let edid = describe(mode, window.size, serial);
        let edid = edid.with_context(|| {
            format!("mode={mode}: too large for this display: write a smaller one, as 3840x2160")
        })?;
        let picture = grants.shared().hypervisor.backing(window.size, GuestAccess::Tracked)?;
        window.set_backing(picture.clone());
        let screen = Arc::new(Screen {
            registers: Mutex::default(),
            preferred: Mutex::new((mode, edid)),
            picture,
            memory: window.size,
            describe,
            serial,
        });
        Ok(Self { screen, window, registers: slot.bar(REGISTERS).region })
    }

    /// Whether an access to this region is for the frame buffer or its registers.
    pub(crate) fn owns(&self, region: Region) -> bool {
        [self.window.region, self.registers].contains(&region)
    }
}

/// The registers. The picture is not part of the saved state: it is memory, and is kept like RAM.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Registers {
    /// The values written to the DISPI registers. Reads of ID and MEMORY_64K return other values.
    dispi: [u16; 11],
    misc: u8,
    status: u8,
    /// The next write to ATTRIBUTE is data, not an index.
    attribute_data: bool,
    /// Whether a driver has switched the screen off.
    blank: bool,
}

impl Registers {
    fn mode(&self, memory: u64) -> Option<Mode> {
        let register = |index: usize| u32::from(self.dispi[index]);
        if self.blank || self.dispi[ENABLE] & ENABLED == 0 || self.dispi[BPP] != 32 {
            return None;
        }
        let (width, height) = (register(X_RES), register(Y_RES));
        let stride = register(VIRTUAL_WIDTH).max(width) * 4;
        let size = u64::from(stride) * u64::from(height);
        let start =
            u64::from(register(X_OFFSET)) * 4 + u64::from(register(Y_OFFSET)) * u64::from(stride);
        let fits = width >= MIN_SIZE && height >= MIN_SIZE && start + size <= memory;
        fits.then_some(Mode { width, height, stride, start })
    }

    fn dispi(&self, memory: u64) -> Vec<u8> {
        let mut all = self.dispi;
        all[ID] = ID_5;
        all[MEMORY_64K] = u16::try_from(memory >> 16).unwrap_or(u16::MAX);
        all.into_iter().flat_map(u16::to_le_bytes).collect()
    }

    fn write_dispi(&mut self, offset: u64, data: &[u8]) -> Access {
        let (words, []) = data.as_chunks::<2>() else { return Access::Ignored };
        if !offset.is_multiple_of(2) {
            return Access::Ignored;
        }
        let first = usize::try_from(offset / 2).unwrap_or(usize::MAX);
        for (register, word) in self.dispi.iter_mut().skip(first).zip(words) {
            *register = u16::from_le_bytes(*word);
        }
        Access::Done
    }

    fn read_vga(&mut self, at: u64) -> Option<u8> {
        Some(match at {
            MISC_READ => self.misc,
            STATUS_1 => {
                self.attribute_data = false;
                // A driver that waits for either state sees it soon.
                self.status ^= RETRACE;
                self.status
            }
            _ => return None,
        })
    }

    fn write_vga(&mut self, at: u64, value: u8) {
        match at {
            MISC_WRITE => self.misc = value,
            ATTRIBUTE => {
                if !self.attribute_data {
                    self.blank = value & SCREEN_ON == 0;
                }
                self.attribute_data = !self.attribute_data;
            }
            // Palettes and timings of modes that do not exist here.
            _ => {}
        }
    }
}

/// The viewers' interface to the device.
pub(crate) struct Screen {
    registers: Mutex<Registers>,
    /// The preferred size of the monitor, and its EDID.
    preferred: Mutex<(Resolution, Vec<u8>)>,
    picture: Arc<dyn Backing>,
    memory: u64,
    describe: fn(Resolution, u64, u32) -> Option<Vec<u8>>,
    serial: u32,
}

impl Screen {
    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().expect("no device panicked")
    }

    /// The preferred size of the monitor, and its EDID.
    pub(crate) fn preferred(&self) -> MutexGuard<'_, (Resolution, Vec<u8>)> {
        self.preferred.lock().expect("no device panicked")
    }
}

impl Scanout for Screen {
    fn mode(&self) -> Option<Mode> {
        self.registers().mode(self.memory)
    }

    fn changed(&self, pages: &mut Vec<u64>) {
        self.picture.changed(pages);
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
        self.picture.read(offset, data);
    }

    fn set_preferred_size(&self, width: u32, height: u32) -> bool {
        let nearest = Resolution::nearest(width, height);
        let fits = nearest.bytes() <= self.memory;
        let edid = (self.describe)(nearest, self.memory, self.serial).filter(|_| fits);
        let Some(edid) = edid else { return false };
        *self.preferred() = (nearest, edid);
        true
    }
}

/// The linear frame buffer with its registers.
pub(crate) struct Bochs {
    pub(crate) screen: Arc<Screen>,
    /// The window of BAR 0.
    pub(crate) window: Arc<Window>,
    /// The region of BAR 2.
    registers: Region,
}

/// Copies the bytes of `from` at `offset`. Bytes of `data` beyond its end stay unchanged.
fn copy(from: &[u8], offset: u64, data: &mut [u8]) -> Access {
    let from = from.iter().skip(usize::try_from(offset).unwrap_or(usize::MAX));
    data.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
    Access::Done
}

impl Device for Bochs {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.window.region {
            self.window.map_backing();
            self.screen.picture.read(offset, data);
            return Access::Done;
        }
        let mut registers = self.screen.registers();
        match offset {
            EDID..EDID_END => {
                // The rest of the EDID area is empty.
                data.fill(0);
                copy(&self.screen.preferred().1, offset - EDID, data)
            }
            VGA..VGA_END => {
                let values: Vec<_> =
                    (offset..).zip(&*data).map(|(at, _)| registers.read_vga(at)).collect();
                let Some(values) = values.into_iter().collect::<Option<Vec<_>>>() else {
                    return Access::Ignored;
                };
                copy(&values, 0, data)
            }
            DISPI..DISPI_END => copy(&registers.dispi(self.screen.memory), offset - DISPI, data),
            EXTENDED..EXTENDED_END => {
                let both = [EXTENDED_SIZE.to_le_bytes(), LITTLE_ENDIAN.to_le_bytes()];
                copy(both.as_flattened(), offset - EXTENDED, data)
            }
            _ => Access::Ignored,
        }
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if region == self.window.region {
            self.window.map_backing();
            self.screen.picture.write(offset, data);
            return Access::Done;
        }
        let mut registers = self.screen.registers();
        match offset {
            VGA..VGA_END => {
                (offset..).zip(data).for_each(|(at, byte)| registers.write_vga(at, *byte));
            }
            DISPI..DISPI_END => return registers.write_dispi(offset - DISPI, data),
            // Read-only: the EDID and the byte order.
            EDID..EDID_END | EXTENDED..EXTENDED_END => {}
            _ => return Access::Ignored,
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        Saved::of(&*self.screen.registers())
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        *self.screen.registers() = saved.take()?;
        Ok(())
    }
}

#[cfg(test)]
mod test;
