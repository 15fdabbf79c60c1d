//! The Q35 host bridge 8086:29c0 (Intel 3 Series MCH datasheet 319966), and the two doors to
//! configuration space: 0xCF8/0xCFC and the ECAM window at PCIEXBAR.
//!
//! Threats: the guest chooses every address here; buses other than 0 and functions that do not
//! exist read all-ones, and ECAM accesses that cross a function's 4 KiB find nobody.

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

/// Where it sits, and its registers of the datasheet's section 5.1.
const AT: Address = Address::new(0, 0);
const PCIEXBAR: usize = 0x60;
const SMRAM: usize = 0x9d;
const ESMRAMC: usize = 0x9e;
/// 256 MiB: all 256 buses.
const ECAM: u64 = 256 << 20;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let id =
            Id { vendor: 0x8086, device: 0x29c0, class: 0x06_0000, revision: 0, subsystem: SUB };
        let own = vec![0x50..0x54, 0x60..0x68, 0x90..0x97, 0x9c..0x9f, 0xa0..0xb2];
        let identity = Identity { at: Some(AT), own, ..Identity::new(id) };
        // Dword accesses at 0xCF8 are ours; the byte at 0xCF9 is the reset control's.
        let ports = grants.claim(Kind::Port, 0xcf8..0xd00)?;
        let ecam = grants.window(Kind::Memory, ECAM);
        let spaces = grants.shared().spaces.clone();
        let slot = grants.pci(identity)?;
        let config = slot.config;
        // The bridge answers its own configuration cycles without going through the bus again,
        // where it would wait for itself; so the function is kept inside instead of around it.
        let registers = Registers { config, ecam: ecam.clone(), state: State::default() };
        let function = slot.carry(Box::new(registers));
        Ok(Box::new(Bridge { ports, config, ecam: ecam.region(), function, spaces, latch: 0 }))
    }
}

/// Red Hat's subsystem ids mark the machine as virtual, which drivers of guests look for.
const SUB: (u16, u16) = (0x1af4, 0x1100);

struct Bridge {
    ports: Region,
    config: Region,
    ecam: Region,
    function: Box<dyn Device>,
    spaces: Arc<Spaces>,
    /// 0xCF8: enable in bit 31, bus, device, function, register.
    latch: u32,
}

/// Where a configuration cycle goes.
enum Cycle {
    Own(u64),
    Other(u64),
}

impl Bridge {
    /// The cycle of an access, unless nobody can answer it.
    fn cycle(&self, region: Region, offset: u64, length: usize) -> Option<Cycle> {
        let address = if region == self.ecam {
            offset
        } else if region == self.config {
            offset + AT.config()
        } else {
            // 0xCFC-0xCFF: byte lanes within the latched dword.
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
            // Bits 30:24 and 1:0 are reserved and read zero.
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

/// The bridge's own registers.
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
        // Compatible SMRAM at segment A, closed; ESMRAMC's cache bits are hard-wired.
        bytes[SMRAM] = 0x02;
        bytes[ESMRAMC] = 0x38;
        Self { bytes }
    }
}

impl State {
    /// PCIEXBAR while it is enabled. Its size bits 00 are 256 MiB, which is all that we decode.
    fn ecam(&self) -> Option<u64> {
        let bar = <[u8; 8]>::try_from(&self.bytes[PCIEXBAR..PCIEXBAR + 8]);
        let bar = u64::from_le_bytes(bar.expect("eight bytes"));
        (bar & 1 == 1).then_some(bar & 0xf_f000_0000)
    }

    fn write(&mut self, at: usize, byte: u8) {
        self.bytes[at] = match at {
            // No SMRAM in this machine: 0x50 and 0x9C must not read back what announces more
            // (extended TSEG sizes, SMRAM at the default SMBASE).
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
        self.ecam.place(self.state.ecam());
        Access::Done
    }

    fn park(&mut self) -> Saved {
        Saved::of(&self.state)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        self.state = saved.take()?;
        self.ecam.place(self.state.ecam());
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
    fn both_doors_show_the_bridge_and_nobody_elsewhere() {
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
