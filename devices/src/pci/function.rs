//! The common part of all PCI functions: wraps a device, and implements its configuration space.

use std::sync::Arc;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::header::{self, Header};
use super::msi::Msi;
use super::msix::{self, Msix};
use super::{Address, Bar, Identity, Interrupt};
use crate::bus::Window;
use crate::bytes::Bytes;
use crate::device::{Access, Device, Kind, Region, Saved};
use crate::hypervisor::Hypervisor;
use crate::line::Line;
use crate::resources::Resources;
use host::memory::Memory;

/// The resources of a PCI function, granted to its device. `wrap` wraps the device as the
/// function.
pub struct Slot {
    pub at: Address,
    /// The region of the configuration registers that the device implements itself.
    pub config: Region,
    /// Guest RAM, accessible only while the guest enables bus mastering.
    pub memory: Memory,
    pub interrupt: Interrupt,
    identity: Identity,
    bars: Vec<(u8, Bar, Arc<Window>)>,
}

impl Slot {
    pub(crate) fn new(
        at: Address,
        mut identity: Identity,
        resources: &mut dyn Resources,
        host: &dyn Hypervisor,
        memory: &Memory,
    ) -> anyhow::Result<Self> {
        let config = resources.claim(Kind::Config, at.config()..at.config() + 0x1000)?;
        if let Some((vectors, bar)) = identity.msix {
            identity.bars.push((bar, Bar::Memory32(msix::bar_size(vectors))));
        }
        let bars = identity.bars.iter().map(|(number, bar)| {
            let kind = if matches!(bar, Bar::Port(_)) { Kind::Port } else { Kind::Memory };
            (*number, *bar, resources.window(kind, bar.size()))
        });
        let bars = bars.collect();
        let line = identity.pin.map(|pin| resources.line(at.gsi(pin))).transpose()?;
        let msix = identity.msix.map(|(vectors, _)| {
            let routes = (0..vectors).map(|_| host.route());
            anyhow::Ok(Arc::new(Msix::new(routes.collect::<Result<_, _>>()?)))
        });
        let msi = identity.msi.then(|| host.route().map(|route| Arc::new(Msi::new(route))));
        let interrupt = Interrupt { msix: msix.transpose()?, msi: msi.transpose()?, line };
        let memory = memory.gated();
        Ok(Self { at, config, memory, interrupt, identity, bars })
    }

    pub fn bar(&self, number: u8) -> &Arc<Window> {
        let bar = self.bars.iter().find(|bar| bar.0 == number);
        &bar.expect("devices use only BARs of their identity").2
    }

    pub fn wrap(self, device: Box<dyn Device>) -> Box<dyn Device> {
        let table = self.identity.msix.map(|(_, bar)| self.bar(bar).region);
        Box::new(Function { header: Header::new(&self.identity), slot: self, device, table })
    }
}

struct Function {
    slot: Slot,
    header: Header,
    device: Box<dyn Device>,
    /// The BAR of the MSI-X table.
    table: Option<Region>,
}

#[derive(Serialize, Deserialize)]
struct State {
    header: Bytes<{ header::SIZE }>,
    msix: msix::State,
    device: Saved,
}

impl Function {
    fn owns(&self, offset: u64) -> bool {
        self.slot.identity.own_registers.iter().any(|range| range.contains(&offset))
    }

    fn line(&self) -> Option<&Line> {
        self.slot.interrupt.line.as_deref()
    }

    /// Applies the header: places the BARs, and sets bus mastering and the line.
    fn apply(&self) {
        self.slot.memory.set_open(self.header.is_master());
        let msix = self.slot.interrupt.msix.as_ref();
        if let Some(msix) = msix {
            msix.set_control(self.header.msix_control());
        }
        let msi = self.slot.interrupt.msi.as_ref();
        if let Some(msi) = msi {
            msi.aim(self.header.message());
        }
        if let Some(line) = self.line() {
            // Messages replace the line, which other devices share.
            let replaced = msix.is_some_and(|msix| msix.is_enabled())
                || msi.is_some_and(|msi| msi.is_enabled());
            line.gate(self.header.intx_disabled() || replaced);
        }
        for (number, bar, window) in &self.slot.bars {
            window.move_to(self.header.bar_address(*number, *bar));
        }
    }
}

impl Device for Function {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if Some(region) == self.table {
            let msix = self.slot.interrupt.msix.as_ref().expect("a table has vectors");
            msix.read(usize::try_from(offset).unwrap_or(usize::MAX), data);
            return Access::Done;
        }
        if region != self.slot.config || self.owns(offset) {
            return self.device.read(region, offset, data);
        }
        let pending = self.line().is_some_and(Line::is_set);
        self.header.read(usize::try_from(offset).unwrap_or(usize::MAX), data, pending);
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if Some(region) == self.table {
            let msix = self.slot.interrupt.msix.as_ref().expect("a table has vectors");
            msix.write(usize::try_from(offset).unwrap_or(usize::MAX), data);
            return Access::Done;
        }
        if region != self.slot.config || self.owns(offset) {
            return self.device.write(region, offset, data);
        }
        self.header.write(usize::try_from(offset).unwrap_or(usize::MAX), data);
        self.apply();
        Access::Done
    }

    fn park(&mut self) -> Saved {
        let device = self.device.park();
        self.slot.memory.set_open(false);
        let msix = self.slot.interrupt.msix.as_ref().map(|msix| msix.state()).unwrap_or_default();
        Saved::of(&State { header: self.header.bytes(), msix, device })
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<State> = saved.take().context("PCI function")?;
        self.header = Header::new(&self.slot.identity);
        let (msix, device) = saved.map_or_else(Default::default, |state| {
            self.header.restore(&state.header);
            (state.msix, state.device)
        });
        if let Some(vectors) = &self.slot.interrupt.msix {
            vectors.restore(msix);
        }
        self.apply();
        self.device.run(device)
    }
}

