//! `diskpart /s`: a script of commands (Microsoft: DiskPart). The first that fails ends the script.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use super::console::say;
use super::disks::{self, Disk};
use super::partition::{self, BASIC, MIN_MIB, RESERVED};
use super::places::Places;
use super::tools::{Tools, Volume};
use super::{drives, files, tool};

#[derive(Debug, PartialEq, Eq)]
enum Command {
    Rescan,
    Select(u32),
    Clean,
    ConvertGpt,
    /// The type and the size in MiB.
    Create(Kind, Option<u64>),
    /// The file system and its label.
    Format(&'static str, String),
    Assign(char),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Efi,
    Msr,
    Primary,
}

/// The disk and the partition that a script has selected.
#[derive(Default)]
struct Focus {
    disk: Option<Disk>,
    is_gpt: bool,
    partitions: u32,
    /// The file system of the last partition.
    system: Option<&'static str>,
    /// Letters of volumes, and where they are mounted at the end: Linux does not partition a disk
    /// that is in use.
    assigned: Vec<(char, PathBuf)>,
}

pub(crate) fn run(
    tools: &mut Tools,
    script: &str,
    places: &mut Places,
    show: &mut dyn FnMut(&str),
) -> anyhow::Result<()> {
    let text = files::text(&places.file(script))?;
    tools.disks.update(&disks::present()?);
    let mut focus = Focus::default();
    for line in text.lines() {
        if let Some(command) = read(line).with_context(|| line.to_owned())? {
            focus.obey(&command, tools, places).with_context(|| line.to_owned())?;
            show(&format!("DiskPart: {}", line.trim()));
        }
    }
    say!("disks: {}; {} partitions", tools.disks.shown(), focus.partitions);
    for (letter, root) in focus.assigned {
        let volume = tools.volumes.get(&letter).context("a volume with a letter")?;
        let kind = if volume.system == "NTFS" { "ntfs3" } else { "vfat" };
        drives::mount(&volume.disk.partition(volume.number), &root, kind, "rw")?;
    }
    Ok(())
}

/// The command of a line, if it is not empty or a remark.
fn read(line: &str) -> anyhow::Result<Option<Command>> {
    let lower = line.to_ascii_lowercase();
    let words: Vec<_> = lower.split_whitespace().collect();
    Ok(Some(match words.as_slice() {
        [] | ["rem", ..] => return Ok(None),
        ["rescan"] => Command::Rescan,
        ["select", "disk", number] => Command::Select(number.parse()?),
        ["select", disk] if disk.starts_with("disk=") => Command::Select(disk[5..].parse()?),
        ["clean"] => Command::Clean,
        ["convert", "gpt"] => Command::ConvertGpt,
        ["create", "partition", kind, size @ ..] => {
            let kind = match *kind {
                "efi" => Kind::Efi,
                "msr" => Kind::Msr,
                "primary" => Kind::Primary,
                other => bail!("{other}: not rehearsed"),
            };
            let size = match size {
                [] => None,
                [size] => Some(size.strip_prefix("size=").context("the arguments")?.parse()?),
                _ => bail!("the arguments specified for this command are not valid"),
            };
            Command::Create(kind, size)
        }
        ["format", options @ ..] => format_of(options, line)?,
        ["assign", letter] => {
            let letter = letter.strip_prefix("letter=").context("the arguments")?;
            let mut letters = letter.trim_matches('"').chars();
            let (Some(it), None) = (letters.next(), letters.next()) else {
                bail!("{letter}: a drive letter is one letter")
            };
            Command::Assign(it.to_ascii_uppercase())
        }
        _ => bail!("no such command"),
    }))
}

/// `format quick fs=SYSTEM label=LABEL`
fn format_of(options: &[&str], line: &str) -> anyhow::Result<Command> {
    let (mut system, mut label) = (None, None);
    let mut quick = false;
    for option in options {
        match option.split_once('=') {
            None if *option == "quick" => quick = true,
            Some(("fs", "fat32")) => system = Some("FAT32"),
            Some(("fs", "ntfs")) => system = Some("NTFS"),
            Some(("label", name)) => {
                // Its case counts.
                let at = line.to_ascii_lowercase().find("label=").context("a label")? + 6;
                let name = line.get(at..at + name.len()).context("a label")?;
                label = Some(name.trim_matches('"').to_owned());
            }
            _ => bail!("{option}: the arguments specified for this command are not valid"),
        }
    }
    ensure!(quick, "a full format is not rehearsed");
    let label = label.unwrap_or_else(|| "New Volume".into());
    Ok(Command::Format(system.context("no file system")?, label))
}

impl Focus {
    fn obey(
        &mut self,
        command: &Command,
        tools: &mut Tools,
        places: &mut Places,
    ) -> anyhow::Result<()> {
        match command {
            Command::Rescan => tools.disks.update(&disks::settled()?),
            Command::Select(number) => {
                let disk = tools.disks.get(*number)?;
                *self = Self { disk: Some(disk.clone()), ..Self::default() };
            }
            Command::Clean => self.clean()?,
            Command::ConvertGpt => self.convert()?,
            Command::Create(kind, size) => self.create(*kind, *size)?,
            Command::Format(system, label) => {
                self.partition()?;
                let device = self.device()?;
                partition::make(system, label, &device)?;
                self.system = Some(*system);
            }
            Command::Assign(letter) => {
                self.partition()?;
                let system = self.system.context("the volume has no file system")?;
                let root = Path::new("/drive").join(letter.to_lowercase().to_string());
                places.assign(*letter, &root)?;
                let disk = self.disk()?.clone();
                let volume = Volume { disk, number: self.partitions, system };
                tools.volumes.insert(*letter, volume);
                self.assigned.push((*letter, root));
            }
        }
        Ok(())
    }

