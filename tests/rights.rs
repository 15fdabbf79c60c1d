//! Runs without root, without capabilities and with 1024 descriptors: the machine in its jail, the
//! pod with user-mode network, the systemd unit. Also checks the permissions of files that they
//! make.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Signal, geteuid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};
use tempfile::TempDir;
use transom_tests::program::{PATIENCE, Running, connect, finish, not_run, transom, vmm};
use vmm::control;
use vmm::kvm::KvmSupport;

/// A user without a name, and another one.
const USER: u32 = 1000;
const STRANGER: u32 = 1001;
/// The soft limit of a login, and the hard limit of many containers.
const FILES: u32 = 1024;

/// A mount and a network namespace in which everybody may open `/dev/kvm`, and `/run` is empty.
const APART: &str = "mount -t tmpfs none /run && ip link set lo up && cp -a /dev/kvm /run/kvm &&
chmod 666 /run/kvm && mount --bind /run/kvm /dev/kvm &&
sed 's/^flags.*/& vmx/' /proc/cpuinfo > /run/cpuinfo && mount --bind /run/cpuinfo /proc/cpuinfo &&";

/// How a program becomes another user on this host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Separation {
    /// The test is root and may make namespaces.
    Namespaces,
    /// The test is root in a container without namespaces; the user gets this group.
    Setpriv(u32),
    /// The test itself runs as another user than root.
    SameUser,
}

/// The way that works on this host. Reports the test as skipped if none does.
fn separation(test: &str) -> Option<Separation> {
    let reason = if KvmSupport::of_this_host() == KvmSupport::None {
        "there is no usable /dev/kvm"
    } else if !geteuid().is_root() {
        return Some(Separation::SameUser);
    } else if may(Command::new("setpriv").args(["--bounding-set=-all", "true"])).is_none() {
        "there is no setpriv, or it may not change rights"
    } else if may(Command::new("unshare").args(["--mount", "--net", "true"])).is_some() {
        return Some(Separation::Namespaces);
    } else {
        let kvm = fs::metadata("/dev/kvm").ok()?;
        if kvm.mode() & 0o006 == 0o006 || (kvm.mode() & 0o060 == 0o060 && kvm.gid() != 0) {
            return Some(Separation::Setpriv(kvm.gid()));
        }
        "only root may open /dev/kvm, and mount namespaces are forbidden"
    };
    not_run(test, reason);
    None
}

fn may(command: &mut Command) -> Option<()> {
    command.output().is_ok_and(|it| it.status.success()).then_some(())
}

/// The user's programs and files.
struct Home {
    separation: Separation,
    folder: TempDir,
}

impl Home {
    /// `None` if the test cannot run on this host.
    fn new(test: &str) -> Result<Option<Self>> {
        let Some(separation) = separation(test) else { return Ok(None) };
        let folder = tempfile::tempdir()?;
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        // Only root may be able to read the target folder.
        for program in [vmm(), transom()] {
            fs::copy(program, folder.path().join(program.file_name().context("a name")?))?;
        }
        let home = Self { separation, folder };
        fs::create_dir(home.own(""))?;
        fs::set_permissions(home.own(""), Permissions::from_mode(0o755))?;
        home.give(&home.own(""))?;
        Ok(Some(home))
    }

