//! The LPC bridge 8086:2918 of the ICH9 (datasheet 316972, 13), with the power management block and
//! the small ports of the chip set: reset control, APM, fast reset, POST codes.
//!
//! Threats: the guest may move the block over other ports, which the bus allows. It may request
//! resets in a loop: each is one message to the machine. PIRQ routes, RCBA and, without SMM, the
//! APM ports are only storage, and have no effect on interrupts, memory or SMIs. With SMM, a guest
//! may cause SMIs in a loop: each is one message to each processor, and pending ones are merged.
//! Reserved bits of a saved state are ignored.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Address, Id, Identity};
use crate::bus::Window;
use crate::bytes::Bytes;
use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Grants};
use crate::grants::{Event, Events};
use crate::hypervisor::Smm;
use crate::platform::pm;
use crate::smi;

/// `--device lpc`: every machine has one.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Writes to APM_CNT cause system-management interrupts.
    #[serde(default)]
    pub smm: bool,
}

/// The fixed address where firmware expects the bridge.
pub(crate) const AT: Address = Address::new(0x1f, 0);
/// The SCI's pin, as in the FADT and in bits 2:0 of ACPI_CNTL at power-on.
const SCI: u32 = 9;

/// The configuration registers that the bridge implements itself.
const OWN: Range<u64> = 0x40..0x100;
/// The base of the PM block in bits 15:7. Bit 0 marks it as ports.
const PMBASE: usize = 0x40;
/// ACPI control. ACPI_EN enables the PM block.
const ACPI_CNTL: usize = 0x44;
const ACPI_EN: u8 = 1 << 7;
/// PIRQA to PIRQD and PIRQE to PIRQH. Bit 7 means "not routed".
const PIRQ: [usize; 8] = [0x60, 0x61, 0x62, 0x63, 0x68, 0x69, 0x6a, 0x6b];
const PIRQ_OFF: u8 = 1 << 7;
const GEN_PMCON_1: usize = 0xa0;
/// Makes GBL_SMI_EN and this bit read-only.
const SMI_LOCK: u8 = 1 << 4;
/// Base of the root complex registers. They are not implemented: drivers read all-ones there.
const RCBA: usize = 0xf0;

// The ports, and their bits with an effect.
const RESET_CONTROL: u64 = 0xcf9;
/// RST_CPU resets the machine when it changes from 0 to 1. SYS_RST and FULL_RST select the kind of
/// reset, which makes no difference here.
const RST_CPU: u8 = 1 << 2;
const RESET_KEPT: u8 = 0x0e;
/// APM_CNT, whose writes cause SMIs, and APM_STS.
const APM: u64 = 0xb2;
const APM_CNT: u64 = 0;
/// INIT_NOW resets the machine. The A20 line is always on, so its bit reads as 1.
const PORT_92: u64 = 0x92;
const INIT_NOW: u8 = 1 << 0;
const A20: u8 = 1 << 1;
/// POST codes. As the cheapest port it is also used for delays and measurements.
const POST: u64 = 0x80;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let id = Id {
            vendor: 0x8086,
            device: 0x2918,
            class: 0x06_0100,
            revision: 2,
            subsystem: (0x1af4, 0x1100),
        };
        let identity = Identity {
            at: Some(AT),
            own_registers: vec![OWN],
            multifunction: true,
            ..Identity::new(id)
        };
        let slot = grants.pci(identity)?;
        let ports = Ports {
            reset: grants.claim(Kind::Port, RESET_CONTROL..RESET_CONTROL + 1)?,
            apm: grants.claim(Kind::Port, APM..APM + 2)?,
            port_92: grants.claim(Kind::Port, PORT_92..PORT_92 + 1)?,
            post: grants.claim(Kind::Port, POST..POST + 1)?,
        };
        let window = grants.window(Kind::Port, pm::SIZE);
        let line = grants.line(SCI)?;
        let shared = grants.shared();
        let pm = pm::Block::new(line, shared, self.smm);
        let events = shared.events.clone();
        let smm = self.smm.then(|| shared.hypervisor.smm()).transpose()?;
        let smi = Smi { smm, features: shared.smi.clone() };
        let (config, registers) = (slot.config, Registers::default());
        Ok(slot.wrap(Box::new(Lpc { config, ports, window, pm, smi, events, registers })))
    }
}