    fn disk(&self) -> anyhow::Result<&Disk> {
        self.disk.as_ref().context("there is no disk selected")
    }

    fn partition(&self) -> anyhow::Result<()> {
        ensure!(self.partitions > 0, "there is no partition selected");
        Ok(())
    }

    fn device(&self) -> anyhow::Result<String> {
        let device = self.disk()?.partition(self.partitions);
        partition::appears(&device)?;
        Ok(device)
    }

    fn clean(&mut self) -> anyhow::Result<()> {
        let disk = self.disk()?;
        ensure!(!disk.is_readonly(), "the media is write protected");
        ensure!(!disk.is_removable(), "Windows is not installed on a removable disk");
        let path = disk.path();
        if disk.has_partitions() {
            tool::run("/bin/sfdisk", &["--quiet", "--delete", &path])?;
        }
        self.is_gpt = false;
        Ok(())
    }

    fn convert(&mut self) -> anyhow::Result<()> {
        let path = self.disk()?.path();
        ensure!(!self.disk()?.has_partitions(), "the disk is not empty");
        let arguments = ["--quiet", "--wipe", "always", "--wipe-partitions", "always", &path];
        tool::run_with("/bin/sfdisk", &arguments, "label: gpt\n")?;
        self.is_gpt = true;
        Ok(())
    }

    fn create(&mut self, kind: Kind, mib: Option<u64>) -> anyhow::Result<()> {
        let path = self.disk()?.path();
        ensure!(self.is_gpt, "the selected disk is not a GPT disk");
        let word = match kind {
            Kind::Efi => "uefi",
            Kind::Msr => RESERVED,
            Kind::Primary => BASIC,
        };
        let size = mib.map_or_else(String::new, |mib| format!("size={mib}MiB, "));
        let arguments = ["--quiet", "--append", "--wipe-partitions", "always", &path];
        tool::run_with("/bin/sfdisk", &arguments, &format!("{size}type={word}\n"))
            .context("no usable free extent could be found")?;
        self.partitions += 1;
        self.system = None;
        let mib = partition::mib(&self.device()?)?;
        ensure!(kind != Kind::Primary || mib >= MIN_MIB, "the partition has {mib} MiB");
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn of(line: &str) -> Command {
        read(line).unwrap().unwrap()
    }

    #[test]
    fn commands_are_those_that_are_documented() {
        assert_eq!([of("select disk 1"), of("SELECT DISK=1")], [const { Command::Select(1) }; 2]);
        assert_eq!(of("create partition efi size=128"), Command::Create(Kind::Efi, Some(128)));
        assert_eq!(of("create partition primary"), Command::Create(Kind::Primary, None));
        assert_eq!(of("format quick fs=ntfs label=Win"), Command::Format("NTFS", "Win".into()));
        assert_eq!(
            [of("assign letter=w"), of("assign letter=\"W\"")],
            [const { Command::Assign('W') }; 2]
        );
        assert!(read("").unwrap().is_none() && read("rem x").unwrap().is_none());
        for bad in [
            "select disk",
            "select disk one",
            "clean up",
            "convert mbr",
            "create partition efi 128",
            "create partition primary size=1 offset=2",
            "format fs=ntfs",
            "format quick fs=ext4",
            "format quick label=x",
            "assign letter=W:",
            "assign W",
            "lunch",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_partition_needs_a_disk_of_the_right_kind() {
        let (mut tools, mut places) = (Tools::default(), Places::new(Path::new("/none")));
        let mut obey = |line: &str| {
            let done = Focus::default().obey(&of(line), &mut tools, &mut places);
            done.unwrap_err().to_string()
        };
        assert!(obey("select disk 1").contains("disk 1"));
        assert_eq!(obey("clean"), "there is no disk selected");
        assert_eq!(obey("create partition efi"), "there is no disk selected");
        assert_eq!(obey("format quick fs=ntfs"), "there is no partition selected");
        assert_eq!(obey("assign letter=W"), "there is no partition selected");
    }
}