    fn program(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A file in the user's folder.
    fn own(&self, name: &str) -> PathBuf {
        self.folder.path().join("own").join(name)
    }

    fn give(&self, path: &Path) -> Result<()> {
        if self.separation != Separation::SameUser {
            chown(path, Some(USER), Some(USER))?;
        }
        Ok(())
    }

    fn disk(&self, name: &str) -> Result<PathBuf> {
        let path = self.own(name);
        File::create(&path)?.set_len(1 << 20)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        self.give(&path)?;
        Ok(path)
    }

    /// Runs a program as the user, in the user's folder.
    fn command(&self, name: &str, words: &[&str]) -> Command {
        self.command_of(USER, name, words)
    }

    fn command_of(&self, user: u32, name: &str, words: &[&str]) -> Command {
        let program = self.program(name).display().to_string();
        let groups = match self.separation {
            Separation::Setpriv(group) => format!("--groups {group}"),
            _ => "--clear-groups".into(),
        };
        let sets = "--inh-caps=-all --ambient-caps=-all --bounding-set=-all";
        let setpriv = format!("setpriv --reuid {user} --regid {user} {groups} {sets}");
        let (first, becomes) = match self.separation {
            Separation::SameUser => ("", String::new()),
            Separation::Setpriv(_) => ("", setpriv),
            Separation::Namespaces => (APART, setpriv),
        };
        let script = format!("{first} ulimit -n {FILES} && exec {becomes} \"$0\" \"$@\"");
        let shell = ["sh", "-c", &script, &program];
        let apart = ["unshare", "--mount", "--net", "--propagation", "private"];
        let all: Vec<&str> = match self.separation {
            Separation::Namespaces => {
                apart.into_iter().chain(shell).chain(words.iter().copied()).collect()
            }
            _ => shell.into_iter().chain(words.iter().copied()).collect(),
        };
        let mut command = Command::new(all[0]);
        command.args(&all[1..]).current_dir(self.own("")).env_clear();
        command.env("PATH", "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Starts a machine with a disk and a screen, and waits for the probe's report.
    fn machine(&self, jail: &str) -> Result<(Running, control::Client)> {
        let (control, disk) = (self.own("control"), self.disk("disk")?);
        let vnc = format!("unix:{}", self.own("vnc").display());
        let words = ["run", "--jail", jail, "--vnc", &vnc, "--cmdline", "then=halt"];
        let (control, disk) = (control.display().to_string(), disk.display().to_string());
        let words = [&words[..], &["--control", &control, "--disk", &disk]].concat();
        let mut machine = Running::spawn(&mut self.command("vmm", &words))?;
        machine.says("]}\n", 1)?;
        let client = connect(&self.own("control"))?;
        Ok((machine, client))
    }

    /// The user ID of the programs.
    fn user(&self) -> u32 {
        if self.separation == Separation::SameUser { geteuid().as_raw() } else { USER }
    }

    /// Connects to a port in the program's network.
    fn dial(&self, running: &Running, port: u16) -> Result<TcpStream> {
        let address = ("127.0.0.1", port);
        if self.separation != Separation::Namespaces {
            return Ok(TcpStream::connect(address)?);
        }
        let space = File::open(format!("/proc/{}/ns/net", running.pid().as_raw_nonzero()))?;
        let dialled = thread::spawn(move || -> Result<TcpStream> {
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(TcpStream::connect(address)?)
        });
        dialled.join().map_err(|_| anyhow::anyhow!("a thread"))?
    }

    /// Requests a page until its status is 200, and returns the answer.
    fn page(&self, pod: &mut Running, port: u16, path: &str) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = self.dial(pod, port).and_then(|mut stream| {
                stream.set_read_timeout(Some(PATIENCE))?;
                write!(
                    stream,
                    "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer)?;
                Ok(answer)
            });
            match answer {
                Ok(answer) if answer.starts_with("HTTP/1.1 200") => return Ok(answer),
                other if Instant::now() > end => {
                    anyhow::bail!("{path}: {other:?}\n{}{}", pod.stdout.text(), pod.stderr.text())
                }
                _ => thread::sleep(Duration::from_millis(50)),
            }
        }
    }
}

/// Checks that the status of each thread of a process has these lines. Returns the number of
/// threads.
fn all_have(process: u32, lines: &[&str]) -> Result<usize> {
    let mut count = 0;
    for task in fs::read_dir(format!("/proc/{process}/task"))?.flatten() {
        // A thread that has just ended has no status.
        let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
        for line in lines {
            ensure!(status.contains(&format!("\n{line}\n")), "no {line} in {status}");
        }
        count += 1;
    }
    Ok(count)
}

/// The child processes of a process.
fn children(process: u32) -> Result<Vec<u32>> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{process}/children"))?;
    Ok(text.split_whitespace().filter_map(|it| it.parse().ok()).collect())
}

fn number(running: &Running) -> u32 {
    running.pid().as_raw_nonzero().get().unsigned_abs()
}

/// Files in a folder and its subfolders that other users may open.
fn open_to_others(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for file in fs::read_dir(folder)?.flatten() {
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            found.extend(open_to_others(&file.path())?);
        } else if metadata.mode() & 0o077 != 0 {
            found.push(format!("{}: {:o}", file.path().display(), metadata.mode()));
        }
    }
    Ok(found)
}

