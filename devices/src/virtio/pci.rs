//! Virtio over PCI (VIRTIO 1.3, 4.1), modern interface only: capabilities, the common
//! configuration, and the state of a device from reset to DRIVER_OK.
//!
//! The Windows drivers match these ids: 1AF4:1040 + type, subsystem 1100, revision 1. BAR 4 holds
//! every structure in a page of its own. BAR 1 holds the MSI-X table, with one vector for the
//! configuration and one for each queue. There is no power management capability, as in QEMU on
//! the root bus of q35: Windows' drivers enter D3 by a reset of the device.
//!
//! Threats: the guest writes all registers in any order and width. Queue sizes, addresses and
//! vectors are checked when they are written or when the queue is enabled. Accesses to anything
//! else are ignored. A queue is served only between DRIVER_OK and reset, and a reset returns only
//! after the device has stopped using it.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::queue::{Endpoint, Queue, Ring};
use super::signal::{NO_VECTOR, Signal};
use super::{Identity, Virtio};
use crate::device::{Access, Device, Region, Saved};
use crate::grants::Grants;
use crate::pci::{self, Address, Bar, Id, Slot};
use host::memory::Memory;

/// The BAR that holds all structures, its size, and the BAR of the MSI-X table.
const BAR: u8 = 4;
const BAR_SIZE: u64 = 0x4000;
const MSIX_BAR: u8 = 1;
/// Offsets in the BAR: one page for each structure.
const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
const PAGE: u64 = 0x1000;
/// Bytes from one queue's doorbell to the next (`notify_off_multiplier`).
const NOTIFY_STEP: u32 = 4;

/// The vendor-specific capability, and its types (4.1.4).
const VENDOR: u8 = 0x09;
const TYPE_COMMON: u8 = 1;
const TYPE_NOTIFY: u8 = 2;
const TYPE_ISR: u8 = 3;
const TYPE_DEVICE: u8 = 4;
const TYPE_WINDOW: u8 = 5;
/// Offset of the PCI configuration access capability (TYPE_WINDOW) in configuration space: it comes
/// first after MSI-X. The guest may write to it from its `bar` field on.
const WINDOW: u64 = 0x4c;
const WINDOW_BAR: u64 = WINDOW + 4;
const WINDOW_DATA: u64 = WINDOW + 16;
const WINDOW_FIELDS: Range<u64> = WINDOW_BAR..WINDOW_DATA + 4;

/// Device status (2.1)
const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;
const FAILED: u8 = 128;
const WRITABLE_STATUS: u8 = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED;

/// Feature bits of the transport and the queues (6)
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;
const RING_RESET: u64 = 1 << 40;
const TRANSPORT_FEATURES: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1 | RING_RESET;

/// The common configuration (4.1.4.3)
const DEVICE_FEATURE_SELECT: usize = 0;
const DEVICE_FEATURE: usize = 4;
const DRIVER_FEATURE_SELECT: usize = 8;
const DRIVER_FEATURE: usize = 12;
const CONFIG_VECTOR: usize = 16;
const NUM_QUEUES: usize = 18;
const DEVICE_STATUS: usize = 20;
const CONFIG_GENERATION: usize = 21;
const QUEUE_SELECT: usize = 22;
const QUEUE_SIZE: usize = 24;
const QUEUE_VECTOR: usize = 26;
const QUEUE_ENABLE: usize = 28;
const QUEUE_NOTIFY_OFF: usize = 30;
const QUEUE_DESC: usize = 32;
const QUEUE_DRIVER: usize = 40;
const QUEUE_DEVICE: usize = 48;
const QUEUE_NOTIFY_DATA: usize = 56;
const QUEUE_RESET: usize = 58;
const COMMON_SIZE: usize = 64;

pub fn on_pci(
    device: impl Virtio,
    at: Option<Address>,
    grants: &mut dyn Grants,
) -> anyhow::Result<Box<dyn Device>> {
    let slot = grants.pci(function(&device.identity(), at)?)?;
    let transport = transport(device, &slot)?;
    Ok(slot.wrap(transport))
}

