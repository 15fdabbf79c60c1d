//! The configuration header of a function (PCI Local Bus 3.0, 6.1): its bytes, and a mask of the
//! bits that the guest can write. BAR sizing needs no extra code, because the low bits of a BAR are
//! not writable.

use super::{Bar, Identity, msi};
use crate::bytes::Bytes;
use crate::hypervisor::Message;

const COMMAND: usize = 0x04;
// Command register: decode ports, decode memory, bus master, disable INTx.
const IO: u16 = 1;
const MEMORY: u16 = 2;
const MASTER: u16 = 4;
const NO_INTX: u16 = 1 << 10;
// Status register, and its bits "interrupt pending" and "has capabilities".
const STATUS: usize = 0x06;
const PENDING: u8 = 1 << 3;
const CAPABILITIES: u8 = 1 << 4;
const BARS: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const FIRST_CAPABILITY: usize = 0x34;
const LINE: usize = 0x3c;
const PIN: usize = 0x3d;
/// The first byte after the standard header.
const BODY: usize = 0x40;
pub(super) const MSIX: u8 = 0x11;
/// The capability of PCI Express functions.
const EXPRESS: u8 = 0x10;

/// The size of conventional configuration space in bytes.
pub(super) const SIZE: usize = 256;

/// A header: its bytes, and a mask of the bits that the guest can write.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Header {
    bytes: Bytes<SIZE>,
    writable: Bytes<SIZE>,
}

impl Header {
    pub(super) fn new(identity: &Identity) -> Self {
        let mut header = Self { bytes: Bytes::default(), writable: Bytes::default() };
        let id = identity.id;
        header.put(0x00, &id.vendor.to_le_bytes());
        header.put(0x02, &id.device.to_le_bytes());
        header.put(0x08, &(id.class << 8 | u32::from(id.revision)).to_le_bytes());
        header.put(0x0e, &[u8::from(identity.multifunction) << 7]);
        header.put(SUBSYSTEM, &id.subsystem.0.to_le_bytes());
        header.put(SUBSYSTEM + 2, &id.subsystem.1.to_le_bytes());
        header.put(PIN, &[identity.pin.map_or(0, |pin| pin + 1)]);
        // These bits are writable in all functions, even without BARs: firmware tests which bits it
        // can set, and starts no driver on a bridge whose ports it cannot enable. All PCs also have
        // parity and SERR enable (bits 6 and 8).
        let mut command = IO | MEMORY | MASTER | 1 << 6 | 1 << 8;
        if identity.pin.is_some() {
            command |= NO_INTX;
        }
        header.allow(COMMAND, &command.to_le_bytes());
        header.allow(0x0c, &[0xff]);
        header.allow(LINE, &[0xff]);
        for (number, bar) in &identity.bars {
            header.bar(usize::from(*number), *bar);
        }
        header.chain(identity);
        header
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    fn bar(&mut self, number: usize, bar: Bar) {
        let at = BARS + 4 * number;
        let mask = !(bar.size() - 1);
        match bar {
            Bar::Memory32(_) => self.allow(at, &mask.to_le_bytes()[..4]),
            Bar::Prefetchable32(_) => {
                self.put(at, &[0b1000]);
                self.allow(at, &mask.to_le_bytes()[..4]);
            }
            Bar::Memory64(_) => {
                // 64-bit, prefetchable.
                self.put(at, &[0b1100]);
                self.allow(at, &mask.to_le_bytes());
            }
            Bar::Port(_) => {
                self.put(at, &[1]);
                self.allow(at, &(mask & 0xffff).to_le_bytes()[..4]);
            }
        }
    }

    /// Links the capabilities: MSI-X first, then MSI.
    fn chain(&mut self, identity: &Identity) {
        let msix = identity.msix.map(|(vectors, bar)| {
            let pending = super::msix::pending_at(vectors);
            let mut body = (vectors - 1).to_le_bytes().to_vec();
            body.extend(u32::from(bar).to_le_bytes());
            body.extend((pending | u32::from(bar)).to_le_bytes());
            (MSIX, body)
        });
        let msi = identity.msi.then(|| (msi::ID, msi::BODY.to_vec()));
        let (mut link, mut at) = (FIRST_CAPABILITY, usize::from(identity.capabilities_at));
        for (id, body) in msix.iter().chain(&msi).chain(&identity.capabilities) {
            self.bytes[STATUS] |= CAPABILITIES;
            self.bytes[link] = u8::try_from(at).expect("capabilities fit a header");
            self.put(at, &[*id, 0]);
            self.put(at + 2, body);
            if *id == MSIX {
                // The bits "enable" and "function mask".
                self.allow(at + 2, &[0, 0xc0]);
            }
            if *id == msi::ID {
                self.allow(at + 2, &msi::WRITABLE);
            }
            link = at + 1;
            at += (body.len() + 2).next_multiple_of(4);
        }
    }

    pub(super) fn bytes(&self) -> Bytes<SIZE> {
        self.bytes.clone()
    }

    /// Restores the writable bits from a saved state.
    pub(super) fn restore(&mut self, saved: &Bytes<SIZE>) {
        self.write(0, &saved[..]);
    }

    /// `pending` is the state of the INTx request.
    pub(super) fn read(&self, offset: usize, data: &mut [u8], pending: bool) {
        for (at, byte) in (offset..).zip(data) {
            *byte = self.bytes.get(at).copied().unwrap_or_else(|| self.extended());
            if at == STATUS && pending {
                *byte |= PENDING;
            }
        }
    }

    /// A byte of the extended configuration space. That of a conventional function does not exist,
    /// and that of a PCI Express function has no capabilities.
    fn extended(&self) -> u8 {
        if self.capability(EXPRESS).is_some() { 0 } else { 0xff }
    }

    pub(super) fn write(&mut self, offset: usize, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            let Some(&mask) = self.writable.get(at) else { return };
            self.bytes[at] = self.bytes[at] & !mask | byte & mask;
        }
    }