struct Ports {
    reset: Region,
    apm: Region,
    port_92: Region,
    post: Region,
}

/// System-management interrupts.
struct Smi {
    /// `None` in a machine without SMM.
    smm: Option<Arc<dyn Smm>>,
    features: Arc<smi::Negotiation>,
}

struct Lpc {
    config: Region,
    ports: Ports,
    window: Arc<Window>,
    pm: pm::Block,
    smi: Smi,
    events: Events,
    registers: Registers,
}

/// The bridge's registers, without those of the PM block.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Registers {
    /// Configuration space. The part of the header is unused.
    config: Bytes<0x100>,
    reset: u8,
    apm: [u8; 2],
    port_92: u8,
    post: u8,
}

impl Default for Registers {
    fn default() -> Self {
        let mut config = Bytes::default();
        config[PMBASE] = 1;
        for at in PIRQ {
            config[at] = PIRQ_OFF;
        }
        Self { config, reset: 0, apm: [0; 2], port_92: A20, post: 0 }
    }
}

#[derive(Default, Serialize, Deserialize)]
struct State {
    registers: Registers,
    pm: pm::State,
    smi: smi::State,
}

/// The writable bits of a byte of configuration space.
fn writable(at: usize) -> u8 {
    const PMBASE_1: usize = PMBASE + 1;
    const GEN_PMCON_1_1: usize = GEN_PMCON_1 + 1;
    const RCBA_1: usize = RCBA + 1;
    const RCBA_2: usize = RCBA + 2;
    const RCBA_3: usize = RCBA + 3;
    match at {
        PMBASE => 0x80,
        ACPI_CNTL => ACPI_EN | 0x07,
        at if PIRQ.contains(&at) => PIRQ_OFF | 0x0f,
        RCBA => 0x01,
        RCBA_1 => 0xc0,
        PMBASE_1 | GEN_PMCON_1 | GEN_PMCON_1_1 | RCBA_2 | RCBA_3 => 0xff,
        _ => 0,
    }
}

impl Registers {
    /// The base of the PM block while it is enabled.
    fn pm_base(&self) -> Option<u64> {
        let base = u64::from(u16::from_le_bytes([self.config[PMBASE], self.config[PMBASE + 1]]));
        let base = base & !(pm::SIZE - 1);
        (self.config[ACPI_CNTL] & ACPI_EN != 0 && base != 0).then_some(base)
    }

    fn is_smi_locked(&self) -> bool {
        self.config[GEN_PMCON_1] & SMI_LOCK != 0
    }

    fn write_config(&mut self, at: usize, byte: u8) {
        let mask = writable(at);
        let sticky = if at == GEN_PMCON_1 { self.config[at] & SMI_LOCK } else { 0 };
        self.config[at] = self.config[at] & !mask | byte & mask | sticky;
    }
}

impl Lpc {
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (usize::try_from(offset).unwrap_or(usize::MAX)..).zip(data) {
            if at < self.registers.config.len() {
                self.registers.write_config(at, *byte);
            }
        }
        if self.registers.is_smi_locked() {
            self.pm.lock_smi();
        }
        self.window.move_to(self.registers.pm_base());
    }

    fn write_apm(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            self.registers.apm[usize::from(at != APM_CNT)] = *byte;
        }
        if offset == APM_CNT
            && let Some(smm) = &self.smi.smm
            && self.pm.apm_written()
        {
            smm.interrupt(self.smi.features.is_broadcast());
        }
    }

    /// Returns the new value of a byte register. Resets the machine if `bit` changes from 0 to 1.
    fn reset_if_set(events: &Events, old: u8, new: u8, bit: u8) -> u8 {
        if new & !old & bit != 0 {
            events(Event::Reset);
        }
        new
    }
}

