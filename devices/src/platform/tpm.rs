//! The registers of a TPM 2.0: locality 0 of the Command Response Buffer interface (TCG PC Client
//! Platform TPM Profile 1.05, 6.5), as ACPI's `MSFT0101`. The TPM itself is a swtpm process behind
//! a socket.
//!
//! The guest puts a command into the buffer and writes START, which reads as 1 until the response
//! has replaced the command. A thread waits for the TPM, so no vCPU waits for it, and neither does
//! a reset of the machine. A reset cancels the running command. When it has ended, the TPM is
//! switched off and on, and then executes the guest's next command.
//!
//! A snapshot waits until the running command has ended, because another swtpm cannot finish it,
//! and takes the TPM's state from swtpm (`gather`).
//!
//! Behind the registers is the memory of the physical presence interface (`presence.rs`).
//!
//! Threats: the guest writes any bytes and any length, and writes START at any time, even while a
//! command runs. One command at a time is copied out, after its length is checked. Writes to the
//! buffer in the meantime are ignored. This file reads only the length of a command.

mod presence;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::presence::Presence;
use crate::bytes::Bytes;
use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Grants};
use crate::hypervisor::Hypervisor;
use crate::worker::Worker;
use host::gate::Gate;
use host::swtpm::{self, MAX_MESSAGE, NO_SESSIONS, State, Swtpm};

/// `--device tpm,path=PATH`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The control socket of a running swtpm, started for example with `swtpm socket --tpm2
    /// --tpmstate dir=DIR --ctrl type=unixio,path=PATH`. The swtpm ends with the machine.
    pub path: PathBuf,
    /// Whether to build the device without a swtpm, for `vmm inspect`.
    #[serde(skip)]
    pub absent: bool,
}

impl Config {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), absent: false }
    }
}

/// The address of locality 0 in PCs (PTP 6.2).
const BASE: u64 = 0xfed4_0000;
const LENGTH: u64 = 0x1000;
/// The address of the physical presence interface in PCs: after the registers of all localities.
const PRESENCE: u64 = BASE + 0x5000;

/// PTP 6.5.3.1: bit 0 means that no D-RTM was established, bit 1 that a locality is active, bit 7
/// that the other bits are valid.
const LOC_STATE: u64 = 0x00;
const LOC_STATE_UNASSIGNED: u32 = 0x81;
const LOC_STATE_ASSIGNED: u32 = 1 << 1;
/// PTP 6.5.3.2
const LOC_CTRL: u64 = 0x08;
const LOC_CTRL_REQUEST: u8 = 1;
const LOC_CTRL_RELINQUISH: u8 = 1 << 1;
/// PTP 6.5.3.3: bit 0 granted.
const LOC_STS: u64 = 0x0c;
/// PTP 6.5.3.4: type CRB, version 1, transfers of 64 bits, only CRB supported and selected.
const INTERFACE_ID: u64 = 0x30;
const INTERFACE_ID_VALUE: u32 = 0x0002_5811;
/// The other half of the register: vendor and device, IBM's as in libtpms.
const VENDOR_ID: u64 = 0x34;
const VENDOR_ID_VALUE: u32 = 0x1014;
/// PTP 6.5.3.5: both bits read as 0, because both requests are performed at once.
const CTRL_REQ: u64 = 0x40;
const CTRL_REQ_COMMAND_READY: u8 = 1;
const CTRL_REQ_GO_IDLE: u8 = 1 << 1;
/// PTP 6.5.3.6
const CTRL_STS: u64 = 0x44;
const CTRL_STS_FATAL: u32 = 1;
const CTRL_STS_IDLE: u32 = 1 << 1;
/// PTP 6.5.3.7
const CTRL_CANCEL: u64 = 0x48;
/// PTP 6.5.3.8
const CTRL_START: u64 = 0x4c;
/// PTP 6.5.3.10 and following: address and size of the buffer for commands and responses. These
/// registers are read-only: no guest needs to move or shrink the buffer.
const CTRL_CMD_SIZE: u64 = 0x58;
const CTRL_CMD_LADDR: u64 = 0x5c;
const CTRL_RSP_SIZE: u64 = 0x64;
const CTRL_RSP_ADDR: u64 = 0x68;
const DATA_BUFFER: u64 = 0x80;
const _: () = assert!(DATA_BUFFER + MAX_MESSAGE as u64 == LENGTH);

