//! A hostile guest: arbitrary bytes control its accesses to existing registers, and its rings.

use crate::device::Kind;
use crate::grants::Claim;
use crate::testutil::Bench;
use crate::testutil::driver::{Descriptor, Driver};

/// The length of the first part of configuration space, with commands, BARs and capabilities.
/// Writes to it move windows.
const HEADER: u64 = 0x80;

/// The guest. It knows all grants of all devices, and follows windows when they move.
pub struct Guest<'a, B> {
    bench: &'a Bench,
    targets: Vec<&'a Claim>,
    bytes: B,
}

impl<'a, B: Iterator<Item = u8>> Guest<'a, B> {
    pub fn new(bench: &'a Bench, bytes: B) -> Self {
        let claims = bench.board.claims().flat_map(|(_, claims)| claims);
        // The configuration space of a function is claimed twice: as a range, and as a function.
        let targets = claims.filter(|it| match it {
            Claim::Fixed(kind, _) => *kind != Kind::Config,
            Claim::Window(_) | Claim::Pci(..) => true,
            Claim::Line(_) | Claim::Acpi(_) => false,
        });
        Self { bench, targets: targets.collect(), bytes }
    }

    /// Sets up all functions as firmware does, with addresses for BARs and decoding enabled. The
    /// guest does not write their configuration later.
    pub fn open(mut self) -> Self {
        let (mut memory, mut ports) = (0x4000_0000_u32, 0xc000_u32);
        for target in &self.targets {
            let Claim::Pci(at, _) = target else { continue };
            let config = &self.bench.board.shared.spaces.config;
            for bar in 0..6 {
                config.write(at.config() + 0x10 + 4 * bar, &(memory | ports).to_le_bytes());
                (memory, ports) = (memory + (8 << 20), ports + 0x40);
            }
            // Enable port decoding, memory decoding, bus mastering and INTx.
            config.write(at.config() + 4, &[7, 0]);
        }
        self.targets.retain(|it| !matches!(it, Claim::Pci(..)));
        self
    }

    /// Makes one access. Returns false if the bytes are used up.
    pub fn step(&mut self) -> bool {
        self.access().is_some()
    }

    fn access(&mut self) -> Option<()> {
        let target = usize::from(self.bytes.next()?);
        let how = self.bytes.next()?;
        let length = match how >> 1 & 7 {
            odd @ 7 => usize::from(self.bytes.next()? & odd) + 1,
            power => 1 << (power & 3),
        };
        let aim = self.aim(how >> 4 & 3)?;
        // A machine without claims, and a window that has no address, cannot be accessed.
        let Some(target) = self.targets.get(target % self.targets.len().max(1)) else {
            return Some(());
        };
        let (kind, start, size) = match target {
            Claim::Fixed(kind, range) => (*kind, range.start, range.end - range.start),
            Claim::Pci(address, _) => (Kind::Config, address.config(), HEADER),
            Claim::Window(window) => {
                let Some(at) = window.at() else { return Some(()) };
                (window.kind, at, window.size)
            }
            Claim::Line(_) | Claim::Acpi(_) => return Some(()),
        };
        let space = self.bench.board.shared.spaces.of(kind);
        // Accesses near the end of configuration space use its full size.
        let size = if kind == Kind::Config && how >> 4 & 2 != 0 { 0x1000 } else { size };
        let address = start.wrapping_add(aim % size);
        let mut data = [0; 8];
        if how & 1 == 0 {
            space.read(address, &mut data[..length]);
        } else {
            data = self.value(how >> 6)?;
            space.write(address, &data[..length]);
        }
        Some(())
    }

    /// Chooses an offset: most registers are near the start, most bugs near the end.
    fn aim(&mut self, how: u8) -> Option<u64> {
        let byte = u64::from(self.bytes.next()?);
        Some(match how {
            0 => byte,
            1 => (byte & 63) * 4,
            2 => u64::from(u32::from_le_bytes(self.take()?)),
            _ => u64::MAX - byte,
        })
    }

    fn value(&mut self, how: u8) -> Option<[u8; 8]> {
        Some(match how {
            0 => self.take()?,
            1 => u64::from(self.bytes.next()?).to_le_bytes(),
            2 => (1_u64 << (self.bytes.next()? & 63)).to_le_bytes(),
            _ => [0xff; 8],
        })
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        for byte in &mut bytes {
            *byte = self.bytes.next()?;
        }
        Some(bytes)
    }
}

/// The actions of a hostile driver, which `bytes` control. All methods return `None` when the bytes
/// are used up.
pub struct Actions<B> {
    bytes: B,
    ram: u64,
}

