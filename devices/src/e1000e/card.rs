//! The registers with their side effects: resets, interrupts, NVM, PHY and statistics.
//!
//! One lock protects a card. Guest memory is accessed only under this lock, so a driver that has
//! disabled a ring or reset the card knows that its memory is its own again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::nvm::Nvm;
use super::phy::Phy;
use super::registers::{
    self, CTRL, CTRL_EXT, CTRL_EXT_EIAME, CTRL_EXT_IAME, CTRL_EXT_SELF_CLEARING, CTRL_PHY_RST,
    CTRL_RST, EECD, EECD_READ_ONLY, EERD, EEWR, EIAC, EITR, HEAD, HIGH, IAM, ICR, ICS, IMC, IMS,
    ITR, IVAR, LENGTH, MDIC, RAL, RCTL, RDBAL, RDT, Registers, SECOND, STATUS, STATUS_PHYRA, SWSM,
    TAIL, TCTL, TDBAL, TDT,
};
use super::signals::{Signals, VECTORS};
use crate::sleep::Orders;
use host::net::link::Link;

/// Causes of an interrupt, the bits of ICR (10.2.4.1).
pub(super) const TXDW: u32 = 1 << 0;
pub(super) const TXQE: u32 = 1 << 1;
const LSC: u32 = 1 << 2;
pub(super) const RXDMT0: u32 = 1 << 4;
pub(super) const RXT0: u32 = 1 << 7;
const MDAC: u32 = 1 << 9;
/// The causes of the two queues follow one another.
pub(super) const RXQ0: u32 = 1 << 20;
pub(super) const TXQ0: u32 = 1 << 22;
const OTHER: u32 = 1 << 24;
const ASSERTED: u32 = 1 << 31;
/// Causes that set OTHER when MSI-X is enabled: LSC, RXO, MDAC, SRPD, ACK, MNG.
const OTHER_CAUSES: u32 = LSC | 1 << 6 | MDAC | 1 << 16 | 1 << 17 | 1 << 18;
/// The bits that IMS has.
const MASK: u32 = 0x01f7_82d7;
/// Causes with a vector of their own, and the position of their field in IVAR (10.2.4.9).
const VECTORS_OF: [(u32, u32); 5] =
    [(RXQ0, 0), (RXQ0 << 1, 4), (TXQ0, 8), (TXQ0 << 1, 12), (OTHER, 16)];
/// The unit of ITR and EITR.
const THROTTLE_UNIT: Duration = Duration::from_nanos(256);

/// Bytes of a descriptor, except in packet split rings.
pub(super) const DESCRIPTOR: u32 = 16;

pub(super) struct Card {
    pub(super) registers: Registers,
    phy: Phy,
    nvm: Nvm,
    signals: Signals,
    /// Causes for which a message was sent, and which are still pending.
    notified: u32,
    link: Arc<Link>,
    orders: Arc<Orders>,
    /// The number of resets. Work that was begun before a reset is dropped.
    pub(super) resets: u32,
    /// The number of writes that may give the thread work.
    pub(super) kicks: u32,
    /// The thread waits, and must be woken by such a write.
    pub(super) sleeping: bool,
    /// It also waits for buffers.
    pub(super) starved: bool,
}

/// The state of a card that is saved.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    registers: registers::Saved,
    phy: Phy,
    nvm: Option<Nvm>,
    notified: u32,
    /// Vectors with a message that the throttle still holds back.
    #[serde(default)]
    late: Vec<u16>,
}

/// A ring as the driver programmed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    pub(super) base: u64,
    /// Number of descriptors.
    pub(super) count: u32,
    pub(super) head: u32,
    /// Number of descriptors that the card owns.
    pub(super) ready: u32,
    size: u32,
}

impl Ring {
    /// The address of a descriptor, counted from the head.
    pub(super) fn address(&self, number: u32) -> u64 {
        let index = (self.head + number) % self.count;
        self.base.wrapping_add(u64::from(index) * u64::from(self.size))
    }
}