/// The maximum time that `park` waits for a cancelled command.
const PARK_TIMEOUT: Duration = Duration::from_millis(250);
/// The maximum time that a snapshot waits for a command and the TPM's state, and then, after it has
/// cancelled the command.
const GATHER_TIMEOUT: Duration = Duration::from_secs(10);
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval for checking whether the thread is idle.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// The maximum time that the end of the machine waits for a cancelled command.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// TPM 2.0 Library, Part 2, 6.6.3: the response code of a TPM in failure mode.
const TPM_RC_FAILURE: u32 = 0x101;
const TPM_RC_COMMAND_SIZE: u32 = 0x142;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        grants.claim(Kind::Memory, BASE..BASE + LENGTH)?;
        let presence = grants.claim(Kind::Memory, PRESENCE..PRESENCE + presence::LENGTH)?;
        grants.acpi("MSFT0101");
        let swtpm = if self.absent { None } else { Some(Swtpm::connect(&self.path)?) };
        let cancel = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        Ok(Box::new(Tpm {
            presence,
            host: grants.shared().hypervisor.clone(),
            gate: grants.shared().disks.gate(),
            registers: Registers::default(),
            exchange: Arc::default(),
            bell: Arc::new(EventFd::new(EFD_NONBLOCK).context("an event for the TPM")?),
            cancel: Arc::new(cancel.context("an event for the TPM")?),
            broken: swtpm.is_none(),
            gathered: None,
            swtpm,
            worker: None,
        }))
    }

    fn detach_host_side(&mut self) {
        self.absent = true;
    }
}

/// The registers. At power-on the TPM is idle, and no locality is active.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Registers {
    granted: bool,
    ready: bool,
    started: bool,
    buffer: Bytes<MAX_MESSAGE>,
    presence: Presence,
}

/// The saved state.
#[derive(Serialize, Deserialize)]
struct Parked {
    #[serde(flatten)]
    registers: Registers,
    /// Only in a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tpm: Option<State>,
}

/// A request for the TPM's state.
#[derive(Default)]
enum Inquiry {
    #[default]
    None,
    Asked,
    Answered(anyhow::Result<State>),
}

/// State shared between the vCPUs and the thread.
#[derive(Default)]
struct Exchange {
    power_on: bool,
    command: Option<Vec<u8>>,
    response: Option<Vec<u8>>,
    broken: bool,
    /// The device is parked: the thread starts no work.
    parked: bool,
    /// The thread is working.
    at_work: bool,
    /// The thread executes a command.
    busy: bool,
    /// The command is from before a reset: its response is dropped.
    stale: bool,
    inquiry: Inquiry,
}

struct Tpm {
    /// The region of the physical presence interface.
    presence: Region,
    host: Arc<dyn Hypervisor>,
    gate: Arc<Gate>,
    registers: Registers,
    exchange: Arc<Mutex<Exchange>>,
    bell: Arc<EventFd>,
    cancel: Arc<OwnedFd>,
    broken: bool,
    /// The TPM's state, for the next `park`.
    gathered: Option<State>,
    /// The connection while the thread does not own it. `None` for `vmm inspect`.
    swtpm: Option<Swtpm>,
    worker: Option<Worker<Swtpm>>,
}

/// A response with only an error code.
fn error(code: u32) -> Vec<u8> {
    let size = u32::try_from(swtpm::HEADER_LENGTH).expect("it is 10");
    [&NO_SESSIONS.to_be_bytes()[..], &size.to_be_bytes(), &code.to_be_bytes()].concat()
}

