//! The Q35 host bridge 8086:29c0 (Intel 3 Series MCH datasheet 319966), and the two interfaces to
//! configuration space: 0xCF8/0xCFC and the ECAM window at PCIEXBAR.
//!
//! Threats: the guest chooses every address here. Buses other than 0 and missing functions read
//! all-ones, and so do ECAM accesses that cross the end of a function's 4 KiB.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Address, Id, Identity};
use crate::bus::{Spaces, Window};
use crate::bytes::Bytes;
use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Grants};

/// `--device host-bridge`: every machine has one.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

// The bridge's address, and its registers (datasheet, section 5.1).
const AT: Address = Address::new(0, 0);
const PCIEXBAR: usize = 0x60;
const SMRAM: usize = 0x9d;
const ESMRAMC: usize = 0x9e;
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
        let registers = Registers { config, ecam: ecam.clone(), state: State::default() };
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
    state: State,
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
        bytes[SMRAM] = 0x02;
        bytes[ESMRAMC] = 0x38;
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

    fn write(&mut self, at: usize, byte: u8) {
        self.bytes[at] = match at {
            // This machine has no SMRAM. A value that reads back from 0x50 or 0x9C would announce
            // more (extended TSEG sizes, SMRAM at the default SMBASE).
            0x50..=0x51 | 0x9c => 0,
            SMRAM => 0x02 | byte & 0x58,
            ESMRAMC => 0x38 | byte & 0x07,
            _ => byte,
        };
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
                self.state.write(at, *byte);
            }
        }
        self.ecam.move_to(self.state.ecam());
        Access::Done
    }

    fn park(&mut self) -> Saved {
        Saved::of(&self.state)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        self.state = saved.take()?;
        self.ecam.move_to(self.state.ecam());
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::testutil::Bench;

    fn bench() -> Bench {
        let mut bench = Bench::new(4096);
        bench.board.add("host-bridge", |grants| Config {}.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        bench
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
    }
}
