//! Setup on a machine alone, without a pod: with the set-up disk and the patch of the medium that a
//! pod would make.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::{Context, ensure};
use container::answer::target::Target;
use container::answer::xml::Secrets;
use container::answer::{self, from_settings};
use container::media::Opened;
use container::media::windows::analyze;
use container::settings::environment;
use container::settings::settle::Sizes;
use container::settings::translate::Bus;
use container::setup_disk::{self, Content, Item, SetupDisk};
use host::disk::Changes;
use tempfile::TempDir;
use transom_tests::guest::{Guest, Running};
use transom_tests::{lab, say, uefi};

use super::medium;
use super::steps::{BOOT, CLIENT, INSTALL_BAT, STOPPED};

/// Windows on a disk of this kind, from its medium to its second start.
pub(crate) fn installs(kind: &str) -> anyhow::Result<()> {
    let machine = Machine::new(kind)?;
    let start = Instant::now();
    let mut running = machine.guest(true)?.start()?;
    let mut steps = Steps { running: &mut running, start };
    for words in CLIENT.steps() {
        steps.reach(&words)?;
    }
    shut_down(running)?;
    let mut running = machine.guest(false)?.start()?;
    for words in CLIENT.again() {
        running.expect(&words, BOOT)?;
    }
    shut_down(running)
}

/// The medium as it is waits for a key. Without one, firmware goes on.
pub(crate) fn asks() -> anyhow::Result<()> {
    let machine = Machine::new("nvme")?;
    let guest = machine.empty()?;
    let guest = with(guest, format!("ahci-cdrom,path={}", medium::path(CLIENT.medium)?.display()));
    let mut running = guest.start()?;
    running.expect("Press any key to boot from CD or DVD...", BOOT)?;
    running.expect("no key was pressed", BOOT)?;
    running.expect("BdsDxe: failed to start", BOOT)?;
    running.kill()?;
    let mut running = guest.start()?;
    running.expect("Press any key to boot from CD or DVD...", BOOT)?;
    running.send("")?;
    let words = ["windows: Windows PE runs", "no key was pressed"];
    ensure!(running.expect_any(&words, BOOT)?.0 == 0, "the key was not seen");
    running.kill()
}

struct Steps<'a> {
    running: &'a mut Running,
    start: Instant,
}

impl Steps<'_> {
    fn reach(&mut self, words: &str) -> anyhow::Result<()> {
        let found = self.running.expect_any(&[words, STOPPED], BOOT)?;
        if found.0 == 1 {
            let reason = self.running.expect("\n", BOOT)?;
            anyhow::bail!("before {words:?}, Setup stopped: {reason}");
        }
        say!("{:6.1} s: {}", self.start.elapsed().as_secs_f64(), words.trim_end());
        Ok(())
    }
}

fn shut_down(mut running: Running) -> anyhow::Result<()> {
    running.ask(&vmm::control::Command::PowerButton)?;
    running.expect("the power button was pressed", BOOT)?;
    running.ends_with(0, BOOT)
}

/// A machine with an empty disk, and its files.
struct Machine {
    kind: String,
    folder: TempDir,
    vars: PathBuf,
    setup_disk: PathBuf,
}

impl Machine {
    fn new(kind: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let vars = uefi::store(&lab::asset("OVMF_VARS_12")?, folder.path())?;
        File::create(folder.path().join("disk.img"))?.set_len(1 << 30)?;
        let setup_disk = make_setup_disk(folder.path())?;
        Ok(Self { kind: kind.to_owned(), folder, vars, setup_disk })
    }

    /// The machine, with its disk alone.
    fn empty(&self) -> anyhow::Result<Guest> {
        let disk = self.folder.path().join("disk.img");
        let code = lab::asset("OVMF_CODE_12")?;
        let guest = Guest::transom().memory("1G").firmware(code, &self.vars);
        Ok(with(guest, format!("{},path={}", self.kind, disk.display())))
    }

    /// The machine, with the medium and the set-up disk while Windows is installed.
    fn guest(&self, installing: bool) -> anyhow::Result<Guest> {
        let mut guest = self.empty()?;
        if installing {
            let cd = medium::path(CLIENT.medium)?;
            let analyzed = analyze(&Opened::open(&cd)?)?.context("no Windows on the medium")?;
            let patch = analyzed.patch().context("no patch for the medium's question")?;
            let patch = serde_json::to_value(Changes::Patches(vec![patch.clone()]))?;
            let patch = patch.as_str().context("a patch is a text")?;
            guest = with(guest, format!("ahci-cdrom,path={},overlay={patch}", cd.display()));
            guest = with(guest, "xhci".into());
            let stick = self.setup_disk.display();
            guest = with(guest, format!("usb-storage,path={stick},removable,readonly"));
        }
        Ok(guest)
    }
}

fn with(guest: Guest, device: String) -> Guest {
    guest.word("--device").word(device)
}

/// The set-up disk that the settings make.
fn make_setup_disk(folder: &Path) -> anyhow::Result<PathBuf> {
    let words = CLIENT.settings.iter().map(|(name, value)| (name.into(), value.into())).collect();
    let settings = environment::read(&words)?.settings;
    let target = Target::of_version(&settings.windows)?;
    let mut machine = from_settings::machine(&settings, &Sizes::default(), Bus::Nvme);
    let lacks = &mut machine.lacks;
    for lack in [
        &mut lacks.tpm,
        &mut lacks.secure_boot,
        &mut lacks.memory,
        &mut lacks.disk,
        &mut lacks.processors,
    ] {
        *lack = true;
    }
    let (answers, warnings) = from_settings::answers(&settings, &target, machine);
    ensure!(warnings.is_empty(), "{warnings:?}");
    let files = answer::files(&answers, Some(INSTALL_BAT), Secrets::Shown)?;
    let modified = SystemTime::now();
    let item = |file: answer::SetupFile| Item {
        path: file.path.to_owned(),
        content: Some(Content::Bytes(file.bytes)),
        modified,
    };
    let layout = setup_disk::lay_out(files.into_iter().map(item).collect())?;
    let path = folder.join("setup.img");
    fs::copy(SetupDisk::write(&layout)?.path(), &path).context("the set-up disk")?;
    Ok(path)
}