const NO_RIGHTS: [&str; 5] = [
    "CapPrm:\t0000000000000000",
    "CapEff:\t0000000000000000",
    "CapAmb:\t0000000000000000",
    "NoNewPrivs:\t1",
    "Seccomp:\t2",
];

#[test]
fn an_unprivileged_machine_reports_what_its_jail_lacks() -> Result<()> {
    let Some(home) = Home::new("a machine of another user")? else { return Ok(()) };
    let (mut machine, mut client) = home.machine("on")?;
    let user = home.user();
    let uid = format!("Uid:\t{user}\t{user}\t{user}\t{user}");
    let threads = all_have(number(&machine), &[&NO_RIGHTS[..], &[uid.as_str()]].concat())?;
    ensure!(
        threads > 3,
        "threads for processors, devices, control and screen expected, not {threads}"
    );
    let held = client.ask(&control::Command::Status)?["jail"].clone();
    ensure!(held["user"] == json!(user) && held["capabilities"] == "none", "{held}");
    ensure!(held["network"] == "no new sockets" && held["seccomp"] == "on", "{held}");
    // Only root can leave a network namespace. That is reported, and nothing else is missing.
    let lacks: Vec<_> = held["lacks"].as_array().context("a list")?.iter().collect();
    let network = |it: &&Value| it.as_str().is_some_and(|it| it.contains("network namespace"));
    let landlock = usize::from(held["landlock"].is_null());
    ensure!(lacks.iter().filter(|it| network(it)).count() == 1, "{held}");
    ensure!(lacks.len() == 1 + landlock, "{held}");
    let said = machine.stderr.text();
    ensure!(said.contains("network namespace cannot be left"), "{said}");
    // Only their user may open the sockets.
    for name in ["control", "vnc"] {
        let metadata = fs::metadata(home.own(name))?;
        let private = metadata.file_type().is_socket() && metadata.mode() & 0o777 == 0o600;
        ensure!(private, "{name}: {metadata:?}");
        ensure!(metadata.uid() == user, "{name}: {metadata:?}");
    }
    if home.separation != Separation::SameUser {
        let control = home.own("control").display().to_string();
        let words = ["ctl", "--control", &control, "status"];
        let ended = finish(&mut home.command_of(STRANGER, "vmm", &words))?;
        ensure!(ended.status != 0 && ended.stderr.contains("ermission"), "{ended:?}");
        ensure!(
            finish(&mut home.command("vmm", &words))?.status == 0,
            "the machine's own user is refused"
        );
    }
    client.ask(&control::Command::Quit)?;
    let status = machine.wait(PATIENCE)?;
    ensure!(status == 0, "{status}: {}", machine.stderr.text());
    ensure!(!home.own("control").exists(), "the control socket still exists");
    Ok(())
}

#[test]
fn jail_must_refuses_to_run_without_a_network_namespace() -> Result<()> {
    let Some(home) = Home::new("--jail must of another user")? else { return Ok(()) };
    let disk = home.disk("disk")?.display().to_string();
    let mut vmm = home.command("vmm", &["run", "--jail", "must", "--disk", &disk]);
    let ended = finish(&mut vmm)?;
    let lacks = "--jail must: the network namespace cannot be left: ";
    ensure!(ended.status == 1 && ended.stderr.contains(lacks), "{ended:?}");
    ensure!(!ended.stdout.contains("probe"), "the guest ran: {ended:?}");
    Ok(())
}

/// A free port.
fn port() -> Result<u16> {
    Ok(TcpListener::bind("[::]:0")?.local_addr()?.port())
}