/// The PCI function of a virtio device. BARs 0, 2 and 3 are free.
pub(super) fn function(identity: &Identity, at: Option<Address>) -> anyhow::Result<pci::Identity> {
    let queues = u16::try_from(identity.queues.len()).context("queues")?;
    ensure!(u64::from(queues) * u64::from(NOTIFY_STEP) <= PAGE, "{queues} queues are too many");
    Ok(pci::Identity {
        at,
        bars: vec![(BAR, Bar::Memory64(BAR_SIZE))],
        msix: Some((queues + 1, MSIX_BAR)),
        pin: Some(0),
        capabilities: capabilities(queues),
        own_registers: vec![WINDOW_FIELDS],
        ..pci::Identity::new(Id {
            vendor: 0x1af4,
            device: 0x1040 + identity.id,
            class: identity.class,
            revision: 1,
            subsystem: (0x1af4, 0x1100),
        })
    })
}

/// The registers of a virtio device, in the slot of its [`function`].
pub(super) fn transport(device: impl Virtio, slot: &Slot) -> anyhow::Result<Box<dyn Device>> {
    let identity = device.identity();
    let bar = slot.bar(BAR);
    let bells = (0..identity.queues.len() as u64)
        .map(|queue| bar.doorbell(NOTIFY + queue * u64::from(NOTIFY_STEP), 0, None))
        .collect::<anyhow::Result<_>>()?;
    let signal = Signal::new(slot.interrupt.clone(), identity.name, identity.queues.len());
    Ok(Box::new(Transport {
        registers: Registers::new(&identity),
        bar: bar.region,
        config: slot.config,
        memory: slot.memory.clone(),
        signal: Arc::new(signal),
        bells,
        identity,
        device: Box::new(device),
        running: false,
        seen: Vec::new(),
    }))
}

/// The vendor-specific capabilities. [`WINDOW`] is the first.
fn capabilities(queues: u16) -> Vec<(u8, Vec<u8>)> {
    let body = |kind: u8, offset: u64, length: u32, more: &[u8]| {
        let size = u8::try_from(16 + more.len()).expect("a short capability");
        let mut body = vec![size, kind, if kind == TYPE_WINDOW { 0 } else { BAR }, 0, 0, 0];
        body.extend(u32::try_from(offset).expect("within the BAR").to_le_bytes());
        body.extend(length.to_le_bytes());
        body.extend(more);
        (VENDOR, body)
    };
    let page = u32::try_from(PAGE).expect("a page");
    let common = u32::try_from(COMMON_SIZE).expect("a page");
    let bells = u32::from(queues) * NOTIFY_STEP;
    vec![
        body(TYPE_WINDOW, 0, 0, &[0; 4]),
        body(TYPE_COMMON, COMMON, common, &[]),
        body(TYPE_ISR, ISR, 1, &[]),
        body(TYPE_DEVICE, DEVICE, page, &[]),
        body(TYPE_NOTIFY, NOTIFY, bells, &NOTIFY_STEP.to_le_bytes()),
    ]
}

/// The driver's settings, as they are saved.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Registers {
    status: u8,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    queue_select: u16,
    generation: u8,
    queues: Vec<Ring>,
    /// Vectors of the configuration (index 0) and of each queue.
    vectors: Vec<u16>,
    isr: u8,
    broken: bool,
    /// The window's fields `bar`, padding, `offset` and `length`.
    window: [u8; 12],
    device: Saved,
}

impl Registers {
    fn new(identity: &Identity) -> Self {
        let ring = |size: &u16| Ring { size: *size, ..Ring::default() };
        Self { queues: identity.queues.iter().map(ring).collect(), ..Self::default() }
    }

    fn queue(&self) -> Option<&Ring> {
        self.queues.get(usize::from(self.queue_select))
    }
}

struct Transport {
    registers: Registers,
    bar: Region,
    config: Region,
    memory: Memory,
    signal: Arc<Signal>,
    bells: Vec<Arc<EventFd>>,
    identity: Identity,
    device: Box<dyn Virtio>,
    /// The device owns the queues: true between DRIVER_OK and reset.
    running: bool,
    /// The device's configuration at the last read of `config_generation`.
    seen: Vec<u8>,
}

impl Transport {
    fn features(&self) -> u64 {
        self.identity.features | TRANSPORT_FEATURES
    }

    fn status(&self) -> u8 {
        let broken = if self.signal.is_broken() { NEEDS_RESET } else { 0 };
        self.registers.status | broken
    }

