//! An NVMe controller with one namespace (NVM Express 1.4): the system disk that Windows, Linux and
//! UEFI firmware support without extra drivers. PCI class 010802.
//!
//! BAR 0 holds registers and doorbells, BAR 2 the MSI-X table. The admin queue has a thread, and so
//! has each I/O completion queue together with its submission queues. A vCPU that writes a doorbell
//! only stores the value. If the kernel takes the write instead, the value is lost, so this is set
//! up only for doorbells that the driver shadows in its memory (Doorbell Buffer Config). Not
//! supported: controller memory buffer, SGLs, metadata, Compare, Verify, Format.
//!
//! Threats: the guest writes all queues, lists and doorbells, at any time and from all vCPUs.
//! Commands are copied once and then checked. Addresses are checked on every access, and queues
//! outside of memory lead to a fatal status until the guest resets the controller. The work in
//! flight is bounded for each submission queue: at most 511 requests to the disk (255, and the 256
//! ranges of one Dataset Management command), which are 2 MiB for 64 queues. Further commands wait
//! in the guest's memory.

mod admin;
mod command;
mod controller;
mod events;
mod features;
mod group;
mod health;
mod identify;
mod io;
mod io_queues;
mod log;
mod opcodes;
mod prp;
mod queues;
mod server;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use self::controller::{Controller, ENABLE, MAX_MPS, SHUTDOWN, SavedState};
use self::health::{Counter, Health};
use self::queues::{Doorbells, MAX_ENTRIES};
use crate::bus::Window;
use crate::device::{Access, Device, Region, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::pci::{Bar, Id, Identity, Interrupt};
use crate::worker::Worker;
use host::disk::{Drive, Expected, Image};
use host::fnv;
use host::memory::Memory;
use host::uuid::Uuid;

/// The ID that Red Hat assigns to emulated NVMe controllers. Drivers match the class.
const ID: Id = Id {
    vendor: 0x1b36,
    device: 0x0010,
    class: 0x01_0802,
    revision: 2,
    subsystem: (0x1af4, 0x1100),
};
/// VS: 1.4.0.
const VERSION: u32 = 0x0001_0400;

/// Registers in BAR 0 (NVMe 1.4, 3.1).
const CAP: u64 = 0x00;
const VS: u64 = 0x08;
const INTMS: u64 = 0x0c;
const INTMC: u64 = 0x10;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const NSSR: u64 = 0x20;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
/// End of the registers. Those not implemented (memory buffers, boot partitions) read as zero.
const END: u64 = 0x1000;
/// Doorbells, with a stride of 0.
const DOORBELLS: u64 = 0x1000;
const BAR_SIZE: u64 = 0x4000;

/// CAP.CQR: queues must be contiguous. CAP.CSS: the NVM command set.
const CONTIGUOUS: u64 = 1 << 16;
const NVM: u64 = 1 << 37;
/// CAP.TO, in units of 500 ms: maximum time to become ready, or to finish requests in flight.
const TIMEOUT: u64 = 60 << 24;
/// Queues of up to `MAX_ENTRIES` entries, pages of at least 4 KiB.
const CAPABILITIES: u64 =
    (MAX_ENTRIES as u64 - 1) | CONTIGUOUS | TIMEOUT | NVM | (MAX_MPS as u64) << 52;
/// Fields of CC that cannot change while the controller is enabled, and all writable fields.
const FIXED: u32 = 0x7ff << 4 & !SHUTDOWN;
const CC_WRITABLE: u32 = ENABLE | FIXED | SHUTDOWN | 0xff << 16;

/// `--device nvme,path=disk.img`: a disk that all systems have a driver for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Config(pub host::disk::Config);

/// Maximum number of I/O queue pairs.
const MAX_QUEUES: u16 = 64;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let image = self.0.open(grants.shared().holds())?;
        self.attach(image, grants)
    }

    fn fill_defaults(&mut self, processors: u16) {
        self.0.set_default_queues(processors);
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Image(&self.0.path)
    }

    fn detach_host_side(&mut self) {
        self.0.file = Expected::Nothing;
    }
}

