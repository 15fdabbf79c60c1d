//! Translates settings and sizes to the configuration of `vmm`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use devices::display::{Resolution, bochs};
use devices::platform::tpm;
use devices::registry::{self, Config as Device};
use devices::usb::storage;
use devices::virtio::gpu;
use devices::{ahci, e1000e, nvme, virtio};
use host::disk;
use host::disk::{BackingFile, Changes, Direct, Patch};
use host::listen::UnixAddress;
use host::mac::Mac;
use host::pci::Address;
use host::size::Size;
use host::stream::Stream;
use host::uuid::Uuid;
use jail::{Folders, Mode, User};
use screen::keys::layout;
use screen::rfb::listen;
use vmm::config::{
    Absent, BootOrder, Config, Cpus, Features, Hidden, Hide, Hyperv, Incoming, Item, Level, Memory,
    Options, Parent, Present, Restore, UnknownMsr,
};

use super::volume::ephemeral::Unnamed;
use crate::agent;
use crate::disks::{Disk, image_format};
use crate::settings::settle::Sizes;
use crate::settings::translate::arguments::{Content, Drive};
use crate::settings::translate::{Adapter, Bus, Cache, Display, Model, Screen};
use crate::settings::value::Value as _;
use crate::settings::{Discard, Format, Processor, Settings};
use crate::setup_disk::SetupDisk;
use crate::source::Source;

/// User ID of the machine's process if the pod is root. The image uses it for nothing else.
const USER: u32 = 10001;

/// The places of CD drives. Further ones take the first free slot.
const CDROM_SLOTS: [Address; 6] = [
    Address::new(0x1f, 2),
    Address::new(0x1f, 3),
    Address::new(0x1f, 4),
    Address::new(0x1f, 5),
    Address::new(0x1f, 6),
    Address::new(0x1f, 7),
];
/// Fixed, so that this port changes the slot of no other device.
const CLIPBOARD_SLOT: Address = Address::new(0x1e, 0);
/// The set-up disk's serial number, in the characters that USB allows.
const SETUP_SERIAL: &str = "5E7000000001";

/// Files and sockets prepared for the machine.
#[derive(Debug, Default)]
pub struct Parts {
    /// The firmware's code and variables; `None` for the probe.
    pub firmware: Option<(PathBuf, PathBuf)>,
    /// The firmware runs in system-management mode.
    pub smm: bool,
    /// The socket of the TPM.
    pub tpm: Option<PathBuf>,
    pub identity: Identity,
    /// The disks, the system disk first.
    pub disks: Vec<Disk>,
    /// Files of an ephemeral machine.
    pub unnamed: Unnamed,
    /// A CD that boots before the disks.
    pub rescue: Option<PathBuf>,
    /// CDs that boot if no disk does, in this order.
    pub media: Vec<Cd>,
    /// A removable disk with what Windows' setup reads.
    pub setup_disk: Option<SetupDisk>,
    pub card: Option<NetworkCard>,
    pub hardware: Hardware,
    /// A machine that goes on.
    pub origin: Option<Origin>,
    pub control: PathBuf,
    /// The socket behind the serial port of the guest's agent.
    pub agent: PathBuf,
    /// Addresses at which the screen is shown.
    pub listeners: Vec<listen::Config>,
}

/// From where a machine goes on.
#[derive(Debug)]
pub enum Origin {
    Saved(Restore),
    /// It comes from another pod through this socket.
    Arrives(PathBuf),
}

/// The machine's identity, as far as it is kept on the volume.
#[derive(Debug, Default)]
pub struct Identity {
    pub uuid: Option<Uuid>,
    /// The VM Generation ID since a snapshot was restored.
    pub generation: Option<Uuid>,
}

impl Parts {
    pub fn adapter(&self, settings: &Settings) -> Adapter {
        self.hardware.adapter.unwrap_or(settings.network.adapter.value)
    }

    /// The number of queue pairs that the network card may have. Intel's has one.
    pub fn pairs(&self, settings: &Settings, processors: u32) -> u32 {
        match self.adapter(settings) {
            Adapter::Virtio => processors,
            Adapter::E1000e => 1,
        }
    }
}

/// The kinds of devices that Windows was installed with, where they are not those of the settings.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hardware {
    /// The controller of the disks.
    pub controller: Option<Bus>,
    /// The model of the network card.
    pub adapter: Option<Adapter>,
}