impl Device for Lpc {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.window.region {
            return self.pm.read(offset, data);
        }
        let registers = &self.registers;
        let from = if region == self.config {
            &registers.config[..]
        } else if region == self.ports.apm {
            &registers.apm[..]
        } else if region == self.ports.reset {
            &[registers.reset]
        } else if region == self.ports.port_92 {
            &[registers.port_92]
        } else {
            &[registers.post]
        };
        for (at, byte) in (usize::try_from(offset).unwrap_or(usize::MAX)..).zip(data) {
            // Reads beyond the last configuration register return all-ones.
            *byte = from.get(at).copied().unwrap_or(0xff);
        }
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if region == self.window.region {
            return self.pm.write(offset, data);
        }
        if region == self.config {
            self.write_config(offset, data);
            return Access::Done;
        }
        if region == self.ports.apm {
            self.write_apm(offset, data);
            return Access::Done;
        }
        let (registers, events) = (&mut self.registers, &self.events);
        // The other ports are one byte each, and the bus does not split accesses.
        let &[byte] = data else { return Access::Ignored };
        if region == self.ports.reset {
            let new = byte & RESET_KEPT;
            registers.reset = Self::reset_if_set(events, registers.reset, new, RST_CPU);
        } else if region == self.ports.port_92 {
            let new = byte | A20;
            registers.port_92 = Self::reset_if_set(events, registers.port_92, new, INIT_NOW);
        } else if region == self.ports.post {
            registers.post = byte;
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        let (registers, smi) = (self.registers.clone(), self.smi.features.save());
        Saved::of(&State { registers, pm: self.pm.park(), smi })
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let State { registers, pm, smi } = saved.take()?;
        self.smi.features.restore(smi);
        self.registers = Registers::default();
        for (at, byte) in registers.config.iter().enumerate() {
            self.registers.write_config(at, *byte);
        }
        self.registers =
            Registers { config: std::mem::take(&mut self.registers.config), ..registers };
        self.window.move_to(self.registers.pm_base());
        self.pm.run(&pm, self.registers.is_smi_locked())
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::testutil::{Bench, lpc_bench};

    fn config<const N: usize>(bench: &Bench, at: usize) -> [u8; N] {
        bench.read(Kind::Config, AT.config() + at as u64)
    }

    fn set(bench: &Bench, at: usize, data: &[u8]) {
        bench.write(Kind::Config, AT.config() + at as u64, data);
    }

    #[test]
    fn has_the_ids_that_firmware_expects() {
        let bench = lpc_bench(false);
        assert_eq!(config(&bench, 0), [0x86, 0x80, 0x18, 0x29]);
        assert_eq!(config(&bench, 8), [2, 0, 1, 6]);
        assert_eq!(config(&bench, 0x0e), [0x80], "more functions may follow");
        assert_eq!(config(&bench, 0x2c), [0xf4, 0x1a, 0x00, 0x11]);
        assert_eq!(config(&bench, PMBASE), [1, 0, 0, 0, 0]);
        assert_eq!(config(&bench, 0x60), [0x80; 4]);
        assert_eq!(config(&bench, 0x68), [0x80; 4]);
        assert_eq!(config(&bench, 0x100), [0xff; 4]);
    }

    #[test]
    fn the_acpi_block_is_where_firmware_puts_it_while_enabled() {
        let bench = lpc_bench(false);
        set(&bench, PMBASE, &0xffff_ffff_u32.to_le_bytes());
        assert_eq!(config(&bench, PMBASE), [0x81, 0xff, 0, 0]);
        set(&bench, PMBASE, &0x601_u32.to_le_bytes());
        assert_eq!(bench.read(Kind::Port, 0x604), [0xff; 2], "not enabled");
        set(&bench, ACPI_CNTL, &[0xff]);
        assert_eq!(config(&bench, ACPI_CNTL), [0x87]);
        assert_eq!(bench.read(Kind::Port, 0x604), [0; 2]);
        set(&bench, PMBASE, &[0x80, 0xb0]);
        assert_eq!(bench.read(Kind::Port, 0x604), [0xff; 2]);
        assert_eq!(bench.read(Kind::Port, 0xb084), [0; 2]);
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        assert_eq!(bench.read(Kind::Port, 0xb084), [0; 2]);
        set(&bench, PMBASE, &[0, 0]);
        assert_eq!(bench.read(Kind::Port, 4), [0xff; 2], "never at 0");
    }

    #[test]
    fn routes_and_rcba_are_storage() {
        let bench = lpc_bench(false);
        set(&bench, 0x60, &[0x0a, 0x0a, 0x0b, 0xff]);
        set(&bench, 0x68, &[0x0a, 0x0a, 0x0b, 0x7f]);
        set(&bench, RCBA, &0xfed1_ffff_u32.to_le_bytes());
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        assert_eq!(config(&bench, 0x60), [0x0a, 0x0a, 0x0b, 0x8f]);
        assert_eq!(config(&bench, 0x68), [0x0a, 0x0a, 0x0b, 0x0f]);
        assert_eq!(config(&bench, RCBA), 0xfed1_c001_u32.to_le_bytes());
        bench.board.reset().unwrap();
        assert_eq!(config(&bench, RCBA), [0; 4]);
        assert_eq!(config(&bench, 0x60), [0x80; 4]);
    }

    #[test]
    fn a_rising_reset_bit_in_either_port_resets() {
        for (port, values, resets) in [
            (0xcf9, &[0x00, 0x02, 0x0a, 0xf1][..], 0),
            (0xcf9, &[0x02, 0x06], 1),
            (0xcf9, &[0x0f], 1),
            (0xcf9, &[0x0e, 0x0e], 1),
            (0xcf9, &[0x04, 0x00, 0x06], 2),
            (0x92, &[0x00, 0x02, 0xfe], 0),
            (0x92, &[0x03, 0x03], 1),
            (0x92, &[0x01], 1),
        ] {
            let bench = lpc_bench(false);
            values.iter().for_each(|value| bench.write(Kind::Port, port, &[*value]));
            assert_eq!(*bench.events.lock().unwrap(), vec![Event::Reset; resets], "{values:x?}");
        }
    }

    #[test]
    fn small_ports_keep_their_values() {
        let bench = lpc_bench(false);
        assert_eq!(bench.read(Kind::Port, 0x92), [2]);
        bench.write(Kind::Port, 0x92, &[0x40]);
        bench.write(Kind::Port, 0xb3, &[0x77]);
        bench.write(Kind::Port, 0xb2, &[0x02]);
        bench.write(Kind::Port, 0x80, &[0xa5]);
        bench.write(Kind::Port, 0xcf9, &[0x02]);
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        assert_eq!(bench.read(Kind::Port, 0xb2), [0x02, 0x77]);
        assert_eq!([0x92, 0x80, 0xcf9].map(|at| bench.read(Kind::Port, at)), [[0x42], [0xa5], [2]]);
        bench.write(Kind::Port, 0xb2, &[3, 4]);
        assert_eq!(bench.read(Kind::Port, 0xb3), [4]);
        bench.board.reset().unwrap();
        assert_eq!([0x92, 0x80, 0xcf9].map(|at| bench.read(Kind::Port, at)), [[2], [0], [0]]);
    }

    /// Sets PMBASE to 0x600, and SMI_EN.
    fn smi_bench(smi_en: u8) -> Bench {
        let bench = lpc_bench(true);
        set(&bench, PMBASE, &0x601_u32.to_le_bytes());
        set(&bench, ACPI_CNTL, &[0x80]);
        for (at, name) in [(0x630, "SMI_EN"), (0x634, "SMI_STS")] {
            assert_eq!(bench.read(Kind::Port, at), [0; 4], "{name} at power-on");
        }
        bench.write(Kind::Port, 0x630, &[smi_en]);
        bench
    }

    fn interrupts(bench: &Bench) -> (u32, u32) {
        *bench.hypervisor.smm.interrupts.lock().unwrap()
    }

    #[test]
    fn writing_apm_cnt_causes_an_smi_while_both_enables_are_set() {
        for (smi_en, count) in [(0x00, 0), (0x01, 0), (0x20, 0), (0x21, 1), (0xff, 1)] {
            let bench = smi_bench(smi_en);
            bench.write(Kind::Port, 0xb3, &[0x12]);
            assert_eq!(interrupts(&bench), (0, 0), "APM_STS is storage");
            bench.write(Kind::Port, 0xb2, &[0x34]);
            assert_eq!(interrupts(&bench), (count, 0), "SMI_EN {smi_en:#x}");
            assert_eq!(bench.read(Kind::Port, 0xb2), [0x34, 0x12]);
            let status = if count == 1 { 0x20 } else { 0 };
            assert_eq!(bench.read(Kind::Port, 0x634), [status, 0, 0, 0]);
            bench.write(Kind::Port, 0x634, &[0xdf, 0xff, 0xff, 0xff]);
            assert_eq!(bench.read(Kind::Port, 0x634), [status], "other bits");
            bench.write(Kind::Port, 0x634, &[0x20]);
            assert_eq!(bench.read(Kind::Port, 0x634), [0]);
            bench.write(Kind::Port, 0xb2, &[1, 2]);
            assert_eq!(interrupts(&bench), (2 * count, 0), "both ports at once");
        }
    }

    #[test]
    fn without_smm_no_write_causes_an_smi() {
        let bench = lpc_bench(false);
        set(&bench, PMBASE, &0x601_u32.to_le_bytes());
        set(&bench, ACPI_CNTL, &[0x80]);
        bench.write(Kind::Port, 0x630, &[0x21]);
        bench.write(Kind::Port, 0xb2, &[0]);
        assert_eq!(interrupts(&bench), (0, 0));
    }

    #[test]
    fn smis_reach_all_processors_once_firmware_agreed_on_it() {
        let bench = smi_bench(0x21);
        bench.board.shared.smi.request(1);
        bench.write(Kind::Port, 0xb2, &[0]);
        assert_eq!(interrupts(&bench), (1, 0), "requested only");
        assert!(bench.board.shared.smi.agree());
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        bench.write(Kind::Port, 0xb2, &[0]);
        assert_eq!(interrupts(&bench), (1, 1));
        bench.board.reset().unwrap();
        assert!(!bench.board.shared.smi.is_broadcast());
    }

    #[test]
    fn smi_lock_keeps_smis_enabled_until_a_reset() {
        let bench = smi_bench(0x21);
        set(&bench, GEN_PMCON_1, &[SMI_LOCK]);
        set(&bench, GEN_PMCON_1, &[0]);
        assert_eq!(config(&bench, GEN_PMCON_1), [SMI_LOCK]);
        bench.write(Kind::Port, 0x630, &[0x20]);
        assert_eq!(bench.read(Kind::Port, 0x630), [0x21]);
        bench.write(Kind::Port, 0xb2, &[0]);
        assert_eq!(interrupts(&bench), (1, 0));
        bench.board.reset().unwrap();
        assert_eq!(config(&bench, GEN_PMCON_1), [0]);
    }

    #[test]
    fn refuses_a_damaged_saved_state() {
        let bench = lpc_bench(false);
        let mut json = serde_json::to_value(bench.board.park()).unwrap();
        json[0][1]["device"]["registers"]["config"] = "00".into();
        let error = bench.board.run(serde_json::from_value(json).unwrap()).unwrap_err();
        assert!(format!("{error:#}").contains("2 hexadecimal digits instead of 512"), "{error:#}");
    }
}
