//! Setup in a pod, from the user's variables to the desktop: the pod makes the answers and the
//! set-up disk, and starts the medium without its question.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;
use transom_tests::program::{Running, said};
use transom_tests::{lab, say};

use super::medium;
use super::steps::{BOOT, INSTALL_BAT, PROMPT, STOPPED, Setup, in_the_log};

/// The address of the pod in its network.
const ADDRESS: &str = "10.99.0.2";
/// Variables of every pod besides the user's: a small machine.
const SMALL: [(&str, &str); 8] = [
    ("STORAGE", "/mnt"),
    ("NETWORK", "user"),
    ("CPU_CORES", "1"),
    ("RAM_SIZE", "1G"),
    ("RAM_MINIMUM", "512M"),
    ("RAM_CHECK", "N"),
    ("DISK_SIZE", "1G"),
    ("DISK_MINIMUM", "64M"),
];
/// The volume, the run folder and the firmware at their places, and the medium, which is never
/// copied.
const START: &str = "set -e
mount --bind $FOLDER/storage /mnt
mount -t tmpfs run /run
mount -t tmpfs share /usr/share
mkdir /usr/share/OVMF
mount --bind $FIRMWARE /usr/share/OVMF
if [ -e $FOLDER/medium ]; then
  mount --bind $MEDIUM /mnt/custom.iso
fi
exec $TRANSOM pod";

/// A connection request with network level authentication, and the start of the answer.
const REQUEST: [u8; 19] = [3, 0, 0, 19, 14, 0xe0, 0, 0, 0, 0, 0, 1, 0, 8, 0, 3, 0, 0, 0];
const CONFIRM: [u8; 8] = [2, 0x1f, 8, 0, 2, 0, 0, 0];

/// The variable of a machine without Secure Boot.
pub(crate) const PLAIN: (&str, &str) = ("BOOT_MODE", "windows");

/// The differences between the cases.
pub(crate) struct Case {
    pub(crate) setup: Setup,
    /// DISK_TYPE.
    pub(crate) disk: &'static str,
    /// Whether there is an ISO with drivers.
    pub(crate) drivers: bool,
    /// Further variables.
    pub(crate) words: &'static [(&'static str, &'static str)],
}

/// Installs Windows, and starts what was installed.
pub(crate) fn installs(case: &Case) -> anyhow::Result<()> {
    let place = Place::new(case)?;
    let mut pod = place.start(case)?;
    install(case, &place, &mut pod)?;
    start_again(case, &place)
}

/// Follows an installation to its end, and ends the pod.
pub(crate) fn install(case: &Case, place: &Place, pod: &mut Running) -> anyhow::Result<()> {
    let has = |name: &str| case.words.iter().any(|(it, _)| *it == name);
    let steps = match has("INSTALLER") {
        true => case.setup.script_steps(has("DOMAIN")),
        false => case.setup.steps(),
    };
    let mut log = Log::default();
    for words in steps {
        log.reach(pod, in_the_log(&words))?;
    }
    said_all(case, &pod.stdout.text())?;
    if case.drivers {
        is_reached(place, pod)?;
    }
    stops(pod)
}

/// Starts the installed Windows without its medium.
pub(crate) fn start_again(case: &Case, place: &Place) -> anyhow::Result<()> {
    fs::remove_file(place.folder.path().join("medium"))?;
    fs::remove_file(place.folder.path().join("storage/custom.iso"))?;
    let mut pod = place.start(case)?;
    let mut log = Log::default();
    for words in case.setup.again() {
        log.reach(&mut pod, &words)?;
    }
    stops(&mut pod)
}

/// The log after an installation, where the order does not matter.
fn said_all(case: &Case, log: &str) -> anyhow::Result<()> {
    let secure = case.setup.secure && !case.words.contains(&PLAIN);
    let mut wanted = vec![
        format!("windows: Secure Boot: {secure}, TPM: {secure}"),
        "the set-up disk is pulled out".into(),
    ];
    if case.drivers {
        wanted.push("windows: the guest agent runs".into());
    }
    for words in wanted {
        ensure!(log.contains(&words), "no {words:?}: {log}");
    }
    ensure!(!log.contains("Press any key"), "the medium asked for a key: {log}");
    Ok(())
}