/// A CD in a drive of its own.
#[derive(Debug)]
pub struct Cd {
    pub path: PathBuf,
    /// The guest reads these bytes instead of the file's.
    pub patch: Option<Patch>,
}

impl From<PathBuf> for Cd {
    fn from(path: PathBuf) -> Self {
        Self { path, patch: None }
    }
}

#[derive(Debug)]
pub struct NetworkCard {
    pub backend: host::net::Network,
    pub mac: Mac,
    /// The MTU, if it is not the usual one.
    pub mtu: Option<u16>,
    pub pairs: u16,
}

pub fn config(settings: &Settings, sizes: &Sizes, parts: &Parts) -> anyhow::Result<Config> {
    let mut config = Config {
        control: Some(UnixAddress::Path(text(&parts.control)?)),
        // Without the pod, nobody could shut the machine down.
        die_with: Parent::from(rustix::process::getpid()),
        vnc: parts.listeners.clone(),
        ..Config::default()
    };
    origin(&mut config, parts)?;
    frame(&mut config, settings, sizes);
    identity(&mut config, settings, parts)?;
    if let Some((code, vars)) = &parts.firmware {
        config.firmware = Some(text(code)?);
        config.vars = Some(text(vars)?);
        config.smm = parts.smm;
        if let Some(path) = &parts.tpm {
            config.tpm = Some(tpm::Config::new(text(path)?));
        }
        // Windows reads registers that no hypervisor implements.
        config.msr = UnknownMsr::Ignore;
    }
    input_devices(&mut config, settings);
    let mut order = Vec::new();
    if let Some(medium) = &parts.rescue {
        order.extend(insert(&mut config, settings.disk.media.value, &medium.clone().into())?);
    }
    for disk in present(parts) {
        let bus = parts.hardware.controller.unwrap_or(settings.disk.controller.value);
        order.extend(attach(&mut config, settings, bus, disk)?);
    }
    for cd in &parts.media {
        order.extend(insert(&mut config, settings.disk.media.value, cd)?);
    }
    if let Some(disk) = &parts.setup_disk {
        config.device.push(Device::UsbStorage(setup_disk(disk)));
    }
    if let Some(card) = &parts.card {
        config.device.push(network_card(card, parts.adapter(settings)));
    }
    order.extend(add_optional_devices(&mut config, settings, parts)?);
    // The last ones, so that their absence or presence does not change the slots of other devices.
    config.device.push(Device::VirtioSerial(virtio::console::Config {
        name: Some(agent::PORT.to_owned()),
        to: Stream::Socket(text(&parts.agent)?),
        slot: None,
    }));
    let seen = config.display != vmm::config::Display::Absent(Absent::None);
    if settings.screen.clipboard && seen {
        let port = virtio::console::Config {
            name: None,
            to: Stream::Clipboard,
            slot: Some(CLIPBOARD_SLOT),
        };
        config.device.push(Device::VirtioSerial(port));
    }
    if settings.screen.audio {
        config.device.push(Device::Hda(Default::default()));
    }
    if parts.firmware.is_some() {
        config.boot = BootOrder(order);
    }
    set_jail(&mut config, settings)?;
    config.check()?;
    Ok(config)
}

fn origin(config: &mut Config, parts: &Parts) -> anyhow::Result<()> {
    match &parts.origin {
        Some(Origin::Saved(restore)) => config.restore = Some(restore.clone()),
        Some(Origin::Arrives(socket)) => {
            // No option comes from the machine: its guest may have taken over its process.
            let (socket, options) = (UnixAddress::Path(text(socket)?), Options::Given);
            config.incoming = Some(Incoming { socket, options });
        }
        None => {}
    }
    Ok(())
}

/// Checks that such a machine is possible, before anything is created for it.
pub fn check(settings: &Settings, sizes: &Sizes, source: &Source) -> anyhow::Result<()> {
    let mut parts =
        Parts { control: "/control".into(), agent: "/agent".into(), ..Parts::default() };
    if *source != Source::Probe {
        parts.firmware = Some(("/code".into(), "/vars".into()));
        parts.disks.push(Disk::new("/disk".into(), Format::Raw));
        parts.media.push(PathBuf::from("/medium").into());
    }
    config(settings, sizes, &parts).map(drop)
}