impl Card {
    pub(super) fn new(
        address: [u8; 6],
        signals: Signals,
        link: Arc<Link>,
        orders: Arc<Orders>,
    ) -> Self {
        Self {
            registers: Registers::power_on(address),
            phy: Phy::default(),
            nvm: Nvm::new(address),
            signals,
            notified: 0,
            link,
            orders,
            resets: 0,
            kicks: 0,
            sleeping: false,
            starved: false,
        }
    }

    pub(super) fn signals(&mut self) -> &mut Signals {
        &mut self.signals
    }

    pub(super) fn save(&self) -> State {
        State {
            registers: self.registers.save(),
            phy: self.phy.clone(),
            nvm: Some(self.nvm.clone()),
            notified: self.notified,
            late: self.signals.late(),
        }
    }

    /// `address` is the one at power-on.
    pub(super) fn restore(&mut self, state: State, address: [u8; 6]) -> anyhow::Result<()> {
        let nvm = state.nvm.unwrap_or_else(|| Nvm::new(address));
        anyhow::ensure!(nvm.is_valid() && state.phy.is_valid(), "an NVM or PHY of another size");
        self.nvm = nvm;
        self.reset();
        self.phy = state.phy;
        if state.registers != registers::Saved::default() {
            self.registers.restore(&state.registers);
        }
        self.notified = state.notified;
        self.signals.restore(&state.late);
        self.update();
        Ok(())
    }

    /// Its first receive address (RAL0 and RAH0).
    pub(super) fn address(&self) -> [u8; 6] {
        let [low, high] = [0, 4].map(|half| self.registers.get(RAL + half).to_le_bytes());
        [low[0], low[1], low[2], low[3], high[0], high[1]]
    }

    fn reset(&mut self) {
        self.registers = Registers::power_on(self.nvm.address());
        self.phy = Phy::default();
        self.signals.reset();
        self.resets = self.resets.wrapping_add(1);
        self.update();
    }

    /// A ring, unless it is empty or its registers contradict each other.
    pub(super) fn ring(&self, first: u32, queue: u32, size: u32) -> Option<Ring> {
        let at = |offset| self.registers.get(first + SECOND * queue + offset);
        let base = u64::from(at(HIGH)) << 32 | u64::from(at(0));
        // Head and tail count 16 bytes, also if a descriptor has more.
        let unit = size / DESCRIPTOR;
        let (count, head, tail) = (at(LENGTH) / size, at(HEAD) / unit, at(TAIL) / unit);
        if head >= count || tail >= count {
            return None;
        }
        let ready = if tail >= head { tail - head } else { tail + count - head };
        Some(Ring { base, count, head, ready, size })
    }

    /// Advances the head of a ring by `count` descriptors.
    pub(super) fn advance(&mut self, first: u32, queue: u32, ring: &Ring, count: u32) {
        let head = (ring.head + count) % ring.count * (ring.size / DESCRIPTOR);
        self.registers.set(first + SECOND * queue + HEAD, head);
    }

    /// Sets causes of an interrupt.
    pub(super) fn raise(&mut self, causes: u32) {
        self.registers.set(ICR, self.registers.get(ICR) | causes);
        self.update();
    }

    pub(super) fn link_changed(&mut self) {
        self.raise(LSC);
        self.kick(true);
    }

    /// Makes the thread look for work, and wakes it if `wake`.
    fn kick(&mut self, wake: bool) {
        self.kicks = self.kicks.wrapping_add(1);
        if wake && std::mem::take(&mut self.sleeping) {
            self.orders.wake();
        }
    }

    fn interval(&self, vector: u16) -> Duration {
        let msix = self.signals.has_msix();
        let from = if msix { EITR + 4 * u32::from(vector) } else { ITR };
        THROTTLE_UNIT * (self.registers.get(from) & 0xffff)
    }

    /// Sends late interrupts. Returns when the next one is due.
    pub(super) fn send_due(&mut self) -> Option<Instant> {
        let intervals: Vec<_> = (0..VECTORS).map(|it| self.interval(it)).collect();
        self.signals.send_due(|it| intervals[usize::from(it)])
    }

