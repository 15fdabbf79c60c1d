//! Programs the chip set and PCI as firmware does before it starts a kernel, through the same
//! registers: the configuration windows, the power-management block, every BAR.

use std::ops::Range;

use boot::layout;
use devices::bus::Spaces;

/// CONFIG_ADDRESS and CONFIG_DATA.
const ADDRESS: u64 = 0xcf8;
const DATA: u64 = 0xcfc;

/// Registers of the PCI header, and the command bits "I/O space" and "memory space".
const COMMAND: u8 = 0x04;
const BARS: std::ops::RangeInclusive<u8> = 0..=5;
const DECODE: u32 = 3;

/// The host bridge's PCIEXBAR; the LPC bridge's PMBASE and ACPI_CNTL.
const PCIEXBAR: u8 = 0x60;
const LPC: (u8, u8) = (31, 0);
const PM_BASE: u8 = 0x40;
const ACPI_CNTL: u8 = 0x44;
/// The address at which stock firmware puts the power-management block. Bit 0 of PMBASE is the kind
/// of space; bit 7 of ACPI_CNTL enables the block.
const PM_PORTS: u64 = 0x600;
const ACPI_EN: u32 = 0x80;
/// PM1_CNT, and its bit that hands the block over to the operating system.
const PM1_CNT: u64 = PM_PORTS + 4;
const SCI_EN: u16 = 1;
/// Ports for BARs. Lower ports belong to the chip set.
const PORTS: Range<u64> = 0x6000..0x1_0000;

/// Programs the windows, the power-management block and all BARs.
pub(super) fn set_up(spaces: &Spaces, memory: Range<u64>, high: Option<Range<u64>>) {
    let config = Config { spaces };
    let ecam = u32::try_from(layout::PCIEXBAR.start).expect("PCIEXBAR is below 4 GiB");
    config.write((0, 0), PCIEXBAR + 4, 0);
    config.write((0, 0), PCIEXBAR, ecam | 1);
    config.write(LPC, PM_BASE, u32::try_from(PM_PORTS).expect("a port") | 1);
    config.write(LPC, ACPI_CNTL, ACPI_EN);
    spaces.port.write(PM1_CNT, &SCI_EN.to_le_bytes());
    let mut free = FreeWindows { port: PORTS, memory, high };
    for device in 0..32 {
        for function in 0..8 {
            let at = (device, function);
            if config.read(at, 0) & 0xffff == 0xffff {
                if function == 0 {
                    break;
                }
                continue;
            }
            place_bars(&config, at, &mut free);
        }
    }
}

struct FreeWindows {
    port: Range<u64>,
    memory: Range<u64>,
    high: Option<Range<u64>>,
}

fn place_bars(config: &Config<'_>, at: (u8, u8), free: &mut FreeWindows) {
    let mut number = *BARS.start();
    while BARS.contains(&number) {
        let register = 0x10 + 4 * number;
        let wide = config.read(at, register) & 0b111 == 0b100;
        if let Some(address) = find(config, at, register, free) {
            let [low, high] = [address & 0xffff_ffff, address >> 32];
            config.write(at, register, u32::try_from(low).expect("32 bits"));
            if wide {
                config.write(at, register + 4, u32::try_from(high).expect("32 bits"));
            }
        }
        number += if wide { 2 } else { 1 };
    }
    let command = config.read(at, COMMAND);
    config.write(at, COMMAND, command & 0xffff | DECODE);
}

/// Reads the size of a BAR, and allocates this much from the window of its kind.
fn find(config: &Config<'_>, at: (u8, u8), register: u8, free: &mut FreeWindows) -> Option<u64> {
    let kind = config.read(at, register);
    config.write(at, register, u32::MAX);
    let mut mask = u64::from(config.read(at, register)) | 0xffff_ffff_0000_0000;
    if mask & 0xffff_ffff == 0 {
        return None;
    }
    let window = if kind & 1 == 1 {
        mask = mask & !3 | 0xffff_0000;
        &mut free.port
    } else if kind & 0b110 == 0b100 {
        config.write(at, register + 4, u32::MAX);
        mask = mask & 0xffff_fff0 | u64::from(config.read(at, register + 4)) << 32;
        free.high.as_mut().unwrap_or(&mut free.memory)
    } else {
        mask &= !0xf;
        &mut free.memory
    };
    let size = (!mask).checked_add(1)?;
    let start = window.start.checked_next_multiple_of(size)?;
    let end = start.checked_add(size)?;
    if end > window.end {
        tracing::warn!("no room for BAR {register:#x} of {:02x}.{}: {size:#x} bytes", at.0, at.1);
        return None;
    }
    window.start = end;
    Some(start)
}

/// Configuration space through the I/O ports, as firmware accesses it.
struct Config<'a> {
    spaces: &'a Spaces,
}

impl Config<'_> {
    fn select(&self, (device, function): (u8, u8), register: u8) {
        let address = 1 << 31
            | u32::from(device) << 11
            | u32::from(function) << 8
            | u32::from(register & 0xfc);
        self.spaces.port.write(ADDRESS, &address.to_le_bytes());
    }

    fn read(&self, at: (u8, u8), register: u8) -> u32 {
        self.select(at, register);
        let mut data = [0; 4];
        self.spaces.port.read(DATA, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, at: (u8, u8), register: u8, value: u32) {
        self.select(at, register);
        self.spaces.port.write(DATA, &value.to_le_bytes());
    }
}
