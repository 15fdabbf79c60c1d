//! The jail: rights are dropped in every thread of a machine, all control commands still work, and
//! files outside stay closed.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use host::size::Size;
use rustix::process::{Signal, geteuid};
use screen::keys::Combination;
use serde_json::{Value, json};
use tempfile::TempDir;
use transom_tests::program::{PATIENCE, Running, connect, finish, not_run, run_in, vmm};
use vmm::control::{self, Client, LinkState};

use crate::migration::wait_for_socket;
use crate::runs_here;

/// An arbitrary user and group.
const USER: u32 = 12345;
const GROUP: u32 = 23456;

/// A jailed machine with a device for every control command.
struct Jailed {
    machine: Running,
    client: Client,
    folder: TempDir,
}

impl Jailed {
    /// `None` if no guest can run on this host.
    fn new(test: &str, jail: &str, more: &[&str]) -> Option<Self> {
        Self::started(Command::new(vmm()), test, jail, more)
    }

    /// Starts the machine with a command that executes `vmm`.
    fn started(mut vmm: Command, test: &str, jail: &str, more: &[&str]) -> Option<Self> {
        if !runs_here(test) {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        // The user that the machine becomes must reach the folder.
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("a mode");
        for media in ["media", "other"] {
            fs::create_dir(at(media)).expect("a folder");
            for name in ["first.iso", "second.iso"] {
                fs::write(at(media).join(name), vec![7; 1 << 16]).expect("a file");
            }
        }
        File::create(at("disk")).and_then(|it| it.set_len(1 << 20)).expect("a file");
        let control = at("control").display().to_string();
        let disk = at("disk").display().to_string();
        let cd = format!("usb-storage,cdrom,path={}", at("media/first.iso").display());
        let vnc = format!("unix:{}", at("vnc").display());
        let words = ["run", "--jail", jail, "--control", &control, "--disk", &disk];
        let devices = ["--device", "xhci", "--device", "usb-keyboard", "--device", "usb-tablet"];
        let rest = ["--device", &cd, "--device", "virtio-balloon", "--device", "virtio-net"];
        let screen = ["--vnc", &vnc, "--web", "127.0.0.1:0", "--cmdline", "then=halt"];
        let words = [&words[..], &devices, &rest, &screen, more].concat();
        let mut machine = Running::spawn(vmm.args(words)).expect("vmm");
        machine.says("]}\n", 1).expect("a report");
        let client = connect(&at("control")).expect("the control socket");
        Some(Self { machine, client, folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn ask(&mut self, command: &control::Command) -> Value {
        self.client.ask(command).unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    fn insert(&mut self, path: PathBuf) -> Result<Value, String> {
        let insert = control::Command::Insert { name: "usb-storage".into(), path, only: None };
        self.client.ask(&insert).map_err(|error| error.to_string())
    }

    /// The values of a field of `/proc/PID/task/TID/status` for all threads.
    fn threads(&self, field: &str) -> Vec<String> {
        let folder = format!("/proc/{}/task", self.machine.pid().as_raw_nonzero());
        let tasks = fs::read_dir(folder).expect("the process").flatten();
        // A thread that has just ended has no status.
        let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
        texts.map(|text| self::field(&text, field)).collect()
    }

    fn all_have(&self, field: &str, value: &str) {
        let threads = self.threads(field);
        assert!(
            threads.len() > 4,
            "threads for processors, devices, control and screen expected: {threads:?}"
        );
        assert!(threads.iter().all(|it| it == value), "{field}: {threads:?}, not {value}");
    }

    /// The number of open io_uring rings.
    fn rings(&self) -> usize {
        let links = links_of(&self.machine.pid().as_raw_nonzero().to_string());
        links.filter(|link| link.to_string_lossy().contains("io_uring")).count()
    }

    /// Open files with a path: not events, pipes, sockets and timers.
    fn files(&self) -> Vec<PathBuf> {
        let pid = self.machine.pid().as_raw_nonzero().to_string();
        // Without files that this test has passed on.
        let ours: Vec<_> = links_of("self").collect();
        let mut paths: Vec<_> = links_of(&pid).collect();
        paths.retain(|path| path.is_absolute() && !ours.contains(path));
        paths.sort();
        paths.dedup();
        paths
    }
}

/// The targets of a process's open files.
fn links_of(pid: &str) -> impl Iterator<Item = PathBuf> + use<> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).expect("the process").flatten();
    links.filter_map(|link| fs::read_link(link.path()).ok())
}

fn is_root() -> bool {
    geteuid().is_root()
}

/// The words for a jail with everything that the user of this test can have.
fn all() -> String {
    if is_root() { format!("on,user={USER}:{GROUP}") } else { "on".to_owned() }
}

/// The server's greeting to a viewer.
fn greeting(path: &Path) -> Vec<u8> {
    let mut line = UnixStream::connect(path).expect("the screen");
    line.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    let mut text = vec![0; 12];
    line.read_exact(&mut text).expect("a version");
    line.write_all(&text).expect("room");
    text
}

/// A field of a `status` file in `/proc`.
fn field(status: &str, name: &str) -> String {
    let line = status.lines().find(|line| line.split(':').next() == Some(name));
    let words = line.expect(name).split_once(':').expect("a colon").1.split_whitespace();
    words.collect::<Vec<_>>().join(" ")
}

/// The number of filters of system calls of a process.
fn filters(process: &str) -> u32 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("a process");
    field(&status, "Seccomp_filters").parse().expect("a number")
}

#[test]
fn a_process_that_waits_for_a_machine_has_a_first_jail() {
    let folder = tempfile::tempdir().expect("a folder");
    for (jail, more) in [("auto", 2), ("off", 0)] {
        let socket = folder.path().join(jail);
        let words = ["run", "--jail", jail, "--incoming", &socket.display().to_string()];
        let mut waits = Running::vmm(&words).expect("vmm");
        wait_for_socket(&socket);
        let there = filters(&waits.pid().as_raw_nonzero().to_string());
        assert_eq!(there, filters("self") + more, "{jail}");
        waits.signal(Signal::TERM).expect("it waits");
        assert_eq!(waits.wait(PATIENCE).expect("an end"), 143, "{jail}");
    }
}

#[test]
fn no_thread_keeps_any_right() {
    let Some(mut it) = Jailed::new("no_thread_keeps_any_right", &all(), &[]) else { return };
    let held = it.ask(&control::Command::Status)["jail"].clone();
    greeting(&it.path("vnc"));
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        it.all_have(set, "0000000000000000");
    }
    it.all_have("NoNewPrivs", "1");
    it.all_have("Seccomp", "2");
    assert_eq!(held["seccomp"], "on");
    if is_root() {
        it.all_have("CapBnd", "0000000000000000");
        it.all_have("Uid", &[USER.to_string().as_str(); 4].join(" "));
        it.all_have("Gid", &[GROUP.to_string().as_str(); 4].join(" "));
        it.all_have("Groups", "");
        assert_eq!((&held["user"], &held["group"]), (&json!(USER), &json!(GROUP)));
    }
    let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).expect("a network");
    let theirs = network(&it.machine.pid().as_raw_nonzero().to_string());
    assert_eq!(held["network"] == "none", theirs != network("self"), "{held}");
    // The jail reports the features that this host lacks, and nothing else is missing.
    let lacks = held["lacks"].as_array().expect("a list");
    let landlock = held["landlock"].is_object();
    let stays = held["network"] != "none";
    assert_eq!(lacks.len(), usize::from(!landlock) + usize::from(stays), "{held}");
    if landlock {
        assert_eq!(held["landlock"]["files"], true, "{held}");
    }
    // Its own files, its own transfers and pages, and devices that it inherited.
    let [transfers, pages] = ["io", "pagemap"]
        .map(|name| format!("/proc/{}/{name}", it.machine.pid().as_raw_nonzero()).into());
    let own = [transfers, pages, it.path("disk"), it.path("media/first.iso")];
    let others = it.files().into_iter().filter(|path| !path.starts_with("/dev"));
    assert_eq!(others.collect::<Vec<_>>(), own);
    let devices = it.files().into_iter().filter(|path| path.starts_with("/dev"));
    let known =
        |path: &PathBuf| ["/dev/null", "/dev/kvm"].iter().any(|known| path == Path::new(known));
    assert!(devices.clone().all(|path| known(&path)), "{:?}", devices.collect::<Vec<_>>());
}

