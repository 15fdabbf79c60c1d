//! The registers (xHCI 5.3 to 5.6, 7). The vCPUs read and write them, and leave requests in them
//! for the controller's thread.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::events::{Interrupter, SEGMENTS_LOG, half, set_half};
use super::port::Port;
use super::trb::{Ring, Trb};
use crate::pci::Interrupt;
use host::memory::Memory;

pub(super) const SLOTS: u8 = 64;
/// The number of interrupters, each with an MSI-X vector.
pub(super) const INTERRUPTERS: u16 = 16;

/// The offsets of the register sets.
const OPERATIONAL: u64 = 0x80;
const PORTS: u64 = OPERATIONAL + 0x400;
const RUNTIME: u64 = 0x1000;
const DOORBELLS: u64 = 0x2000;
pub(super) const BAR_SIZE: u64 = 0x4000;

/// Extended capabilities (7): legacy support, and the protocols of the ports.
const LEGACY: u64 = 0x20;
/// USBLEGSUP and USBLEGCTLSTS.
pub(super) const LEGACY_REGISTERS: std::ops::Range<u64> = LEGACY..LEGACY + 8;
const USB2: u64 = 0x30;
const USB3: u64 = 0x40;
/// "USB ".
const NAME: u32 = 0x2042_5355;
/// USBLEGSUP: the owner of the controller.
const FIRMWARE: u32 = 1 << 16;
const SYSTEM: u32 = 1 << 24;
/// USBLEGCTLSTS: interrupt enables for firmware, which never fire.
const LEGACY_ENABLES: u32 = 0xe011;

/// USBCMD.
pub(super) const RUN: u32 = 1 << 0;
const RESET: u32 = 1 << 1;
const INTERRUPT_ENABLE: u32 = 1 << 2;
const SAVE: u32 = 1 << 8;
const RESTORE: u32 = 1 << 9;
/// RS, INTE, HSEE, EWE, EU3S.
const COMMAND_KEPT: u32 = RUN | INTERRUPT_ENABLE | 1 << 3 | 1 << 10 | 1 << 11;

/// USBSTS.
pub(super) const HALTED: u32 = 1 << 0;
const SYSTEM_ERROR: u32 = 1 << 2;
const EVENT_INTERRUPT: u32 = 1 << 3;
pub(super) const PORT_CHANGE: u32 = 1 << 4;
const RESTORE_ERROR: u32 = 1 << 10;
const STATUS_CLEARED: u32 = SYSTEM_ERROR | EVENT_INTERRUPT | PORT_CHANGE | RESTORE_ERROR;

/// CRCR: stop, abort, running.
const COMMAND_STOP: u32 = 1 << 1;
const COMMAND_ABORT: u32 = 1 << 2;
const COMMANDS_RUN: u32 = 1 << 3;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Registers {
    pub(super) command: u32,
    pub(super) status: u32,
    notification: u32,
    pub(super) commands: Ring,
    pub(super) commands_run: bool,
    /// Command Stop or Abort was written to CRCR.
    stop_commands: bool,
    pub(super) dcbaap: u64,
    pub(super) config: u32,
    legacy: [u32; 2],
    pub(super) ports: Vec<Port>,
    interrupters: Vec<Interrupter>,
    /// Doorbells that were rung: a bit per endpoint, by slot.
    bells: Vec<u32>,
    /// HCRST, until the controller's thread has completed it.
    reset: bool,
}

/// Orders for the controller's thread.
pub(super) struct Requests {
    pub(super) reset: bool,
    pub(super) run: bool,
    pub(super) stop_commands: bool,
    pub(super) resets: Vec<usize>,
}

impl Registers {
    pub(super) fn new(sockets: u8) -> Self {
        Self {
            command: 0,
            status: HALTED,
            notification: 0,
            commands: Ring::default(),
            commands_run: false,
            stop_commands: false,
            dcbaap: 0,
            config: 0,
            legacy: [0; 2],
            ports: vec![Port::default(); 2 * usize::from(sockets)],
            interrupters: vec![Interrupter::default(); INTERRUPTERS.into()],
            bells: vec![0; usize::from(SLOTS) + 1],
            reset: false,
        }
    }

    pub(super) fn check(&self, sockets: u8) -> anyhow::Result<()> {
        let lengths = [self.ports.len(), self.interrupters.len(), self.bells.len()];
        let expected = [2 * usize::from(sockets), INTERRUPTERS.into(), usize::from(SLOTS) + 1];
        ensure!(
            lengths == expected,
            "saved state: ports, interrupters and slots: {lengths:?} instead of {expected:?}"
        );
        Ok(())
    }

    /// The first half of the ports is USB 2, the second half USB 3.
    pub(super) fn is_usb3(&self, port: usize) -> bool {
        port >= self.ports.len() / 2
    }

    pub(super) fn runs(&self) -> bool {
        self.command & RUN != 0
    }

