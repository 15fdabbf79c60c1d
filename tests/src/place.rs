//! A host for one pod without a container engine: a network namespace with an interface, and
//! private mounts.

use std::fs;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::program::{self, PATIENCE, Running, said, transom};
use anyhow::{Context as _, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;

/// An error with the reason if this host cannot make namespaces.
pub fn is_here() -> Result<(), &'static str> {
    if !rustix::process::geteuid().is_root() {
        return Err("namespaces need root");
    }
    for program in ["ip", "nft", "unshare", "setpriv"] {
        if Command::new(program).arg("--version").output().is_err() {
            return Err("there is no ip, nft, unshare or setpriv");
        }
    }
    Ok(())
}

/// Whether a test of pods can run on this host. Reports it as not run otherwise.
pub fn runs_here(test: &str) -> bool {
    program::runs_here(test, is_here())
}

/// Addresses of a pod: one that other hosts reach, and one that only the pod reaches.
pub const SEEN: &str = "10.99.0.2";
pub const HERE: &str = "127.0.0.1";

/// Adds a network namespace with an interface, and a default route to a router that does not exist.
pub fn add_network(space: &str) -> Result<()> {
    said(Command::new("ip").args(["netns", "add", space]))?;
    for words in [
        "link set lo up",
        "link add eth0 type veth peer name far",
        "address add 10.99.0.2/24 dev eth0",
        "link set eth0 up",
        "link set far up",
        "route add default via 10.99.0.1",
    ] {
        said(Command::new("ip").args(["-n", space]).args(words.split(' ')))?;
    }
    Ok(())
}

/// The host of one pod; dropping it deletes the namespace.
pub struct Place {
    space: String,
    folder: TempDir,
}

impl Place {
    pub fn new(name: &str) -> Result<Self> {
        let place = Self {
            space: format!("transom-{}-{name}", std::process::id()),
            folder: tempfile::tempdir()?,
        };
        for folder in ["run", "storage"] {
            fs::create_dir(place.folder.path().join(folder))?;
        }
        add_network(&place.space)?;
        Ok(place)
    }

    /// A command for a program in its network.
    fn run(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space, program]);
        command
    }

    /// Its volume.
    pub fn storage(&self) -> PathBuf {
        self.folder.path().join("storage")
    }

    /// The control socket of the machine of its pod.
    pub fn control(&self) -> PathBuf {
        self.folder.path().join("run/transom/vmm.sock")
    }

    /// Starts a pod with these variables. A shell runs the script `first` before, in a mount
    /// namespace of its own.
    pub fn start(&self, first: &str, environment: &[(&str, &str)]) -> Result<Running> {
        self.start_as("", first, environment)
    }

    /// Like `start`, with the program `by`, such as `setpriv`, around `transom`.
    pub fn start_as(&self, by: &str, first: &str, environment: &[(&str, &str)]) -> Result<Running> {
        let script = format!(
            "set -e; mount --bind $FOLDER/storage /mnt; mount --bind $FOLDER/run /run; \
             {first}\nunset FOLDER; exec {by} {} pod",
            transom().display()
        );
        let mut command = self.run("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", &script]).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("FOLDER", self.folder.path());
        command.env("STORAGE", "/mnt").env("RAM_SIZE", "64M").env("RAM_MINIMUM", "1M");
        // A failing pod ends at once: the tests read the reason in its log.
        command.env("ERROR_HOLD", "0");
        Running::spawn(command.envs(environment.iter().copied()))
    }

    /// The tables of its packet filter.
    pub fn rules(&self) -> Result<String> {
        said(self.run("nft").args(["list", "tables"]))
    }

    /// Whether it forwards IPv4 packets.
    pub fn forwards(&self) -> Result<bool> {
        Ok(said(self.run("cat").arg("/proc/sys/net/ipv4/ip_forward"))?.trim() == "1")
    }

    /// Occupies a port, as another program of the pod would.
    pub fn listen(&self, port: u16) -> Result<TcpListener> {
        self.within(move || TcpListener::bind(("::", port)))
    }

    /// The web port's answer to a GET request from the pod itself.
    pub fn get(&self, path: &str) -> Result<String> {
        let mut answer = String::new();
        self.ask(HERE, path)?.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Sends a GET request to the web port at one of its addresses, which is also the client's.
    pub fn ask(&self, address: &'static str, path: &str) -> Result<TcpStream> {
        let mut stream = self.connect(address, 8006)?;
        let (host, end) = ("localhost", "Connection: close");
        stream.write_all(
            format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{end}\r\n\r\n").as_bytes(),
        )?;
        Ok(stream)
    }

    /// The web port's answer to a request at one of its addresses.
    pub fn say(&self, address: &'static str, request: &str) -> Result<String> {
        let mut stream = self.connect(address, 8006)?;
        stream.write_all(request.trim_start().replace('\n', "\r\n").as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// A connection to one of its ports.
    pub fn connect(&self, address: &'static str, port: u16) -> Result<TcpStream> {
        let stream = self.within(move || TcpStream::connect((address, port)))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    /// Makes a socket in its network namespace.
    pub fn within<T: Send + 'static>(
        &self,
        make: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let space = File::open(format!("/run/netns/{}", self.space))?;
        let made = thread::spawn(move || {
            // A socket belongs to the namespace of the thread that makes it.
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(make()?)
        });
        made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Fails if interfaces or rules of a pod are left in its network.
    pub fn has_nothing_left(&self) -> Result<()> {
        let links = said(self.run("ip").args(["-brief", "link"]))?;
        let rules = self.rules()?;
        ensure!(!links.contains("qemu") && rules.is_empty(), "a pod left behind: {links}{rules}");
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = said(Command::new("ip").args(["netns", "delete", &self.space])) {
            writeln!(std::io::stderr(), "{error:#}").ok();
        }
    }
}

/// Runs a program among the mounts of a pod; returns its status and output.
pub fn beside(pod: &Running, words: &[&str]) -> Result<(Option<i32>, String)> {
    let target = pod.pid().as_raw_nonzero().to_string();
    let mut command = Command::new("nsenter");
    command.args(["--mount", "--target", &target, "--"]).args(words).env("STORAGE", "/mnt");
    let output = command.output().context("nsenter")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&text).into_owned()))
}

/// Waits until a condition is true; `failure` describes it being false.
pub fn until(failure: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !is_so()? {
        ensure!(Instant::now() < end, "{failure}");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The last line on its standard error.
pub fn last_line(pod: &Running) -> String {
    pod.stderr.text().trim().lines().last().unwrap_or_default().to_owned()
}

/// The process of its machine. The kernel's list of children can be incomplete while a child ends.
pub fn machine(pod: &Running) -> Result<Pid> {
    let mut machine = None;
    until(&format!("{:?} has no machine", pod.pid()), || {
        machine = child(pod)?;
        Ok(machine.is_some())
    })?;
    machine.context("a process number")
}

fn child(pod: &Running) -> Result<Option<Pid>> {
    for task in fs::read_dir(format!("/proc/{}/task", pod.pid().as_raw_nonzero()))? {
        // A thread or a child may have ended in the meantime.
        let children = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace() {
            let name = fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
            if name == "vmm\n" {
                return Ok(Pid::from_raw(child.parse()?));
            }
        }
    }
    Ok(None)
}