#[test]
fn an_unprivileged_pod_is_reachable_and_stops() -> Result<()> {
    let Some(home) = Home::new("a pod of another user")? else { return Ok(()) };
    let (web, vnc) = (port()?, port()?);
    let mut pod = home.command("transom", &["pod"]);
    pod.envs([("VERSION", "probe"), ("NETWORK", "user"), ("RAM_SIZE", "256M")]);
    pod.env("WEB_PORT", web.to_string()).env("VNC_PORT", vnc.to_string());
    let mut pod = Running::spawn(&mut pod)?;
    home.page(&mut pod, web, "/readyz")?;
    ensure!(home.page(&mut pod, web, "/")?.contains("viewer.js"), "no viewer");
    let said = pod.stdout.text();
    ensure!(said.contains("user mode: the guest is "), "{said}");
    let user = home.user();
    let uid = format!("Uid:\t{user}\t{user}\t{user}\t{user}");
    let processes = [&[number(&pod)][..], &children(number(&pod))?].concat();
    ensure!(processes.len() == 2, "the pod and its machine: {processes:?}");
    for process in processes {
        let wanted = [&NO_RIGHTS[..], &[uid.as_str()]].concat();
        // The pod is ready once its machine has its configuration; the machine enters its jail
        // after that.
        let end = Instant::now() + PATIENCE;
        while all_have(process, &wanted).is_err() && Instant::now() < end {
            thread::sleep(Duration::from_millis(20));
        }
        all_have(process, &wanted)?;
        let open = fs::read_dir(format!("/proc/{process}/fd"))?.count();
        ensure!(open < 200, "{open} descriptors are open, of {FILES}");
    }
    // Only its user may open its sockets and secrets.
    let root = PathBuf::from(format!("/proc/{}/root", number(&pod)));
    let places = ["run/transom", "dev/shm/transom", "tmp/transom"].map(|it| root.join(it));
    let ours = |it: &&PathBuf| fs::metadata(it).is_ok_and(|it| it.uid() == user);
    let room = places.iter().find(ours).context("the pod's folder")?;
    ensure!(fs::metadata(room)?.mode() & 0o777 == 0o700, "{:?}", fs::metadata(room)?);
    ensure!(open_to_others(room)?.is_empty(), "{:?}", open_to_others(room)?);
    pod.signal(Signal::TERM)?;
    let status = pod.wait(PATIENCE)?;
    ensure!(status == 143, "{status}: {}{}", pod.stdout.text(), pod.stderr.text());
    Ok(())
}

#[test]
fn a_pod_creates_private_files_on_its_volume() -> Result<()> {
    let Some(home) = Home::new("a volume of another user")? else { return Ok(()) };
    let storage = home.own("storage");
    fs::create_dir(&storage)?;
    home.give(&storage)?;
    let mut medium = vec![0; 1 << 20];
    medium[16 * 2048..][..7].copy_from_slice(b"\x01CD001\x01");
    fs::write(storage.join("custom.iso"), medium)?;
    fs::set_permissions(storage.join("custom.iso"), Permissions::from_mode(0o600))?;
    home.give(&storage.join("custom.iso"))?;
    let start = || {
        let mut pod = home.command("transom", &["pod"]);
        pod.envs([("NETWORK", "user"), ("RAM_SIZE", "1G"), ("RAM_MINIMUM", "64M")]);
        pod.envs([("DISK_SIZE", "64M"), ("DISK_MINIMUM", "1M"), ("BOOT_MODE", "windows_secure")]);
        pod.env("STORAGE", &storage).env("TPM", "Y").env("MANUAL", "Y");
        pod.env("WEB_PORT", port()?.to_string()).env("VNC_PORT", port()?.to_string());
        Running::spawn(&mut pod)
    };
    let mut pod = start()?;
    // The result of the start depends on the host, but the files are made before it.
    let end = Instant::now() + PATIENCE;
    while !pod.stdout.text().contains("Starting ") && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    pod.signal(Signal::TERM).ok();
    pod.wait(PATIENCE)?;
    let said = pod.stdout.text();
    let names: Vec<_> = fs::read_dir(&storage)?.flatten().map(|it| it.file_name()).collect();
    for end in ["password", "vars", "tpm", "img"] {
        let found = names.iter().any(|it| Path::new(it).extension() == Some(OsStr::new(end)));
        ensure!(found, "no file .{end}: {names:?}\n{said}");
    }
    ensure!(open_to_others(&storage)?.is_empty(), "{:?}", open_to_others(&storage)?);
    let without = said.contains("Secure Boot without system management mode");
    ensure!(without != has_smm()?, "the line about SMM: {said}");
    if home.separation == Separation::SameUser {
        return Ok(());
    }
    // Files of another user's start are not replaced, though the folder would allow it.
    for name in ["windows.password", "windows.uuid"] {
        let path = storage.join(name);
        let before = fs::read(&path)?;
        chown(&path, Some(0), Some(0))?;
        let mut pod = start()?;
        let status = pod.wait(PATIENCE)?;
        let said = [pod.stdout.text(), pod.stderr.text()].concat();
        let reason = said.contains(name) && said.contains("it belongs to another user");
        ensure!(status != 0 && reason, "{name}: {status}: {said}");
        ensure!(fs::read(&path)? == before, "{name} was replaced");
        home.give(&path)?;
    }
    Ok(())
}

