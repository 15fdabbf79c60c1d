//! `ARGUMENTS`: one function per supported option of QEMU's command line.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use host::usb::Filter;
use vmm::control::host_usb::MAX_DEVICES;

use super::monitor::{Place, Protocol};
use super::options::Options;
use super::smbios::Smbios;
use crate::settings::Format;
use crate::settings::translate::Bus;
use crate::settings::value::{Value, quote};

/// The translation of QEMU's options.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arguments {
    pub smbios: Smbios,
    /// Files of fw_cfg: name and content.
    pub files: Vec<(String, Content)>,
    /// Further disks and CDs.
    pub drives: Vec<Drive>,
    /// USB devices of the host, in the words of `usb-host`.
    pub usb: Vec<String>,
    /// The clock shows UTC instead of local time.
    pub utc: bool,
    /// Allocates the guest's memory at the start.
    pub prealloc: bool,
    /// Listeners for QEMU's control protocols.
    pub monitors: Vec<(Protocol, Place)>,
    /// Sockets that `-mon` refers to, with their ids.
    pub(super) sockets: Vec<(String, Place)>,
    pub(super) notes: Vec<String>,
}

/// The content of a fw_cfg file.
#[derive(Clone, PartialEq, Eq)]
pub enum Content {
    Text(String),
    File(PathBuf),
}

/// Hides texts, because guests receive secrets this way.
impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(_) => f.write_str("***"),
            Self::File(path) => write!(f, "{path:?}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    pub path: PathBuf,
    pub format: Option<Format>,
    pub bus: Bus,
    pub cdrom: bool,
    pub readonly: bool,
    /// The id by which a `-device` refers to it.
    name: String,
    /// Whether it has a controller.
    pub(super) used: bool,
}

/// The maximum number of drives, of files and of notes. A longer list is a mistake.
const MAX_ENTRIES: usize = 64;
/// The maximum number of listeners, each of which has a few clients.
const MAX_MONITORS: usize = 8;

/// The USB device of QEMU's options.
pub fn usb_filter(get: impl Fn(&str) -> Option<String>) -> anyhow::Result<Filter> {
    fn number<T: TryFrom<u32>>(key: &str, text: &str) -> anyhow::Result<T> {
        let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
        let number = hex.map_or_else(|| text.parse(), |digits| u32::from_str_radix(digits, 16));
        let number = number.ok().and_then(|it| T::try_from(it).ok());
        number.with_context(|| format!("{key}={}: write a number, as 0x0403", quote(text)))
    }
    let port = get("hostport");
    let mut filter = Filter { port, ..Filter::default() };
    filter.vendor = get("vendorid").map(|it| number("vendorid", &it)).transpose()?;
    filter.product = get("productid").map(|it| number("productid", &it)).transpose()?;
    filter.bus = get("hostbus").map(|it| number("hostbus", &it)).transpose()?;
    filter.address = get("hostaddr").map(|it| number("hostaddr", &it)).transpose()?;
    if let Some(node) = get("hostdevice") {
        let place = node.strip_prefix("/dev/bus/usb/").and_then(|it| it.split_once('/'));
        let place = place.and_then(|(bus, at)| Some((bus.parse().ok()?, at.parse().ok()?)));
        let (bus, address) = place.with_context(|| {
            format!("hostdevice={}: write the node, as /dev/bus/usb/001/004", quote(&node))
        })?;
        (filter.bus, filter.address) = (Some(bus), Some(address));
    }
    filter.check()?;
    Ok(filter)
}

impl Arguments {
    /// Adds a note, up to the maximum.
    pub(super) fn note(&mut self, sentence: String) {
        if self.notes.len() < MAX_ENTRIES {
            self.notes.push(sentence);
        }
    }

