//! `ARGUMENTS`: what options of QEMU's command line become, each by a function.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};

use super::options::Options;
use super::smbios::Smbios;
use crate::settings::Format;
use crate::settings::translate::Bus;
use crate::settings::value::{Value, quote};

/// What options of QEMU became.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arguments {
    /// What the machine says of itself.
    pub smbios: Smbios,
    /// Files of fw_cfg: their names and what is in them.
    pub files: Vec<(String, Content)>,
    /// Further disks and CDs.
    pub drives: Vec<Drive>,
    /// The clock shows UTC.
    pub utc: bool,
    /// The guest's memory is taken at once.
    pub prealloc: bool,
    /// What has no meaning here.
    pub(super) notes: Vec<String>,
}

/// What is in a file of fw_cfg.
#[derive(Clone, PartialEq, Eq)]
pub enum Content {
    /// This text.
    Text(String),
    /// What is in this file.
    File(PathBuf),
}

/// Texts may be secret: guests get keys so.
impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(_) => f.write_str("***"),
            Self::File(path) => write!(f, "{path:?}"),
        }
    }
}

/// A further disk, or a CD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Its file.
    pub path: PathBuf,
    /// The file's format, if it is said.
    pub format: Option<Format>,
    /// What it is connected to.
    pub bus: Bus,
    /// It is a CD.
    pub cdrom: bool,
    /// The guest cannot write it.
    pub readonly: bool,
    /// What devices call it.
    name: String,
    /// Whether it is connected.
    pub(super) used: bool,
}

/// More would be somebody's mistake.
const MOST: usize = 64;

impl Arguments {
    /// Says what has no meaning here, as long as there is little of it.
    pub(super) fn note(&mut self, sentence: String) {
        if self.notes.len() < MOST {
            self.notes.push(sentence);
        }
    }

    /// `-drive`, and what stands for it.
    pub(super) fn drive(&mut self, options: &Options) -> anyhow::Result<()> {
        let path = options.get("file").context("no file= is said: name the file")?;
        let path = PathBuf::read(path.strip_prefix("file:").unwrap_or(path))?;
        let cdrom = options.get("media") == Some("cdrom");
        let bus = match options.get("if") {
            None | Some("ide" | "scsi") if cdrom => Bus::Ahci,
            // QEMU's own choice is one that the machine has not.
            None => Bus::Auto,
            Some("ide") => Bus::Ahci,
            Some("virtio") => Bus::Blk,
            Some("scsi") => Bus::Scsi,
            Some("none") => Bus::None,
            Some("pflash") => bail!("the firmware is our own: leave it out, or see BOOT_MODE"),
            Some(other) => bail!("{} is no if= of a drive here: say virtio", quote(other)),
        };
        let format = options.get("format").map(Format::read).transpose()?;
        ensure!(self.drives.len() < MOST, "{MOST} drives are the most");
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

    /// A file that is a disk or CD by itself.
    fn medium(&mut self, path: &str, cdrom: bool) -> anyhow::Result<()> {
        let media = if cdrom { "cdrom" } else { "disk" };
        let said = [("file", path), ("media", media)];
        let rest = said.map(|(key, value)| (key.to_owned(), Some(value.to_owned()))).into();
        self.drive(&Options { first: String::new(), rest })
    }

    /// `-cdrom`: the value is the path, and may have commas.
    pub(super) fn cdrom(&mut self, options: &Options) -> anyhow::Result<()> {
        self.medium(&options.first, true)
    }

    /// `-hda` and the like.
    pub(super) fn hard_disk(&mut self, options: &Options) -> anyhow::Result<()> {
        self.medium(&options.first, false)
    }

    /// A device that connects a drive.
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
        let name = options.get("drive").context("no drive= is said: name a drive")?;
        let drive = self.drives.iter_mut().find(|drive| drive.name == name && !name.is_empty());
        let drive = drive.with_context(|| {
            let sentence = "is not there: a -drive with this id must stand before";
            format!("the drive {} {sentence}", quote(name))
        })?;
        (drive.bus, drive.used) = (bus, true);
        drive.cdrom |= cdrom;
        drive.readonly |= cdrom;
        Ok(())
    }

    /// `-smbios`.
    pub(super) fn smbios(&mut self, options: &Options) -> anyhow::Result<()> {
        self.smbios.take(options)
    }

    /// `-uuid`.
    pub(super) fn uuid(&mut self, options: &Options) -> anyhow::Result<()> {
        self.smbios.uuid = Some(Value::read(&options.first)?);
        Ok(())
    }

    /// `-fw_cfg`.
    pub(super) fn file(&mut self, options: &Options) -> anyhow::Result<()> {
        let name = options.get("name").unwrap_or(&options.first);
        let plain = name.bytes().all(|byte| byte.is_ascii_graphic());
        let fits = name.starts_with("opt/") && name.len() <= 55 && plain;
        ensure!(fits, "a file of fw_cfg is called opt/…, with at most 55 characters");
        let content = match (options.get("string"), options.get("file")) {
            (Some(text), None) => Content::Text(text.to_owned()),
            (None, Some(path)) => Content::File(PathBuf::read(path)?),
            _ => bail!("say string= or file="),
        };
        ensure!(self.files.len() < MOST, "{MOST} files are the most");
        self.files.push((name.to_owned(), content));
        Ok(())
    }

    /// `-rtc`.
    pub(super) fn clock(&mut self, options: &Options) -> anyhow::Result<()> {
        match options.get("base") {
            Some("utc") => self.utc = true,
            None | Some("localtime") => self.utc = false,
            Some(_) => bail!("the clock shows the host's time: say base=utc or base=localtime"),
        }
        Ok(())
    }

    /// `-mem-prealloc`.
    #[expect(clippy::unnecessary_wraps, reason = "rows of the table have one type")]
    pub(super) fn prealloc(&mut self, _: &Options) -> anyhow::Result<()> {
        self.prealloc = true;
        Ok(())
    }
}
