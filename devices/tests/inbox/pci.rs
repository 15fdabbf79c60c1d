//! pci.sys, the bus driver in front of each function: finds the capabilities, measures and places
//! the BARs, connects messages, and switches the power.
//!
//! Sources: PCI Local Bus 3.0, 6.2.5.1 (measuring a BAR) and 6.8 (messages). A function without a
//! power management capability has no PMCSR, so its registers keep their values in D3. Conjecture:
//! Windows nevertheless switches decoding and bus mastering off, and writes the configuration back.

use devices::device::Kind;
use devices::pci::Address;
use devices::testutil::Bench;

const COMMAND: u64 = 0x04;
const STATUS: u64 = 0x06;
const FIRST_CAPABILITY: u64 = 0x34;
/// Command: decode memory, bus master, no interrupt line.
pub(crate) const MEMORY: u16 = 1 << 1;
pub(crate) const MASTER: u16 = 1 << 2;
const NO_INTX: u16 = 1 << 10;
/// Capabilities: power management, MSI, MSI-X.
const POWER: u8 = 0x01;
const MSI: u8 = 0x05;
const MSIX: u8 = 0x11;

pub(crate) struct Function {
    at: Address,
    /// The command register and the BARs while the function has no power.
    saved: Option<(u16, [u32; 6])>,
}

impl Function {
    /// Enumerates the function: its identity, its capabilities, and the size of each BAR.
    pub(crate) fn find(bench: &Bench, at: Address) -> Self {
        let function = Self { at, saved: None };
        assert_ne!(function.get(bench, 0), u32::MAX, "there is no function");
        let was = function.word(bench, COMMAND);
        function.set_command(bench, was & !(MEMORY | MASTER | 1));
        for bar in 0..6 {
            let old = function.get(bench, bar_at(bar));
            function.set(bench, bar_at(bar), u32::MAX);
            // The upper half of a port's BAR is zero.
            let mask = match function.get(bench, bar_at(bar)) {
                ports if ports & 1 == 1 => ports & !3 | 0xffff_0000,
                memory => memory & !0xf,
            };
            assert!(mask == 0 || (!mask).wrapping_add(1).is_power_of_two(), "BAR {bar}: {mask:#x}");
            function.set(bench, bar_at(bar), old);
            assert_eq!(function.get(bench, bar_at(bar)), old);
        }
        function.set_command(bench, was);
        function
    }

    fn address(&self, register: u64) -> u64 {
        self.at.config() + register
    }

    pub(crate) fn get(&self, bench: &Bench, register: u64) -> u32 {
        u32::from_le_bytes(bench.read(Kind::Config, self.address(register)))
    }

    fn set(&self, bench: &Bench, register: u64, value: u32) {
        bench.write(Kind::Config, self.address(register), &value.to_le_bytes());
    }

    fn word(&self, bench: &Bench, register: u64) -> u16 {
        u16::from_le_bytes(bench.read(Kind::Config, self.address(register)))
    }

    fn byte(&self, bench: &Bench, register: u64) -> u8 {
        let [byte] = bench.read(Kind::Config, self.address(register));
        byte
    }

    pub(crate) fn set_command(&self, bench: &Bench, command: u16) {
        bench.write(Kind::Config, self.address(COMMAND), &command.to_le_bytes());
    }

    /// The register of a capability.
    fn capability(&self, bench: &Bench, wanted: u8) -> Option<u64> {
        if self.word(bench, STATUS) & 1 << 4 == 0 {
            return None;
        }
        let mut at = u64::from(self.byte(bench, FIRST_CAPABILITY));
        while at >= 0x40 {
            if self.byte(bench, at) == wanted {
                return Some(at);
            }
            at = u64::from(self.byte(bench, at + 1));
        }
        None
    }

    /// Assigns an address to a BAR.
    pub(crate) fn place(&self, bench: &Bench, bar: u64, address: u32) {
        self.set(bench, bar_at(bar), address);
    }

    /// Starts the function: decoding and bus mastering are on.
    pub(crate) fn start(&self, bench: &Bench) {
        self.set_command(bench, MEMORY | MASTER);
    }

    /// Connects vectors of MSI-X, whose table is at `table`. The vector is the message.
    pub(crate) fn connect_vectors(&self, bench: &Bench, table: u64, vectors: u32) {
        let at = self.capability(bench, MSIX).expect("MSI-X");
        assert!(u32::from(self.word(bench, at + 2) & 0x7ff) + 1 >= vectors, "vectors");
        for vector in 0..vectors {
            let entry = table + 16 * u64::from(vector);
            for (offset, value) in [(0, 0xfee0_0000), (4, 0), (8, vector), (12, 0)] {
                bench.write(Kind::Memory, entry + offset, &u32::to_le_bytes(value));
            }
        }
        bench.write(Kind::Config, self.address(at + 2), &0x8000_u16.to_le_bytes());
        self.set_command(bench, MEMORY | MASTER | NO_INTX);
    }

    /// Connects the message of MSI.
    pub(crate) fn connect_message(&self, bench: &Bench, data: u16) {
        let at = self.capability(bench, MSI).expect("MSI");
        self.set(bench, at + 4, 0xfee0_0000);
        self.set(bench, at + 8, 0);
        bench.write(Kind::Config, self.address(at + 12), &data.to_le_bytes());
        bench.write(Kind::Config, self.address(at + 2), &1_u16.to_le_bytes());
        self.set_command(bench, MEMORY | MASTER | NO_INTX);
    }

    /// D3: there is no PMCSR, so only decoding and bus mastering end.
    pub(crate) fn power_down(&mut self, bench: &Bench) {
        assert_eq!(self.capability(bench, POWER), None, "without PMCSR, D3 is not lossy");
        let bars = std::array::from_fn(|bar| self.get(bench, bar_at(bar as u64)));
        let command = self.word(bench, COMMAND);
        self.saved = Some((command, bars));
        self.set_command(bench, command & !(MEMORY | MASTER));
    }

    /// D0: the saved configuration is written back.
    pub(crate) fn power_up(&mut self, bench: &Bench) {
        let (command, bars) = self.saved.take().expect("it is in D3");
        for (bar, value) in (0..).zip(bars) {
            self.set(bench, bar_at(bar), value);
        }
        self.set_command(bench, command);
    }
}

fn bar_at(bar: u64) -> u64 {
    0x10 + 4 * bar
}
