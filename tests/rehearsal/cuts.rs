//! Pods that are ended in the middle, by SIGKILL or SIGTERM, and started again with the same
//! variables: an installation in many pieces.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::Instant;

use anyhow::ensure;
use container::state::BOOTED;
use fake_microsoft::fault::Fault;
use rustix::process::Signal;
use transom_tests::program::Running;
use transom_tests::rehearsal::Log;
use transom_tests::say;

use super::download::range;
use super::health::Health;
use super::medium;
use super::pod::{Case, Place, is_reached, stops};
use super::steps::{BOOT, CLIENT};

/// A moment at which a pod is ended, and the step that the next one takes.
struct Cut {
    at: At,
    by: Signal,
    next: Next,
}

#[derive(Debug)]
enum At {
    /// Words in the log.
    Words(&'static str),
    /// A percentage of the download.
    Percent(u64),
    /// The health page says so.
    Ready,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The download begins.
    Download,
    /// It goes on where it was.
    Resume,
    /// The medium is there, and nothing on the disk.
    Install,
    /// The disk has never booted.
    InstallAgain,
    /// The disk boots, and nothing on it is lost.
    Boot,
}

/// Bytes per second of each connection. The pieces that all of them fetch at the same time are
/// complete at about 27, 54 and 81 percent, and on the disk some seconds later.
const RATE: u64 = 400_000;
const KILL: Signal = Signal::KILL;
const TERM: Signal = Signal::TERM;
/// The words of firmware that starts the disk.
const STARTS: At = At::Words("\"Windows Boot Manager\" from HD(");

/// Points before the disk first boots.
const FIRST: &[Cut] = &[
    cut(At::Words("Requesting Windows 11 "), KILL, Next::Download),
    cut(At::Percent(45), KILL, Next::Resume),
    cut(At::Percent(60), TERM, Next::Resume),
    cut(At::Percent(75), KILL, Next::Resume),
    cut(At::Percent(90), TERM, Next::Resume),
    cut(At::Words("Verifying Windows 11"), KILL, Next::Resume),
    cut(At::Words("Preparing the machine"), TERM, Next::Install),
    cut(At::Words("installing Windows 11 Pro"), KILL, Next::Install),
    cut(At::Words("Starting Windows"), TERM, Next::Install),
    cut(At::Words("windows: Windows PE runs"), KILL, Next::Install),
    cut(At::Words("windows: disk 0 has "), KILL, Next::InstallAgain),
    cut(At::Words("image applied"), TERM, Next::InstallAgain),
    cut(At::Words("files copied from $OEM$"), KILL, Next::InstallAgain),
];

/// Points from then on.
const LATER: &[Cut] = &[
    cut(STARTS, KILL, Next::Boot),
    cut(At::Words("Windows 11 Pro starts from"), KILL, Next::Boot),
    cut(At::Words("Windows adapts itself to the machine"), KILL, Next::Boot),
    cut(STARTS, KILL, Next::Boot),
    cut(At::Words("install.bat runs"), TERM, Next::Boot),
    cut(At::Words("ada is logged on"), KILL, Next::Boot),
    cut(At::Ready, KILL, Next::Boot),
    cut(At::Words("Starting Windows"), TERM, Next::Boot),
    cut(STARTS, KILL, Next::Boot),
    cut(At::Ready, TERM, Next::Boot),
];

const fn cut(at: At, by: Signal, next: Next) -> Cut {
    Cut { at, by, next }
}

/// A new disk, divided several times before it boots.
pub(crate) fn of_the_first_boot() -> anyhow::Result<()> {
    survives(&[Fault::Slow(RATE)], FIRST)
}

/// A disk that boots, and is never erased.
pub(crate) fn of_an_installed_disk() -> anyhow::Result<()> {
    survives(&[], LATER)
}

/// Ends pods at these points. The one after the last becomes ready.
fn survives(faults: &'static [Fault], cuts: &[Cut]) -> anyhow::Result<()> {
    let words = &[("TIMEOUT", "20")];
    let case = Case { setup: CLIENT, disk: "nvme", drivers: true, download: Some(faults), words };
    let place = Place::new(&case)?;
    let (mut next, mut before) = (Next::Download, None);
    for cut in cuts {
        let start = Instant::now();
        let (mut pod, mut log) = begin(&place, &case, next)?;
        cut.at.reach(&place, &mut pod, &mut log)?;
        let disk = Disk::look(&place)?;
        next.check(&pod.stdout.text(), before, disk)?;
        end(&mut pod, cut.by)?;
        let by = if cut.by == KILL { "SIGKILL" } else { "SIGTERM" };
        say!("{:6.1} s: {by} at {:?}", start.elapsed().as_secs_f64(), cut.at);
        (next, before) = (cut.next, disk);
    }
    let (mut pod, _) = begin(&place, &case, next)?;
    Health::watch(&place)?.is_ready(&pod)?;
    is_reached(&place, &mut pod)?;
    next.check(&pod.stdout.text(), before, Disk::look(&place)?)?;
    stops(&mut pod)?;
    // A pod that is killed between the first boot and its mark forgets the medium.
    if let Some(microsoft) = place.microsoft.as_ref().filter(|_| !matches!(next, Next::Boot)) {
        microsoft.is_removed(&place)?;
    }
    was_resumed(&place)
}

/// Starts a pod that takes this step.
fn begin(place: &Place, case: &Case, next: Next) -> anyhow::Result<(Running, Log)> {
    let (mut pod, mut log) = (place.start(case)?, Log::default());
    next.words().iter().try_for_each(|words| log.reach(&mut pod, words))?;
    Ok((pod, log))
}

fn end(pod: &mut Running, by: Signal) -> anyhow::Result<()> {
    if by == TERM {
        return stops(pod);
    }
    pod.signal(by)?;
    let status = pod.wait(BOOT)?;
    ensure!(status == 128 + KILL.as_raw(), "{status}: {}", pod.stdout.text());
    Ok(())
}

/// Most of the medium came once.
fn was_resumed(place: &Place) -> anyhow::Result<()> {
    let Some(microsoft) = &place.microsoft else { return Ok(()) };
    let whole = fs::metadata(medium::path(CLIENT.medium)?)?.len();
    let requests = microsoft.site.take_requests();
    let asked: u64 = requests.iter().filter_map(|it| range(it)).map(|(from, to)| to - from).sum();
    say!("{} of {} MB asked for", asked / 1_000_000, whole / 1_000_000);
    ensure!(asked < 3 * whole, "{asked} of {whole} bytes: {requests:?}");
    let mut names = fs::read_dir(place.storage())?.flatten().map(|it| it.file_name());
    let part = names.find(|name| name.to_string_lossy().contains(".part"));
    ensure!(part.is_none(), "{part:?} is left");
    Ok(())
}

impl At {
    fn reach(&self, place: &Place, pod: &mut Running, log: &mut Log) -> anyhow::Result<()> {
        match self {
            Self::Words(words) => log.reach(pod, words),
            Self::Percent(percent) => Health::watch(place)?.downloads(*percent),
            Self::Ready => Health::watch(place)?.is_ready(pod),
        }
    }
}

impl Next {
    /// The pod's words, soon after its start.
    fn words(self) -> &'static [&'static str] {
        const INSTALL: &str = "the next step is install: nothing is installed yet";
        match self {
            Self::Download => &[INSTALL],
            Self::Resume => &[INSTALL, " are there already"],
            Self::Install => &[INSTALL, "the medium has "],
            Self::InstallAgain => &["the next step is install-again: ", "the medium has "],
            // It is marked as booted, or it was about to be.
            Self::Boot => &["the next step is boot: it has "],
        }
    }

