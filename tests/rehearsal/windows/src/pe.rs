//! Windows PE from the install medium, with Windows Setup: the pass windowsPE.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};

use super::answers::{self, Answers};
use super::boot::{self, Boot};
use super::console::say;
use super::disks::{self, Numbered};
use super::drivers::Package;
use super::drives::{self, C, Drive, SYSTEM};
use super::edition::Edition;
use super::partition::Target;
use super::registry::Registry;
use super::shell::Shell;
use super::tools::Tools;
use super::{drivers, edition, files, partition};

const PASS: &str = "windowsPE";
const DRIVERS: &str = "$WinPEDriver$";
const OEM: &str = "$OEM$";
const LAB: &str = "HKLM\\SYSTEM\\Setup\\LabConfig";

pub(crate) fn start() -> anyhow::Result<()> {
    say!("Windows PE runs");
    let (secure, tpm) = (boot::is_secure()?, has_tpm());
    say!("Secure Boot: {secure}, TPM: {tpm}");
    let mut numbered = Numbered::default();
    let present = disks::settled()?;
    numbered.update(&present);
    say!("disks with drivers of Windows: {}", numbered.shown());
    let drives = drives::removable(&present)?;
    let answers = answers::find(&drives)?;
    let answers = answers.context("no answer file: Setup asks for the language")?;
    let setup = answers.component(PASS, "Microsoft-Windows-Setup");
    let setup = setup.context("no answers for Microsoft-Windows-Setup: Setup asks")?;
    let tools = Tools::new(numbered);
    let memory = Path::new("/drive/x");
    fs::create_dir_all(memory)?;
    let mut shell = Shell::in_windows_pe(memory, &drives, tools);
    // Microsoft does not document whether drivers are loaded before: commands cannot rely on that.
    shell.run_all(&answers.commands(PASS, "Microsoft-Windows-Setup")?)?;
    let (registry, tools) = shell.into_tools();
    let mut numbered = tools.disks;
    let mut packages = Vec::new();
    for drive in &drives {
        packages.extend(drivers::packages(&files::below(&drive.root, DRIVERS))?);
    }
    drivers::load(&packages)?;
    if !drivers::of_boot(&packages)?.is_empty() {
        numbered.update(&disks::settled()?);
        say!("disks with drivers from {DRIVERS}: {}", numbered.shown());
    }
    let edition = edition::choose(&drives, setup, language(&answers)?)?;
    let target = partition::prepare(setup, &numbered)?;
    meets(&edition, &target, &registry)?;
    install(&answers, &drives, &edition, target, &packages)
}

/// Puts Windows on its disk, and starts it.
fn install(
    answers: &Answers,
    drives: &[Drive],
    edition: &Edition,
    target: Target,
    packages: &[Package],
) -> anyhow::Result<()> {
    let boot = Boot { target, windows: C.into(), system: SYSTEM.into() };
    let target = &boot.target;
    drives::mount(&target.disk.partition(target.windows), &boot.windows, "ntfs3", "rw")?;
    if let Some(complaint) = edition.apply(&boot.windows, &mut |_| {})? {
        bail!("Windows cannot install required files: 0x8007000D: {complaint}");
    }
    say!("image applied");
    drivers::store(packages, &boot.windows)?;
    let setup = answers.component(PASS, "Microsoft-Windows-Setup");
    if setup.is_some_and(|setup| setup.is("UseConfigurationSet")) {
        copy_oem(answers, drives)?;
    }
    answers.keep(&boot.windows)?;
    drives::mount(&target.disk.partition(target.system), &boot.system, "vfat", "rw")?;
    boot.install()?;
    boot.finish()?;
    say!("Windows PE restarts the machine");
    drives::restart()
}

/// The language of Setup, without which it asks.
fn language(answers: &Answers) -> anyhow::Result<&str> {
    let name = "Microsoft-Windows-International-Core-WinPE";
    let locale = answers.component(PASS, name);
    let locale = locale.context("no answers for the language: Setup asks")?;
    for field in ["SetupUILanguage/UILanguage", "InputLocale", "SystemLocale", "UserLocale"] {
        ensure!(locale.at(field).is_some(), "no {field}: Setup asks for the language");
    }
    locale.value("UILanguage").context("no UILanguage: Setup asks for the language")
}

fn has_tpm() -> bool {
    let version = fs::read_to_string("/sys/class/tpm/tpm0/tpm_version_major");
    version.is_ok_and(|version| version.trim() == "2")
}

/// The requirements of Windows 11, with the keys of the registry that waive each.
fn meets(edition: &Edition, target: &Target, registry: &Registry) -> anyhow::Result<()> {
    if !edition.is_windows_11() {
        return Ok(());
    }
    let memory = fs::read_to_string("/proc/meminfo")?;
    let memory: u64 = number(&memory, "MemTotal:")?;
    let processors = fs::read_to_string("/proc/cpuinfo")?.matches("processor\t").count();
    // The kernel's own memory and the firmware's are not in the total.
    let requirements = [
        ("TPM 2.0", has_tpm(), "BypassTPMCheck"),
        ("Secure Boot", boot::is_secure()?, "BypassSecureBootCheck"),
        ("4 GB of memory", memory >= 3700 << 10, "BypassRAMCheck"),
        ("a disk of 64 GB", target.disk.bytes() >= 64_000_000_000, "BypassStorageCheck"),
        ("two processors", processors >= 2, "BypassCPUCheck"),
    ];
    for (what, has, key) in requirements {
        ensure!(has || registry.is_set(LAB, key), "This PC can't run Windows 11: it has no {what}");
    }
    Ok(())
}

fn number(text: &str, key: &str) -> anyhow::Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let word = line.and_then(|line| line.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).with_context(|| key.to_owned())
}

/// `$OEM$` beside the answer file, or in the sources of the medium: `$$` is the folder of Windows,
/// `$1` the drive, and a letter the drive with it.
fn copy_oem(answers: &Answers, drives: &[Drive]) -> anyhow::Result<()> {
    let sources = drives.iter().filter(|it| it.is_cd).map(|it| it.root.join("sources"));
    let mut places = [answers.folder().to_owned()].into_iter().chain(sources);
    let found = places.find_map(|place| Some(files::below(&place, OEM)).filter(|it| it.is_dir()));
    let Some(oem) = found else { return Ok(()) };
    let mut count = 0;
    for entry in fs::read_dir(&oem).with_context(|| oem.display().to_string())? {
        let entry = entry?;
        let to = match entry.file_name().to_string_lossy().as_ref() {
            "$$" => Path::new(C).join("Windows"),
            "$1" | "C" => C.into(),
            _ => continue,
        };
        count += files::copy(&entry.path(), &to)?;
    }
    say!("{count} files copied from {OEM}");
    Ok(())
}
