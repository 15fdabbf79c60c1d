//! Mass storage (USB Mass Storage Class, Bulk-Only Transport 1.0): a disk or a CD-ROM drive with
//! SCSI commands. Firmware and Windows' setup have a driver for it.
//!
//! Data moves between guest memory and the image's channel without a copy. This happens on the
//! controller's thread. Commands of the operator run on the operator's thread, which waits until
//! the device has released the medium.
//!
//! Threats: the guest controls wrappers, commands, and all lengths in them. Each command has two
//! data lengths, in its wrapper and in its SCSI block, which are compared before anything is done.
//! Blocks are checked against the medium here and in the channel. At most one part of one transfer
//! is in flight, and answers are short.

mod bulk;
mod transport;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context, ensure};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use self::transport::{IN, OUT, State, Transport};
use super::{
    Change, Descriptors, Endpoint, Function, Identity, Interface, Kind, Progress, Setup, Speed,
    Stall, Transfer, TransferEnd, plug_device,
};
use crate::device::{Device, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::scsi::{Bus, MediaEvent, Profile, Sense, open_medium};
use host::disk::{
    self, BackingFile, Changes, Direct, Drive, Expected, FileId, Format, MediumOpener, Sector, Tray,
};
use host::memory::Memory;
use host::size::Size;

/// `--device usb-storage,path=win11.iso`: a disk or a CD-ROM drive at the first free USB port.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The file or block device. Optional for CD-ROM drives and removable disks, which may be
    /// empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// A CD-ROM drive, which is read-only. Defaults to `on` for files whose names end in .iso.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdrom: Option<bool>,
    /// The disk can be removed by `eject`. CDs always can.
    pub removable: bool,
    /// The speed: `high` (USB 2) or `super` (USB 3, the default).
    pub speed: Rate,
    /// The format, as for other disks: `raw` or `qcow2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Read-only for the guest. Several machines may then read the same disk.
    pub readonly: bool,
    /// Bypasses the host's page cache: `on`, `off`, or `auto`, which is on where the file system
    /// can.
    pub direct: Direct,
    /// The bytes per sector of a disk: 512 or 4096. CDs have 2048.
    pub sector: Sector,
    /// The maximum number of requests per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// The maximum number of bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// Space that the guest discards is freed on the host.
    pub discard: bool,
    /// `on`: writes stay in memory and are lost when the machine ends. The file is not changed. Or
    /// patches of a read-only disk, as `OFFSET:OLD:NEW+...` with bytes in hexadecimal: the guest
    /// reads NEW where the file has OLD.
    pub overlay: Changes,
    /// `on` allows the backing file of a qcow2 image in any folder. By default, only in that of the
    /// image. Or the path of the backing file, whatever the image names.
    pub backing: BackingFile,
    /// The serial number: at most 20 ASCII characters. By default, made from the name of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The file that is expected at the path.
    #[serde(skip)]
    pub file: Expected,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            path: None,
            cdrom: None,
            removable: false,
            speed: Rate::default(),
            format: None,
            readonly: false,
            direct: Direct::default(),
            sector: Sector::default(),
            iops: None,
            bandwidth: None,
            discard: true,
            overlay: Changes::None,
            backing: BackingFile::OwnFolder,
            serial: None,
            file: Expected::Any,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rate {
    /// USB 2: 480 Mb/s.
    High,
    /// USB 3: 5 Gb/s.
    #[default]
    Super,
}

/// Mass storage, transparent SCSI, bulk only.
const CLASS: (u8, u8, u8) = (8, 6, 0x50);
/// The vendor and the product that QEMU uses.
const VENDOR: u16 = 0x46f4;
const PRODUCT: u16 = 0x0001;

/// bmRequestType without the direction (class, to an interface), and bRequest (3).
const RESET: (u8, u8) = (0x21, 0xff);
const GET_MAX_LUN: (u8, u8) = (0x21, 0xfe);

impl Config {
    fn is_cdrom(&self) -> bool {
        let iso =
            |path: &PathBuf| path.extension().is_some_and(|it| it.eq_ignore_ascii_case("iso"));
        self.cdrom.unwrap_or_else(|| self.path.as_ref().is_some_and(iso))
    }

    fn disk(&self) -> disk::Config {
        disk::Config {
            format: self.format,
            readonly: self.readonly || self.is_cdrom(),
            direct: self.direct,
            sector: self.sector,
            iops: self.iops,
            bandwidth: self.bandwidth,
            discard: self.discard,
            overlay: self.overlay.clone(),
            backing: self.backing.clone(),
            serial: self.serial.clone(),
            queues: Some(1),
            ..disk::Config::new(self.path.clone().unwrap_or_default())
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        let cdrom = self.is_cdrom();
        ensure!(
            !cdrom || self.sector == Sector::default(),
            "a CD has sectors of 2048 bytes: remove `sector`, or set `cdrom=off`"
        );
        if cdrom {
            self.overlay.check_cdrom()?;
        }
        ensure!(
            cdrom || self.removable || self.path.is_some(),
            "`usb-storage` needs `path=FILE`; only with `removable` or `cdrom` it may be empty"
        );
        Ok(())
    }

    fn descriptors(&self, serial: &str) -> Descriptors {
        let (speed, packet) = match self.speed {
            Rate::High => (Speed::High, 512),
            Rate::Super => (Speed::Super, 1024),
        };
        let bulk = |address| Endpoint { address, kind: Kind::Bulk, packet, interval: 0 };
        let interface = Interface {
            number: 0,
            alternate: 0,
            class: CLASS,
            extra: Vec::new(),
            endpoints: vec![bulk(IN), bulk(OUT)],
        };
        let name = if self.is_cdrom() { "USB CD-ROM" } else { "USB disk" };
        let identity = Identity {
            vendor: VENDOR,
            product: PRODUCT,
            maker: "Transom".into(),
            name: name.into(),
            serial: number(serial),
        };
        Descriptors::new(speed, identity, vec![interface])
    }
}

/// A serial number of at least twelve hexadecimal digits, as the transport demands (4.1.1). Windows
/// ignores any other.
fn number(serial: &str) -> String {
    let fits =
        serial.len() >= 12 && serial.bytes().all(|it| matches!(it, b'0'..=b'9' | b'A'..=b'F'));
    if fits {
        return serial.to_owned();
    }
    format!("{:016X}", host::fnv::hash(serial.as_bytes(), 0))
}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        self.check()?;
        let disk = self.disk();
        let serial = if self.path.is_some() || self.serial.is_some() {
            disk.serial()?
        } else {
            grants.name().to_owned()
        };
        let cdrom = self.is_cdrom();
        let removable = cdrom || self.removable;
        let profile = Profile { bus: Bus::Usb, cdrom, removable, serial: serial.clone() };
        let opener = {
            let shared = grants.shared();
            MediumOpener::new(disk, grants.name(), shared.holds(), shared.disks.clone())
        };
        let medium = match &self.path {
            Some(path) if self.file != Expected::Nothing => {
                let only = if let Expected::Only(file) = self.file { Some(file) } else { None };
                Some(open_medium(&opener, path, only, cdrom)?)
            }
            _ => None,
        };
        let shared = Arc::new(Shared::new(grants, opener, Transport::new(profile, medium))?);
        grants.shared().disks.add_tray(&(shared.clone() as Arc<dyn Tray>));
        let function = Box::new(Storage(shared.clone()));
        // Pulling the device releases the file at once, even if the controller is slow. It is no
        // longer found by its name either, which another device may get.
        let release = Box::new(move || {
            shared.with(|transport| {
                transport.remove_medium();
                transport.profile.removable = false;
            });
        });
        let hub = grants.shared().usb.clone();
        plug_device(hub, grants.name(), self.descriptors(&serial), function, release)
    }

    fn is_usb(&self) -> bool {
        true
    }

    fn expect_file(&mut self, file: FileId) -> bool {
        self.file = Expected::Only(file);
        true
    }

    fn host_side(&self) -> HostSide<'_> {
        self.path.as_deref().map_or(HostSide::None, HostSide::Medium)
    }

    fn detach_host_side(&mut self) {
        self.file = Expected::Nothing;
    }
}

