//! Setup in a pod, from the user's variables to the desktop: the pod makes the answers and the
//! set-up disk, and starts the medium without its question.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::Command;
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use fake_microsoft::fault::Fault;
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;
use transom_tests::place::add_network;
use transom_tests::program::{Running, said};
use transom_tests::rehearsal::Log;
use transom_tests::{lab, say};

use super::download::Microsoft;
use super::health::Health;
use super::medium;
use super::steps::{BOOT, INSTALL_BAT, Setup, in_the_log, is_told};

/// The address of the pod in its network.
pub(crate) const ADDRESS: &str = "10.99.0.2";
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
/// The volume, the user's folder, the run folder and the firmware at their places, and a mounted
/// medium, which is never copied.
const START: &str = "set -e
mount --bind $FOLDER/storage /mnt
mkdir -p /oem
mount --bind $FOLDER/oem /oem
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
    /// The faults of the server that has the medium. `None`: the medium is mounted.
    pub(crate) download: Option<&'static [Fault]>,
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
    let health = Health::watch(place)?;
    let mut log = Log::default();
    if let Some(microsoft) = &place.microsoft {
        microsoft.steps(case).iter().try_for_each(|words| log.reach(pod, words))?;
    }
    for words in steps {
        log.reach(pod, in_the_log(&words))?;
        if is_told(&words) {
            health.ask(pod)?;
        }
    }
    said_all(case, &pod.stdout.text())?;
    health.reported_all(pod, case.download.is_some())?;
    if let Some(microsoft) = &place.microsoft {
        microsoft.was_asked()?;
        microsoft.is_removed(place)?;
    }
    if case.drivers {
        is_reached(place, pod)?;
    }
    stops(pod)
}

/// Starts the installed Windows without its medium.
pub(crate) fn start_again(case: &Case, place: &Place) -> anyhow::Result<()> {
    if case.download.is_none() {
        fs::remove_file(place.folder.path().join("medium"))?;
        fs::remove_file(place.storage().join("custom.iso"))?;
    }
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
    } else {
        // LinOffice follows an installation by this number of the reference image. The CD with
        // drivers would have an entry, too.
        wanted.push("starting Boot0004 \"Windows Boot Manager\" from HD(".into());
    }
    for words in wanted {
        ensure!(log.contains(&words), "no {words:?}: {log}");
    }
    ensure!(!log.contains("Press any key"), "the medium asked for a key: {log}");
    ensure!(!log.contains("without system management mode"), "no SMM: {log}");
    Ok(())
}

/// The remote desktop answers from outside as one with network level authentication.
pub(crate) fn is_reached(place: &Place, pod: &mut Running) -> anyhow::Result<()> {
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

/// A host for one pod: a volume, and a network with an address.
pub(crate) struct Place {
    space: String,
    pub(crate) folder: TempDir,
    /// The CD, if it is mounted.
    pub(crate) medium: PathBuf,
    pub(crate) microsoft: Option<Microsoft>,
}

impl Place {
    pub(crate) fn new(case: &Case) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let space = format!("rehearsal-{}", std::process::id());
        let medium = medium::path(case.setup.medium)?;
        let mut place = Self { space, folder, medium, microsoft: None };
        let storage = place.storage();
        fs::create_dir(&storage)?;
        fs::create_dir(place.folder.path().join("oem"))?;
        fs::write(place.folder.path().join("oem/install.bat"), INSTALL_BAT)?;
        if case.drivers {
            fs::copy(medium::bundle()?, storage.join("drivers.iso"))?;
        }
        add_network(&place.space)?;
        match case.download {
            Some(faults) => place.microsoft = Some(Microsoft::serve(&place, case, faults)?),
            None => {
                // The medium is mounted on the first, as long as the second is there.
                File::create(storage.join("custom.iso"))?;
                File::create(place.folder.path().join("medium"))?;
            }
        }
        Ok(place)
    }

    pub(crate) fn storage(&self) -> PathBuf {
        self.folder.path().join("storage")
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
        if !case.drivers {
            command.env("DRIVERS", "N");
        }
        command.envs(self.microsoft.iter().flat_map(Microsoft::variables));
        Running::spawn(command.envs(case.words.iter().copied()))
    }

    /// Runs a function in the network of the pod: a socket belongs to the namespace of the thread
    /// that makes it.
    pub(crate) fn inside<T: Send + 'static>(
        &self,
        function: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<JoinHandle<anyhow::Result<T>>> {
        let space = File::open(format!("/run/netns/{}", self.space))?;
        Ok(thread::spawn(move || {
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?;
            function()
        }))
    }

    /// A connection to a port of the pod.
    pub(crate) fn connect(&self, port: u16) -> anyhow::Result<TcpStream> {
        let connected = self.inside(move || Ok(TcpStream::connect((ADDRESS, port))?))?;
        let stream = connected.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(stream)
    }

    /// Sends bytes to a port of the pod, and returns the first bytes that it answers.
    pub(crate) fn ask(&self, port: u16, bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
        let mut stream = self.connect(port)?;
        stream.write_all(bytes)?;
        let mut answer = vec![0; 4096];
        let length = stream.read(&mut answer)?;
        answer.truncate(length);
        Ok(answer)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.microsoft = None;
        if let Err(error) = said(Command::new("ip").args(["netns", "delete", &self.space])) {
            say!("{error:#}");
        }
        // A folder that has something is a user's.
        fs::remove_dir("/oem").ok();
    }
}