#[test]
fn the_jail_allows_all_control_commands() {
    let test = "the_jail_allows_all_control_commands";
    let Some(mut it) = Jailed::new(test, &all(), &[]) else { return };
    let (picture, pixels) = it.client.screenshot().expect("a picture");
    assert_eq!(pixels.len(), 4 * picture.width as usize * picture.height as usize);
    let file = it.path("picture.png").display().to_string();
    let control = it.path("control").display().to_string();
    let words = ["ctl", "--control", &control, "screenshot", &file];
    assert_eq!(run_in(it.folder.path(), &words).expect("an end").status, 0);
    assert_eq!(greeting(&it.path("vnc")), b"RFB 003.008\n");
    let key: Combination = serde_json::from_value(json!("a")).expect("a key");
    it.ask(&control::Command::Key { keys: key });
    it.ask(&control::Command::Type { text: "Typed, in jail.\n".into() });
    let grown = it.ask(&control::Command::Grow { name: "nvme".into(), size: Some(Size(4 << 20)) });
    assert_eq!(grown["size"], 4 << 20);
    it.ask(&control::Command::Eject { name: "usb-storage".into(), force: None });
    it.insert(it.path("media/second.iso")).expect("it is in the folder of the first");
    let device = format!("usb-storage,path={}", it.path("media/first.iso").display());
    let name = it.ask(&control::Command::Attach { device, only: None })["name"].clone();
    it.ask(&control::Command::Detach { name: name.as_str().expect("a name").into() });
    it.ask(&control::Command::Link {
        name: "virtio-net".into(),
        state: Some(LinkState::Down),
        mtu: None,
    });
    it.ask(&control::Command::Registers);
    it.ask(&control::Command::Pause);
    it.ask(&control::Command::Resume);
    it.ask(&control::Command::Reset);
    it.machine.says("]}\n", 2).expect("a second report");
    it.ask(&control::Command::Nmi);
    it.ask(&control::Command::Status);
    it.ask(&control::Command::Quit);
    assert_eq!(it.machine.wait(PATIENCE).expect("an end"), 0, "{}", it.machine.stderr.text());
}