/// State shared between the controller's thread and the operator.
struct Shared {
    opener: MediumOpener,
    /// The guest's side. Only the operator waits for this lock, at most for one part of a transfer.
    transport: Mutex<Transport>,
    /// Signaled after commands of the operator.
    kick: Arc<OwnedFd>,
    grown: Arc<AtomicBool>,
    /// Readable after events of the operator or of the medium.
    events: OwnedFd,
}

impl Shared {
    fn new(
        grants: &dyn Grants,
        opener: MediumOpener,
        transport: Transport,
    ) -> anyhow::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC);
        let events = events.with_context(|| format!("an epoll for {}", grants.name()))?;
        let kick = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let kick = Arc::new(kick.with_context(|| format!("an event for {}", grants.name()))?);
        watch(&events, &kick)?;
        let transport = Mutex::new(transport);
        Ok(Self { opener, transport, kick, grown: Arc::default(), events })
    }

    fn transport(&self) -> MutexGuard<'_, Transport> {
        self.transport.lock().expect("no device panicked")
    }

    /// Runs `act` on the operator's thread, then wakes the controller's thread.
    fn with<T>(&self, act: impl FnOnce(&mut Transport) -> T) -> T {
        let mut transport = self.transport();
        let result = act(&mut transport);
        transport.proceed();
        drop(transport);
        signal(&self.kick);
        result
    }

    fn connect(&self, transport: &mut Transport) -> anyhow::Result<()> {
        let (Some(medium), Some(memory)) = (&transport.medium, &transport.memory) else {
            return Ok(());
        };
        let channel = medium.image.channel(memory)?;
        watch(&self.events, channel.event())?;
        transport.channel = Some(channel);
        let (grown, kick) = (self.grown.clone(), self.kick.clone());
        medium.watch(Some(Box::new(move || {
            grown.store(true, Ordering::Release);
            signal(&kick);
        })));
        Ok(())
    }
}

