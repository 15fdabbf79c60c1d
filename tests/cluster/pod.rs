//! `transom pod` in a container of runc, as clusters start it: with the namespaces, mounts, devices
//! and capabilities of a profile.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use transom_tests::lab;
use transom_tests::program::{number, said};
use transom_tests::say;

use super::town::{SOON, Space, Town, four};

/// How a cluster starts a pod.
pub(crate) struct Profile {
    /// Name of the pod, its namespace and its files.
    pub(crate) name: &'static str,
    /// Last byte of its address.
    pub(crate) last: u8,
    /// User and group ID.
    pub(crate) user: u32,
    /// Owner of its volume, and of the files there.
    pub(crate) owner: u32,
    /// Capabilities, without `CAP_`.
    pub(crate) capabilities: &'static str,
    /// Full capabilities, writable `/proc/sys`, no masked paths, all devices.
    pub(crate) privileged: bool,
    /// Has /dev/net/tun.
    pub(crate) tun: bool,
    pub(crate) disk: DiskOf,
    /// Variables in addition to `WORDS`, or instead of them.
    pub(crate) words: &'static [&'static str],
}

/// The disk of a guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskOf {
    /// A disk on the volume.
    Volume,
    /// A CD at /custom.iso. The volume is empty.
    Medium,
    /// A disk in /base, which is only read. The volume is empty.
    Base,
}

/// All capabilities.
pub(crate) const ALL: &str = "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID \
    SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER \
    SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE \
    SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN \
    SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE";

/// Variables of every pod: a small machine.
const WORDS: [&str; 14] = [
    "PATH=/usr/sbin:/usr/bin",
    "STORAGE=/storage",
    "CPU_CORES=1",
    "RAM_SIZE=512M",
    "RAM_MINIMUM=512M",
    "RAM_CHECK=N",
    "DISK_SIZE=256M",
    "DISK_MINIMUM=64M",
    "USERNAME=ada",
    "PASSWORD=a long word",
    "HOST_PORTS=7149",
    "TIMEOUT=180",
    "LOG_FORMAT=text",
    // A pod that fails ends at once.
    "ERROR_HOLD=0",
];
/// Owner of the volume, and user of pods without root.
pub(crate) const OWNER: u32 = 10001;

/// A running pod; dropping it deletes the container.
pub(crate) struct Pod {
    pub(crate) name: &'static str,
    pub(crate) address: Ipv4Addr,
    /// Its network namespace.
    pub(crate) space: Space,
    /// Its volume on this host.
    pub(crate) volume: PathBuf,
    folder: PathBuf,
    start: Instant,
    child: Child,
}

impl Pod {
    /// Starts a pod, and waits until its machine is about to run the guest.
    pub(crate) fn start(town: &Town, profile: &Profile) -> anyhow::Result<Self> {
        let folder = town.folder.path().join(profile.name);
        let volume = folder.join("volume");
        fs::create_dir_all(&volume)?;
        // Owner and mode as a cluster with fsGroup sets them.
        chown(&volume, Some(profile.owner), Some(profile.owner))?;
        fs::set_permissions(&volume, Permissions::from_mode(0o2775))?;
        if profile.disk == DiskOf::Volume {
            let disk = volume.join("data.img");
            let from = lab::asset("POD_DISK")?;
            said(Command::new("cp").arg("--sparse=always").args([&from, &disk]))?;
            chown(&disk, Some(profile.owner), Some(profile.owner))?;
            fs::create_dir(volume.join("shared"))?;
            chown(volume.join("shared"), Some(OWNER), Some(OWNER))?;
        }
        let mut pod = Self::launch(town, profile, volume)?;
        // The last log line before the guest's first instruction.
        pod.says("vnc: listening at a Unix socket", 1, BOOT)?;
        let age = pod.age();
        say!("{}: the guest's first instruction {age:.2} s after the start of runc", pod.name);
        Ok(pod)
    }

    /// Starts another pod on the same volume.
    pub(crate) fn beside(&self, town: &Town, profile: &Profile) -> anyhow::Result<Self> {
        let folder = town.folder.path().join(profile.name);
        fs::create_dir(&folder)?;
        std::os::unix::fs::symlink(&self.volume, folder.join("volume"))?;
        Self::launch(town, profile, self.volume.clone())
    }

    fn launch(town: &Town, profile: &Profile, volume: PathBuf) -> anyhow::Result<Self> {
        let name = profile.name;
        let space = town.space(name, profile.last)?;
        let folder = town.folder.path().join(name);
        fs::create_dir_all(folder.join("root/usr"))?;
        for (link, to) in [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
            std::os::unix::fs::symlink(to, folder.join("root").join(link))?;
        }
        let container = container(town, profile, &space, &folder)?;
        fs::write(folder.join("config.json"), container.to_string())?;
        let start = Instant::now();
        let child = run(name, &folder)?;
        Ok(Self { name, address: four(profile.last), space, volume, folder, start, child })
    }