#[test]
fn files_outside_the_jail_cannot_be_opened() {
    let test = "files_outside_the_jail_cannot_be_opened";
    let Some(mut it) = Jailed::new(test, &all(), &[]) else { return };
    if it.ask(&control::Command::Status)["jail"]["landlock"].is_null() {
        return not_run(test, "this kernel has no Landlock");
    }
    it.ask(&control::Command::Eject { name: "usb-storage".into(), force: None });
    for outside in [it.path("other/../../second.iso"), "/etc/passwd".into(), "/etc".into()] {
        it.insert(outside).expect_err("it is outside of the jail");
    }
    let link = it.path("media/link.iso");
    std::os::unix::fs::symlink("/etc/passwd", &link).expect("a link");
    let said = it.insert(link).expect_err("it leads out of the jail");
    assert!(said.contains("no permission to open") && said.contains("--jail folders="), "{said}");
    it.insert(it.path("media/second.iso")).expect("it is in the jail");
}

#[test]
fn listed_folders_are_accessible() {
    let test = "listed_folders_are_accessible";
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("a mode");
    let file = folder.path().join("a.iso");
    fs::write(&file, vec![7; 1 << 16]).expect("a file");
    let jail = format!("{},folders={}", all(), folder.path().display());
    let Some(mut it) = Jailed::new(test, &jail, &[]) else { return };
    it.ask(&control::Command::Eject { name: "usb-storage".into(), force: None });
    it.insert(file).expect("it is in a named folder");
}