    /// The contents of the common configuration structure, as the guest reads it.
    fn common(&mut self) -> [u8; COMMON_SIZE] {
        let mut bytes = [0; COMMON_SIZE];
        let half = |features: u64, select: u32| match select {
            0 => features & 0xffff_ffff,
            1 => features >> 32,
            _ => 0,
        };
        let generation = self.generation();
        let registers = &self.registers;
        let number = usize::from(registers.queue_select);
        let mut put = |at: usize, value: u64, width: usize| {
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        };
        put(DEVICE_FEATURE_SELECT, registers.device_feature_select.into(), 4);
        put(DEVICE_FEATURE, half(self.features(), registers.device_feature_select), 4);
        put(DRIVER_FEATURE_SELECT, registers.driver_feature_select.into(), 4);
        put(DRIVER_FEATURE, half(registers.driver_features, registers.driver_feature_select), 4);
        put(CONFIG_VECTOR, self.signal.vector(0).into(), 2);
        put(NUM_QUEUES, registers.queues.len() as u64, 2);
        put(DEVICE_STATUS, self.status().into(), 1);
        put(CONFIG_GENERATION, generation.into(), 1);
        put(QUEUE_SELECT, registers.queue_select.into(), 2);
        if let Some(ring) = registers.queue() {
            put(QUEUE_SIZE, ring.size.into(), 2);
            put(QUEUE_VECTOR, self.signal.vector(number + 1).into(), 2);
            put(QUEUE_ENABLE, ring.enabled.into(), 2);
            put(QUEUE_NOTIFY_OFF, number as u64, 2);
            put(QUEUE_DESC, ring.descriptors, 8);
            put(QUEUE_DRIVER, ring.driver, 8);
            put(QUEUE_DEVICE, ring.device, 8);
            put(QUEUE_NOTIFY_DATA, number as u64, 2);
        }
        bytes
    }

    /// `config_generation`: changes whenever the configuration has changed since the last read.
    fn generation(&mut self) -> u8 {
        let now = self.device.config();
        if self.seen != now {
            self.seen = now;
            self.registers.generation = self.registers.generation.wrapping_add(1);
        }
        self.registers.generation
    }

    fn write_common(&mut self, offset: usize, data: &[u8]) -> Access {
        let mut bytes = [0; 8];
        let Some(start) = bytes.get_mut(..data.len()) else { return Access::Ignored };
        start.copy_from_slice(data);
        let value = u64::from_le_bytes(bytes);
        let word = value & 0xffff_ffff;
        let short = u16::try_from(value).unwrap_or(u16::MAX);
        let registers = &mut self.registers;
        match (offset, data.len()) {
            (DEVICE_FEATURE_SELECT, 4) => {
                registers.device_feature_select = u32::try_from(word).unwrap_or(0);
            }
            (DRIVER_FEATURE_SELECT, 4) => {
                registers.driver_feature_select = u32::try_from(word).unwrap_or(0);
            }
            (DRIVER_FEATURE, 4) => self.accept(word),
            (CONFIG_VECTOR, 2) => self.signal.set_vector(0, short),
            (DEVICE_STATUS, 1) => self.set_status(data[0]),
            (QUEUE_SELECT, 2) => registers.queue_select = short,
            (QUEUE_SIZE | QUEUE_VECTOR | QUEUE_ENABLE | QUEUE_RESET, 2) => {
                self.write_queue(offset, short);
            }
            (QUEUE_DESC..QUEUE_NOTIFY_DATA, 4 | 8) => return self.place_ring(offset, data),
            _ => return Access::Ignored,
        }
        Access::Done
    }

    fn accept(&mut self, half: u64) {
        let registers = &mut self.registers;
        if registers.status & FEATURES_OK != 0 {
            return;
        }
        let features = &mut registers.driver_features;
        match registers.driver_feature_select {
            0 => *features = *features >> 32 << 32 | half,
            1 => *features = *features & 0xffff_ffff | half << 32,
            // Feature bits from 64 on do not exist here.
            _ => {}
        }
    }

    fn write_queue(&mut self, offset: usize, value: u16) {
        let number = self.registers.queue_select;
        let Some(max_size) = self.identity.queues.get(usize::from(number)) else { return };
        let ring = &mut self.registers.queues[usize::from(number)];
        match offset {
            QUEUE_SIZE if !ring.enabled && value.is_power_of_two() && value <= *max_size => {
                ring.size = value;
            }
            QUEUE_VECTOR => self.signal.set_vector(usize::from(number) + 1, value),
            QUEUE_ENABLE if value == 1 && !ring.enabled => {
                ring.enabled = true;
                self.restart(|_| {});
            }
            QUEUE_RESET if value == 1 => {
                let new = Ring { size: *max_size, ..Ring::default() };
                self.restart(|registers| registers.queues[usize::from(number)] = new);
            }
            _ => {}
        }
    }