    /// Starts it again after its end, in a new container, without the first variables and with the
    /// others, which may replace some. Its log begins anew.
    pub(crate) fn again(&mut self, without: &[&str], with: &[&str]) -> anyhow::Result<()> {
        let file = self.folder.join("config.json");
        let mut container: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
        let words = container["process"]["env"].as_array_mut().context("no variables")?;
        words.retain(|word| without.iter().all(|it| *word != *it));
        let name = |word: &str| word.split('=').next().map(str::to_owned);
        words.retain(|word| with.iter().all(|it| word.as_str().and_then(name) != name(it)));
        words.extend(with.iter().copied().map(Value::from));
        fs::write(&file, container.to_string())?;
        self.start = Instant::now();
        self.child = run(self.name, &self.folder)?;
        Ok(())
    }

    /// Seconds since its start.
    pub(crate) fn age(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Its log so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// How often its log contains these words.
    pub(crate) fn said(&self, words: &str) -> usize {
        self.log().matches(words).count()
    }

    /// Waits until its log contains these words at least `times` times.
    pub(crate) fn says(
        &mut self,
        words: &str,
        times: usize,
        within: Duration,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        while self.said(words) < times {
            let ended = self.child.try_wait()?;
            let left = ended.is_none() && start.elapsed() < within;
            ensure!(left, "{}: no {words:?} ({ended:?}): {}", self.name, self.log());
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Runs a program in the container; returns its output.
    pub(crate) fn exec(&self, words: &[&str]) -> anyhow::Result<String> {
        said(runc(&["exec", &id(self.name)]).args(words))
    }

    /// Runs `transom` in the container, as people and hooks do.
    pub(crate) fn transom(&self, words: &[&str]) -> anyhow::Result<Output> {
        Ok(self.start_transom(words)?.wait_with_output()?)
    }

    /// Starts `transom` in the container without waiting for its end.
    pub(crate) fn start_transom(&self, words: &[&str]) -> anyhow::Result<Child> {
        let mut run = runc(&["exec", &id(self.name), "/transom/transom"]);
        run.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        run.spawn().context("runc")
    }

    /// Waits until `is` returns true.
    pub(crate) fn waits(
        &mut self,
        is: impl Fn(&Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        while !is(self)? {
            let left = start.elapsed() < SOON && self.child.try_wait()?.is_none();
            ensure!(left, "{}: the condition never held: {}", self.name, self.log());
            sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Sends a signal to the pod, as a cluster does to end it.
    pub(crate) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        // runc forwards it.
        let pid = Pid::from_raw(self.child.id().cast_signed()).context("a number")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Waits for its end; returns the exit status.
    pub(crate) fn ends(&mut self, within: Duration) -> anyhow::Result<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(number(status));
            }
            if start.elapsed() > within {
                bail!("{}: no end within {within:?}: {}", self.name, self.log());
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// The processes of the container, as the host numbers them: `transom` and `vmm`.
    pub(crate) fn processes(&self) -> anyhow::Result<[u32; 2]> {
        Ok([self.first()?, self.child("vmm")?])
    }

    fn first(&self) -> anyhow::Result<u32> {
        let state: Value = serde_json::from_str(&said(&mut runc(&["state", &id(self.name)]))?)?;
        Ok(u32::try_from(state["pid"].as_u64().context("no number")?)?)
    }

    /// The child process of the pod with this name.
    pub(crate) fn child(&self, name: &str) -> anyhow::Result<u32> {
        self.child_of(self.first()?, name)
    }

    /// The child of one of its processes with this name.
    pub(crate) fn child_of(&self, parent: u32, name: &str) -> anyhow::Result<u32> {
        let mut children = String::new();
        for task in fs::read_dir(format!("/proc/{parent}/task"))? {
            // A thread may have ended in the meantime.
            children += &fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        }
        let is_it = |child: &&str| {
            let said = fs::read_to_string(format!("/proc/{child}/comm"));
            said.is_ok_and(|said| said.trim_end() == name)
        };
        let child = children.split_whitespace().find(is_it);
        Ok(child.with_context(|| format!("{}: no {name}: {children:?}", self.name))?.parse()?)
    }

    /// Runs a command in the guest's shell, from outside; returns its output.
    pub(crate) fn guest(&self, town: &Town, words: &str) -> anyhow::Result<String> {
        let script = format!("({words}) < /dev/null 2>&1\nexit\n");
        let said = town.outside.ask((self.address, 2222), script)?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    /// Runs a command that takes longer than a connection waits for its answer.
    pub(crate) fn guest_slowly(&self, town: &Town, words: &str) -> anyhow::Result<String> {
        // A connection ends when nobody has it anymore.
        let script = format!("(({words}) > /saying; mv /saying /said) > /dev/null 2>&1 &");
        self.guest(town, &format!("rm -f /said; {script}"))?;
        let start = Instant::now();
        loop {
            let said = self.guest(town, "cat /said 2> /dev/null")?;
            if !said.is_empty() {
                return Ok(said);
            }
            ensure!(start.elapsed() < BOOT, "no answer to {words}");
            sleep(Duration::from_secs(1));
        }
    }

    /// Sends the guest's shell a command that ends the guest, so that no answer comes.
    pub(crate) fn order(&self, town: &Town, words: &str) -> anyhow::Result<()> {
        let (to, line) = ((self.address, 2222), format!("{words}\n"));
        town.outside.within(move || {
            let mut stream = TcpStream::connect(to)?;
            stream.write_all(line.as_bytes()).context("the guest's shell")
        })
    }

    /// Sends a GET request to the web port; returns status and text.
    pub(crate) fn page(&self, town: &Town, path: &str) -> anyhow::Result<(u16, String)> {
        self.page_with(town, path, "")
    }

    /// Like `page`, with further headers.
    pub(crate) fn page_with(
        &self,
        town: &Town,
        path: &str,
        more: &str,
    ) -> anyhow::Result<(u16, String)> {
        let request = format!("GET {path} HTTP/1.0\r\nHost: {}\r\n{more}\r\n", self.address);
        let answer = town.outside.ask((self.address, 8006), request)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer.split(' ').nth(1).and_then(|it| it.parse().ok());
        Ok((status.with_context(|| format!("{path}: {answer:?}"))?, answer))
    }

    /// Waits until a page has this status.
    pub(crate) fn until(
        &mut self,
        town: &Town,
        (path, wanted): (&str, u16),
        within: Duration,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let got = self.page(town, path);
            if got.as_ref().is_ok_and(|it| it.0 == wanted) {
                return Ok(());
            }
            let left = start.elapsed() < within && self.child.try_wait()?.is_none();
            ensure!(left, "{}: {path}: {got:?}: {}", self.name, self.log());
            sleep(Duration::from_millis(500));
        }
    }
}

impl Pod {
    /// Kills all of its processes at once, as when its node fails.
    pub(crate) fn fails(&mut self) {
        // The container may be gone already.
        let mut delete = runc(&["delete", "--force", &id(self.name)]);
        delete.stdout(Stdio::null()).stderr(Stdio::null()).status().ok();
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.fails();
    }
}

fn id(name: &str) -> String {
    format!("transom-{}-{name}", std::process::id())
}

/// Starts a container with its log in a file.
fn run(name: &str, folder: &Path) -> anyhow::Result<Child> {
    let log = File::create(folder.join("log"))?;
    let mut run = runc(&["run", "--bundle"]);
    run.arg(folder).arg(id(name)).stdin(Stdio::null());
    run.stdout(log.try_clone()?).stderr(log).spawn().context("runc")
}

fn runc(words: &[&str]) -> Command {
    let mut command = Command::new("runc");
    command.args(["--root", "/run/transom-runc"]).args(words);
    command
}

/// The container's configuration (OCI runtime specification).
fn container(
    town: &Town,
    profile: &Profile,
    space: &Space,
    folder: &Path,
) -> anyhow::Result<Value> {
    let privileged = profile.privileged;
    let capabilities = profile.capabilities.split_whitespace().map(|name| format!("CAP_{name}"));
    let capabilities: Vec<_> = capabilities.collect();
    let same = |one: &str, other: &str| one.split('=').next() == other.split('=').next();
    let replaced = |word: &&&str| profile.words.iter().any(|own| same(own, word));
    let words = WORDS.iter().filter(|word| !replaced(word)).chain(profile.words);
    let words: Vec<_> = words.collect();
    let mut devices = vec![device("/dev/kvm")?];
    if profile.tun {
        devices.push(device("/dev/net/tun")?);
    }
    let mut allowed = vec![json!({ "allow": privileged, "access": "rwm" })];
    allowed.extend(devices.iter().map(|it| {
        let (major, minor) = (&it["major"], &it["minor"]);
        json!({ "allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm" })
    }));
    // Paths that engines mask, and paths that they make read-only, for unprivileged containers.
    let closed: &[&str] = &["/proc/acpi", "/proc/kcore", "/proc/keys", "/sys/firmware"];
    let kept: &[&str] = &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"];
    let [closed, kept] = [closed, kept].map(|it| if privileged { &[] } else { it });
    let space = space.path();
    Ok(json!({
        "ociVersion": "1.0.2",
        "hostname": profile.name,
        "root": { "path": "root", "readonly": !privileged },
        "process": {
            "user": { "uid": profile.user, "gid": profile.user },
            "args": ["/transom/transom", "pod"],
            "env": words,
            "cwd": "/",
            "noNewPrivileges": !privileged,
            "capabilities": {
                "bounding": capabilities,
                "permitted": capabilities,
                "effective": capabilities,
            },
        },
        "mounts": mounts(town, profile, folder)?,
        "linux": {
            "namespaces": [
                { "type": "pid" },
                { "type": "ipc" },
                { "type": "uts" },
                { "type": "mount" },
                { "type": "network", "path": space },
            ],
            "devices": devices,
            "resources": { "devices": allowed },
            "maskedPaths": closed,
            "readonlyPaths": kept,
        },
    }))
}

/// Mounts a new file system of this kind.
fn made(to: &str, kind: &str, options: &[&str]) -> Value {
    json!({ "destination": to, "type": kind, "source": kind, "options": options })
}

/// Bind-mounts a path of this host.
fn bound(to: &str, from: &Path, how: &str) -> Value {
    json!({ "destination": to, "type": "bind", "source": from, "options": ["rbind", how] })
}

fn mounts(town: &Town, profile: &Profile, folder: &Path) -> anyhow::Result<Vec<Value>> {
    let firmware = lab::asset("OVMF_CODE_12")?;
    let firmware = firmware.parent().context("a file has a folder")?;
    let vmm = lab::vmm()?;
    let transom = vmm.with_file_name("transom");
    ensure!(transom.exists(), "{}: not there; build it with this profile", transom.display());
    let sys = if profile.privileged { "rw" } else { "ro" };
    let mut mounts = vec![
        made("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        made("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        made("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        made("/sys", "sysfs", &["nosuid", "noexec", "nodev", sys]),
        // Folders from the cluster, writable for everyone.
        made("/run", "tmpfs", &["mode=777"]),
        made("/tmp", "tmpfs", &["mode=1777"]),
        bound("/usr/bin", Path::new("/usr/bin"), "ro"),
        bound("/usr/sbin", Path::new("/usr/sbin"), "ro"),
        bound("/usr/lib", Path::new("/usr/lib"), "ro"),
        bound("/usr/lib64", Path::new("/usr/lib64"), "ro"),
        bound("/usr/share/OVMF", firmware, "ro"),
        bound("/transom/transom", &transom, "ro"),
        bound("/transom/vmm", &vmm, "ro"),
        bound("/etc/resolv.conf", &town.folder.path().join("resolv.conf"), "ro"),
        bound("/storage", &folder.join("volume"), "rw"),
    ];
    match profile.disk {
        DiskOf::Volume => {}
        DiskOf::Medium => mounts.push(bound("/custom.iso", &medium(folder)?, "ro")),
        DiskOf::Base => mounts.push(bound("/base", &town.folder.path().join("base"), "ro")),
    }
    Ok(mounts)
}

/// A command in the CD's shell script, and its replacement of the same length, which waits for a
/// key.
const SAYS: &str = "@echo -off\r\necho started from the CD\r\n";
const ASKS: &str = "pause\r\necho a key was pressed\r\n       ";

/// Makes a CD with Microsoft as its publisher (ISO 9660) that waits for a key.
fn medium(folder: &Path) -> anyhow::Result<PathBuf> {
    let mut cd = fs::read(lab::asset("BOOT_CD")?)?;
    let at = cd.windows(SAYS.len()).position(|it| it == SAYS.as_bytes()).context("another CD")?;
    cd[at..][..SAYS.len()].copy_from_slice(ASKS.as_bytes());
    let publisher = 16 * 2048 + 318;
    cd[publisher..][..9].copy_from_slice(b"MICROSOFT");
    let path = folder.join("medium.iso");
    fs::write(&path, cd)?;
    Ok(path)
}

/// A device node of this host, as a device plugin passes it to a container.
fn device(path: &str) -> anyhow::Result<Value> {
    let number = fs::metadata(path).with_context(|| path.to_owned())?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    Ok(json!({ "path": path, "type": "c", "major": major, "minor": minor, "fileMode": 0o666 }))
}

/// Limit for everything that includes the start of a machine.
pub(crate) const BOOT: Duration = Duration::from_secs(600);

/// A line of `/proc/PID/status`.
pub(crate) fn line(status: &str, name: &str) -> anyhow::Result<String> {
    let found = status.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
    let words = found.with_context(|| format!("no {name} in {status}"))?;
    Ok(words.split_whitespace().collect::<Vec<_>>().join(" "))
}
