//! A pod of this host, with the probe as its guest.

use std::env;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use transom_benches::rival::{MEMORY, release};

use crate::Player;
use crate::show::{SIZE, Show};

/// The unit of processor times in `/proc`, per second, which is the same on all x86 kernels.
const TICKS: f64 = 100.0;
const PATIENCE: Duration = Duration::from_secs(60);

/// Dropping it ends the pod.
pub(crate) struct Pod {
    child: Child,
    pub(crate) web: u16,
    /// The guest's serial port.
    serial: UnixStream,
    _folder: TempDir,
}

impl Pod {
    pub(crate) fn start(show: &Show) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        show.write(&path.join("module"))?;
        fs::write(path.join("probe.elf"), probe::IMAGE)?;
        let program = programs(path)?;
        let port = || anyhow::Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port());
        let (web, storage) = (port()?, path.join("storage"));
        fs::create_dir(&storage)?;
        let mut command = Command::new(program);
        command.arg("pod").env_clear().env("STORAGE", storage).envs([
            ("VERSION", "probe"),
            ("NETWORK", "user"),
            // There is xrdp in place of the guest.
            ("HOST_PORTS", "3389"),
            ("CPU_CORES", "1"),
            ("DISPLAY", "web"),
            // The probe does not react to a request to shut down.
            ("TIMEOUT", "1"),
        ]);
        command.envs([
            ("RAM_SIZE", format!("{MEMORY}M")),
            ("WIDTH", SIZE.0.to_string()),
            ("HEIGHT", SIZE.1.to_string()),
            ("WEB_PORT", web.to_string()),
            ("VNC_PORT", port()?.to_string()),
        ]);
        let log = fs::File::create(path.join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut child = command.spawn().context("the pod")?;
        let serial = connect(&path.join("serial"), || Ok(child.try_wait()?.is_none()));
        let serial = serial.with_context(|| {
            let log = fs::read_to_string(path.join("log")).unwrap_or_default();
            child.kill().ok();
            log
        })?;
        serial.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { child, web, serial, _folder: folder })
    }

    /// Processor seconds of the pod's processes without the guest's processor, and of the latter.
    pub(crate) fn seconds(&self) -> Result<(f64, f64)> {
        let guest = family(self.child.id())?.into_iter().map(guest_seconds).sum::<Result<f64>>()?;
        Ok((processor_seconds(self.child.id())? - guest, guest))
    }
}

impl Player for Pod {
    fn play(&mut self, scene: u8) -> Result<f64> {
        self.serial.write_all(&[b'a' + scene])?;
        let (mut said, ready) = (String::new(), format!("scene {scene}\n"));
        while !said.replace('\r', "").contains(&ready) {
            let mut bytes = [0; 256];
            let count = self.serial.read(&mut bytes).context("the guest's serial port")?;
            ensure!(count > 0, "the machine has ended: {said}");
            said.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
        let drew = said.lines().rev().find_map(|line| line.trim_end().strip_prefix("drew "));
        drew.context("no number of drawn frames")?.parse().context("the number of drawn frames")
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).ok();
        }
        self.child.wait().ok();
    }
}

/// Puts the pod's programs into a folder: `transom`, and a `vmm` that runs ours with the guest's
/// pictures, for which a pod has no variable. Returns the path of the former.
fn programs(folder: &Path) -> Result<PathBuf> {
    let built = match env::var_os("TRANSOM_VMM") {
        Some(vmm) => PathBuf::from(vmm),
        None => release(&["vmm", "container"])?.join("vmm"),
    };
    let built = fs::canonicalize(&built).with_context(|| built.display().to_string())?;
    let (transom, vmm) = (folder.join("transom"), folder.join("vmm"));
    fs::copy(built.with_file_name("transom"), &transom).context("transom")?;
    let (built, place) = (built.display(), folder.display());
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = run ] || exec {built} \"$@\"\n\
         exec {built} \"$@\" --accept-emulation --kernel {place}/probe.elf \
         --initrd {place}/module --cmdline 'checks=none then=halt show=yes' \
         --serial socket:{place}/serial\n"
    );
    fs::write(&vmm, script)?;
    fs::set_permissions(&vmm, fs::Permissions::from_mode(0o755))?;
    Ok(transom)
}

/// Connects to a socket as soon as it exists.
fn connect(path: &Path, mut goes_on: impl FnMut() -> Result<bool>) -> Result<UnixStream> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Ok(stream) = UnixStream::connect(path) {
            return Ok(stream);
        }
        ensure!(goes_on()?, "the pod has ended");
        if Instant::now() > end {
            bail!("there is no machine");
        }
        sleep(Duration::from_millis(50));
    }
}

/// Processor seconds of a process and its descendants, also of those that have ended.
pub(crate) fn processor_seconds(pid: u32) -> Result<f64> {
    let used = |pid: u32| -> Result<f64> {
        // A descendant may end in the meantime: then its parent has its time.
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // Fields after the name: the time of the process, and that of its children.
        let fields = text.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(4);
        fields.map(|it| Ok(it.parse::<f64>()? / TICKS)).sum()
    };
    family(pid)?.into_iter().map(used).sum()
}

/// A process and its descendants.
fn family(pid: u32) -> Result<Vec<u32>> {
    let mut all = vec![pid];
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let children = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace() {
            all.extend(family(child.parse()?).unwrap_or_default());
        }
    }
    Ok(all)
}

/// Processor seconds of the threads of a process that run a guest's processor.
fn guest_seconds(pid: u32) -> Result<f64> {
    let mut seconds = 0.0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten() {
        let task = task?.path();
        // A thread may end in the meantime.
        let read = |file| fs::read_to_string(task.join(file)).unwrap_or_default();
        if read("comm").starts_with("cpu") {
            let text = read("schedstat");
            seconds += text.split_ascii_whitespace().next().unwrap_or("0").parse::<f64>()? / 1e9;
        }
    }
    Ok(seconds)
}