fn signal(event: &OwnedFd) {
    // If the counter is full, the thread is woken anyway.
    rustix::io::write(event, &1_u64.to_ne_bytes()).ok();
}

/// Adds a file descriptor to an epoll. Closing it removes it again.
fn watch(events: &OwnedFd, event: impl AsFd) -> anyhow::Result<()> {
    let data = epoll::EventData::new_u64(0);
    match epoll::add(events, event, data, epoll::EventFlags::IN) {
        // A disk passes the ring of its last channel on to the next one.
        Err(Errno::EXIST) => Ok(()),
        added => added.context("an event of a disk"),
    }
}

impl Tray for Shared {
    fn name(&self) -> &str {
        &self.opener.name
    }

    fn is_removable(&self) -> bool {
        self.transport().profile.removable
    }

    fn is_locked(&self) -> bool {
        self.transport().state.conditions.prevented
    }

    fn medium(&self) -> Option<Arc<Drive>> {
        self.transport().medium.clone()
    }

    fn eject(&self, force: bool) -> anyhow::Result<()> {
        let name = self.name();
        self.with(|transport| {
            ensure!(
                transport.profile.removable,
                "the medium of {name} cannot be removed: attach the device with `removable`, \
                 or unplug it with `detach`"
            );
            ensure!(transport.medium.is_some(), "there is no medium in {name}");
            let conditions = &mut transport.state.conditions;
            if conditions.prevented && !force {
                conditions.news = MediaEvent::EjectRequest;
                anyhow::bail!(
                    "the guest has locked the medium of {name}, and was asked to release it: use \
                     `force` to remove it anyway"
                );
            }
            transport.remove_medium();
            Ok(())
        })
    }

    fn insert(&self, path: &Path, only: Option<FileId>) -> anyhow::Result<()> {
        let name = self.name();
        ensure!(
            self.is_removable(),
            "the medium of {name} cannot be changed: attach the device with `removable`"
        );
        ensure!(self.medium().is_none(), "there is already a medium in {name}: `eject` it first");
        let cdrom = self.transport().profile.cdrom;
        let drive = open_medium(&self.opener, path, only, cdrom)?;
        self.with(|transport| {
            transport.medium = Some(drive);
            if let Err(error) = self.connect(transport) {
                transport.remove_medium();
                return Err(error);
            }
            transport.state.out = false;
            transport.state.conditions.add_attention(Sense::MEDIUM_CHANGED);
            transport.state.conditions.news = MediaEvent::NewMedium;
            Ok(())
        })
    }
}

/// The function of the device, on the controller's thread.
struct Storage(Arc<Shared>);

impl Function for Storage {
    fn control(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<Progress, Stall> {
        match (setup.is_in(), setup.kind_and_request()) {
            (true, GET_MAX_LUN) if setup.value == 0 && setup.index == 0 => data.push(0),
            (false, RESET) if setup.value == 0 && setup.index == 0 => {
                self.0.transport().bulk_only_reset();
            }
            _ => return Err(Stall),
        }
        Ok(Progress::Done)
    }

    fn change(&mut self, change: Change) {
        let mut transport = self.0.transport();
        match change {
            Change::Reset => transport.reset(),
            Change::Configure(_) | Change::Alternate(..) => transport.bulk_only_reset(),
            Change::Cancel(endpoint) => transport.cancel(endpoint),
            // A command that was refused has ended already. The broken phase stays until a reset.
            Change::Clear(_) => {}
        }
    }

    fn begin(&mut self, transfer: Transfer) {
        self.0.transport().begin(transfer);
    }

    fn reap(&mut self, done: &mut Vec<TransferEnd>) {
        rustix::io::read(&*self.0.kick, &mut [0; 8]).ok();
        let mut transport = self.0.transport();
        if self.0.grown.swap(false, Ordering::AcqRel) {
            transport.state.conditions.add_attention(Sense::CAPACITY_CHANGED);
        }
        transport.reap(done);
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.events.as_fd())
    }

    fn park(&mut self) -> Saved {
        let mut transport = self.0.transport();
        transport.cancel_transfers();
        (transport.channel, transport.memory) = (None, None);
        if let Some(medium) = &transport.medium {
            medium.watch(None);
        }
        Saved::of(&transport.state)
    }

    fn run(&mut self, saved: Saved, memory: &Memory) -> anyhow::Result<()> {
        let state: Option<State> = saved.take()?;
        let mut transport = self.0.transport();
        let size = transport.medium.as_ref().map_or(0, |it| it.geometry().size);
        let state = state.unwrap_or_default();
        ensure!(
            state.phase.is_valid(size) || state.out,
            "saved state: a command beyond the end of the medium"
        );
        transport.state = state;
        if transport.state.out {
            transport.remove_medium();
        }
        transport.state.out = transport.medium.is_none();
        transport.memory = Some(memory.clone());
        self.0.connect(&mut transport)?;
        transport.proceed();
        Ok(())
    }
}

#[cfg(test)]
mod test;
