//! Boards, drivers and hostile guests for tests and fuzzers.

pub mod ahci;
pub mod bulk;
pub mod driver;
pub mod e1000e;
pub mod hda;
pub mod hostile;
pub mod image;
pub mod usb_host;
pub(crate) mod vhost;
pub mod xhci;

use std::sync::{Arc, Mutex};

use host::ram::GuestMemoryMmap;
use vm_memory::GuestAddress;

use crate::board::Board;
use crate::grants::Event;
use crate::hypervisor::fake::FakeHypervisor;
use host::memory::Memory;

/// A board on a fake host, with RAM and a record of the devices' requests.
pub struct Bench {
    pub board: Board,
    pub hypervisor: FakeHypervisor,
    pub memory: Memory,
    pub events: Arc<Mutex<Vec<Event>>>,
}

impl Bench {
    /// RAM is from 0 to `size`.
    pub fn new(size: usize) -> Self {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).unwrap();
        let memory = Memory::new(Arc::new(ram));
        let host = FakeHypervisor::default();
        let events = Arc::<Mutex<Vec<Event>>>::default();
        let recorded = events.clone();
        let record = Arc::new(move |event| recorded.lock().unwrap().push(event));
        let board = Board::new(memory.clone(), Arc::new(host.clone()), record);
        Self { board, hypervisor: host, memory, events }
    }

    pub fn read<const N: usize>(&self, kind: crate::device::Kind, address: u64) -> [u8; N] {
        let mut data = [0; N];
        self.board.shared.spaces.of(kind).read(address, &mut data);
        data
    }

    pub fn write(&self, kind: crate::device::Kind, address: u64, data: &[u8]) {
        self.board.shared.spaces.of(kind).write(address, data);
    }
}

/// A board with only an LPC bridge, running.
#[cfg(test)]
pub(crate) fn lpc_bench(smm: bool) -> Bench {
    use crate::grants::Build;

    let mut bench = Bench::new(4096);
    bench.board.add("lpc", |grants| crate::pci::lpc::Config { smm }.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}