/// Processors, memory, display, keyboard and serial port.
fn frame(config: &mut Config, settings: &Settings, sizes: &Sizes) {
    config.cpus = match &settings.processor.topology {
        Some(it) => Cpus {
            count: it.count.into(),
            sockets: it.sockets.into(),
            cores: it.cores.into(),
            threads: it.threads.into(),
        },
        None => Cpus { count: sizes.processors, ..Cpus::default() },
    };
    let prealloc = settings.machine.arguments.as_ref().is_some_and(|it| it.prealloc);
    config.memory = Memory { size: mebibytes(sizes.memory), prealloc, ..Memory::default() };
    config.hyperv = if settings.processor.hyperv { Hyperv::Auto } else { Hyperv::Off };
    config.features = features(&settings.processor);
    let picture = &settings.screen;
    let dark = picture.adapter.value == Screen::None || picture.display.value == Display::None;
    config.display = if dark {
        vmm::config::Display::Absent(Absent::None)
    } else {
        let size = (settings.windows.width.0, settings.windows.height.0);
        vmm::config::Display::Present(display(size, picture.adapter.value))
    };
    let windows = &settings.windows;
    let keyboard = windows.keyboard.as_ref().map(|it| it.show());
    let keyboard = keyboard.unwrap_or_else(|| windows.language.show());
    // Unknown layouts fall back to the default.
    config.keyboard = keyboard.parse::<layout::Name>().unwrap_or_default();
    // Always connected: the firmware reports there what it boots.
    config.serial = Some(Stream::Stdio);
}

/// A display with enough memory for this size, or for the nearest that it can show.
fn display((width, height): (u32, u32), adapter: Screen) -> Present {
    if adapter == Screen::Virtio {
        let mode = Some(gpu::Config::nearest(width, height));
        return Present { adapter: vmm::config::Adapter::Virtio, mode, ..Present::default() };
    }
    let mode = Resolution::nearest(width, height);
    let memory = Size(bochs::Config::default().memory.0.max(mode.bytes().next_power_of_two()));
    Present { mode: Some(mode), memory: Some(memory), ..Present::default() }
}

fn features(processor: &Processor) -> Features {
    let flags = processor.flags.clone().unwrap_or_default();
    let mut hidden = flags.hidden;
    if !processor.virtual_machine {
        hidden.insert(Hide::Hypervisor);
    }
    let hidden: Vec<_> = hidden.into_iter().collect();
    Features {
        nested: flags.nested.unwrap_or(processor.nested),
        level: processor.model.as_ref().and_then(|it| level(it.value)),
        without: (!hidden.is_empty()).then_some(Hidden(hidden)),
        hv_vendor: flags.vendor,
    }
}

fn level(model: Model) -> Option<Level> {
    match model {
        Model::Host => None,
        Model::V2 => Some(Level::V2),
        Model::V3 => Some(Level::V3),
        Model::V4 => Some(Level::V4),
    }
}

/// The SMBIOS strings, the UUID and the VM Generation ID.
fn identity(config: &mut Config, settings: &Settings, parts: &Parts) -> anyhow::Result<()> {
    config.vmgenid = parts.identity.generation.map(|id| id.to_string());
    let machine = &settings.machine;
    let said = [machine.smbios.as_ref(), machine.arguments.as_ref().map(|it| &it.smbios)];
    let said = || said.into_iter().flatten();
    let smbios = &mut config.smbios;
    for (name, field, values) in [
        ("manufacturer", &mut smbios.manufacturer, said().map(|it| &it.manufacturer).collect()),
        ("product", &mut smbios.product, said().map(|it| &it.product).collect::<Vec<_>>()),
        ("version", &mut smbios.version, said().map(|it| &it.version).collect()),
        ("serial", &mut smbios.serial, said().map(|it| &it.serial).collect()),
    ] {
        let mut values = values.into_iter().flatten();
        if let Some(value) = values.next() {
            value.clone_into(field);
        }
        ensure!(values.next().is_none(), "SM_BIOS and ARGUMENTS both set {name}=: set it once");
    }
    let uuid = said().filter_map(|it| it.uuid.as_ref()).next();
    if let Some(uuid) = machine.uuid.as_ref().or(uuid).or(parts.identity.uuid.as_ref()) {
        smbios.uuid = uuid.to_string();
    }
    Ok(())
}

