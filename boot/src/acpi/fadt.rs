//! The Fixed ACPI Description Table (ACPI 3.0, 5.2.9): the ICH9's power management registers.
//!
//! Revision 3, which virtual Q35 machines have shown to guests for years. There is no SMI command:
//! the firmware sets SCI_EN, and in direct boot the machine sets it.

use std::mem::offset_of;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::script::Pointer;
use super::table::{self, Register};
use super::{Platform, SCI};

/// The fields after the header.
#[derive(Default, IntoBytes, Immutable)]
#[repr(C, packed)]
struct Fadt {
    firmware_ctrl: U32,
    dsdt: U32,
    int_model: u8,
    preferred_pm_profile: u8,
    sci_int: U16,
    smi_cmd: U32,
    acpi_enable: u8,
    acpi_disable: u8,
    s4bios_req: u8,
    pstate_cnt: u8,
    pm1a_evt_blk: U32,
    pm1b_evt_blk: U32,
    pm1a_cnt_blk: U32,
    pm1b_cnt_blk: U32,
    pm2_cnt_blk: U32,
    pm_tmr_blk: U32,
    gpe0_blk: U32,
    gpe1_blk: U32,
    pm1_evt_len: u8,
    pm1_cnt_len: u8,
    pm2_cnt_len: u8,
    pm_tmr_len: u8,
    gpe0_blk_len: u8,
    gpe1_blk_len: u8,
    gpe1_base: u8,
    cst_cnt: u8,
    p_lvl2_lat: U16,
    p_lvl3_lat: U16,
    flush_size: U16,
    flush_stride: U16,
    duty_offset: u8,
    duty_width: u8,
    day_alrm: u8,
    mon_alrm: u8,
    century: u8,
    iapc_boot_arch: U16,
    reserved: u8,
    flags: U32,
    reset_reg: Register,
    reset_value: u8,
    arm_boot_arch: U16,
    minor_version: u8,
    x_firmware_ctrl: U64,
    x_dsdt: U64,
    x_pm1a_evt_blk: Register,
    x_pm1b_evt_blk: Register,
    x_pm1a_cnt_blk: Register,
    x_pm1b_cnt_blk: Register,
    x_pm2_cnt_blk: Register,
    x_pm_tmr_blk: Register,
    x_gpe0_blk: Register,
    x_gpe1_blk: Register,
}

/// Registers of the power management block, relative to PMBASE (ICH9, 13.8.3).
const PM1_CNT: u16 = 0x04;
const PM_TMR: u16 = 0x08;
const GPE0: u16 = 0x20;
const GPE0_LENGTH: u8 = 16;

/// The reset control register, and the value that requests a full reset.
const RESET_PORT: u16 = 0xCF9;
const RESET_VALUE: u8 = 0x0F;

/// A latency above 100 (C2) or above 1000 (C3) means that the state is not supported.
const NO_C_STATE: u16 = 0x0FFF;

/// Index of the century in the RTC's RAM.
const RTC_CENTURY: u8 = 0x32;

/// IAPC_BOOT_ARCH: a keyboard controller is present.
const BOOT_ARCH_8042: u16 = 1 << 1;
/// IAPC_BOOT_ARCH: no VGA hardware is present. The display is a frame buffer without VGA registers.
const BOOT_ARCH_NO_VGA: u16 = 1 << 2;
/// IAPC_BOOT_ARCH: no RTC is present.
const BOOT_ARCH_NO_RTC: u16 = 1 << 5;

const WBINVD: u32 = 1 << 0;
/// C1 is supported on every processor.
const PROC_C1: u32 = 1 << 2;
/// There is no fixed sleep button. The fixed power button exists: PWR_BUTTON, bit 4, is clear.
const SLP_BUTTON: u32 = 1 << 5;
/// Set because QEMU's Q35 sets it. It has no effect without S4.
const RTC_S4: u32 = 1 << 7;
const RESET_REG_SUP: u32 = 1 << 10;
/// The guest should prefer the PM timer to the processors' own clocks.
const USE_PLATFORM_CLOCK: u32 = 1 << 15;

/// Returns the table and its fields that point to other tables. `facs` and `dsdt` are offsets in
/// the blob.
/// X_FIRMWARE_CTRL stays 0: only one of the two FACS fields may be set (ACPI 3.0, table 5-9), and
/// firmware that copies the table would clear it. Both DSDT fields are set.
pub(super) fn fadt(platform: &Platform, facs: u32, dsdt: u32) -> (Vec<u8>, Vec<Pointer>) {
    let field = |field: usize, size: u8| Pointer { field: table::HEADER + field, size };
    let pointers = vec![
        field(offset_of!(Fadt, firmware_ctrl), 4),
        field(offset_of!(Fadt, dsdt), 4),
        field(offset_of!(Fadt, x_dsdt), 8),
    ];
    let body = body(platform, facs, dsdt);
    let bytes = table::table(*b"FACP", 3, body.as_bytes()).expect("244 bytes");
    (bytes, pointers)
}

fn body(platform: &Platform, facs: u32, dsdt: u32) -> Fadt {
    let pm = platform.pm_base;
    let block = |offset: u16| U32::new(u32::from(pm + offset));
    let boot_arch = BOOT_ARCH_NO_VGA
        | platform.node("PNP0303").map_or(0, |_| BOOT_ARCH_8042)
        | platform.node("PNP0B00").map_or(BOOT_ARCH_NO_RTC, |_| 0);
    Fadt {
        firmware_ctrl: facs.into(),
        dsdt: dsdt.into(),
        sci_int: u16::from(SCI).into(),
        pm1a_evt_blk: block(0),
        pm1a_cnt_blk: block(PM1_CNT),
        pm_tmr_blk: block(PM_TMR),
        gpe0_blk: block(GPE0),
        pm1_evt_len: 4,
        pm1_cnt_len: 2,
        pm_tmr_len: 4,
        gpe0_blk_len: GPE0_LENGTH,
        p_lvl2_lat: NO_C_STATE.into(),
        p_lvl3_lat: NO_C_STATE.into(),
        century: RTC_CENTURY,
        iapc_boot_arch: boot_arch.into(),
        flags: (WBINVD | PROC_C1 | SLP_BUTTON | RTC_S4 | RESET_REG_SUP | USE_PLATFORM_CLOCK).into(),
        reset_reg: Register::port(RESET_PORT, 8, 1),
        reset_value: RESET_VALUE,
        x_dsdt: u64::from(dsdt).into(),
        x_pm1a_evt_blk: Register::port(pm, 32, 2),
        x_pm1a_cnt_blk: Register::port(pm + PM1_CNT, 16, 2),
        x_pm_tmr_blk: Register::port(pm + PM_TMR, 32, 3),
        x_gpe0_blk: Register::port(pm + GPE0, GPE0_LENGTH * 8, 1),
        ..Fadt::default()
    }
}
