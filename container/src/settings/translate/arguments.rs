//! `ARGUMENTS`: options of QEMU's command line.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};

use super::options::{self, Options};
use super::smbios::Smbios;
use super::table::{self, Becomes, Place};
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
    notes: Vec<String>,
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
    used: bool,
}

/// More would be somebody's mistake.
const MOST: usize = 64;

impl Arguments {
    /// Obeys an option; `word` has its dash.
    fn take(&mut self, word: &str, value: &str) -> anyhow::Result<()> {
        let options = Options::read(value);
        let mut said = word.to_owned();
        let mut found = table::find(Place::Option, word);
        if let Some(Becomes::Below(place)) = found {
            said = format!("{word} {}", quote(&options.first));
            found = table::find(place, &options.first.to_lowercase());
        }
        match found {
            Some(Becomes::Take(take)) => take(self, &options).context(said),
            Some(Becomes::Already) => Ok(()),
            Some(Becomes::Never(why)) => bail!("{said} is refused: {why}"),
            Some(Becomes::Not(why)) => {
                self.note(format!("{said} has no effect: {why}"));
                Ok(())
            }
            _ => {
                let why = "has no effect: nothing is known that it could become here";
                self.note(format!("{said} {why}"));
                Ok(())
            }
        }
    }

    fn note(&mut self, sentence: String) {
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

/// The option that a word is, with one dash: QEMU takes two as well.
fn option(word: &str) -> Option<String> {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
    name.starts_with(|first: char| first.is_ascii_alphabetic()).then(|| format!("-{name}"))
}

impl Value for Arguments {
    const ACCEPTS: &'static str = "options of QEMU";
    const SHOWN: bool = false;

    fn read(text: &str) -> anyhow::Result<Self> {
        let mut arguments = Self::default();
        let mut words = options::split(text)?.into_iter().peekable();
        while let Some(word) = words.next() {
            let Some(name) = option(&word) else {
                ensure!(
                    !word.starts_with('-'),
                    "{} is no option of QEMU: take it out",
                    quote(&word)
                );
                // QEMU takes a word without a dash for a disk; here it is a slip more often.
                arguments.note(format!("{} has no effect: no option is before it", quote(&word)));
                continue;
            };
            // A switch has no value, and no value begins as an option does.
            let switch = table::is_switch(&name);
            let value = words.next_if(|next| !switch && option(next).is_none());
            arguments.take(&quote(&name), &value.unwrap_or_default())?;
        }
        for drive in arguments.drives.extract_if(.., |drive| !drive.used) {
            let sentence = "has no effect: no -device has it";
            arguments.notes.push(format!("-drive {} {sentence}", drive.path.show()));
        }
        Ok(arguments)
    }
    fn show(&self) -> String {
        let mut said = Vec::new();
        let smbios = self.smbios.show();
        if !smbios.is_empty() {
            said.push(format!("SMBIOS {smbios}"));
        }
        said.extend(self.files.iter().map(|(name, _)| format!("file {name}")));
        said.extend(self.drives.iter().map(|drive| {
            let kind = if drive.cdrom { "CD" } else { "disk" };
            format!("{kind} {} at {}", drive.path.show(), drive.bus.show())
        }));
        said.extend(self.utc.then(|| "clock in UTC".to_owned()));
        said.extend(self.prealloc.then(|| "memory at once".to_owned()));
        if said.is_empty() { "nothing".into() } else { said.join("; ") }
    }
    fn notes(&self) -> Vec<String> {
        self.notes.iter().chain(&self.smbios.notes).cloned().collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn read(text: &str) -> Arguments {
        Arguments::read(text).unwrap()
    }

    fn refusal(text: &str) -> String {
        format!("{:#}", Arguments::read(text).unwrap_err())
    }

    #[test]
    fn what_has_a_meaning_is_taken() {
        let arguments = read(
            "-drive file=/a,,b.qcow2,format=qcow2,id=x,if=none -device virtio-blk-pci,drive=x \
             -cdrom /c.iso --rtc base=utc -smbios type=1,serial='A B' -device virtio-rng-pci \
             -fw_cfg name=opt/x,string=hush -mem-prealloc -name whatever",
        );
        assert_eq!(
            arguments.show(),
            "SMBIOS serial=A B; file opt/x; disk /a,b.qcow2 at blk; CD /c.iso at ide; clock in \
             UTC; memory at once"
        );
        assert_eq!(arguments.notes(), [""; 0]);
        assert_eq!(arguments.drives[0].format, Some(Format::Qcow2));
        assert!(!format!("{arguments:?}").contains("hush"));
    }

    #[test]
    fn a_drive_that_no_device_has_is_named() {
        let arguments = read("-drive file=/a.img,id=x,if=none");
        assert_eq!(arguments.drives, []);
        assert!(arguments.notes()[0].contains("/a.img"));
        assert!(refusal("-device nvme,drive=y").contains("the drive y is not there"));
    }

    #[test]
    fn doors_into_the_machine_are_refused() {
        for text in [
            "-qmp tcp:0.0.0.0:7149,server,wait=off",
            "--qmp unix:/x,server",
            "-monitor stdio",
            "-mon chardev=x",
            "-vnc :0",
            "-gdb tcp::1234",
            "-s",
            "-incoming tcp:0:4444",
        ] {
            let refusal = refusal(text);
            assert!(refusal.contains("is refused: "), "{text}: {refusal}");
            assert!(refusal.contains("use ") || refusal.contains("set "), "{text}: {refusal}");
        }
    }

    #[test]
    fn every_other_option_is_named_but_not_its_value() {
        let arguments = read("-zzz secret -device qxl,x=secret -object secret,data=hush word");
        let notes = arguments.notes().join("\n");
        for said in ["-zzz", "-device qxl", "-object secret", "word"] {
            assert!(notes.contains(said), "{said} in {notes}");
        }
        assert!(!notes.contains("hush") && !notes.contains("zzz secret"), "{notes}");
    }

    #[test]
    fn refuses_what_makes_no_sense() {
        for bad in [
            "-drive id=x",
            "-drive file=relative",
            "-drive file=/x,if=floppy",
            "-drive file=/x,format=vmdk",
            "-drive file=/x,if=pflash",
            "-uuid 1",
            "-fw_cfg name=etc/x,string=1",
            "-fw_cfg name=opt/x",
            "-rtc base=2020-01-01",
            "-name 'open",
            "-",
            "--",
        ] {
            assert!(!refusal(bad).is_empty(), "{bad}");
        }
    }
}
