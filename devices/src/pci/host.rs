//! The Q35 host bridge 8086:29c0 (Intel 3 Series MCH datasheet 319966), the two interfaces to
//! configuration space (0xCF8/0xCFC and the ECAM window at PCIEXBAR), and SMRAM.
//!
//! Threats: the guest chooses every address here. Buses other than 0 and missing functions read
//! all-ones, and so do ECAM accesses that cross the end of a function's 4 KiB. The system would
//! like to open SMRAM: D_LCK makes its registers read-only until a reset. If the host cannot hide
//! SMRAM, the machine is switched off.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Address, Id, Identity};
use crate::bus::{Spaces, Window};
use crate::bytes::Bytes;
use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Event, Events, Grants};
use crate::hypervisor;
use host::memory::Memory;
use host::smram::{SegmentA, Smram, TSEG_MIB};

/// `--device host-bridge`: every machine has one.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The machine has system-management mode (SMM), and RAM for it.
    #[serde(default)]
    pub smm: bool,
}

// The bridge's address, and its registers (datasheet, section 5.1).
const AT: Address = Address::new(0, 0);
const PCIEXBAR: usize = 0x60;
/// EXT_TSEG_MBYTES, QEMU's extension: after a write of `EXT_TSEG_QUERY`, firmware reads the size
/// that TSEG_SZ 11b selects.
const EXT_TSEG: usize = 0x50;
const EXT_TSEG_HIGH: usize = EXT_TSEG + 1;
const EXT_TSEG_QUERY: [u8; 2] = [0xff; 2];
const SMRAM: usize = 0x9d;
/// C_BASE_SEG: segment A. No other value exists.
const SMRAM_FIXED: u8 = 0x02;
const G_SMRAME: u8 = 1 << 3;
const D_LCK: u8 = 1 << 4;
const D_CLS: u8 = 1 << 5;
const D_OPEN: u8 = 1 << 6;
const ESMRAMC: usize = 0x9e;
/// SM_CACHE, SM_L1 and SM_L2.
const ESMRAMC_FIXED: u8 = 0x38;
const T_EN: u8 = 1 << 0;
const TSEG_SZ: u8 = 3 << 1;
/// 256 MiB: all 256 buses.
const ECAM: u64 = 256 << 20;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let id = Id {
            vendor: 0x8086,
            device: 0x29c0,
            class: 0x06_0000,
            revision: 0,
            subsystem: SUBSYSTEM,
        };
        let own = vec![0x50..0x54, 0x60..0x68, 0x90..0x97, 0x9c..0x9f, 0xa0..0xb2];
        let identity = Identity { at: Some(AT), own_registers: own, ..Identity::new(id) };
        // Dword accesses at 0xCF8 belong to the bridge, the byte at 0xCF9 to the reset control.
        let ports = grants.claim(Kind::Port, 0xcf8..0xd00)?;
        let ecam = grants.window(Kind::Memory, ECAM);
        let spaces = grants.shared().spaces.clone();
        let slot = grants.pci(identity)?;
        let config = slot.config;
        // The bridge must answer its own configuration cycles without the bus, where it would wait
        // for its own lock. Therefore it contains its function instead of being wrapped in it.
        let shared = grants.shared();
        let smm = self.smm.then(|| shared.hypervisor.smm()).transpose()?;
        let smm = smm.map(|smm| Smm {
            smm,
            memory: shared.memory.clone(),
            events: shared.events.clone(),
            smram: Smram::default(),
        });
        let registers = Registers { config, ecam: ecam.clone(), smm, state: State::default() };
        let function = slot.wrap(Box::new(registers));
        Ok(Box::new(Bridge { ports, config, ecam: ecam.region, function, spaces, latch: 0 }))
    }
}

/// Red Hat's subsystem IDs, by which guest drivers recognize a virtual machine.
const SUBSYSTEM: (u16, u16) = (0x1af4, 0x1100);

struct Bridge {
    ports: Region,
    config: Region,
    ecam: Region,
    function: Box<dyn Device>,
    spaces: Arc<Spaces>,
    /// The register at 0xCF8: enable in bit 31, bus, device, function, register.
    latch: u32,
}

enum Cycle {
    Own(u64),
    Other(u64),
}

