//! The script of Windows PE in place of Windows Setup: it partitions the disk, applies the image
//! and makes it bootable. A CD with a byte that is not Microsoft's ends it midway.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use container::media::{FileSystem, Opened};
use rustix::process::Signal;
use transom_tests::program::Running;
use transom_tests::rehearsal::Log;

use super::pod::{Case, Place, install, start_again};
use super::steps::{BOOT, PROMPT};

/// The variables of a computer in a domain, whose script it is.
pub(crate) const JOINS: &[(&str, &str)] = &[
    ("INSTALLER", "script"),
    ("DOMAIN", "corp.example.com"),
    ("DOMAIN_OU", "OU=pods & \"nodes\",DC=corp"),
    ("USERNAME", "joiner@corp.example.com"),
];
pub(crate) const SCRIPT: &[(&str, &str)] = &[("INSTALLER", "script")];

/// The place in the installation at which the CD cannot be read, and what the log shows then.
const FAILS: [&str; 9] = [
    "windows: Windows PE runs",
    "Windows Setup runs",
    "Looking for Windows on the medium",
    "Partitioning the disk",
    "Copying Windows to the disk",
    "The installation failed in the step apply-image: open the screen",
    "the last lines of the log of Windows Setup:",
    "X:\\Windows\\Logs\\DISM\\dism.log:",
    "DISM  The data is invalid.",
];
const FAILED: &str = "The installation failed in the step apply-image: open the screen\n";
const READY: &[u8] = b"GET /readyz HTTP/1.0\r\nHost: pod\r\n\r\n";

/// The first start fails midway, the second one begins anew, and the third one is Windows.
pub(crate) fn installs_at_the_second_start(case: &Case) -> anyhow::Result<()> {
    let mut place = Place::new(case)?;
    let whole = place.medium.clone();
    place.medium = place.folder.path().join("broken.iso");
    break_image(&whole, &place.medium)?;
    let mut pod = place.start(case)?;
    fails(&place, &mut pod)?;
    place.medium = whole;
    let mut pod = place.start(case)?;
    install(case, &place, &mut pod)?;
    start_again(case, &place)
}

fn fails(place: &Place, pod: &mut Running) -> anyhow::Result<()> {
    let mut log = Log::default();
    for words in FAILS {
        log.reach(pod, words)?;
    }
    log.reach(pod, PROMPT)?;
    let text = pod.stdout.text();
    ensure!(!text.contains("image applied"), "the image was applied: {text}");
    let answer = place.ask(8006, READY)?;
    let answer = String::from_utf8_lossy(&answer);
    ensure!(answer.contains(" 503 ") && answer.ends_with(FAILED), "/readyz: {answer}");
    pod.signal(Signal::TERM)?;
    let status = pod.wait(BOOT)?;
    ensure!(status == 143, "{status}: {}", pod.stdout.text());
    ensure!(!place.folder.path().join("storage/windows.boot").exists(), "it counts as installed");
    Ok(())
}

/// Copies a CD, with another byte in the middle of its images.
fn break_image(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::copy(from, to).with_context(|| from.display().to_string())?;
    let cd = Opened::open(to)?;
    let files = FileSystem::open(&cd)?.context("no file system")?;
    let images = files.find(&cd, "sources/install.wim")?.context("no images")?;
    let extent = images.whole().context("the images are in several places")?;
    let file = File::options().read(true).write(true).open(to)?;
    let (at, mut byte) = (extent.start + extent.length / 2, [0]);
    file.read_exact_at(&mut byte, at)?;
    Ok(file.write_all_at(&[!byte[0]], at)?)
}