    /// Writes one of the queue's three addresses, in one or two parts.
    fn place_ring(&mut self, offset: usize, data: &[u8]) -> Access {
        let select = usize::from(self.registers.queue_select);
        let Some(ring) = self.registers.queues.get_mut(select) else { return Access::Done };
        let field = match offset & !7 {
            QUEUE_DESC => &mut ring.descriptors,
            QUEUE_DRIVER => &mut ring.driver,
            _ => &mut ring.device,
        };
        let (at, mut bytes) = (offset & 7, field.to_le_bytes());
        let Some(part) = bytes.get_mut(at..at + data.len()) else { return Access::Ignored };
        part.copy_from_slice(data);
        if !ring.enabled {
            *field = u64::from_le_bytes(bytes);
        }
        Access::Done
    }

    fn set_status(&mut self, value: u8) {
        if value == 0 {
            self.reset();
            return;
        }
        let mut status = self.registers.status | value & WRITABLE_STATUS;
        let wanted = self.registers.driver_features;
        let agreed = wanted & VERSION_1 != 0 && wanted & !self.features() == 0;
        if !agreed {
            status &= !FEATURES_OK;
        }
        if status & FEATURES_OK == 0 {
            status &= !DRIVER_OK;
        }
        self.registers.status = status;
        if status & DRIVER_OK != 0 && !self.running {
            self.start();
        }
    }

    /// The device uses no queue afterwards.
    fn reset(&mut self) {
        self.stop();
        self.power_on(&Registers::new(&self.identity));
        // The empty state is valid for every device.
        self.device.restore(Saved::default()).ok();
        for bell in &self.bells {
            bell.read().ok();
        }
        self.registers = Registers {
            generation: self.registers.generation,
            window: self.registers.window,
            ..Registers::new(&self.identity)
        };
    }

    fn power_on(&self, registers: &Registers) {
        self.signal.restore(registers.isr, registers.broken);
        for number in 0..=self.bells.len() {
            let vector = registers.vectors.get(number).copied().unwrap_or(NO_VECTOR);
            self.signal.set_vector(number, vector);
        }
    }

    /// Changes the queues of a device that may be running: drivers can reset a single queue.
    fn restart(&mut self, change: impl FnOnce(&mut Registers)) {
        let running = self.running;
        self.stop();
        change(&mut self.registers);
        if running {
            self.start();
        }
    }

    fn start(&mut self) {
        self.running = true;
        match self.queues() {
            Ok(queues) => {
                // The driver may have rung before a thread listened, or before the machine was
                // paused.
                for queue in &queues {
                    queue.bell.write(1).ok();
                }
                let negotiated = self.registers.driver_features;
                if let Err(error) = self.device.start(queues, negotiated) {
                    self.signal.fail(0, &format!("{error:#}"));
                }
            }
            Err(error) => self.signal.fail(0, &format!("{error:#}")),
        }
    }

    fn queues(&self) -> anyhow::Result<Vec<Queue>> {
        let event_index = self.registers.driver_features & EVENT_IDX != 0;
        let mut queues = Vec::new();
        for (number, ring) in (0_u16..).zip(&self.registers.queues) {
            if !ring.enabled {
                continue;
            }
            let max_size = self.identity.queues[usize::from(number)];
            let bell = self.bells[usize::from(number)].clone();
            let endpoint = Endpoint { number, max_size, bell, signal: self.signal.clone() };
            let queue = Queue::new(endpoint, ring, event_index, self.memory.clone());
            let queue = queue.with_context(|| format!("queue {number}"))?;
            ensure!(queue.is_in_memory(), "queue {number}: its rings are outside of guest memory");
            queues.push(queue);
        }
        Ok(queues)
    }

    fn stop(&mut self) {
        if std::mem::take(&mut self.running) {
            for queue in self.device.stop() {
                self.registers.queues[usize::from(queue.number)] = queue.ring();
            }
        }
    }

    /// PCI configuration access (4.1.4.9), for firmware that can only reach configuration space:
    /// the offset and the length of the access to the BAR, if they are valid.
    fn window(&self) -> Option<(u64, usize)> {
        let window = &self.registers.window;
        let word = |at: usize| {
            u32::from_le_bytes([window[at], window[at + 1], window[at + 2], window[at + 3]])
        };
        let (bar, offset, length) = (window[0], u64::from(word(4)), word(8) as usize);
        let fits = matches!(length, 1 | 2 | 4) && offset + length as u64 <= BAR_SIZE;
        (bar == BAR && fits).then_some((offset, length))
    }