/// Lets the whole guest wait until its memory is checked, since its driver would give up earlier.
fn look_again(gate: &Gate, bell: &EventFd) {
    gate.hurry();
    sleep(CHECK_INTERVAL);
    bell.write(1).expect("an eventfd takes a 1");
}

/// Performs the pending work. Runs on the thread. If there is some, and the guest's memory is
/// `unchecked`, it does nothing and returns false.
fn serve(
    swtpm: &mut Swtpm,
    (exchange, cancel): (&Mutex<Exchange>, &OwnedFd),
    unchecked: bool,
) -> bool {
    let (power_on, command) = {
        let mut exchange = lock(exchange);
        if exchange.parked {
            return true;
        }
        if unchecked && (exchange.power_on || exchange.command.is_some()) {
            return false;
        }
        exchange.at_work = true;
        exchange.busy = exchange.command.is_some();
        (std::mem::take(&mut exchange.power_on), exchange.command.take())
    };
    if power_on {
        swtpm.power_on();
    }
    let response =
        command.map(|it| swtpm.execute(&it, cancel).unwrap_or_else(|| error(TPM_RC_FAILURE)));
    let asked = {
        let mut exchange = lock(exchange);
        (exchange.broken, exchange.busy) = (swtpm.broken, false);
        if std::mem::take(&mut exchange.stale) {
            // The command may have ended before it was cancelled. Do not cancel the next one.
            drain(cancel);
        } else if response.is_some() {
            exchange.response = response;
        }
        // A command that has come meanwhile is first: the state would not have its effects.
        let rests = exchange.command.is_none() && !exchange.power_on;
        rests && matches!(exchange.inquiry, Inquiry::Asked)
    };
    let state = asked.then(|| swtpm.save());
    let mut exchange = lock(exchange);
    (exchange.broken, exchange.at_work) = (swtpm.broken, false);
    // Nobody waits for a state that comes too late.
    if let (Some(state), Inquiry::Asked) = (state, &exchange.inquiry) {
        exchange.inquiry = Inquiry::Answered(state);
    }
    true
}

fn lock(exchange: &Mutex<Exchange>) -> MutexGuard<'_, Exchange> {
    exchange.lock().expect("no TPM panicked")
}

fn drain(cancel: &OwnedFd) {
    // Usually the event is clear already.
    rustix::io::read(cancel, &mut [0; 8]).ok();
}

impl Tpm {
    /// Copies the response to the buffer if there is one.
    fn collect(&mut self) {
        if self.swtpm.is_none() && self.worker.is_none() {
            return;
        }
        let mut exchange = lock(&self.exchange);
        self.broken = exchange.broken;
        let response = exchange.response.take();
        drop(exchange);
        if let Some(response) = response {
            self.respond(&response);
        }
    }

    fn respond(&mut self, response: &[u8]) {
        let room = self.registers.buffer.iter_mut();
        room.zip(response).for_each(|(to, from)| *to = *from);
        self.registers.started = false;
    }

    /// Waits until the thread has something to take.
    fn wait<T>(
        &self,
        time: Duration,
        mut take: impl FnMut(&mut Exchange) -> Option<T>,
    ) -> Option<T> {
        let end = Instant::now() + time;
        loop {
            let taken = take(&mut lock(&self.exchange));
            if taken.is_some() || Instant::now() >= end {
                return taken;
            }
            sleep(CHECK_INTERVAL);
        }
    }

    /// Waits for the answer to an inquiry.
    fn answer(&self, time: Duration) -> Option<anyhow::Result<State>> {
        self.wait(time, |exchange| match std::mem::take(&mut exchange.inquiry) {
            Inquiry::Answered(state) => Some(state),
            other => {
                exchange.inquiry = other;
                None
            }
        })
    }