impl Config {
    /// Creates a controller for an image that is already open.
    pub fn attach(
        self,
        image: Arc<dyn Image>,
        grants: &mut dyn Grants,
    ) -> anyhow::Result<Box<dyn Device>> {
        let (queues, serial) = (self.0.queues(), self.0.serial()?);
        let drive = self.0.drive(image.clone(), grants.name())?;
        grants.shared().disks.add(&drive);
        ensure!(
            (1..=MAX_QUEUES).contains(&queues),
            "queues={queues}: an NVMe controller has 1 to {MAX_QUEUES} queue pairs"
        );
        // UEFI firmware creates two queue pairs without asking, and rejects a disk that has only
        // one.
        let queues = queues.max(2);
        let identity = Identity {
            at: self.0.slot,
            bars: vec![(0, Bar::Memory64(BAR_SIZE))],
            msix: Some((queues + 1, 2)),
            pin: Some(0),
            ..Identity::new(ID)
        };
        let slot = grants.pci(identity)?;
        let shared = Shared::new(image, serial, queues, &slot.memory, &slot.interrupt)?;
        let window = slot.bar(0).clone();
        let device = Nvme { shared: Arc::new(shared), window, drive, worker: None };
        Ok(slot.wrap(Box::new(device)))
    }
}

/// The writable registers without the doorbells.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Registers {
    cc: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
    /// CSTS.RDY, and CSTS.SHST at its bit position.
    ready: bool,
    shutdown: u32,
    /// CC.EN was cleared, and the reset is not finished yet.
    reset: bool,
}

/// State shared by the vCPUs, the controller's thread and the threads of the queues.
struct Shared {
    registers: Mutex<Registers>,
    bells: Doorbells,
    memory: Memory,
    image: Arc<dyn Image>,
    health: Mutex<Health>,
    reads: Counter,
    writes: Counter,
    /// Size of the namespace that the guest knows, in bytes.
    size: AtomicU64,
    /// CC.MPS, in bytes.
    page: AtomicU32,
    /// The volatile write cache is enabled.
    cache: AtomicBool,
    /// CSTS.CFS
    fatal: AtomicBool,
    /// The device is about to be parked: do not wait for requests that wait for disk space.
    parking: AtomicBool,
    /// Limits host errors to one line in the log: a guest can cause them again and again.
    logged: Once,
    fixed: Fixed,
}

struct Fixed {
    queues: u16,
    serial: String,
    /// Sizes in bytes: logical block, physical block, discard granularity (0 without discard).
    block: u32,
    physical_block: u32,
    discard: u32,
    read_only: bool,
}

impl std::ops::Deref for Shared {
    type Target = Fixed;

    fn deref(&self) -> &Fixed {
        &self.fixed
    }
}