    /// Applies ICR and IMS to the messages and to the line.
    fn update(&mut self) {
        let msix = self.signals.has_msix();
        let mut icr = self.registers.get(ICR) & !ASSERTED;
        if msix && icr & OTHER_CAUSES != 0 {
            icr |= OTHER;
        }
        let pending = icr & self.registers.get(IMS);
        self.registers.set(ICR, icr | if pending != 0 { ASSERTED } else { 0 });
        self.signals.set_line(pending != 0);
        let new = pending & !self.notified;
        self.notified = pending;
        if msix {
            for (cause, field) in VECTORS_OF {
                if new & cause != 0 {
                    self.send_vector(cause, self.registers.get(IVAR) >> field & 15);
                }
            }
            if self.registers.get(ICR) & self.registers.get(IMS) == 0 {
                self.registers.set(ICR, self.registers.get(ICR) & !ASSERTED);
            }
        } else if new != 0 {
            self.signals.send(0, self.interval(0));
        }
    }

    fn send_vector(&mut self, cause: u32, entry: u32) {
        if let Ok(vector @ 0..VECTORS) = u16::try_from(entry & 7)
            && entry & 8 != 0
        {
            self.signals.send(vector, self.interval(vector));
        }
        let extended = self.registers.get(CTRL_EXT);
        let cleared = self.registers.get(EIAC) & cause;
        let mut masked = if extended & CTRL_EXT_IAME == 0 { cleared } else { 0 };
        if extended & CTRL_EXT_EIAME != 0 {
            masked |= self.registers.get(IAM) & cause;
        }
        self.registers.set(IMS, self.registers.get(IMS) & !masked);
        self.registers.set(ICR, self.registers.get(ICR) & !cleared);
        self.notified &= !(cleared | masked);
    }

    /// With MSI-X, causes stay if none of them is an interrupt now (10.2.4.1).
    fn read_icr(&mut self) -> u32 {
        let icr = self.registers.get(ICR);
        let asserted = icr & ASSERTED != 0;
        if asserted || self.registers.get(IMS) == 0 || !self.signals.has_msix() {
            self.registers.set(ICR, 0);
        }
        if asserted && self.registers.has(CTRL_EXT, CTRL_EXT_IAME) {
            self.registers.set(IMS, self.registers.get(IMS) & !self.registers.get(IAM));
        }
        self.update();
        icr
    }

    fn write_icr(&mut self, value: u32) {
        let icr = self.registers.get(ICR);
        if icr & ASSERTED != 0 && self.registers.has(CTRL_EXT, CTRL_EXT_IAME) {
            self.registers.set(IMS, self.registers.get(IMS) & !self.registers.get(IAM));
        }
        // Windows' driver expects that OTHER clears its causes too.
        let others = if value & OTHER != 0 { OTHER_CAUSES } else { 0 };
        self.registers.set(ICR, icr & !(value | others));
        self.update();
    }

    /// The value of a register. `None` if there is no such register.
    pub(super) fn read(&mut self, offset: u32) -> Option<u32> {
        let offset = registers::canonical(offset);
        let value = self.registers.get(offset);
        Some(match offset {
            ICR => self.read_icr(),
            ICS => self.registers.get(ICR),
            STATUS => self.registers.status(self.link.is_up()),
            // Reading takes the semaphore (10.2.10.14).
            SWSM => {
                self.registers.set(SWSM, value | 1);
                value
            }
            _ if registers::is_statistic(offset) => {
                self.registers.set(offset, 0);
                value
            }
            CTRL | CTRL_EXT | EECD | EERD | EEWR | MDIC | ITR | IMS | IMC => value,
            _ if registers::is_stored(offset) => value,
            _ => return None,
        })
    }