/// The remote desktop answers from outside as one with network level authentication.
fn is_reached(place: &Place, pod: &mut Running) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let answer = place.ask(3389, &REQUEST);
        match &answer {
            Ok(bytes) if bytes.ends_with(&CONFIRM) => return Ok(()),
            _ => ensure!(start.elapsed() < BOOT, "3389: {answer:?}: {}", pod.stdout.text()),
        }
        sleep(Duration::from_secs(2));
    }
}

pub(crate) fn stops(pod: &mut Running) -> anyhow::Result<()> {
    pod.signal(Signal::TERM)?;
    let status = pod.wait(BOOT)?;
    let log = pod.stdout.text();
    ensure!(status == 143 && !log.contains("killing it"), "{status}: {log}{}", pod.stderr.text());
    Ok(())
}

/// The place in a pod's log after the last step.
#[derive(Default)]
pub(crate) struct Log {
    at: usize,
}

impl Log {
    pub(crate) fn reach(&mut self, pod: &mut Running, words: &str) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let text = pod.stdout.text();
            let new = &text[self.at..];
            if let Some(found) = new.find(words) {
                self.at += found + words.len();
                say!("{:6.1} s: {}", start.elapsed().as_secs_f64(), words.trim_end());
                return Ok(());
            }
            let ended = pod.wait(Duration::ZERO).is_ok();
            let stopped = [STOPPED, PROMPT].iter().any(|words| new.contains(words));
            if ended || stopped || start.elapsed() > BOOT {
                bail!("no {words:?} (ended: {ended}) in:\n{text}\n{}", pod.stderr.text());
            }
            sleep(Duration::from_millis(200));
        }
    }
}

/// A host for one pod: a volume, and a network with an address.
pub(crate) struct Place {
    space: String,
    pub(crate) folder: TempDir,
    /// The CD.
    pub(crate) medium: PathBuf,
}

impl Place {
    pub(crate) fn new(case: &Case) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let storage = folder.path().join("storage");
        fs::create_dir_all(storage.join("oem"))?;
        fs::write(storage.join("oem/install.bat"), INSTALL_BAT)?;
        // The medium is mounted on the first, as long as the second is there.
        File::create(storage.join("custom.iso"))?;
        File::create(folder.path().join("medium"))?;
        if case.drivers {
            fs::copy(medium::bundle()?, storage.join("drivers.iso"))?;
        }
        let space = format!("rehearsal-{}", std::process::id());
        let place = Self { space, folder, medium: medium::path(case.setup.medium)? };
        said(Command::new("ip").args(["netns", "add", &place.space]))?;
        for words in [
            "link set lo up",
            "link add eth0 type veth peer name far",
            "address add 10.99.0.2/24 dev eth0",
            "link set eth0 up",
            "link set far up",
            "route add default via 10.99.0.1",
        ] {
            said(Command::new("ip").args(["-n", &place.space]).args(words.split(' ')))?;
        }
        Ok(place)
    }

    pub(crate) fn start(&self, case: &Case) -> anyhow::Result<Running> {
        let firmware = lab::asset("OVMF_CODE_12")?;
        let firmware = firmware.parent().context("a file has a folder")?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space, "unshare", "--mount", "--propagation"]);
        command.args(["private", "sh", "-c", START]).env_clear();
        let paths: [(&str, PathBuf); 4] = [
            ("FOLDER", self.folder.path().into()),
            ("FIRMWARE", firmware.into()),
            ("MEDIUM", self.medium.clone()),
            ("TRANSOM", lab::vmm()?.with_file_name("transom")),
        ];
        command.envs(paths).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("ERROR_HOLD", "0");
        command.envs(SMALL).envs(case.setup.settings.iter().copied()).env("DISK_TYPE", case.disk);
        Running::spawn(command.envs(case.words.iter().copied()))
    }

    /// Sends bytes to a port of the pod, and returns the first bytes that it answers.
    pub(crate) fn ask(&self, port: u16, bytes: &'static [u8]) -> anyhow::Result<Vec<u8>> {
        let space = File::open(format!("/run/netns/{}", self.space))?;
        let asked = thread::spawn(move || {
            // A socket belongs to the namespace of the thread that makes it.
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?;
            let mut stream = TcpStream::connect((ADDRESS, port))?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            stream.write_all(bytes)?;
            let mut answer = vec![0; 4096];
            let length = stream.read(&mut answer)?;
            answer.truncate(length);
            anyhow::Ok(answer)
        });
        asked.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = said(Command::new("ip").args(["netns", "delete", &self.space])) {
            say!("{error:#}");
        }
    }
}