    /// Checks the log of a pod that took this step, and the disk before and after it.
    fn check(self, log: &str, before: Option<Disk>, after: Option<Disk>) -> anyhow::Result<()> {
        let downloads = matches!(self, Self::Download | Self::Resume);
        ensure!(downloads == log.contains("Requesting Windows 11"), "{self:?}: {log}");
        let marks = |disk: Option<Disk>| disk.map(|it| (it.file, it.name));
        match self {
            Self::Download | Self::Resume | Self::Install => {
                ensure!(before.is_none(), "there was a disk already: {before:?}");
            }
            Self::InstallAgain => {
                let booted = before.is_some_and(|disk| disk.booted);
                ensure!(!booted, "a disk that has booted is erased: {before:?}");
                ensure!(marks(before) != marks(after), "the disk is not divided anew");
            }
            Self::Boot => {
                let (before, after) = (marks(before), marks(after));
                ensure!(before.is_some() && before == after, "{before:?} became {after:?}");
            }
        }
        Ok(())
    }
}

/// The marks of an installed disk, by which it is known again: its file, and the random name in its
/// partition table. Also, whether it has booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Disk {
    file: u64,
    name: [u8; 16],
    booted: bool,
}

impl Disk {
    /// The disk on the volume, if anything was written to it.
    fn look(place: &Place) -> anyhow::Result<Option<Self>> {
        let file = match File::open(place.storage().join("data.img")) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut name = [0; 16];
        // The second sector of a GPT.
        file.read_exact_at(&mut name, 512 + 56)?;
        let booted = place.storage().join(format!("windows.{BOOTED}")).is_file();
        Ok((name != [0; 16]).then_some(Self { file: file.metadata()?.ino(), name, booted }))
    }
}