impl Shared {
    fn new(
        image: Arc<dyn Image>,
        serial: String,
        queues: u16,
        memory: &Memory,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Self> {
        let geometry = image.geometry();
        let block = geometry.logical_block;
        ensure!(matches!(block, 512 | 4096), "a disk with blocks of {block} bytes");
        let fixed = Fixed {
            queues,
            serial,
            block,
            physical_block: geometry.physical_block,
            discard: geometry.discard,
            read_only: geometry.read_only,
        };
        Ok(Self {
            registers: Mutex::default(),
            bells: Doorbells::new(queues, interrupt.clone())?,
            memory: memory.clone(),
            image,
            health: Mutex::default(),
            reads: Counter::default(),
            writes: Counter::default(),
            size: AtomicU64::new(geometry.size),
            page: AtomicU32::new(4096),
            cache: AtomicBool::new(true),
            fatal: AtomicBool::new(false),
            parking: AtomicBool::new(false),
            logged: Once::new(),
            fixed,
        })
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().expect("no device panicked")
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().expect("no device panicked")
    }

    /// One for each I/O queue pair, and one for the admin queue.
    fn vectors(&self) -> u16 {
        self.queues + 1
    }

    fn page(&self) -> u32 {
        self.page.load(Ordering::SeqCst)
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn blocks(&self) -> u64 {
        self.size() / u64::from(self.block)
    }

    fn caches(&self) -> bool {
        self.cache.load(Ordering::SeqCst)
    }

    fn discards(&self) -> bool {
        self.discard > 0
    }

    /// Shadow doorbells need MSI-X: a guest that does not ring cannot lower an interrupt line.
    fn offers_shadows(&self) -> bool {
        self.bells.uses_messages()
    }

    /// UUID version 8, computed from the serial number.
    fn uuid(&self) -> Uuid {
        let lanes = [1, 2].map(|lane| fnv::hash(self.serial.as_bytes(), lane).to_be_bytes());
        Uuid::with_version(std::array::from_fn(|at| lanes[at / 8][at % 8]), 8)
    }

    fn is_fatal(&self) -> bool {
        self.fatal.load(Ordering::SeqCst)
    }

    /// Sets the fatal status: the queues are unusable, so no completion can report the error.
    fn fail(&self) {
        if !self.fatal.swap(true, Ordering::SeqCst) {
            tracing::debug!(
                "NVMe: the guest's queues are unusable: fatal status until it resets the controller"
            );
        }
    }

    /// Reads a register, or one half of a 64-bit register.
    fn read(&self, offset: u64) -> Option<u32> {
        let wide = |value: u64| {
            let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
            u32::from_le_bytes(if offset & 4 == 0 { [a, b, c, d] } else { [e, f, g, h] })
        };
        let registers = self.registers();
        Some(match offset {
            CAP | 0x04 => wide(CAPABILITIES),
            VS => VERSION,
            INTMS | INTMC => self.bells.mask(),
            CC => registers.cc,
            CSTS => {
                registers.shutdown | u32::from(self.is_fatal()) << 1 | u32::from(registers.ready)
            }
            AQA => registers.aqa,
            ASQ | 0x2c => wide(registers.asq),
            ACQ | 0x34 => wide(registers.acq),
            // Reading a doorbell is undefined.
            _ if offset < END || self.is_doorbell(offset) => 0,
            _ => return None,
        })
    }

    fn is_doorbell(&self, offset: u64) -> bool {
        (DOORBELLS..DOORBELLS + 8 * u64::from(self.vectors())).contains(&offset)
    }

    fn write(&self, offset: u64, value: u32) -> Access {
        if offset >= DOORBELLS {
            self.bells.ring((offset - DOORBELLS) / 4, value);
            return Access::Done;
        }
        let upper = |old: u64| old & u64::from(u32::MAX) | u64::from(value) << 32;
        let lower = |old: u64| old >> 32 << 32 | u64::from(value & !0xfff);
        match offset {
            INTMS => self.bells.set_mask(|mask| mask | value),
            INTMC => self.bells.set_mask(|mask| mask & !value),
            CC => self.configure(value),
            AQA => self.registers().aqa = value & 0x0fff_0fff,
            ASQ | ACQ | 0x2c | 0x34 => {
                let mut registers = self.registers();
                let at = if offset < ACQ { &mut registers.asq } else { &mut registers.acq };
                *at = if offset & 4 == 0 { lower(*at) } else { upper(*at) };
            }
            // Read-only, or not supported.
            CAP | 0x04 | VS | CSTS | NSSR => {}
            _ => return Access::Ignored,
        }
        Access::Done
    }

    /// Handles a write to CC. The controller's thread does the work, because it takes time.
    fn configure(&self, value: u32) {
        let mut registers = self.registers();
        let old = registers.cc;
        let value = value & CC_WRITABLE;
        registers.cc = value;
        if old & value & ENABLE != 0 {
            registers.cc = value & !FIXED | old & FIXED;
        }
        registers.reset |= old & !value & ENABLE != 0;
        // If the event's counter is full, it has rung already.
        self.bells.kick.write(1).ok();
    }
}

struct Nvme {
    shared: Arc<Shared>,
    window: Arc<Window>,
    drive: Arc<Drive>,
    worker: Option<Worker<Controller>>,
}

impl Device for Nvme {
    fn read(&mut self, _: Region, offset: u64, data: &mut [u8]) -> Access {
        let aligned = offset.is_multiple_of(4) && matches!(data.len(), 4 | 8);
        for (word, at) in data.chunks_mut(4).zip((offset..).step_by(4)) {
            let Some(value) = self.shared.read(at).filter(|_| aligned) else {
                return Access::Ignored;
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
        Access::Done
    }

    fn write(&mut self, _: Region, offset: u64, data: &[u8]) -> Access {
        let (words, rest) = data.as_chunks::<4>();
        let aligned = offset.is_multiple_of(4) && rest.is_empty() && words.len() <= 2;
        // One access must not write two doorbells.
        if !aligned || words.len() == 2 && offset >= DOORBELLS {
            return Access::Ignored;
        }
        let mut access = Access::Done;
        for (word, at) in words.iter().zip((offset..).step_by(4)) {
            if self.shared.write(at, u32::from_le_bytes(*word)) == Access::Ignored {
                access = Access::Ignored;
            }
        }
        access
    }

    fn park(&mut self) -> Saved {
        let Some(worker) = self.worker.take() else { return Saved::default() };
        self.drive.watch(None);
        self.shared.parking.store(true, Ordering::SeqCst);
        let saved = worker.stop().save();
        self.shared.bells.kick.read().ok();
        Saved::of(&saved)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: SavedState = saved.take()?;
        self.shared.parking.store(false, Ordering::SeqCst);
        let controller = Controller::restore(&self.shared, &self.window, saved)?;
        let bells = vec![self.shared.bells.kick.clone()];
        let step = |controller: &mut Controller, _| controller.step();
        self.worker = Some(Worker::spawn("nvme", controller, bells, step)?);
        let kick = self.shared.bells.kick.clone();
        self.drive.watch(Some(Box::new(move || {
            // A bell that cannot take one more ring is rung already.
            kick.write(1).ok();
        })));
        Ok(())
    }
}

#[cfg(test)]
mod test;