impl Bridge {
    fn cycle(&self, region: Region, offset: u64, length: usize) -> Option<Cycle> {
        let address = if region == self.ecam {
            offset
        } else if region == self.config {
            offset + AT.config()
        } else {
            // 0xCFC-0xCFF: the bytes of the selected dword.
            let lane = offset.checked_sub(4)?;
            let enabled = self.latch >> 31 == 1;
            let bus_to_register = u64::from(self.latch & 0xff_ff00) << 4;
            enabled.then_some(bus_to_register | u64::from(self.latch & 0xfc) | lane)?
        };
        let register = address & 0xfff;
        if register + length as u64 > 0x1000 {
            return None;
        }
        Some(if address >> 12 == AT.config() >> 12 {
            Cycle::Own(register)
        } else {
            Cycle::Other(address)
        })
    }
}

impl Device for Bridge {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.ports && offset < 4 {
            let Ok(data) = <&mut [u8; 4]>::try_from(data) else { return Access::Ignored };
            *data = self.latch.to_le_bytes();
            return Access::Done;
        }
        match self.cycle(region, offset, data.len()) {
            Some(Cycle::Own(register)) => return self.function.read(self.config, register, data),
            Some(Cycle::Other(address)) => self.spaces.config.read(address, data),
            None => data.fill(0xff),
        }
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if region == self.ports && offset < 4 {
            let Ok(data) = <[u8; 4]>::try_from(data) else { return Access::Ignored };
            // Bits 30:24 and 1:0 are reserved and read as zero.
            self.latch = u32::from_le_bytes(data) & 0x80ff_fffc;
            return Access::Done;
        }
        match self.cycle(region, offset, data.len()) {
            Some(Cycle::Own(register)) => return self.function.write(self.config, register, data),
            Some(Cycle::Other(address)) => self.spaces.config.write(address, data),
            None => {}
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        Saved::of(&(self.latch, self.function.park()))
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let (latch, function) = saved.take()?;
        self.latch = latch;
        self.function.run(function)
    }
}

struct Registers {
    config: Region,
    ecam: Arc<Window>,
    /// `None` in a machine without SMM.
    smm: Option<Smm>,
    state: State,
}

/// Hides SMRAM from processors outside of system-management mode, and from devices.
struct Smm {
    smm: Arc<dyn hypervisor::Smm>,
    memory: Memory,
    events: Events,
    /// The present SMRAM.
    smram: Smram,
}

impl Smm {
    fn set(&mut self, smram: Smram) {
        if self.smram == smram {
            return;
        }
        self.smram = smram;
        self.memory.hide_tseg(smram.tseg_mib);
        if let Err(error) = self.smm.set_smram(smram) {
            tracing::error!("the machine is switched off: SMRAM cannot be protected: {error:#}");
            (self.events)(Event::PowerOff);
        }
    }
}

#[derive(Clone, Serialize, Deserialize)]
struct State {
    bytes: Bytes<256>,
}

impl Default for State {
    fn default() -> Self {
        let mut bytes = Bytes::default();
        bytes[PCIEXBAR..PCIEXBAR + 4].copy_from_slice(&0xb000_0000_u32.to_le_bytes());
        // Compatible SMRAM at segment A, closed. The cache bits of ESMRAMC are fixed.
        bytes[SMRAM] = SMRAM_FIXED;
        bytes[ESMRAMC] = ESMRAMC_FIXED;
        Self { bytes }
    }
}

impl State {
    /// The base of PCIEXBAR while it is enabled. Only the size 256 MiB (bits 00) is supported.
    fn ecam(&self) -> Option<u64> {
        let bar = <[u8; 8]>::try_from(&self.bytes[PCIEXBAR..PCIEXBAR + 8]);
        let bar = u64::from_le_bytes(bar.expect("eight bytes"));
        (bar & 1 == 1).then_some(bar & 0xf_f000_0000)
    }

    fn write(&mut self, at: usize, byte: u8, smm: bool) {
        let old = self.bytes[at];
        let locked = smm && self.bytes[SMRAM] & D_LCK != 0;
        self.bytes[at] = match at {
            // A value that reads back from 0x9C would announce SMRAM at the default SMBASE.
            0x9c => 0,
            EXT_TSEG..=EXT_TSEG_HIGH if !smm => 0,
            // Locking closes SMRAM. D_CLS only is never locked.
            SMRAM if locked => old & !D_CLS | byte & D_CLS,
            SMRAM if byte & D_LCK != 0 && smm => SMRAM_FIXED | byte & (D_CLS | D_LCK | G_SMRAME),
            SMRAM => SMRAM_FIXED | byte & (D_OPEN | D_CLS | D_LCK | G_SMRAME),
            ESMRAMC if locked => old,
            ESMRAMC => ESMRAMC_FIXED | byte & (TSEG_SZ | T_EN),
            _ => byte,
        };
        if smm && self.bytes[EXT_TSEG..=EXT_TSEG_HIGH] == EXT_TSEG_QUERY {
            let [.., extended] = TSEG_MIB;
            self.bytes[EXT_TSEG..=EXT_TSEG_HIGH].copy_from_slice(&extended.to_le_bytes());
        }
    }