    fn read_window(&mut self, offset: u64, data: &mut [u8]) -> Access {
        let Some(at) = offset.checked_sub(WINDOW_DATA) else {
            let at = usize::try_from(offset - WINDOW_BAR).unwrap_or(usize::MAX);
            for (to, from) in data.iter_mut().zip(self.registers.window.iter().skip(at)) {
                *to = *from;
            }
            return Access::Done;
        };
        match self.window() {
            Some((target, length)) if at == 0 && data.len() >= length => {
                data.fill(0);
                self.read_bar(target, &mut data[..length])
            }
            _ => Access::Ignored,
        }
    }

    fn write_window(&mut self, offset: u64, data: &[u8]) -> Access {
        let Some(at) = offset.checked_sub(WINDOW_DATA) else {
            let at = usize::try_from(offset - WINDOW_BAR).unwrap_or(usize::MAX);
            for (to, from) in self.registers.window.iter_mut().skip(at).zip(data) {
                *to = *from;
            }
            return Access::Done;
        };
        match self.window() {
            Some((target, length)) if at == 0 && data.len() >= length => {
                self.write_bar(target, &data[..length])
            }
            _ => Access::Ignored,
        }
    }

    fn read_bar(&mut self, offset: u64, data: &mut [u8]) -> Access {
        let at = usize::try_from(offset % PAGE).unwrap_or(usize::MAX);
        match offset - offset % PAGE {
            COMMON => copy(&self.common(), at, data),
            ISR if at == 0 => {
                data.fill(0);
                data[0] = self.signal.acknowledge();
                Access::Done
            }
            DEVICE => copy(&self.device.config(), at, data),
            _ => Access::Ignored,
        }
    }

    fn write_bar(&mut self, offset: u64, data: &[u8]) -> Access {
        let at = usize::try_from(offset % PAGE).unwrap_or(usize::MAX);
        match offset - offset % PAGE {
            COMMON => self.write_common(at, data),
            DEVICE if at + data.len() <= self.device.config().len() => {
                self.device.write_config(at, data);
                Access::Done
            }
            // The kernel did not handle this doorbell write.
            NOTIFY => {
                let Some(bell) = self.bells.get(at / NOTIFY_STEP as usize) else {
                    return Access::Ignored;
                };
                bell.write(1).ok();
                Access::Done
            }
            _ => Access::Ignored,
        }
    }
}

/// Bytes beyond the end of the structure read as zeros.
fn copy(bytes: &[u8], at: usize, data: &mut [u8]) -> Access {
    data.fill(0);
    for (to, from) in data.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    Access::Done
}

impl Device for Transport {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.config {
            self.read_window(offset, data)
        } else if region == self.bar {
            self.read_bar(offset, data)
        } else {
            Access::Ignored
        }
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if region == self.config {
            self.write_window(offset, data)
        } else if region == self.bar {
            self.write_bar(offset, data)
        } else {
            Access::Ignored
        }
    }

    fn park(&mut self) -> Saved {
        self.stop();
        let mut registers = self.registers.clone();
        registers.vectors = (0..=self.bells.len()).map(|it| self.signal.vector(it)).collect();
        registers.isr = self.signal.isr();
        registers.broken = self.signal.is_broken();
        registers.device = self.device.save();
        Saved::of(&registers)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<Registers> = saved.take()?;
        let mut registers = saved.unwrap_or_else(|| Registers::new(&self.identity));
        self.check(&registers)?;
        self.device.restore(std::mem::take(&mut registers.device))?;
        self.power_on(&registers);
        self.registers = registers;
        if self.registers.status & DRIVER_OK != 0 && !self.signal.is_broken() {
            self.start();
        }
        Ok(())
    }
}

impl Transport {
    /// Rejects the state of another device, and damaged states.
    fn check(&self, registers: &Registers) -> anyhow::Result<()> {
        let max_size = &self.identity.queues;
        ensure!(registers.queues.len() == max_size.len(), "{} queues", registers.queues.len());
        for (ring, max_size) in registers.queues.iter().zip(max_size) {
            let size = ring.size;
            ensure!(size.is_power_of_two() && size <= *max_size, "a queue of {size} entries");
        }
        Ok(())
    }
}

#[cfg(test)]
mod test;