fn input_devices(config: &mut Config, settings: &Settings) {
    config.device.push(Device::Xhci(Default::default()));
    if settings.screen.display.value != Display::None {
        config.device.push(Device::UsbTablet(Default::default()));
        config.device.push(Device::UsbKeyboard(Default::default()));
    }
}

fn network_card(card: &NetworkCard, adapter: Adapter) -> Device {
    let (to, mac, mtu) = (card.backend.clone(), Some(card.mac), card.mtu);
    match adapter {
        Adapter::Virtio => {
            let pairs = card.pairs.max(1);
            Device::VirtioNet(virtio::net::Config { to, mac, mtu, pairs, ..Default::default() })
        }
        Adapter::E1000e => Device::E1000e(e1000e::Config { to, mac, mtu, ..Default::default() }),
    }
}

/// Returns the disk's name.
fn attach(
    config: &mut Config,
    settings: &Settings,
    bus: Bus,
    disk: &Disk,
) -> anyhow::Result<Option<String>> {
    let drives = &settings.disk;
    let direct = drives.cache.value == Cache::Direct;
    let image = disk::Config {
        format: Some(image_format(disk.format)),
        size: disk.longer.map(mebibytes),
        direct: if direct { Direct::Auto } else { Direct::Off },
        discard: drives.discard == Discard::Unmap,
        backing: disk.base.clone().map_or(BackingFile::OwnFolder, BackingFile::This),
        serial: disk.serial.clone(),
        ..disk::Config::new(text(&disk.path)?)
    };
    attach_image(config, bus, image)
}

/// Returns the disk's name.
fn attach_image(
    config: &mut Config,
    bus: Bus,
    image: disk::Config,
) -> anyhow::Result<Option<String>> {
    config.device.push(match bus {
        Bus::Auto | Bus::Nvme => Device::Nvme(nvme::Config(image)),
        Bus::Scsi => Device::VirtioScsi(virtio::scsi::Config(image)),
        Bus::Blk => Device::VirtioBlk(virtio::blk::Config(image)),
        Bus::Ahci => Device::AhciDisk(ahci::disk::Config(image)),
        Bus::Usb => Device::UsbStorage(usb_disk(image)?),
        Bus::None => return Ok(None),
    });
    Ok(name_of_last(config))
}

fn usb_disk(image: disk::Config) -> anyhow::Result<storage::Config> {
    let disk::Config { path, format, readonly, direct, discard, size, backing, serial, .. } = image;
    ensure!(
        size.is_none(),
        "{}: a USB disk cannot be enlarged: set DISK_TYPE=nvme or scsi",
        path.display()
    );
    let path = Some(path);
    let rest = storage::Config::default();
    Ok(storage::Config { path, format, readonly, direct, discard, backing, serial, ..rest })
}

/// Attaches a CD drive. Returns the drive's name.
fn insert(config: &mut Config, bus: Bus, cd: &Cd) -> anyhow::Result<Option<String>> {
    if bus == Bus::None {
        return Ok(None);
    }
    let path = Some(text(&cd.path)?);
    let patches = cd.patch.iter().cloned().collect::<Vec<_>>();
    let overlay = if patches.is_empty() { Changes::None } else { Changes::Patches(patches) };
    let drive = if bus == Bus::Usb {
        let cdrom = Some(true);
        Device::UsbStorage(storage::Config { path, cdrom, overlay, ..storage::Config::default() })
    } else {
        let slot = cdrom_slot(config);
        let rest = ahci::cdrom::Config::default();
        Device::AhciCdrom(ahci::cdrom::Config { path, slot, overlay, ..rest })
    };
    config.device.push(drive);
    Ok(name_of_last(config))
}

/// The place of the next CD drive: beside the LPC bridge, where QEMU's machine has its SATA
/// controller. The slots of other devices do not depend on the number of drives.
fn cdrom_slot(config: &Config) -> Option<Address> {
    let drives = config.device.iter().filter(|it| matches!(it, Device::AhciCdrom(_))).count();
    CDROM_SLOTS.get(drives).copied()
}

/// The set-up disk. Its file is in memory already.
fn setup_disk(disk: &SetupDisk) -> storage::Config {
    storage::Config {
        path: Some(disk.path()),
        format: Some(disk::Format::Raw),
        removable: true,
        readonly: true,
        direct: Direct::Off,
        serial: Some(SETUP_SERIAL.to_owned()),
        ..storage::Config::default()
    }
}