impl<B: Iterator<Item = u8>> Actions<B> {
    /// `ram` is the end of RAM, which starts at 0.
    pub fn new(bytes: B, ram: u64) -> Self {
        Self { bytes, ram }
    }

    pub fn byte(&mut self) -> Option<u8> {
        self.bytes.next()
    }

    pub fn short(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes([self.byte()?, self.byte()?]))
    }

    pub fn word(&mut self) -> Option<u32> {
        Some(u32::from(self.short()?) | u32::from(self.short()?) << 16)
    }

    /// An address: mostly in RAM, sometimes at its end, rarely any number.
    pub fn address(&mut self) -> Option<u64> {
        let (kind, low) = (self.byte()?, u64::from(self.short()?));
        Some(match kind {
            0..200 => low * 16 % self.ram,
            200..230 => self.ram - (low & 0xff),
            230..250 => u64::MAX - low,
            _ => low << 40,
        })
    }

    /// A length: of a message, a header or a buffer, rarely any number.
    pub fn length(&mut self) -> Option<u32> {
        let (kind, low) = (self.byte()?, u32::from(self.short()?));
        Some(match kind {
            0..50 => 8,
            50..90 => low & 0x1f,
            90..200 => low & 0x7ff,
            200..240 => low * 4,
            _ => u32::MAX - low,
        })
    }

    /// Performs one action that is possible with every device that has rings of `entries` entries:
    /// it writes descriptors, chains, doorbells, memory or the status, or pauses the machine.
    pub fn corrupt_queue(
        &mut self,
        driver: &mut Driver<'_>,
        queue: u16,
        entries: u16,
    ) -> Option<()> {
        match self.byte()? {
            0..120 => {
                let (index, next) = (u16::from(self.byte()?), u16::from(self.byte()?));
                let (address, length) = (self.address()?, self.length()?);
                // Most descriptors continue with a valid one, and few are tables.
                let flags = u16::from(self.byte()?) & if next < 240 { 3 } else { 7 };
                let next = if next < 250 { next % entries } else { next };
                let descriptor = Descriptor { address, length, flags, next };
                driver.write_descriptor(queue, index % entries, descriptor);
            }
            120..180 => {
                let head = u16::from(self.byte()?);
                driver.publish(queue, if head < 250 { head % entries } else { head });
            }
            180..220 => driver.kick(queue),
            220..232 => {
                let saved = driver.bench.board.park();
                driver.bench.board.run(saved).expect("the state was just saved");
            }
            232..250 => {
                let (at, value) = (self.address()?, self.word()?);
                driver.bench.memory.write(at, &value.to_le_bytes()).ok();
            }
            _ => driver.set_status(self.byte()?),
        }
        Some(())
    }
}

#[cfg(test)]
mod test {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::device::{Access, Device, Region, Saved};

    /// Records the accesses to it.
    struct Target(Arc<Mutex<Vec<(u64, usize)>>>);

    impl Device for Target {
        fn read(&mut self, _: Region, offset: u64, data: &mut [u8]) -> Access {
            self.0.lock().unwrap().push((offset, data.len()));
            Access::Done
        }
        fn write(&mut self, _: Region, offset: u64, data: &[u8]) -> Access {
            self.0.lock().unwrap().push((offset, data.len()));
            Access::Ignored
        }
        fn park(&mut self) -> Saved {
            Saved::default()
        }
        fn run(&mut self, _: Saved) -> anyhow::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn accesses_cover_every_byte_and_width_reproducibly() {
        let rounds = [(); 2].map(|()| {
            let (mut bench, hits) = (Bench::new(4096), Arc::<Mutex<Vec<_>>>::default());
            let target = Target(hits.clone());
            let build = |grants: &mut dyn crate::grants::Grants| {
                grants.claim(Kind::Port, 0x100..0x110)?;
                Ok(Box::new(target) as Box<dyn Device>)
            };
            bench.board.add("target", build).unwrap();
            let mut guest = Guest::new(&bench, host::testutil::noise::Noise::new(7));
            assert!((0..2000).all(|_| guest.step()));
            drop(bench);
            Arc::into_inner(hits).unwrap().into_inner().unwrap()
        });
        assert_eq!(rounds[0], rounds[1]);
        assert!((0..16).all(|at| rounds[0].contains(&(at, 1))));
        assert!((1..=8).all(|length| rounds[0].iter().any(|hit| hit.1 == length)));
    }

    #[test]
    fn stops_at_the_end_of_the_input() {
        let bench = Bench::new(4096);
        assert!(!Guest::new(&bench, [1, 2].into_iter()).step());
    }
}
