//! virtio-gpu (VIRTIO 1.3, 5.7) with 2D commands, and a linear frame buffer for systems without a
//! driver, like QEMU's virtio-vga. Firmware, boot loaders and Windows' basic driver draw into the
//! frame buffer (`display/bochs.rs`). Drivers of Linux and Windows (viogpudo) learn the size that a
//! viewer asks for, and change to it.
//!
//! Viewers see the frame buffer until a driver shows a resource (SET_SCANOUT), and again after the
//! device's reset. A switched-off scanout shows nothing: a driver's reset may be long after it, and
//! firmware's old picture between two modes would flicker.
//!
//! Differences to QEMU's device: the virtio structures are in BAR 4, as with our other virtio
//! devices, and MSI-X is in BAR 1. Drivers find both by capabilities. The pointer is part of the
//! picture, because a viewer cannot know which of its clients moved it.
//!
//! **Resources have no memory of the host.** A resource is a list of the guest's pages, and viewers
//! read them when they need the picture. So TRANSFER_TO_HOST_2D copies nothing, and an offset that
//! would place pixels elsewhere is refused: the drivers of Linux and Windows place them naturally.
//! Older viogpudo use the frame buffer itself as those pages (registry: UsePhysicalMemory).
//!
//! Threats: the guest chooses identifiers, sizes, rectangles, and lists of pages, and changes the
//! pages while viewers read. Sizes are limited by the frame buffer, the number of resources by
//! [`resource::MAX_RESOURCES`], their lists together by [`resource::MAX_EXTENTS`]: at most 8 MiB
//! with a request that is read. The parts of a list are not smaller than pages, so that viewers
//! are not slowed down. The lists are unchecked until they are used, by [`Memory`]. A viewer
//! reads at most the picture, however often the guest flushes.

mod command;
mod cursor;
mod resource;
mod screen;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use self::command::{CONTROL, CURSOR};
use self::screen::{Screen, State};
use super::pci::{function, transport};
use super::{Identity, Queue, Virtio, next};
use crate::device::{Access, Device, Region, Saved};
use crate::display::bochs::{self, Bochs, Monitor};
use crate::display::{Resolution, edid};
use crate::grants::{Build, Grants};
use crate::pci::Address;
use crate::worker::Worker;
use host::size::Size;

/// `--device virtio-gpu,mode=1920x1080`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Preferred resolution of the monitor, until a viewer asks for another.
    pub mode: Resolution,
    /// Size of the frame buffer, and of the largest picture: a power of two from 4M to 128M.
    /// Windows' driver reserves as much RAM in the guest. Unused parts take no memory of the host.
    pub memory: Size,
    /// PCI slot. Defaults to the first free slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
}

impl Default for Config {
    /// The memory holds 3840x2160.
    fn default() -> Self {
        Self { mode: Resolution::new(1280, 800), memory: Size(32 << 20), slot: None }
    }
}

/// The largest size in its default memory.
const LARGEST: Resolution = Resolution::new(3840, 2160);

impl Config {
    /// Limits width and height to a size that this display can show with its default memory.
    pub fn nearest(width: u32, height: u32) -> Resolution {
        let size = Resolution::nearest(width, height);
        let memory = Self::default().memory.0;
        let fits = size.bytes() <= memory && edid::single_block(size, memory, 0).is_some();
        if fits { size } else { LARGEST }
    }
}

/// viogpudo sends a list of pages of this size in as many descriptors as it has MiB, plus 2, and
/// has room for 256.
const MAX_MEMORY: Size = Size(128 << 20);

/// GET_EDID exists.
const EDID: u64 = 1 << 1;

/// Fields of the configuration (5.7.4): `events_read`, `events_clear`, `num_scanouts`,
/// `num_capsets`.
const EVENTS_CLEAR: usize = 4;
const SCANOUTS: u32 = 1;

/// Requests that the worker processes before it checks whether it must stop.
const BATCH: usize = 16;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let Self { mode, memory, slot } = self;
        bochs::check(mode, memory, MAX_MEMORY)?;
        let mut identity = function(&identity(), slot)?;
        identity.bars.extend(bochs::bars(memory));
        let slot = grants.pci(identity)?;
        let linear = Bochs::new(&slot, grants, Monitor { describe: edid::single_block, mode })?;
        let screen = Arc::new(Screen::new(&linear, slot.memory.clone()));
        grants.shared().screens.register(screen.clone());
        let transport = transport(Gpu { screen, worker: None }, &slot)?;
        Ok(slot.wrap(Box::new(Both { linear, transport })))
    }
}

/// The linear frame buffer and the virtio device, in one function.
struct Both {
    linear: Bochs,
    transport: Box<dyn Device>,
}

impl Device for Both {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if self.linear.owns(region) {
            return self.linear.read(region, offset, data);
        }
        self.transport.read(region, offset, data)
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if self.linear.owns(region) {
            return self.linear.write(region, offset, data);
        }
        self.transport.write(region, offset, data)
    }

    fn park(&mut self) -> Saved {
        let virtio = self.transport.park();
        Saved::of(&(self.linear.park(), virtio))
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let (linear, virtio) = saved.take()?;
        self.linear.run(linear)?;
        self.transport.run(virtio)
    }
}

fn identity() -> Identity {
    Identity {
        id: 16,
        name: "gpu",
        class: 0x03_0000,
        // One descriptor for each MiB of the largest memory, and more.
        queues: vec![256, 16],
        features: EDID,
    }
}

struct Gpu {
    screen: Arc<Screen>,
    worker: Option<Worker<Vec<Queue>>>,
}

/// Serves a queue: the control queue or the cursor queue.
fn serve(screen: &Screen, queue: &mut Queue) {
    for _ in 0..BATCH {
        let Some(mut chain) = next(queue) else {
            queue.notify();
            return;
        };
        let written = match queue.number {
            CONTROL => command::control(screen, &queue.memory, &mut chain),
            CURSOR => command::cursor(screen, &queue.memory, &mut chain),
            _ => 0,
        };
        queue.push(chain, written);
    }
    queue.notify();
    // There may be more requests. They are served after a pending stop.
    queue.bell.write(1).ok();
}

impl Virtio for Gpu {
    fn identity(&self) -> Identity {
        identity()
    }

    fn config(&self) -> Vec<u8> {
        [self.screen.events(), 0, SCANOUTS, 0].into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        let mut clear = [0; 4];
        for (byte, at) in data.iter().zip(offset..) {
            let field = at.checked_sub(EVENTS_CLEAR).and_then(|at| clear.get_mut(at));
            field.into_iter().for_each(|to| *to = *byte);
        }
        self.screen.clear_events(u32::from_le_bytes(clear));
    }

    fn start(&mut self, queues: Vec<Queue>, _: u64) -> anyhow::Result<()> {
        let bells = queues.iter().map(|queue| queue.bell.clone()).collect();
        self.screen.connect(queues.first().map(|queue| queue.signal.clone()));
        let screen = self.screen.clone();
        let step = move |queues: &mut Vec<Queue>, at: usize| serve(&screen, &mut queues[at]);
        self.worker = Some(Worker::spawn("virtio-gpu", queues, bells, step)?);
        Ok(())
    }

    fn stop(&mut self) -> Vec<Queue> {
        self.screen.connect(None);
        self.worker.take().map(Worker::stop).unwrap_or_default()
    }

    fn save(&self) -> Saved {
        self.screen.save()
    }

    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        let state: State = saved.take()?;
        self.screen.restore(state)
    }
}

#[cfg(test)]
mod test;