    fn start(&mut self) {
        self.registers.started = true;
        let Ok(size) = swtpm::size(&self.registers.buffer[..]) else {
            return self.respond(&error(TPM_RC_COMMAND_SIZE));
        };
        if self.worker.is_none() {
            return self.respond(&error(TPM_RC_FAILURE));
        }
        let mut exchange = lock(&self.exchange);
        if !exchange.busy {
            // A pending cancel request was for the previous command.
            drain(&self.cancel);
        }
        exchange.command = Some(self.registers.buffer[..size].to_vec());
        drop(exchange);
        self.ring();
    }

    fn ring(&self) {
        self.bell.write(1).expect("an eventfd takes a 1");
    }

    fn cancel(&self) {
        // This fails only after about 2^64 requests, and then one is pending anyway.
        rustix::io::write(&*self.cancel, &1_u64.to_ne_bytes()).ok();
    }

    fn register(&self, offset: u64) -> u32 {
        let Registers { granted, ready, started, .. } = self.registers;
        let flag = |is: bool, bit: u32| if is { bit } else { 0 };
        match offset {
            LOC_STATE => LOC_STATE_UNASSIGNED | flag(granted, LOC_STATE_ASSIGNED),
            LOC_STS => flag(granted, 1),
            INTERFACE_ID => INTERFACE_ID_VALUE,
            VENDOR_ID => VENDOR_ID_VALUE,
            CTRL_STS => flag(self.broken, CTRL_STS_FATAL) | flag(!ready, CTRL_STS_IDLE),
            CTRL_START => flag(started, 1),
            CTRL_CMD_SIZE | CTRL_RSP_SIZE => u32::try_from(MAX_MESSAGE).unwrap_or(0),
            CTRL_CMD_LADDR | CTRL_RSP_ADDR => u32::try_from(BASE + DATA_BUFFER).unwrap_or(0),
            _ => 0,
        }
    }

    fn byte(&self, offset: u64) -> u8 {
        let shift = 8 * (offset % 4);
        u8::try_from(self.register(offset - offset % 4) >> shift & 0xff).unwrap_or(0)
    }

    /// Writes a byte of a register. All bits with an effect are in the lowest byte of their
    /// register.
    fn command(&mut self, offset: u64, byte: u8) {
        match offset {
            LOC_CTRL if byte & LOC_CTRL_RELINQUISH != 0 => self.registers.granted = false,
            LOC_CTRL if byte & LOC_CTRL_REQUEST != 0 => self.registers.granted = true,
            CTRL_REQ if self.registers.started => {}
            CTRL_REQ if byte & CTRL_REQ_COMMAND_READY != 0 => self.registers.ready = true,
            CTRL_REQ if byte & CTRL_REQ_GO_IDLE != 0 => self.registers.ready = false,
            CTRL_CANCEL if byte & 1 != 0 && self.registers.started => self.cancel(),
            CTRL_START if byte & 1 != 0 && self.registers.granted && !self.registers.started => {
                self.start();
            }
            _ => {}
        }
    }
}

/// The index in the buffer of the byte at `offset`.
fn in_buffer(offset: u64) -> Option<usize> {
    usize::try_from(offset.checked_sub(DATA_BUFFER)?).ok()
}

