//! The registers (xHCI 5.3 to 5.6, 7): what processors read and write, and what they leave there
//! for the controller's thread.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::events::{Interrupter, SEGMENTS_LOG, half, set_half};
use super::port::Port;
use super::trb::{Ring, Trb};
use crate::pci::Interrupt;
use host::memory::Memory;

/// Device slots.
pub(super) const SLOTS: u8 = 64;
/// Interrupters, each with its vector.
pub(super) const INTERRUPTERS: u16 = 16;

/// Where the sets of registers begin.
const OPERATIONAL: u64 = 0x80;
const PORTS: u64 = OPERATIONAL + 0x400;
const RUNTIME: u64 = 0x1000;
const DOORBELLS: u64 = 0x2000;
pub(super) const BAR_SIZE: u64 = 0x4000;

/// Extended capabilities (7): legacy support, and the protocols of the ports.
const LEGACY: u64 = 0x20;
const USB2: u64 = 0x30;
const USB3: u64 = 0x40;
/// "USB ".
const NAME: u32 = 0x2042_5355;
/// USBLEGSUP: who has the controller.
const FIRMWARE: u32 = 1 << 16;
const SYSTEM: u32 = 1 << 24;
/// USBLEGCTLSTS: the interrupts that firmware would like; there are none.
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
    /// The command ring, and whether it runs.
    pub(super) commands: Ring,
    pub(super) commands_run: bool,
    /// CRCR asked for the end of that.
    stop_commands: bool,
    pub(super) dcbaap: u64,
    pub(super) config: u32,
    legacy: [u32; 2],
    pub(super) ports: Vec<Port>,
    interrupters: Vec<Interrupter>,
    /// Doorbells that were rung, by slot: a bit for each endpoint.
    bells: Vec<u32>,
    /// HCRST, until the controller's thread has done it.
    reset: bool,
}

/// What the controller's thread is to do.
pub(super) struct Orders {
    pub(super) reset: bool,
    pub(super) run: bool,
    pub(super) stop_commands: bool,
    /// Slots, and the endpoints whose bells were rung.
    pub(super) bells: Vec<(u8, u32)>,
    /// Ports that are to be reset.
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

    /// That a state is one of this controller.
    pub(super) fn check(&self, sockets: u8) -> anyhow::Result<()> {
        let lengths = [self.ports.len(), self.interrupters.len(), self.bells.len()];
        let expected = [2 * usize::from(sockets), INTERRUPTERS.into(), usize::from(SLOTS) + 1];
        ensure!(
            lengths == expected,
            "ports, interrupters and slots: {lengths:?}, not {expected:?}"
        );
        Ok(())
    }

    /// Ports are in two halves.
    pub(super) fn is_usb3(&self, port: usize) -> bool {
        port >= self.ports.len() / 2
    }

    pub(super) fn runs(&self) -> bool {
        self.command & RUN != 0
    }