/// Whether this host has system management mode and Debian's firmware for it.
fn has_smm() -> Result<bool> {
    let report = Command::new(vmm()).args(["doctor", "--json"]).output()?;
    let report: Value = serde_json::from_slice(&report.stdout)?;
    let has = |name| {
        let found = report["capabilities"].as_array().into_iter().flatten();
        found.into_iter().any(|it| it["name"] == name && it["there"] == true)
    };
    let firmware = Path::new("/usr/share/OVMF/OVMF_CODE_4M.secboot.fd");
    Ok(firmware.exists()
        && ["X86_SMM", "MULTI_ADDRESS_SPACE", "X86_MSR_FILTER"].map(has) == [true; 3])
}

#[test]
fn the_systemd_unit_starts_an_unprivileged_machine() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/vmm@.service");
    let unit = fs::read_to_string(path)?;
    let has = |line: &str| unit.lines().any(|it| it == line);
    for line in ["DynamicUser=yes", "SupplementaryGroups=kvm", "CapabilityBoundingSet="] {
        ensure!(has(line), "no {line}");
    }
    check_with_systemd(&unit)?;
    let Some(home) = Home::new("the unit of systemd")? else { return Ok(()) };
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let start = start.context("ExecStart")?.replace("%i", "x");
    let words = start.strip_prefix("/usr/local/bin/vmm ").context("vmm")?;
    let folder = home.own("").display().to_string();
    let words = words.replace("/etc/vmm/", &folder).replace("/run/vmm-x/", &folder);
    ensure!(words.contains("--jail on"), "{words}");
    // The path is relative to the machine's working folder.
    home.disk("disk")?;
    let config = json!({ "cmdline": "then=halt", "disk": [{ "path": "disk" }] });
    fs::write(home.own("x.json"), config.to_string())?;
    let mut vmm = home.command("vmm", &words.split(' ').collect::<Vec<_>>());
    let mut machine = Running::spawn(&mut vmm)?;
    machine.says("]}\n", 1)?;
    let held = connect(&home.own("control"))?.ask(&control::Command::Status)?["jail"].clone();
    ensure!(held["mode"] == "on" && held["capabilities"] == "none", "{held}");
    all_have(number(&machine), &NO_RIGHTS)?;
    connect(&home.own("control"))?.ask(&control::Command::Quit)?;
    let status = machine.wait(PATIENCE)?;
    ensure!(status == 0, "{status}: {}", machine.stderr.text());
    Ok(())
}

/// Checks the unit with systemd: no unknown lines, and little exposure.
fn check_with_systemd(unit: &str) -> Result<()> {
    let analyze = |words: &[&str]| Command::new("systemd-analyze").args(words).output();
    if !analyze(&["--version"]).is_ok_and(|it| it.status.success()) {
        not_run("systemd's check of the unit", "there is no systemd-analyze");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("vmm@.service");
    fs::write(&path, unit.replace("/usr/local/bin/vmm", "/bin/true"))?;
    let path = path.display().to_string();
    let verified = analyze(&["verify", "--man=no", &path])?;
    let said = String::from_utf8_lossy(&verified.stderr).into_owned();
    let ours: Vec<_> = said.lines().filter(|line| line.contains("vmm@")).collect();
    ensure!(verified.status.success() && ours.is_empty(), "{said}");
    // The exposure in tenths, of 100. It was 82 before the unit had its own user.
    let judged = analyze(&["security", "--offline=true", "--threshold=25", &path])?;
    let said = String::from_utf8_lossy(&judged.stdout);
    ensure!(judged.status.success(), "{}", said.lines().last().unwrap_or_default());
    Ok(())
}