impl Device for Tpm {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.presence {
            let presence = &self.registers.presence;
            (offset..).zip(data).for_each(|(at, byte)| *byte = presence.read(at));
            return Access::Done;
        }
        self.collect();
        // Windows reads one byte at a time, Linux four, and others eight.
        for (offset, byte) in (offset..).zip(data) {
            *byte = match in_buffer(offset) {
                Some(at) => self.registers.buffer.get(at).copied().unwrap_or(0),
                None => self.byte(offset),
            };
        }
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if region == self.presence {
            let presence = &mut self.registers.presence;
            (offset..).zip(data).for_each(|(at, byte)| presence.write(at, *byte));
            return Access::Done;
        }
        self.collect();
        for (offset, byte) in (offset..).zip(data) {
            match in_buffer(offset) {
                // The TPM owns the buffer while it executes a command.
                Some(_) if self.registers.started => {}
                Some(at) => {
                    if let Some(to) = self.registers.buffer.get_mut(at) {
                        *to = *byte;
                    }
                }
                None => self.command(offset, *byte),
            }
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        if self.worker.is_some() {
            let mut exchange = lock(&self.exchange);
            exchange.parked = true;
            // The command is still in the buffer.
            exchange.command = None;
            if exchange.busy {
                // The driver sends a cancelled command again.
                self.cancel();
            }
            drop(exchange);
            // If the command takes longer, the thread keeps running.
            if self.wait(PARK_TIMEOUT, |it| (!it.at_work).then_some(())).is_some() {
                self.swtpm = self.worker.take().map(Worker::stop);
            }
            self.collect();
        }
        let (registers, tpm) = (self.registers.clone(), self.gathered.take());
        Saved::of(&Some(Parked { registers, tpm }))
    }

    fn gather(&mut self) -> anyhow::Result<()> {
        if self.worker.is_none() {
            return Ok(());
        }
        lock(&self.exchange).inquiry = Inquiry::Asked;
        self.ring();
        let mut state = self.answer(GATHER_TIMEOUT);
        if state.is_none() {
            if lock(&self.exchange).busy {
                self.cancel();
            }
            state = self.answer(CANCEL_TIMEOUT);
        }
        lock(&self.exchange).inquiry = Inquiry::None;
        let state = state.context("the TPM is executing a long command: try again later")?;
        self.gathered = Some(state?);
        Ok(())
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<Parked> = saved.take()?;
        let power_on = saved.is_none();
        let (saved, tpm) = saved.map(|it| (it.registers, it.tpm)).unzip();
        self.gathered = None;
        // Requests for firmware outlive a reset.
        let presence = std::mem::take(&mut self.registers.presence);
        self.registers = saved.unwrap_or(Registers { presence, ..Registers::default() });
        if power_on {
            self.registers.presence.reset(&*self.host);
        }
        if let Some(swtpm) = self.swtpm.as_mut().filter(|it| !power_on && !it.is_on()) {
            // After a power-on that the thread has still to do, it goes on with that.
            match tpm.flatten() {
                Some(state) => {
                    lock(&self.exchange).power_on = false;
                    swtpm.restore(&state).context("the state of the TPM")?;
                }
                None if lock(&self.exchange).power_on => {}
                None => bail!("the saved machine has no state of its TPM"),
            }
        }
        if let Some(swtpm) = self.swtpm.take() {
            let (exchange, cancel) = (self.exchange.clone(), self.cancel.clone());
            let bells = vec![self.bell.clone()];
            let (gate, bell) = (self.gate.clone(), self.bell.clone());
            let step = move |swtpm: &mut Swtpm, _: usize| {
                // A guest with damaged memory must not change its TPM.
                if !serve(swtpm, (&exchange, &cancel), gate.is_unchecked()) {
                    look_again(&gate, &bell);
                }
            };
            self.worker = Some(Worker::spawn("tpm", swtpm, bells, step)?);
        }
        let mut exchange = lock(&self.exchange);
        exchange.parked = false;
        if power_on {
            (exchange.power_on, exchange.response, exchange.stale) = (true, None, exchange.busy);
        }
        // A command that started before is answered as usual.
        let begun = exchange.busy && !exchange.stale || exchange.response.is_some();
        drop(exchange);
        self.ring();
        if self.registers.started && !begun {
            self.start();
        }
        Ok(())
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        lock(&self.exchange).parked = true;
        self.cancel();
        if worker.stop_within(END_TIMEOUT).is_none() {
            tracing::warn!("the TPM does not end its command: not waiting for it any longer");
        }
    }
}

#[cfg(test)]
mod test;