    /// Writes a register. Returns `None` if there is no such register.
    pub(super) fn write(&mut self, offset: u32, value: u32) -> Option<()> {
        let offset = registers::canonical(offset);
        match offset {
            CTRL => self.write_ctrl(value),
            STATUS => {
                let kept = if value & STATUS_PHYRA == 0 { !STATUS_PHYRA } else { !0 };
                self.registers.set(STATUS, self.registers.get(STATUS) & kept);
            }
            EECD => {
                let fixed = self.registers.get(EECD) & EECD_READ_ONLY;
                self.registers.set(EECD, fixed | value & !EECD_READ_ONLY);
            }
            EERD => self.registers.set(EERD, self.nvm.execute(value, false)),
            EEWR => self.registers.set(EEWR, self.nvm.execute(value, true)),
            CTRL_EXT => self.registers.set(CTRL_EXT, value & !CTRL_EXT_SELF_CLEARING),
            MDIC => self.command_phy(value),
            ICR => self.write_icr(value),
            ICS => self.raise(value & MASK),
            IMS => {
                self.registers.set(IMS, self.registers.get(IMS) | value & MASK);
                self.update();
            }
            IMC => {
                self.registers.set(IMS, self.registers.get(IMS) & !value);
                self.update();
            }
            ITR => self.registers.set(ITR, value & 0xffff),
            _ if registers::is_statistic(offset) => {}
            _ if registers::is_stored(offset) => self.store(offset, value),
            _ => return None,
        }
        Some(())
    }

    fn store(&mut self, offset: u32, value: u32) {
        const SECOND_RDT: u32 = RDT + SECOND;
        const SECOND_TDT: u32 = TDT + SECOND;
        let ring = [RDBAL, TDBAL].into_iter().find(|it| (*it..it + 2 * SECOND).contains(&offset));
        let mask = match ring.map(|first| (offset - first) % SECOND) {
            Some(0) => !15,
            Some(LENGTH) => 0xf_ff80,
            Some(HEAD | TAIL) => 0xffff,
            _ => u32::MAX,
        };
        self.registers.set(offset, value & mask);
        match offset {
            RCTL | TCTL | TDT | SECOND_TDT => self.kick(true),
            RDT | SECOND_RDT => self.kick(self.starved),
            _ => {}
        }
    }

    fn write_ctrl(&mut self, value: u32) {
        if value & CTRL_RST != 0 {
            self.reset();
            return self.kick(true);
        }
        self.registers.set(CTRL, value & !CTRL_PHY_RST);
        if value & CTRL_PHY_RST != 0 {
            self.phy = Phy::default();
            self.registers.set(STATUS, self.registers.get(STATUS) | STATUS_PHYRA);
            self.raise(LSC);
        }
    }

    fn command_phy(&mut self, command: u32) {
        let done = self.phy.execute(command, self.link.is_up());
        self.registers.set(MDIC, done.mdic);
        let causes = [(done.interrupt, MDAC), (done.negotiated, LSC)];
        let causes =
            causes.into_iter().filter(|(on, _)| *on).fold(0, |sum, (_, cause)| sum | cause);
        if causes != 0 {
            self.raise(causes);
        }
    }

    /// Counts a frame of `length` bytes, with its CRC, that was received or sent.
    pub(super) fn count(&mut self, frame: &[u8], received: bool) {
        let registers = &mut self.registers;
        let length = u32::try_from(frame.len()).unwrap_or(u32::MAX).saturating_add(4);
        let (sizes, good, all, [low, total], [multicast, broadcast]) = if received {
            (0x405c, 0x4074, 0x40d0, [0x4088, 0x40c0], [0x407c, 0x4078])
        } else {
            (0x40d8, 0x4080, 0x40d4, [0x4090, 0x40c8], [0x40f0, 0x40f4])
        };
        let class = match length {
            0..=64 => 0,
            65..=127 => 1,
            128..=255 => 2,
            256..=511 => 3,
            512..=1023 => 4,
            _ => 5,
        };
        registers.count(sizes + 4 * class, 1);
        registers.count(good, 1);
        registers.count(all, 1);
        registers.count_bytes(low, length);
        registers.count_bytes(total, length);
        if frame.starts_with(&[0xff; 6]) {
            registers.count(broadcast, 1);
        } else if frame.first().is_some_and(|byte| byte & 1 != 0) {
            registers.count(multicast, 1);
        }
    }
}