    pub(super) fn read(&self, offset: u64, microframes: u32) -> u32 {
        match offset {
            0..LEGACY => self.capability(offset),
            LEGACY..OPERATIONAL => self.extended(offset),
            OPERATIONAL..PORTS => self.operational(offset - OPERATIONAL),
            PORTS..RUNTIME => {
                let (port, register) = port_at(offset);
                self.ports.get(port).map_or(0, |port| port.read(register))
            }
            RUNTIME..DOORBELLS => match interrupter_at(offset) {
                (None, 0) => microframes & 0x3fff,
                (number, register) => {
                    let interrupter = number.and_then(|number| self.interrupters.get(number));
                    interrupter.map_or(0, |interrupter| interrupter.read(register))
                }
            },
            // Doorbells read as zero.
            _ => 0,
        }
    }

    fn capability(&self, offset: u64) -> u32 {
        let ports = u32::try_from(self.ports.len()).unwrap_or(0);
        match offset {
            // CAPLENGTH, and HCIVERSION 1.0.
            0x00 => 0x0100_0000 | u32::try_from(OPERATIONAL).expect("a byte"),
            // HCSPARAMS1.
            0x04 => u32::from(SLOTS) | u32::from(INTERRUPTERS) << 8 | ports << 24,
            // HCSPARAMS2: scheduling takes up to a frame. No scratchpads.
            0x08 => 0xf | SEGMENTS_LOG << 4,
            // HCCPARAMS1: 64-bit addresses, extended capabilities, small contexts, no streams.
            0x10 => 1 | u32::try_from(LEGACY / 4).expect("a byte") << 16,
            0x14 => u32::try_from(DOORBELLS).expect("in the BAR"),
            0x18 => u32::try_from(RUNTIME).expect("in the BAR"),
            // HCSPARAMS3: no latencies. HCCPARAMS2: no features of xHCI 1.1.
            _ => 0,
        }
    }

    fn extended(&self, offset: u64) -> u32 {
        let sockets = u32::try_from(self.ports.len() / 2).unwrap_or(0);
        match offset {
            // Bits 8 to 15: the offset of the next capability in words.
            LEGACY => 1 | 4 << 8 | self.legacy[0],
            0x24 => self.legacy[1],
            USB2 => 0x0200_0402,
            USB3 => 0x0300_0002,
            0x34 | 0x44 => NAME,
            // The first port, counted from 1, and the number of ports.
            0x38 => 1 | sockets << 8,
            0x48 => (sockets + 1) | sockets << 8,
            _ => 0,
        }
    }

    fn operational(&self, offset: u64) -> u32 {
        match offset {
            0x00 => self.command | if self.reset { RESET } else { 0 },
            0x04 => self.status,
            // PAGESIZE: 4 KiB.
            0x08 => 1,
            0x14 => self.notification,
            // CRCR: the pointer reads as zero.
            0x18 if self.commands_run => COMMANDS_RUN,
            0x30 | 0x34 => half(self.dcbaap, offset),
            0x38 => self.config,
            _ => 0,
        }
    }

    /// Returns true if the controller's thread has something to do.
    pub(super) fn write(&mut self, offset: u64, value: u32) -> bool {
        // Writes during a reset are ignored.
        if self.reset {
            return false;
        }
        match offset {
            LEGACY => {
                let owners = value & (FIRMWARE | SYSTEM);
                // There is no firmware driver, so ownership is given up at once.
                self.legacy[0] = if owners & SYSTEM != 0 { SYSTEM } else { owners };
                false
            }
            0x24 => {
                self.legacy[1] = value & LEGACY_ENABLES;
                false
            }
            OPERATIONAL..PORTS => self.write_operational(offset - OPERATIONAL, value),
            PORTS..RUNTIME => {
                let (port, register) = port_at(offset);
                let usb3 = self.is_usb3(port);
                self.ports.get_mut(port).is_some_and(|port| port.write(register, value, usb3))
            }
            RUNTIME..DOORBELLS => {
                if let (Some(number), register) = interrupter_at(offset) {
                    self.interrupter(number, |interrupter| interrupter.write(register, value));
                }
                self.is_blocked()
            }
            DOORBELLS.. => self.ring((offset - DOORBELLS) / 4, value),
            _ => false,
        }
    }

    fn write_operational(&mut self, offset: u64, value: u32) -> bool {
        match offset {
            0x00 => {
                self.reset = value & RESET != 0;
                self.command = value & COMMAND_KEPT;
                if self.runs() {
                    self.status &= !HALTED;
                }
                if value & SAVE != 0 {
                    self.status &= !RESTORE_ERROR;
                }
                // Nothing was saved, so the guest must initialize the controller.
                if value & RESTORE != 0 {
                    self.status |= RESTORE_ERROR;
                }
                return true;
            }
            0x04 => self.status &= !(value & STATUS_CLEARED),
            0x14 => self.notification = value & 0xffff,
            0x18 if value & (COMMAND_STOP | COMMAND_ABORT) != 0 => {
                self.stop_commands = self.commands_run;
                return self.stop_commands;
            }
            0x18 | 0x1c if !self.commands_run => {
                let mut pointer = self.commands.pointer();
                set_half(&mut pointer, offset, value);
                self.commands = Ring::new(pointer & !0x3e);
            }
            0x30 | 0x34 => {
                set_half(&mut self.dcbaap, offset, value);
                self.dcbaap &= !0x3f;
            }
            0x38 => self.config = value & 0xff,
            _ => {}
        }
        false
    }