    fn command(&self) -> u16 {
        u16::from_le_bytes([self.bytes[COMMAND], self.bytes[COMMAND + 1]])
    }

    /// Whether bus mastering is enabled.
    pub(super) fn is_master(&self) -> bool {
        self.command() & MASTER != 0
    }

    pub(super) fn intx_disabled(&self) -> bool {
        self.command() & NO_INTX != 0
    }

    /// The present address of a BAR. `None` if decoding is off, or if the address is 0.
    pub(super) fn bar_address(&self, number: u8, bar: Bar) -> Option<u64> {
        let at = BARS + 4 * usize::from(number);
        let dword = |at| {
            let mut bytes = [0; 4];
            self.read(at, &mut bytes, false);
            u64::from(u32::from_le_bytes(bytes))
        };
        let (address, enable) = match bar {
            Bar::Memory32(_) | Bar::Prefetchable32(_) => (dword(at) & !0xf, MEMORY),
            Bar::Memory64(_) => (dword(at) & !0xf | dword(at + 4) << 32, MEMORY),
            Bar::Port(_) => (dword(at) & !3, IO),
        };
        (self.command() & enable != 0 && address != 0).then_some(address)
    }

    /// The control word of MSI-X. 0 if the function has no MSI-X.
    pub(super) fn msix_control(&self) -> u16 {
        let control = |at| u16::from_le_bytes([self.bytes[at + 2], self.bytes[at + 3]]);
        self.capability(MSIX).map_or(0, control)
    }

    /// The message of MSI, while the guest enables it.
    pub(super) fn message(&self) -> Option<Message> {
        let body = &self.bytes[self.capability(msi::ID)? + 2..];
        msi::message(body.first_chunk()?)
    }

    fn capability(&self, wanted: u8) -> Option<usize> {
        let next = |at: &usize| Some(usize::from(self.bytes[at + 1])).filter(|it| *it >= BODY);
        let first = Some(usize::from(self.bytes[FIRST_CAPABILITY])).filter(|it| *it >= BODY);
        std::iter::successors(first, next).find(|at| self.bytes[*at] == wanted)
    }
}