    /// `-drive`, and options that are short for it.
    pub(super) fn drive(&mut self, options: &Options) -> anyhow::Result<()> {
        let path = options.get("file").context("file= is missing: name the file")?;
        let path = PathBuf::read(path.strip_prefix("file:").unwrap_or(path))?;
        let cdrom = options.get("media") == Some("cdrom");
        let bus = match options.get("if") {
            None | Some("ide" | "scsi") if cdrom => Bus::Ahci,
            // This machine does not have QEMU's default controller.
            None => Bus::Auto,
            Some("ide") => Bus::Ahci,
            Some("virtio") => Bus::Blk,
            Some("scsi") => Bus::Scsi,
            Some("none") => Bus::None,
            Some("pflash") => {
                self.note("-drive if=pflash has no effect: the firmware is built in".to_owned());
                return Ok(());
            }
            Some(other) => {
                let sentence = "has no effect: there is no such drive: use if=virtio";
                self.note(format!("-drive if={} {sentence}", quote(other)));
                return Ok(());
            }
        };
        let format = options.get("format").map(Format::read).transpose()?;
        ensure!(self.drives.len() < MAX_ENTRIES, "at most {MAX_ENTRIES} drives are supported");
        self.drives.push(Drive {
            path,
            format,
            bus,
            cdrom,
            readonly: cdrom || options.on("readonly"),
            name: options.get("id").unwrap_or_default().to_owned(),
            used: bus != Bus::None,
        });
        Ok(())
    }

    /// Adds a drive for a file that is given by its path alone.
    fn medium(&mut self, path: &str, cdrom: bool) -> anyhow::Result<()> {
        let media = if cdrom { "cdrom" } else { "disk" };
        let said = [("file", path), ("media", media)];
        let rest = said.map(|(key, value)| (key.to_owned(), Some(value.to_owned()))).into();
        self.drive(&Options { first: String::new(), rest })
    }

    /// `-cdrom`: the value is a path, which may contain commas.
    pub(super) fn cdrom(&mut self, options: &Options) -> anyhow::Result<()> {
        self.medium(&options.first, true)
    }

    /// `-hda` to `-hdd`.
    pub(super) fn hard_disk(&mut self, options: &Options) -> anyhow::Result<()> {
        self.medium(&options.first, false)
    }

    /// `-device` with a `drive=`: sets the controller of that drive.
    pub(super) fn connect(&mut self, options: &Options) -> anyhow::Result<()> {
        let (bus, cdrom) = match options.first.to_lowercase().as_str() {
            "nvme" => (Bus::Nvme, false),
            "usb-storage" | "usb-uas" | "usb-bot" => (Bus::Usb, false),
            "scsi-hd" | "scsi-disk" | "scsi-block" => (Bus::Scsi, false),
            "scsi-cd" => (Bus::Scsi, true),
            "ide-hd" => (Bus::Ahci, false),
            "ide-cd" => (Bus::Ahci, true),
            _ => (Bus::Blk, false),
        };
        let name = options.get("drive").context("drive= is missing: name a drive")?;
        let drive = self.drives.iter_mut().find(|drive| drive.name == name && !name.is_empty());
        let drive = drive.with_context(|| {
            let sentence = "does not exist: put a -drive with this id before it";
            format!("the drive {} {sentence}", quote(name))
        })?;
        (drive.bus, drive.used) = (bus, true);
        drive.cdrom |= cdrom;
        drive.readonly |= cdrom;
        Ok(())
    }

    /// `-device usb-host`. QEMU's `hostdevice` is a path of a node: bus and address.
    pub(super) fn usb_host(&mut self, options: &Options) -> anyhow::Result<()> {
        ensure!(self.usb.len() < MAX_DEVICES, "at most {MAX_DEVICES} USB devices are supported");
        let filter = usb_filter(|key| options.get(key).map(str::to_owned))?;
        self.usb.push(filter.to_string());
        Ok(())
    }

    pub(super) fn smbios(&mut self, options: &Options) -> anyhow::Result<()> {
        self.smbios.take(options)
    }

    pub(super) fn uuid(&mut self, options: &Options) -> anyhow::Result<()> {
        self.smbios.uuid = Some(Value::read(&options.first)?);
        Ok(())
    }

