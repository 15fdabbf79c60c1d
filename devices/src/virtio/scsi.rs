//! virtio-scsi: a disk behind a SCSI controller (VIRTIO 1.3, 5.6). QEMU machines often have their
//! disk there, and a system installed on one of them boots from no other controller.
//!
//! The controller has one target with one logical unit, both number 0. Each request queue has its
//! own thread and its own channel to the image, as in virtio-blk. One more thread serves the
//! control queue and the events.
//!
//! Threats: units, commands, lengths and segments come from the guest. They are checked against the
//! image in the SCSI layer and in the channel. An invalid request is answered with an error, and a
//! request without space for its response breaks the device. The work in flight is bounded for each
//! queue: its 256 commands, and at most 511 requests to the disk (255, and the 256 ranges of one
//! UNMAP), which are 2 MiB for 64 queues. Further commands wait.

mod control;
mod request;
mod target;

use std::sync::{Arc, Mutex};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use self::control::Control;
use self::request::{Server, SharedServer};
use self::target::Target;
use super::{Identity, Queue, Virtio, on_pci, open_disk};
use crate::device::{Device, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::poller::Poller;
use crate::scsi::Conditions;
use host::disk::{Drive, Expected};

/// `--device virtio-scsi,path=disk.img`: a disk behind a SCSI controller, as QEMU's
/// `virtio-scsi-pci` with `scsi-hd`. Windows needs a driver for it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Config(pub host::disk::Config);

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let disk = self.0;
        let drive = open_disk(&disk, grants)?;
        on_pci(Scsi::new(drive, disk.queues())?, disk.slot, grants)
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

/// Entries of a queue, and the maximum number of data pieces of one command, which also needs a
/// request and a response.
const QUEUE_SIZE: u16 = 256;
const SEGMENTS: u32 = 254;
const MAX_QUEUES: u16 = 64;

/// Numbers of the control queue, the event queue and the first request queue.
const CONTROL: u16 = 0;
const EVENTS: u16 = 1;
const REQUESTS: u16 = 2;

/// Feature bits (5.6.3). Linux offers event buffers only to controllers with HOTPLUG.
const HOTPLUG: u64 = 1 << 1;
const CHANGE: u64 = 1 << 2;

/// Maximum number of sectors (of 512 bytes) in a command, maximum number of commands of a unit, and
/// highest target and unit number, as in QEMU. The Windows driver looks for no target if the
/// highest number is 0.
const MAX_SECTORS: u32 = 0xffff;
const MAX_COMMANDS: u32 = 128;
const MAX_TARGET: u16 = 255;
const MAX_UNIT: u32 = 16383;
const EVENT_SIZE: u32 = 16;

/// Offsets of the two fields that a driver writes.
const SENSE_SIZE: usize = 20;
const CDB_SIZE: usize = 24;

/// Lengths of the sense data and the command in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Sizes {
    sense: u32,
    cdb: u32,
}

impl Sizes {
    /// Power-on values (5.6.4).
    const NEW: Self = Self { sense: 96, cdb: 32 };

    /// No standard has longer ones (SPC-4, 4.5.1 and 4.2.5).
    fn are_valid(self) -> bool {
        self.sense <= 252 && self.cdb <= 260
    }
}

pub struct Scsi {
    target: Arc<Target>,
    queues: u16,
    sizes: Sizes,
    control: Option<Poller<Control>>,
    servers: Vec<Poller<SharedServer>>,
    /// Size of the disk that the driver last knew, in bytes.
    known: u64,
}

impl Scsi {
    /// `queues` is the number of request queues, 1 to 64.
    pub fn new(drive: Arc<Drive>, queues: u16) -> anyhow::Result<Self> {
        ensure!(
            (1..=MAX_QUEUES).contains(&queues),
            "queues={queues}: a disk has 1 to {MAX_QUEUES} queues"
        );
        let known = drive.geometry().size;
        let target = Arc::new(Target::new(drive)?);
        let (control, servers) = (None, Vec::new());
        Ok(Self { target, queues, sizes: Sizes::NEW, control, servers, known })
    }