#[cfg(test)]
mod test {
    use std::sync::Mutex;

    use super::*;
    use crate::pci::Id;
    use crate::testutil::Bench;

    /// A device without registers. The test uses its handles.
    struct Held;

    impl Device for Held {
        fn read(&mut self, _: Region, offset: u64, data: &mut [u8]) -> Access {
            data.fill(u8::try_from(offset & 0xff).unwrap());
            Access::Done
        }
        fn write(&mut self, _: Region, _: u64, _: &[u8]) -> Access {
            Access::Ignored
        }
        fn park(&mut self) -> Saved {
            Saved::default()
        }
        fn run(&mut self, _: Saved) -> anyhow::Result<()> {
            Ok(())
        }
    }

    fn bench() -> (Bench, Interrupt, Memory) {
        let mut bench = Bench::new(1 << 20);
        let kept = Mutex::new(None);
        let id = Id { vendor: 1, device: 2, class: 0x00ff_0000, revision: 3, subsystem: (4, 5) };
        let identity = Identity {
            at: Some(Address::new(2, 0)),
            bars: vec![(0, Bar::Memory32(0x1000)), (2, Bar::Memory64(1 << 20)), (4, Bar::Port(64))],
            msix: Some((3, 1)),
            pin: Some(0),
            ..Identity::new(id)
        };
        bench
            .board
            .add("held", |grants| {
                let slot = grants.pci(identity)?;
                *kept.lock().unwrap() = Some((slot.interrupt.clone(), slot.memory.clone()));
                Ok(slot.wrap(Box::new(Held)))
            })
            .unwrap();
        bench.board.run(Vec::new()).unwrap();
        let (interrupt, memory) = kept.into_inner().unwrap().unwrap();
        (bench, interrupt, memory)
    }

    const AT: u64 = 2 << 15;

    fn config(bench: &Bench, offset: u64) -> u32 {
        u32::from_le_bytes(bench.read(Kind::Config, AT + offset))
    }

    fn set(bench: &Bench, offset: u64, value: u32) {
        bench.write(Kind::Config, AT + offset, &value.to_le_bytes());
    }

    #[test]
    fn bars_are_sized_placed_moved_and_disabled() {
        let (bench, ..) = bench();
        for (register, size) in [(0x10, !0xfff), (0x18, !0xf_ffff | 0xc), (0x20, 0xffc1)] {
            set(&bench, register, u32::MAX);
            assert_eq!(config(&bench, register), size, "register {register:#x}");
        }
        set(&bench, 0x1c, u32::MAX);
        assert_eq!(config(&bench, 0x1c), u32::MAX, "the upper half of a 64-bit BAR");
        set(&bench, 0x18, 0);
        set(&bench, 0x1c, 8);
        assert_eq!(bench.read(Kind::Memory, 0x8_0000_0005), [0xff], "decode is off");
        set(&bench, 0x04, 3);
        assert_eq!(bench.read(Kind::Memory, 0x8_0000_0005), [5]);
        set(&bench, 0x1c, 9);
        assert_eq!(bench.read(Kind::Memory, 0x9_0000_0007), [7]);
        assert_eq!(bench.read(Kind::Memory, 0x8_0000_0005), [0xff]);
        set(&bench, 0x20, 0xc000);
        assert_eq!(bench.read(Kind::Port, 0xc001), [1]);
        set(&bench, 0x04, 0);
        assert_eq!(bench.read(Kind::Port, 0xc001), [0xff]);
    }

    #[test]
    fn memory_is_accessible_only_as_bus_master() {
        let (bench, _, memory) = bench();
        assert!(memory.write(0, &[1]).is_err());
        set(&bench, 0x04, 4);
        assert!(memory.write(0, &[1]).is_ok());
        bench.board.park();
        assert!(memory.write(0, &[1]).is_err());
    }

    #[test]
    fn the_interrupt_line_shows_in_status_and_can_be_disabled() {
        let (bench, interrupt, _) = bench();
        let line = interrupt.line.unwrap();
        line.set(true);
        assert!(bench.hypervisor.pins.is_high(22));
        assert_eq!(config(&bench, 4) >> 16 & 8, 8);
        set(&bench, 4, 1 << 10);
        assert!(!bench.hypervisor.pins.is_high(22));
    }

    #[test]
    fn park_and_run_keep_the_state_and_reset_clears_it() {
        let (bench, interrupt, _) = bench();
        set(&bench, 0x10, 0xc000_0000);
        set(&bench, 0x14, 0xd000_0000);
        set(&bench, 0x40, 0x8000_0000);
        set(&bench, 4, 6);
        bench.write(Kind::Memory, 0xd000_0000, &0xfee0_1000_u64.to_le_bytes());
        bench.write(Kind::Memory, 0xd000_0008, &0x51_u64.to_le_bytes());
        let saved = bench.board.park();
        bench.board.run(saved.clone()).unwrap();
        assert_eq!(bench.board.park(), saved);
        bench.board.run(saved).unwrap();
        assert!(interrupt.message(0));
        assert_eq!(bench.hypervisor.sent.lock().unwrap()[0].data, 0x51);
        bench.board.reset().unwrap();
        assert_eq!(config(&bench, 0x10), 0);
        assert_eq!(bench.read(Kind::Memory, 0xc000_0000), [0xff]);
        assert!(!interrupt.message(0));
    }
}