    /// `-fw_cfg`.
    pub(super) fn file(&mut self, options: &Options) -> anyhow::Result<()> {
        let name = options.get("name").unwrap_or(&options.first);
        let plain = name.bytes().all(|byte| byte.is_ascii_graphic());
        if !name.starts_with("opt/") || name.len() > 55 || !plain {
            let sentence = "has no effect: give a name that starts with opt/ and has at most 55 \
                            characters";
            self.note(format!("-fw_cfg {} {sentence}", quote(name)));
            return Ok(());
        }
        let content = match (options.get("string"), options.get("file")) {
            (Some(text), None) => Content::Text(text.to_owned()),
            (None, Some(path)) => Content::File(PathBuf::read(path)?),
            _ => bail!("give either string= or file="),
        };
        ensure!(self.files.len() < MAX_ENTRIES, "at most {MAX_ENTRIES} files are supported");
        self.files.push((name.to_owned(), content));
        Ok(())
    }

    /// `-rtc`.
    #[expect(clippy::unnecessary_wraps, reason = "rows of the table have one type")]
    pub(super) fn clock(&mut self, options: &Options) -> anyhow::Result<()> {
        match options.get("base") {
            Some("utc") => self.utc = true,
            None | Some("localtime") => self.utc = false,
            Some(_) => self.note(
                "-rtc base has no effect: the clock shows the host's time: use base=utc or \
                 base=localtime"
                    .to_owned(),
            ),
        }
        Ok(())
    }

    /// `-qmp`.
    pub(super) fn qmp(&mut self, options: &Options) -> anyhow::Result<()> {
        self.listen("-qmp", Protocol::Qmp, Place::read(options))
    }

    /// `-monitor`.
    pub(super) fn monitor(&mut self, options: &Options) -> anyhow::Result<()> {
        self.listen("-monitor", Protocol::Human, Place::read(options))
    }

    /// `-mon`, for a socket of `-chardev`.
    pub(super) fn mon(&mut self, options: &Options) -> anyhow::Result<()> {
        let name = options.get("chardev").unwrap_or(&options.first);
        let mut found = self.sockets.iter().filter(|(id, _)| id == name && !name.is_empty());
        let place = found.next().map(|(_, place)| place.clone());
        let place = place.context("put a -chardev socket with this id before it");
        let qmp = options.get("mode") == Some("control");
        self.listen("-mon", if qmp { Protocol::Qmp } else { Protocol::Human }, place)
    }

    /// `-chardev`: has an effect once a `-mon` refers to it.
    pub(super) fn chardev(&mut self, options: &Options) -> anyhow::Result<()> {
        ensure!(self.sockets.len() < MAX_ENTRIES, "at most {MAX_ENTRIES} sockets are supported");
        match (Place::read(options), options.get("id")) {
            (Ok(place), Some(id)) => self.sockets.push((id.to_owned(), place)),
            _ => self.note(format!(
                "-chardev {} has no effect: only a listening socket for -mon is supported: set \
                 SERIAL for the serial port",
                quote(&options.first)
            )),
        }
        Ok(())
    }

    /// Adds a listener, or a note on an address that cannot be served.
    fn listen(
        &mut self,
        option: &str,
        protocol: Protocol,
        place: anyhow::Result<Place>,
    ) -> anyhow::Result<()> {
        let place = match place {
            Ok(place) => place,
            Err(error) => {
                self.note(format!("{option} has no effect: {error:#}"));
                return Ok(());
            }
        };
        ensure!(self.monitors.len() < MAX_MONITORS, "at most {MAX_MONITORS} are supported");
        if let Some(note) = place.note() {
            self.note(format!("{option}: {note}"));
        }
        self.monitors.push((protocol, place));
        Ok(())
    }

    #[expect(clippy::unnecessary_wraps, reason = "rows of the table have one type")]
    pub(super) fn prealloc(&mut self, _: &Options) -> anyhow::Result<()> {
        self.prealloc = true;
        Ok(())
    }
}