    /// The register of four bytes at this offset.
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
            // HCSPARAMS2: a frame is what it takes to schedule; no scratchpads.
            0x08 => 0xf | SEGMENTS_LOG << 4,
            // HCCPARAMS1: 64-bit addresses, the extended capabilities; small contexts, no streams.
            0x10 => 1 | u32::try_from(LEGACY / 4).expect("a byte") << 16,
            0x14 => u32::try_from(DOORBELLS).expect("in the BAR"),
            0x18 => u32::try_from(RUNTIME).expect("in the BAR"),
            // HCSPARAMS3: no latencies. HCCPARAMS2: nothing of 1.1.
            _ => 0,
        }
    }

    fn extended(&self, offset: u64) -> u32 {
        let sockets = u32::try_from(self.ports.len() / 2).unwrap_or(0);
        match offset {
            // The next one is so many words on.
            LEGACY => 1 | 4 << 8 | self.legacy[0],
            0x24 => self.legacy[1],
            USB2 => 0x0200_0402,
            USB3 => 0x0300_0002,
            0x34 | 0x44 => NAME,
            // Counted from 1.
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

    /// A write; true when the controller's thread has something to do.
    pub(super) fn write(&mut self, offset: u64, value: u32) -> bool {
        // A controller that resets takes nothing.
        if self.reset {
            return false;
        }
        match offset {
            LEGACY => {
                let owners = value & (FIRMWARE | SYSTEM);
                // The firmware gives it away as soon as it is asked: there is none.
                self.legacy[0] = if owners & SYSTEM != 0 { SYSTEM } else { owners };
                false
            }
            0x24 => {
                self.legacy[1] = value & LEGACY_ENABLES;
                false
            }
            OPERATIONAL..PORTS => self.operate(offset - OPERATIONAL, value),
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

    fn operate(&mut self, offset: u64, value: u32) -> bool {
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
                // Nothing was saved: the guest begins anew.
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

    /// A doorbell; those of a controller that stands still are not heard.
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

    /// Whether it is told to run, and can.
    pub(super) fn may_run(&self) -> bool {
        self.runs() && self.status & SYSTEM_ERROR == 0
    }

    /// What is to be done now. Nothing that makes events is, while events wait.
    pub(super) fn orders(&mut self) -> Orders {
        let run = self.may_run();
        let hears = run && !self.is_blocked();
        let mut bells = Vec::new();
        if hears {
            let rung = (0..).zip(&mut self.bells).filter(|(_, bells)| **bells != 0);
            bells.extend(rung.map(|(slot, bells)| (slot, std::mem::take(bells))));
        }
        let resets = (0..self.ports.len()).filter(|at| self.ports[*at].wants_reset());
        Orders {
            reset: self.reset,
            run,
            stop_commands: hears && std::mem::take(&mut self.stop_commands),
            bells,
            resets: resets.collect(),
        }
    }

    /// Power-on, but for who has the controller; devices stay where they are.
    pub(super) fn restart(&mut self) {
        let sockets = u8::try_from(self.ports.len() / 2).expect("as many as at the start");
        *self = Self { legacy: self.legacy, ..Self::new(sockets) };
    }

    /// It stands still. The command ring stops with it (5.4.5), and goes on with the next doorbell
    /// where it is, unless the guest names another place.
    pub(super) fn halt(&mut self) {
        if !self.runs() {
            self.status |= HALTED;
            (self.commands_run, self.stop_commands) = (false, false);
        }
    }

    /// Does something to an interrupter, and notes in USBSTS what comes of it.
    fn interrupter(&mut self, number: usize, act: impl FnOnce(&mut Interrupter)) {
        let Some(interrupter) = self.interrupters.get_mut(number) else { return };
        let before = interrupter.is_pending();
        act(interrupter);
        if !before && interrupter.is_pending() {
            self.status |= EVENT_INTERRUPT;
        }
    }

    /// Puts an event into the ring of an interrupter; of one that is not there, into the first.
    pub(super) fn push(&mut self, number: usize, event: Trb) {
        if !self.reset {
            let number = if number < self.interrupters.len() { number } else { 0 };
            self.interrupters[number].push(event);
        }
    }

    /// Writes what waits, as far as there is room.
    pub(super) fn flush(&mut self, memory: &Memory) {
        for number in 0..self.interrupters.len() {
            let mut written = Ok(());
            self.interrupter(number, |it| written = it.flush(memory));
            if written.is_err() && self.status & SYSTEM_ERROR == 0 {
                tracing::debug!("the guest's xHCI event ring is no memory: stopped until a reset");
                self.status |= SYSTEM_ERROR;
                self.command &= !RUN;
            }
        }
    }

    /// Events wait for room.
    pub(super) fn is_blocked(&self) -> bool {
        self.interrupters.iter().any(Interrupter::waits)
    }

    /// Sends messages, or sets the wire.
    pub(super) fn settle(&mut self, interrupt: &Interrupt) {
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

/// Ports have four registers each.
fn port_at(offset: u64) -> (usize, u64) {
    let port = usize::try_from((offset - PORTS) / 16).expect("within the BAR");
    (port, offset % 16)
}

/// Interrupters have eight, behind those of the whole.
fn interrupter_at(offset: u64) -> (Option<usize>, u64) {
    let number = (offset - RUNTIME) / 32;
    (usize::try_from(number).ok().and_then(|number| number.checked_sub(1)), offset % 32)
}