    /// Ignored while the controller is halted.
    fn ring(&mut self, slot: u64, value: u32) -> bool {
        let bell = usize::try_from(slot).ok().and_then(|slot| self.bells.get_mut(slot));
        let (Some(bell), true) = (bell, self.command & RUN != 0) else { return false };
        match (slot, value & 0xff) {
            (0, 0) => self.commands_run = true,
            (1.., target @ 1..=31) => *bell |= 1 << target,
            _ => return false,
        }
        true
    }

    pub(super) fn may_run(&self) -> bool {
        self.runs() && self.status & SYSTEM_ERROR == 0
    }

    /// Takes the doorbells that were rung: slots, each with a bit per endpoint.
    pub(super) fn take_bells(&mut self) -> Vec<(u8, u32)> {
        let rung = (0..).zip(&mut self.bells).filter(|(_, bells)| **bells != 0);
        rung.map(|(slot, bells)| (slot, std::mem::take(bells))).collect()
    }

    /// Takes the current requests. While events are queued, none of them causes further events.
    pub(super) fn take_requests(&mut self) -> Requests {
        let run = self.may_run();
        let accepts = run && !self.is_blocked();
        let resets = (0..self.ports.len()).filter(|at| self.ports[*at].wants_reset());
        Requests {
            reset: self.reset,
            run,
            stop_commands: accepts && std::mem::take(&mut self.stop_commands),
            resets: resets.collect(),
        }
    }

    /// Resets all registers to their state after power-on, except for the owner of the controller.
    pub(super) fn restart(&mut self) {
        let sockets =
            u8::try_from(self.ports.len() / 2).expect("the number of sockets never changes");
        *self = Self { legacy: self.legacy, ..Self::new(sockets) };
    }

    /// Halts the controller and the command ring (5.4.5). The next doorbell continues the command
    /// ring at its position, unless the guest sets another one.
    pub(super) fn halt(&mut self) {
        if !self.runs() {
            self.status |= HALTED;
            (self.commands_run, self.stop_commands) = (false, false);
        }
    }

    /// Runs `act` on an interrupter. If an interrupt becomes pending, sets Event Interrupt in
    /// USBSTS.
    fn interrupter(&mut self, number: usize, act: impl FnOnce(&mut Interrupter)) {
        let Some(interrupter) = self.interrupters.get_mut(number) else { return };
        let before = interrupter.is_pending();
        act(interrupter);
        if !before && interrupter.is_pending() {
            self.status |= EVENT_INTERRUPT;
        }
    }

    /// If there is no such interrupter, the first one gets the event.
    pub(super) fn push(&mut self, number: usize, event: Trb) {
        if !self.reset {
            let number = if number < self.interrupters.len() { number } else { 0 };
            self.interrupters[number].push(event);
        }
    }

    /// Writes queued events to the rings, as far as there is room.
    pub(super) fn flush(&mut self, memory: &Memory) {
        for number in 0..self.interrupters.len() {
            let mut written = Ok(());
            self.interrupter(number, |it| written = it.flush(memory));
            if written.is_err() && self.status & SYSTEM_ERROR == 0 {
                tracing::debug!(
                    "xHCI: the guest's event ring is outside of memory: halted until a reset"
                );
                self.status |= SYSTEM_ERROR;
                self.command &= !RUN;
            }
        }
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.interrupters.iter().any(Interrupter::has_queued)
    }

    /// Sends pending interrupts as messages, or sets the interrupt line.
    pub(super) fn update_interrupts(&mut self, interrupt: &Interrupt) {
        let enabled = self.command & INTERRUPT_ENABLE != 0;
        let mut high = false;
        for (number, interrupter) in (0..).zip(&mut self.interrupters) {
            if enabled && interrupter.is_raised() {
                if interrupt.message(number) {
                    interrupter.sent();
                } else {
                    high = true;
                }
            }
        }
        if let Some(line) = &interrupt.line {
            line.set(high);
        }
    }
}

/// The port and the register at an offset. Ports have four registers each.
fn port_at(offset: u64) -> (usize, u64) {
    let port = usize::try_from((offset - PORTS) / 16).expect("within the BAR");
    (port, offset % 16)
}

/// The interrupter and the register at an offset. Interrupters have eight registers each, after
/// those of the controller (`None`).
fn interrupter_at(offset: u64) -> (Option<usize>, u64) {
    let number = (offset - RUNTIME) / 32;
    (usize::try_from(number).ok().and_then(|number| number.checked_sub(1)), offset % 32)
}