    /// Notifies the driver whenever the disk grows. Also notifies it now if the disk grew while the
    /// device was stopped.
    fn watch(&self) {
        let target = Arc::downgrade(&self.target);
        self.target.drive.watch(Some(Box::new(move || {
            if let Some(target) = target.upgrade() {
                target.grow();
            }
        })));
        if self.target.drive.geometry().size != self.known {
            self.target.grow();
        }
    }
}

/// Saved state besides the queues.
#[derive(Serialize, Deserialize)]
struct State {
    conditions: Conditions,
    sizes: Sizes,
    /// The size that the driver knows, in bytes.
    size: u64,
}

impl Virtio for Scsi {
    fn identity(&self) -> Identity {
        let queues = vec![QUEUE_SIZE; usize::from(REQUESTS + self.queues)];
        let features = HOTPLUG | CHANGE;
        Identity { id: 8, name: "virtio-scsi", class: 0x01_0000, queues, features }
    }

    fn config(&self) -> Vec<u8> {
        let words = [self.queues.into(), SEGMENTS, MAX_SECTORS, MAX_COMMANDS, EVENT_SIZE];
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.extend(self.sizes.sense.to_le_bytes());
        bytes.extend(self.sizes.cdb.to_le_bytes());
        // `max_channel`: only channel 0.
        bytes.extend([0, 0]);
        bytes.extend(MAX_TARGET.to_le_bytes());
        bytes.extend(MAX_UNIT.to_le_bytes());
        bytes
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        let Ok(value) = data.try_into().map(u32::from_le_bytes) else { return };
        let sizes = match offset {
            SENSE_SIZE => Sizes { sense: value, ..self.sizes },
            CDB_SIZE => Sizes { cdb: value, ..self.sizes },
            _ => return,
        };
        if sizes.are_valid() {
            self.sizes = sizes;
        }
    }

    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()> {
        self.watch();
        let (mut others, mut servers) = ([None, None], Vec::new());
        for queue in queues {
            if let Some(slot) = others.get_mut(usize::from(queue.number)) {
                *slot = Some(queue);
                continue;
            }
            let name = format!("scsi-{}", queue.number - REQUESTS);
            let server = Server::new(queue, self.target.clone(), self.sizes)?;
            let server = Arc::new(Mutex::new(server));
            servers.push(server.clone());
            self.servers.push(Poller::spawn(&name, SharedServer(server))?);
        }
        let [control, events] = others;
        if control.is_some() || events.is_some() {
            let wants_events = negotiated & CHANGE != 0;
            let control =
                Control::new([control, events], servers, self.target.clone(), wants_events);
            self.control = Some(Poller::spawn("scsi-control", control)?);
        }
        Ok(())
    }

    fn stop(&mut self) -> Vec<Queue> {
        self.target.drive.watch(None);
        // If the event was not sent yet, the old size stays: the driver is notified when it runs
        // again.
        if !self.target.is_grown() {
            self.known = self.target.drive.geometry().size;
        }
        // First: the control thread may be aborting tasks of the others.
        let others = self.control.take().map(|it| it.stop().finish()).unwrap_or_default();
        let servers = self.servers.drain(..).map(Poller::stop);
        others.into_iter().chain(servers.map(SharedServer::finish)).collect()
    }

    fn save(&self) -> Saved {
        let conditions = self.target.conditions().clone();
        Saved::of(&State { conditions, sizes: self.sizes, size: self.known })
    }

    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<State> = saved.take()?;
        // A driver that starts reads the size by itself.
        let size = self.target.drive.geometry().size;
        let new = State { conditions: Conditions::default(), sizes: Sizes::NEW, size };
        let State { conditions, sizes, size } = saved.unwrap_or(new);
        ensure!(sizes.are_valid(), "a request with {sizes:?}");
        self.target.restore(conditions);
        (self.sizes, self.known) = (sizes, size);
        Ok(())
    }
}

#[cfg(test)]
mod test;