    fn smram(&self) -> Smram {
        let (smram, esmramc) = (self.bytes[SMRAM], self.bytes[ESMRAMC]);
        if smram & G_SMRAME == 0 {
            return Smram::default();
        }
        let segment_a = if smram & D_OPEN != 0 { SegmentA::Everybody } else { SegmentA::InSmm };
        let enabled = esmramc & T_EN != 0;
        let tseg_mib = if enabled { TSEG_MIB[usize::from((esmramc & TSEG_SZ) >> 1)] } else { 0 };
        Smram { segment_a, tseg_mib }
    }
}

impl Registers {
    fn settle(&mut self) {
        self.ecam.move_to(self.state.ecam());
        if let Some(smm) = &mut self.smm {
            smm.set(self.state.smram());
        }
    }
}

impl Device for Registers {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        debug_assert!(region == self.config);
        for (at, byte) in (usize::try_from(offset).unwrap_or(usize::MAX)..).zip(data) {
            *byte = self.state.bytes.get(at).copied().unwrap_or(0xff);
        }
        Access::Done
    }

    fn write(&mut self, _: Region, offset: u64, data: &[u8]) -> Access {
        for (at, byte) in (usize::try_from(offset).unwrap_or(usize::MAX)..).zip(data) {
            if at < self.state.bytes.len() {
                self.state.write(at, *byte, self.smm.is_some());
            }
        }
        self.settle();
        Access::Done
    }

    fn park(&mut self) -> Saved {
        Saved::of(&self.state)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        self.state = saved.take()?;
        self.settle();
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::testutil::Bench;

    fn bench() -> Bench {
        bench_with(Config::default())
    }

    fn bench_with(config: Config) -> Bench {
        let mut bench = Bench::new(4096);
        bench.board.add("host-bridge", |grants| config.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        bench
    }

    /// Writes registers, and returns what they read then.
    fn set<const N: usize>(bench: &Bench, register: usize, bytes: [u8; N]) -> [u8; N] {
        let at = AT.config() + register as u64;
        bench.write(Kind::Config, at, &bytes);
        bench.read(Kind::Config, at)
    }

    fn smram(bench: &Bench) -> (SegmentA, u16) {
        let Smram { segment_a, tseg_mib } = *bench.hypervisor.smm.smram.lock().unwrap();
        (segment_a, tseg_mib)
    }

    fn config_word(bench: &Bench, latch: u32, port: u64) -> u16 {
        bench.write(Kind::Port, 0xcf8, &latch.to_le_bytes());
        u16::from_le_bytes(bench.read(Kind::Port, port))
    }

    #[test]
    fn both_config_mechanisms_show_the_bridge_and_no_other_device() {
        let bench = bench();
        assert_eq!(config_word(&bench, 0x8000_0000, 0xcfc), 0x8086);
        assert_eq!(config_word(&bench, 0x8000_0000, 0xcfe), 0x29c0);
        assert_eq!(config_word(&bench, 0x0000_0000, 0xcfc), 0xffff, "not enabled");
        assert_eq!(config_word(&bench, 0x8000_1000, 0xcfc), 0xffff, "no such device");
        assert_eq!(config_word(&bench, 0x8001_0000, 0xcfc), 0xffff, "no such bus");
        assert_eq!(u32::from_le_bytes(bench.read(Kind::Port, 0xcf8)), 0x8001_0000);
        assert_eq!(bench.read(Kind::Memory, 0xe000_0000), [0xff; 4]);
        config_word(&bench, 0x8000_0060, 0xcfc);
        bench.write(Kind::Port, 0xcfc, &0xe000_0001_u32.to_le_bytes());
        assert_eq!(bench.read(Kind::Memory, 0xe000_0000), [0x86, 0x80, 0xc0, 0x29]);
        assert_eq!(bench.read(Kind::Memory, 0xe000_8000), [0xff; 4]);
        bench.board.reset().unwrap();
        assert_eq!(bench.read(Kind::Memory, 0xe000_0000), [0xff; 4]);
    }

    #[test]
    fn announces_no_smm() {
        let bench = bench();
        config_word(&bench, 0x8000_009c, 0xcfc);
        bench.write(Kind::Port, 0xcfc, &[0xff]);
        assert_eq!(bench.read(Kind::Port, 0xcfc), [0, 0x02, 0x38]);
        assert_eq!(set(&bench, EXT_TSEG, [0xff; 2]), [0; 2]);
        set(&bench, SMRAM, [0xff]);
        set(&bench, ESMRAMC, [0xff]);
        assert_eq!(smram(&bench), (SegmentA::Nobody, 0));
    }

    #[test]
    fn the_extended_tseg_announces_16_mib() {
        let bench = bench_with(Config { smm: true });
        assert_eq!(bench.read(Kind::Config, AT.config() + 0x50), [0; 2]);
        assert_eq!(set(&bench, EXT_TSEG, [0xff; 2]), [16, 0]);
        assert_eq!(set(&bench, EXT_TSEG, [0x34, 0x12]), [0x34, 0x12]);
        assert_eq!(set(&bench, 0x9c, [0xff]), [0], "no SMRAM at the default SMBASE");
    }

    #[test]
    fn firmware_opens_sizes_and_closes_smram() {
        let bench = bench_with(Config { smm: true });
        assert_eq!(smram(&bench), (SegmentA::Nobody, 0));
        set(&bench, ESMRAMC, [0x01]);
        assert_eq!(smram(&bench), (SegmentA::Nobody, 0), "without G_SMRAME");
        assert_eq!(set(&bench, SMRAM, [G_SMRAME]), [0x0a]);
        for (esmramc, mib) in [(0x01, 1), (0x03, 2), (0x05, 8), (0x07, 16), (0x06, 0), (0xff, 16)] {
            assert_eq!(set(&bench, ESMRAMC, [esmramc]), [0x38 | esmramc & 7]);
            assert_eq!(smram(&bench), (SegmentA::InSmm, mib));
        }
        assert_eq!(set(&bench, SMRAM, [0xef]), [0x6a]);
        assert_eq!(smram(&bench), (SegmentA::Everybody, 16));
        let saved = bench.board.park();
        bench.board.run(Vec::new()).unwrap();
        assert_eq!(smram(&bench), (SegmentA::Nobody, 0), "at power-on");
        bench.board.run(saved).unwrap();
        assert_eq!(smram(&bench), (SegmentA::Everybody, 16));
    }

    #[test]
    fn locked_smram_stays_closed_until_a_reset() {
        let bench = bench_with(Config { smm: true });
        set(&bench, ESMRAMC, [0x07]);
        assert_eq!(set(&bench, SMRAM, [D_OPEN | D_LCK | G_SMRAME]), [0x1a], "locking closes");
        for byte in [0, 0x40, 0x48, 0x5a, 0x4a] {
            assert_eq!(set(&bench, SMRAM, [byte]), [0x1a], "{byte:#x}");
            assert_eq!(set(&bench, ESMRAMC, [byte]), [0x3f], "{byte:#x}");
        }
        assert_eq!(set(&bench, SMRAM, [D_CLS]), [0x3a], "D_CLS is never locked");
        // A wider write, over the register before and both of SMRAM.
        assert_eq!(set(&bench, 0x9c, [0xff, 0x48, 0x00]), [0, 0x1a, 0x3f]);
        // Through 0xCF8, and the other half of configuration space's aliases.
        config_word(&bench, 0x8000_009c, 0xcfc);
        bench.write(Kind::Port, 0xcfd, &[0x48, 0x00]);
        assert_eq!(bench.read(Kind::Port, 0xcfc), [0, 0x1a, 0x3f, 0]);
        assert_eq!(smram(&bench), (SegmentA::InSmm, 16));
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        assert_eq!(set(&bench, SMRAM, [0x48]), [0x1a], "after a pause");
        bench.board.reset().unwrap();
        assert_eq!(bench.read(Kind::Config, AT.config() + 0x9d), [0x02, 0x38]);
        assert_eq!(smram(&bench), (SegmentA::Nobody, 0));
    }
}
