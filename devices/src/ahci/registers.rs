//! The registers of the controller and of its port (AHCI 1.3.1, 3). vCPUs only store values here;
//! the port's thread carries out resets, stops and commands.

use serde::{Deserialize, Serialize};

use super::fis::{BSY, DRQ};

/// Generic host control (3.1).
const CAP: u64 = 0x00;
const GHC: u64 = 0x04;
const IS: u64 = 0x08;
const PI: u64 = 0x0c;
const VS: u64 = 0x10;
const CAP2: u64 = 0x24;
/// The registers of port 0 (3.3), and their end.
const PORT: u64 = 0x100;
const PORT_END: u64 = 0x180;
const PXCLB: u64 = 0x00;
const PXCLBU: u64 = 0x04;
const PXFB: u64 = 0x08;
const PXFBU: u64 = 0x0c;
const PXIS: u64 = 0x10;
const PXIE: u64 = 0x14;
const PXCMD: u64 = 0x18;
const PXTFD: u64 = 0x20;
const PXSIG: u64 = 0x24;
const PXSSTS: u64 = 0x28;
const PXSCTL: u64 = 0x2c;
const PXSERR: u64 = 0x30;
const PXSACT: u64 = 0x34;
const PXCI: u64 = 0x38;
/// The bits of an index of the index-data pair.
const INDEX_MASK: u32 = 0xffc;

/// CAP: 64-bit addresses, NCQ, CLO, 3 Gb/s, AHCI only, PIO in several blocks, 32 slots, 1 port.
const CAPABILITIES: u32 =
    1 << 31 | 1 << 30 | 1 << 24 | 2 << 20 | 1 << 18 | 1 << 15 | (SLOTS - 1) << 8;
pub(super) const SLOTS: u32 = 32;
/// VS: 1.3.1.
const VERSION: u32 = 0x0001_0301;

/// GHC: reset, interrupt enable, and AHCI enable, which is always set (CAP.SAM).
const HR: u32 = 1 << 0;
const IE: u32 = 1 << 1;
const AE: u32 = 1 << 31;

/// PxCMD: start, spin up, power on, command list override, FIS receive enable, current command
/// slot, and both "running" bits.
const ST: u32 = 1 << 0;
const SUD: u32 = 1 << 1;
const POD: u32 = 1 << 2;
const CLO: u32 = 1 << 3;
const FRE: u32 = 1 << 4;
const CCS: u32 = 0x1f << 8;
const FR: u32 = 1 << 14;
const CR: u32 = 1 << 15;
/// The device is ATAPI, and its LED. Both are only storage.
const ATAPI: u32 = 1 << 24 | 1 << 25;
const CMD_WRITABLE: u32 = ST | FRE | ATAPI;

/// PxIS. PCS and PRCS mirror PxSERR.
pub(super) const DHRS: u32 = 1 << 0;
pub(super) const PSS: u32 = 1 << 1;
pub(super) const SDBS: u32 = 1 << 3;
pub(super) const DPS: u32 = 1 << 5;
pub(super) const OFS: u32 = 1 << 24;
pub(super) const IFS: u32 = 1 << 27;
pub(super) const HBFS: u32 = 1 << 29;
pub(super) const TFES: u32 = 1 << 30;
const PCS: u32 = 1 << 6;
const PRCS: u32 = 1 << 22;
const DSS: u32 = 1 << 2;
const CLEARABLE: u32 = DHRS | PSS | DSS | SDBS | DPS | OFS | IFS | HBFS | TFES;
const IE_WRITABLE: u32 = CLEARABLE | PCS | PRCS;

/// PxSERR.DIAG: the state of the link changed (N), and the device was detected (X).
const DIAG_N: u32 = 1 << 16;
const DIAG_X: u32 = 1 << 26;
/// PxSCTL and PxSSTS: DET. The other fields of PxSCTL are only storage.
const DET: u32 = 0xf;
const SCTL_WRITABLE: u32 = 0xfff;
const DET_RESET: u32 = 1;
const DET_OFFLINE: u32 = 4;
/// PxSSTS: a device at 3 Gb/s, in the active state.
const LINK_UP: u32 = 0x123;