#[test]
fn by_default_any_file_can_be_inserted() {
    let test = "by_default_any_file_can_be_inserted";
    let Some(mut it) = Jailed::new(test, "auto", &[]) else { return };
    let held = it.ask(&control::Command::Status)["jail"].clone();
    assert_eq!((&held["mode"], &held["seccomp"]), (&json!("auto"), &json!("on")));
    it.all_have("NoNewPrivs", "1");
    it.all_have("Seccomp", "2");
    if is_root() {
        // Not even the right to open files of others.
        it.all_have("CapEff", "0000000000000000");
        it.all_have("CapBnd", "0000000000000000");
    }
    it.ask(&control::Command::Eject { name: "usb-storage".into(), force: None });
    let elsewhere = tempfile::NamedTempFile::new().expect("a file");
    elsewhere.as_file().set_len(1 << 16).expect("room");
    it.insert(elsewhere.path().into()).expect("any file");
    if is_root() {
        it.ask(&control::Command::Eject { name: "usb-storage".into(), force: None });
        chown(elsewhere.path(), Some(USER), Some(GROUP)).expect("its owner");
        let said = it.insert(elsewhere.path().into()).expect_err("another user owns it");
        assert!(said.contains("root has no capabilities"), "{said}");
    }
}

/// A command that executes `vmm` without the right to leave its network. `None` if this cannot be
/// tested.
fn kept_in_its_network(test: &str) -> Option<Command> {
    let mut command = Command::new("setpriv");
    command.arg("--bounding-set=-sys_admin");
    let tried = Command::new("setpriv").args(["--bounding-set=-sys_admin", "true"]).status();
    if is_root() && tried.is_ok_and(|it| it.success()) {
        command.arg(vmm());
        return Some(command);
    }
    if !is_root() {
        return Some(Command::new(vmm()));
    }
    not_run(test, "there is no setpriv, or it may not change rights");
    None
}

#[test]
fn without_a_network_namespace_new_sockets_are_forbidden() {
    let test = "without_a_network_namespace_new_sockets_are_forbidden";
    let Some(command) = kept_in_its_network(test) else { return };
    let Some(mut it) = Jailed::started(command, test, &all(), &[]) else { return };
    let held = it.ask(&control::Command::Status)["jail"].clone();
    assert_eq!(held["network"], "no new sockets", "{held}");
    let lacks = held["lacks"].to_string();
    assert!(lacks.contains("the network namespace cannot be left: "), "{held}");
    let said = it.machine.stderr.text();
    assert!(said.contains("the network namespace cannot be left: "), "{said}");
    // The rings of the first disk were made before the jail; later disks have none.
    let device = format!("usb-storage,path={}", it.path("media/second.iso").display());
    let before = it.rings();
    if before == 0 {
        return not_run(test, "this host has no io_uring");
    }
    it.ask(&control::Command::Attach { device, only: None });
    assert_eq!(it.rings(), before);
    it.ask(&control::Command::Reset);
    it.machine.says("]}\n", 2).expect("a second report");
    assert_eq!(it.rings(), before);
}

#[test]
fn jail_off_changes_nothing() {
    let Some(it) = Jailed::new("jail_off_changes_nothing", "off", &[]) else { return };
    it.all_have("NoNewPrivs", "0");
    it.all_have("Seccomp", "0");
}

#[test]
fn jail_must_refuses_an_incomplete_jail() {
    if !runs_here("jail_must_refuses_an_incomplete_jail") {
        return;
    }
    let (jail, words) = if is_root() {
        ("must", "--jail must: the process stays root: set user=UID:GID")
    } else {
        ("must,user=1", "may not switch to another user")
    };
    let mut machine = Running::vmm(&["run", "--jail", jail]).expect("vmm");
    assert_eq!(machine.wait(PATIENCE).expect("an end"), 1);
    let said = machine.stderr.text();
    assert!(said.contains(words), "{said}");
    // Without a network namespace, `must` fails too, with a disk or without.
    let Some(mut command) = kept_in_its_network("--jail must in a network that stays") else {
        return;
    };
    let jail = all().replace("on", "must");
    let disk = tempfile::NamedTempFile::new().expect("a file");
    disk.as_file().set_len(1 << 20).expect("room");
    command.args(["run", "--jail", &jail, "--disk"]).arg(disk.path());
    let ended = finish(&mut command).expect("an end");
    assert_eq!(ended.status, 1, "{ended:?}");
    assert!(
        ended.stderr.contains("--jail must: the network namespace cannot be left: "),
        "{ended:?}"
    );
}