/// The name that `vmm` gives the USB disk of this file.
pub fn name_of(config: &Config, path: &Path) -> Option<String> {
    let disks = config.device.iter().filter_map(|device| match device {
        Device::UsbStorage(disk) => Some(disk),
        _ => None,
    });
    let number = (1..).zip(disks).find(|(_, disk)| disk.path.as_deref() == Some(path))?.0;
    Some(registry::name("usb-storage", number))
}

/// The name that `vmm` gives the device added last: its kind and number.
fn name_of_last(config: &Config) -> Option<String> {
    let kind = config.device.last()?.kind();
    let count = config.device.iter().filter(|it| it.kind() == kind).count();
    Some(registry::name(kind, count))
}

/// The jail of the machine's process: another user, and no files outside of the volume.
fn set_jail(config: &mut Config, settings: &Settings) -> anyhow::Result<()> {
    let user = User { user: USER, group: USER };
    config.jail = jail::Config {
        mode: Mode::On,
        user: rustix::process::geteuid().is_root().then_some(user),
        folders: Some(Folders(vec![text(&settings.storage.folder)?])),
        ..jail::Config::default()
    };
    Ok(())
}

/// Adds optional devices and drives of `ARGUMENTS`. Returns the names of the drives that can boot.
fn add_optional_devices(
    config: &mut Config,
    settings: &Settings,
    parts: &Parts,
) -> anyhow::Result<Vec<String>> {
    if settings.machine.rng {
        config.device.push(Device::VirtioRng(Default::default()));
    }
    if settings.balloon.on {
        config.device.push(Device::VirtioBalloon(Default::default()));
    }
    if settings.machine.hpet {
        config.device.push(Device::Hpet(Default::default()));
    }
    let Some(arguments) = &settings.machine.arguments else { return Ok(Vec::new()) };
    for (name, content) in &arguments.files {
        let value = match content {
            Content::Text(text) => text.clone(),
            Content::File(path) => format!("@{}", text(path)?.display()),
        };
        let item = Item::new(name, value).map_err(anyhow::Error::msg);
        config.fw_cfg.push(item.context("ARGUMENTS: -fw_cfg")?);
    }
    let mut order = Vec::new();
    for drive in arguments.drives.iter().filter(|it| !waits(it, parts)) {
        order.extend(attach_argument(config, drive)?);
    }
    Ok(order)
}

/// Whether a drive of `ARGUMENTS` must not be there now: an installation erases a disk by its
/// number, and every disk that Windows can use changes the numbers.
pub fn waits(drive: &Drive, parts: &Parts) -> bool {
    parts.setup_disk.is_some() && !drive.cdrom
}

/// The machine's disks without those that wait for the same reason.
pub fn present(parts: &Parts) -> &[Disk] {
    let count = if parts.setup_disk.is_some() { 1 } else { parts.disks.len() };
    parts.disks.get(..count).unwrap_or_default()
}

/// Attaches a drive of `ARGUMENTS`. Returns its name.
fn attach_argument(config: &mut Config, drive: &Drive) -> anyhow::Result<Option<String>> {
    if drive.cdrom {
        return insert(config, drive.bus, &drive.path.clone().into());
    }
    let image = disk::Config {
        format: drive.format.map(image_format),
        readonly: drive.readonly,
        ..disk::Config::new(text(&drive.path)?)
    };
    attach_image(config, drive.bus, image)
}

/// Rounds down to whole MiB.
fn mebibytes(bytes: u64) -> Size {
    Size(bytes >> 20 << 20)
}

/// Checks that a path is text: JSON cannot carry others.
fn text(path: &Path) -> anyhow::Result<PathBuf> {
    ensure!(path.to_str().is_some(), "{} is not text", path.display());
    Ok(path.to_owned())
}

/// Further CDs on the volume or mounted, such as drivers.
pub fn further_media(root: &Path, volume: &Path) -> Vec<PathBuf> {
    let places = [root.join("mount.iso"), root.join("drivers.iso"), volume.join("drivers.iso")];
    places.into_iter().filter(|path| path.is_file()).collect()
}

/// The rescue CD, which boots before all other drives.
pub fn rescue(root: &Path, volume: &Path) -> Option<PathBuf> {
    [root.join("start.iso"), volume.join("start.iso")].into_iter().find(|path| path.is_file())
}

#[cfg(test)]
mod test;