/// Work for the port's thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Requests {
    /// GHC.HR was set.
    pub(super) hba_reset: bool,
    /// PxSCTL.DET was changed: the link is reset.
    pub(super) link_reset: bool,
    /// PxCMD.ST was cleared.
    pub(super) stop: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Registers {
    /// GHC.IE.
    interrupts: bool,
    /// IS, which has one bit.
    pending: bool,
    /// The interrupt is raised.
    pub(super) raised: bool,
    port: Port,
    pub(super) requests: Requests,
    /// An error stopped the command list until PxCMD.ST is cleared.
    pub(super) halted: bool,
    /// The device's first FIS after a reset, which has its signature, is not received yet.
    unsigned: bool,
    /// The register that the index-data pair selects.
    index: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Port {
    clb: u64,
    fb: u64,
    is: u32,
    ie: u32,
    cmd: u32,
    tfd: u32,
    sig: u32,
    ssts: u32,
    sctl: u32,
    serr: u32,
    sact: u32,
    ci: u32,
}

impl Default for Port {
    fn default() -> Self {
        Self {
            clb: 0,
            fb: 0,
            is: 0,
            ie: 0,
            cmd: SUD | POD,
            tfd: 0x7f,
            sig: u32::MAX,
            ssts: 0,
            sctl: 0,
            serr: 0,
            sact: 0,
            ci: 0,
        }
    }
}

impl Default for Registers {
    /// At power-on, the link starts by itself, because CAP.SSS is 0.
    fn default() -> Self {
        let mut registers = Self {
            interrupts: false,
            pending: false,
            raised: false,
            port: Port::default(),
            requests: Requests::default(),
            halted: false,
            unsigned: false,
            index: 0,
        };
        registers.connect();
        registers
    }
}

/// Changes of the interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signal {
    pub(super) line: bool,
    pub(super) message: bool,
}

impl Registers {
    pub(super) fn read(&self, offset: u64) -> u32 {
        match offset {
            CAP => CAPABILITIES,
            GHC => {
                let reset = if self.requests.hba_reset { HR } else { 0 };
                AE | reset | if self.interrupts { IE } else { 0 }
            }
            IS => self.pending.into(),
            PI => 1,
            VS => VERSION,
            CAP2 => 0,
            PORT..PORT_END => self.read_port(offset - PORT),
            _ => 0,
        }
    }

    fn read_port(&self, offset: u64) -> u32 {
        let port = &self.port;
        let half = |value: u64| {
            let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
            u32::from_le_bytes(if offset & 4 == 0 { [a, b, c, d] } else { [e, f, g, h] })
        };
        match offset {
            PXCLB | PXCLBU => half(port.clb),
            PXFB | PXFBU => half(port.fb),
            PXIS => self.port_status(),
            PXIE => port.ie,
            PXCMD => port.cmd,
            PXTFD => port.tfd,
            PXSIG => port.sig,
            PXSSTS => port.ssts,
            PXSCTL => port.sctl,
            PXSERR => port.serr,
            PXSACT => port.sact,
            PXCI => port.ci,
            _ => 0,
        }
    }

    /// Returns whether the port's thread has work.
    pub(super) fn write(&mut self, offset: u64, value: u32) -> bool {
        match offset {
            GHC => {
                self.interrupts = value & IE != 0;
                self.requests.hba_reset |= value & HR != 0;
                value & HR != 0
            }
            IS => {
                self.pending &= value & 1 == 0;
                false
            }
            PORT..PORT_END => self.write_port(offset - PORT, value),
            _ => false,
        }
    }

    fn write_port(&mut self, offset: u64, value: u32) -> bool {
        let port = &mut self.port;
        let upper = |old: u64| old & u64::from(u32::MAX) | u64::from(value) << 32;
        let lower = |old: u64, align: u32| old >> 32 << 32 | u64::from(value & !(align - 1));
        match offset {
            PXCLB => port.clb = lower(port.clb, 1024),
            PXCLBU => port.clb = upper(port.clb),
            PXFB => port.fb = lower(port.fb, 256),
            PXFBU => port.fb = upper(port.fb),
            PXIS => port.is &= !(value & CLEARABLE),
            PXIE => port.ie = value & IE_WRITABLE,
            PXSERR => port.serr &= !value,
            PXCMD => return self.command(value),
            PXSCTL => return self.control_link(value & SCTL_WRITABLE),
            // Commands exist only while the list is started.
            PXSACT if port.cmd & ST != 0 => port.sact |= value,
            PXCI if port.cmd & ST != 0 => {
                port.ci |= value;
                return true;
            }
            _ => {}
        }
        false
    }

    fn command(&mut self, value: u32) -> bool {
        let port = &mut self.port;
        let old = port.cmd;
        port.cmd = old & !CMD_WRITABLE | value & CMD_WRITABLE;
        port.cmd = if port.cmd & FRE != 0 { port.cmd | FR } else { port.cmd & !FR };
        if old & !value & ST != 0 {
            (port.ci, port.sact) = (0, 0);
            port.cmd &= !CCS;
            self.requests.stop = true;
        }
        if !old & value & ST != 0 {
            port.cmd |= CR;
        }
        if value & CLO != 0 && port.cmd & ST == 0 {
            port.tfd &= !u32::from(BSY | DRQ);
        }
        (old ^ port.cmd) & (ST | FRE) != 0
    }

    /// PxSCTL: 1 resets the link, 4 disables the port, and 0 lets the link start.
    fn control_link(&mut self, value: u32) -> bool {
        let old = std::mem::replace(&mut self.port.sctl, value);
        if old & DET == value & DET {
            return false;
        }
        match value & DET {
            DET_RESET => self.disconnect(0),
            DET_OFFLINE => self.disconnect(DET_OFFLINE),
            _ => {}
        }
        self.requests.link_reset = true;
        true
    }

