//! Programs of Windows PE that partition a disk and put Windows on it, with the options that
//! Microsoft documents (Windows Commands; Deployment tools and commands). Others are errors.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};

use super::boot::{self, Boot};
use super::console::say;
use super::disks::{Disk, Numbered};
use super::partition::Target;
use super::places::Places;
use super::{diskpart, dism, drivers, drives, files};

/// A partition with a drive letter.
pub(crate) struct Volume {
    pub(crate) disk: Disk,
    pub(crate) number: u32,
    /// `FAT32` or `NTFS`.
    pub(crate) system: &'static str,
}

#[derive(Default)]
pub(crate) struct Tools {
    pub(crate) disks: Numbered,
    /// The volumes that a script made.
    pub(crate) volumes: BTreeMap<char, Volume>,
    /// The Windows that was made bootable.
    boot: Option<Boot>,
}

impl Tools {
    pub(crate) fn new(disks: Numbered) -> Self {
        Self { disks, ..Self::default() }
    }

    /// Runs a program, and returns its status. `None`: it is not one of these.
    pub(crate) fn run(
        &mut self,
        name: &str,
        words: &[String],
        places: &mut Places,
        show: &mut dyn FnMut(&str),
    ) -> Option<anyhow::Result<i32>> {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let done = |outcome: anyhow::Result<()>| Some(outcome.map(|()| 0));
        match (name, words.as_slice()) {
            ("drvload.exe", [inf]) => done(drivers::load_one(&places.file(inf))),
            ("diskpart.exe", [switch, script]) if switch.eq_ignore_ascii_case("/s") => {
                done(diskpart::run(self, script, places, show))
            }
            ("dism.exe", words) => Some(dism::run(self, words, places, show)),
            ("bcdboot.exe", words) => done(self.make_bootable(words, places)),
            ("bcdedit.exe", ["/set", "{fwbootmgr}", "bootsequence", "{bootmgr}"]) => {
                done(boot::next())
            }
            ("robocopy.exe", words) => Some(copy(words, places)),
            ("wpeutil.exe", ["reboot"]) => done(self.restart()),
            _ => None,
        }
    }

    /// The volume of a path like `W:\Windows`.
    pub(crate) fn volume(&self, path: &str) -> anyhow::Result<&Volume> {
        let letter = path.chars().next().map(|it| it.to_ascii_uppercase());
        let is_drive = path.get(1..2) == Some(":");
        let found = letter.filter(|_| is_drive).and_then(|letter| self.volumes.get(&letter));
        found.with_context(|| format!("{path}: no such volume"))
    }

    /// `bcdboot SOURCE /s VOLUME: [/f UEFI]`
    fn make_bootable(&mut self, words: &[&str], places: &Places) -> anyhow::Result<()> {
        let (source, volume) = match words {
            [source, "/s", volume] | [source, "/s", volume, "/f", "UEFI" | "ALL"] => {
                (source, volume)
            }
            other => bail!("bcdboot {other:?} is not rehearsed"),
        };
        ensure!(volume.len() == 2, "{volume}: no letter of a volume");
        let (windows, system) = (self.volume(source)?, self.volume(volume)?);
        ensure!(system.system == "FAT32", "{volume} is {}, and firmware reads FAT", system.system);
        ensure!(windows.disk == system.disk, "two disks are not rehearsed");
        let root = format!("{}\\", &source[..2]);
        ensure!(source[2..].eq_ignore_ascii_case("\\Windows"), "{source}: not rehearsed");
        let boot = Boot {
            target: Target {
                disk: windows.disk.clone(),
                windows: windows.number,
                system: system.number,
            },
            windows: places.file(&root),
            system: places.file(&format!("{volume}\\")),
        };
        boot.install().context("failure when attempting to copy boot files")?;
        self.boot = Some(boot);
        Ok(())
    }

    fn restart(&self) -> anyhow::Result<()> {
        if let Some(boot) = &self.boot {
            boot.finish()?;
        }
        say!("Windows PE restarts the machine");
        drives::restart()
    }
}

/// `robocopy FROM TO [OPTIONS]`. The status is 1 if files were copied, and 16 if that failed.
fn copy(words: &[&str], places: &Places) -> anyhow::Result<i32> {
    let [from, to, options @ ..] = words else { bail!("robocopy needs two folders") };
    let mut all = false;
    for option in options {
        let lower = option.to_ascii_lowercase();
        let number = |start| lower.strip_prefix(start).map(str::parse::<u32>);
        match lower.as_str() {
            "/e" => all = true,
            _ if matches!(number("/r:"), Some(Ok(_))) => {}
            _ if matches!(number("/w:"), Some(Ok(_))) => {}
            _ => bail!("Invalid Parameter: {option}"),
        }
    }
    ensure!(all, "robocopy without /e is not rehearsed");
    let [from, to] = [from, to].map(|path| places.file(path));
    match copied(&from, &to) {
        Ok(count) => {
            say!("{count} files copied from {}", from.display());
            Ok(i32::from(count > 0))
        }
        Err(error) => {
            say!("robocopy: {error:#}");
            Ok(16)
        }
    }
}

fn copied(from: &Path, to: &Path) -> anyhow::Result<u32> {
    ensure!(from.is_dir(), "{}: the system cannot find the file", from.display());
    files::copy(from, to)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn programs_refuse_what_is_not_documented() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(folder.path().join("a/x"), "1").unwrap();
        let mut places = Places::new(folder.path());
        let mut tools = Tools::default();
        let mut run = |line: &str| {
            let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
            let outcome = tools.run(&words[0], &words[1..], &mut places, &mut |_| {});
            outcome.map(|outcome| outcome.map_err(|error| format!("{error:#}")))
        };
        assert_eq!(run("robocopy.exe C:\\a C:\\b /e /r:1 /w:1"), Some(Ok(1)));
        assert!(folder.path().join("b/x").exists());
        assert_eq!(run("robocopy.exe C:\\none C:\\b /e"), Some(Ok(16)));
        for (line, why) in [
            ("robocopy.exe C:\\a C:\\b /e /x", "Invalid Parameter"),
            ("bcdboot.exe W:\\Windows /s S: /q", "not rehearsed"),
            ("bcdboot.exe W:\\Windows /s S: /f UEFI", "no such volume"),
            ("drvload.exe C:\\none.inf", "none.inf"),
        ] {
            let error = run(line).unwrap().unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
        assert_eq!(run("wpeutil.exe lunch"), None);
        assert_eq!(run("diskpart.exe X:\\script"), None);
    }
}