    fn disconnect(&mut self, status: u32) {
        let port = &mut self.port;
        (port.ssts, port.tfd, port.sig) = (status, 0x7f, u32::MAX);
        self.unsigned = false;
    }

    /// The link starts, and the device will send its signature.
    fn connect(&mut self) {
        let port = &mut self.port;
        if port.sctl & DET == 0 {
            (port.ssts, port.tfd) = (LINK_UP, BSY.into());
            port.serr |= DIAG_N | DIAG_X;
            self.unsigned = true;
        }
    }

    /// PxIS with the bits that mirror PxSERR.
    fn port_status(&self) -> u32 {
        let Port { is, serr, .. } = self.port;
        is | if serr & DIAG_X != 0 { PCS } else { 0 } | if serr & DIAG_N != 0 { PRCS } else { 0 }
    }

    /// Derives the interrupt from the status. Must follow every change of the registers.
    pub(super) fn settle(&mut self) -> Signal {
        let wanted = self.port_status() & self.port.ie != 0;
        let new = wanted && !self.pending;
        self.pending |= wanted;
        let line = self.pending && self.interrupts;
        let message = line && (new || !self.raised);
        self.raised = line;
        Signal { line, message }
    }

    /// A saved state may have anything in the bits that are read-only.
    pub(super) fn sanitize(&mut self) {
        self.set_index(self.index);
        let port = &mut self.port;
        port.clb &= !1023;
        port.fb &= !255;
        port.is &= CLEARABLE;
        port.ie &= IE_WRITABLE;
        port.sctl &= SCTL_WRITABLE;
        port.cmd = port.cmd & (CMD_WRITABLE | CCS | FR | CR) | SUD | POD;
    }

    pub(super) fn index(&self) -> u32 {
        self.index
    }

    pub(super) fn set_index(&mut self, index: u32) {
        self.index = index & INDEX_MASK;
    }

    pub(super) fn list(&self) -> u64 {
        self.port.clb
    }

    /// The address of received FISes, while the driver enables their reception.
    pub(super) fn fis_area(&self) -> Option<u64> {
        (self.port.cmd & FRE != 0).then_some(self.port.fb)
    }

    /// Whether the device must send its signature now.
    pub(super) fn wants_signature(&self) -> bool {
        self.unsigned && self.port.cmd & FRE != 0
    }

    pub(super) fn sign(&mut self, signature: u32) {
        self.unsigned = false;
        self.port.sig = signature;
    }

    /// The slots with commands to start, while the list runs.
    pub(super) fn issued(&self) -> u32 {
        if self.runs() { self.port.ci } else { 0 }
    }

    /// Whether the list is started, and the device is ready for commands.
    pub(super) fn runs(&self) -> bool {
        let started = self.port.cmd & (ST | CR) == ST | CR;
        started && !self.halted && !self.unsigned && self.port.ssts == LINK_UP
    }

    /// The device takes the command of a slot.
    pub(super) fn begin(&mut self, slot: u32) {
        self.port.tfd |= u32::from(BSY);
        self.port.cmd = self.port.cmd & !CCS | slot << 8 & CCS;
    }

    pub(super) fn set_task_file(&mut self, status: u8, error: u8) {
        self.port.tfd = u32::from(status) | u32::from(error) << 8;
    }

    /// The status of a Set Device Bits FIS, which leaves BSY and DRQ as they are.
    pub(super) fn set_device_bits(&mut self, status: u8, error: u8, slots: u32) {
        let old = self.port.tfd & u32::from(BSY | DRQ);
        self.port.tfd = old | u32::from(status & 0x77) | u32::from(error) << 8;
        self.port.sact &= !slots;
    }

    pub(super) fn end(&mut self, slot: u32) {
        self.port.ci &= !(1 << slot);
    }

    pub(super) fn raise(&mut self, status: u32) {
        self.port.is |= status;
    }

    /// Stops the command list until the driver restarts it.
    pub(super) fn halt(&mut self, status: u32) {
        self.raise(status);
        self.halted = true;
    }

    /// The list has stopped: no command is in progress any more.
    pub(super) fn stopped(&mut self) {
        self.requests.stop = false;
        self.halted = false;
        self.port.tfd &= !u32::from(BSY | DRQ);
        if self.port.cmd & ST == 0 {
            self.port.cmd &= !CR;
        }
    }

    /// The device was reset with its link.
    pub(super) fn link_was_reset(&mut self) {
        self.requests.link_reset = false;
        self.halted = false;
        (self.port.ci, self.port.sact) = (0, 0);
        if self.port.ssts != LINK_UP {
            self.connect();
        }
    }

    /// The controller was reset. The addresses of the list and of the FIS area stay (10.4.3).
    pub(super) fn was_reset(&mut self) {
        let Port { clb, fb, .. } = self.port;
        let index = self.index;
        *self = Self { index, ..Self::default() };
        (self.port.clb, self.port.fb) = (clb, fb);
    }
}
