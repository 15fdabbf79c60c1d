//! Pods of the image in private network namespaces, and a second host on their network.

use std::fs::{self, File};
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use transom_tests::engine::{Engine, IMAGE, Namespace};
use transom_tests::program::{PATIENCE, said};

/// Polling interval.
const LOOK: Duration = Duration::from_millis(50);

/// An answer of the web port.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// A process of a pod.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) name: String,
    /// `/proc/PID/task/TID/status` of each thread.
    pub(crate) threads: Vec<String>,
    /// Its open files.
    pub(crate) files: Vec<PathBuf>,
}

/// A running pod and a second host on its network, each in a network namespace.
pub(crate) struct Pod {
    engine: &'static Engine,
    /// Name of the container, and prefix of both namespaces' names.
    name: String,
    inside: Namespace,
    outside: Namespace,
    volume: tempfile::TempDir,
}

const OURS: &str = "10.99.0.1";
const THEIRS: &str = "10.99.0.2";

impl Pod {
    /// Starts the image with further options of `podman run`, and with the rights that a tap needs.
    pub(crate) fn start(engine: &'static Engine, name: &str, words: &[&str]) -> Result<Self> {
        let rights = ["--device", "/dev/kvm", "--device", "/dev/net/tun", "--cap-add", "NET_ADMIN"];
        Self::start_with(engine, name, &[&rights, words].concat())
    }

    /// Like `start`, but with only the rights that `words` contains.
    pub(crate) fn start_with(engine: &'static Engine, name: &str, words: &[&str]) -> Result<Self> {
        let name = format!("transom-{}-{name}", std::process::id());
        let outside = Namespace::make(&format!("{name}-o"))?;
        let inside = Namespace::make(&format!("{name}-i"))?;
        let (near, far) = (outside.name.as_str(), inside.name.as_str());
        let link = ["link", "add", "eth0", "netns", near, "type", "veth"];
        said(Command::new("ip").args(link).args(["peer", "name", "eth0", "netns", far]))?;
        for (space, address) in [(&outside, OURS), (&inside, THEIRS)] {
            let address = format!("{address}/24");
            said(&mut space.run(&["ip", "address", "add", &address, "dev", "eth0"]))?;
            said(&mut space.run(&["ip", "link", "set", "eth0", "up"]))?;
            said(&mut space.run(&["ip", "link", "set", "lo", "up"]))?;
        }
        said(&mut inside.run(&["ip", "route", "add", "default", "via", OURS]))?;
        let volume = tempfile::tempdir()?;
        let pod = Self { engine, name, inside, outside, volume };
        let network = format!("ns:/run/netns/{}", pod.inside.name);
        let storage = format!("{}:/storage", pod.volume.path().display());
        let mut run = vec!["run", "--detach", "--name", &pod.name, "--network", &network];
        // A failing pod ends at once, and tests read its log, unless `words` sets ERROR_HOLD.
        run.extend(["--volume", &storage, "--env", "ERROR_HOLD=0"]);
        run.extend(words);
        run.push(IMAGE);
        said(&mut engine.podman(&run))?;
        Ok(pod)
    }

    /// An address of the web port for a browser on this host, which is in none of these namespaces.
    pub(crate) fn address(&self) -> Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let place = listener.local_addr()?;
        let space = File::open(format!("/run/netns/{}", self.outside.name))?;
        thread::spawn(move || {
            // A socket belongs to the namespace of the thread that makes it.
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(space.as_fd(), kind).expect("the namespace");
            for near in listener.incoming() {
                let Ok(near) = near else { return };
                let Ok(far) = TcpStream::connect((THEIRS, 8006)) else { continue };
                carry(&near, &far).expect("two sockets more");
            }
        });
        Ok(format!("http://{place}/"))
    }

    /// Sends a GET request to the web port from outside.
    pub(crate) fn get(&self, path: &str) -> Result<Answer> {
        self.get_as(path, None)
    }

    /// Like `get`, with `name:password`.
    pub(crate) fn get_as(&self, path: &str, who: Option<&str>) -> Result<Answer> {
        let who: Vec<_> = who.iter().flat_map(|who| ["--user", who]).collect();
        self.curl(path, &who)
    }

    /// Sends JSON to the web port, as our own page does.
    pub(crate) fn post(&self, path: &str, json: &str) -> Result<Answer> {
        let origin = format!("Origin: http://{THEIRS}:8006");
        let kind = "Content-Type: application/json";
        self.curl(path, &["--header", &origin, "--header", kind, "--data", json])
    }

    fn curl(&self, path: &str, words: &[&str]) -> Result<Answer> {
        let place = format!("http://{THEIRS}:8006{path}");
        let form = "\n%{http_code}";
        let mut curl = vec!["curl", "--silent", "--max-time", "20", "--write-out", form];
        curl.extend(words);
        curl.push(&place);
        let text = said(&mut self.outside.run(&curl))?;
        let (body, status) = text.rsplit_once('\n').context("no status")?;
        Ok(Answer { status: status.parse()?, body: body.into() })
    }

    /// Waits until a page has this status.
    pub(crate) fn until(&self, path: &str, status: u16) -> Result<Answer> {
        self.until_by(path, None, status)
    }

    /// Like `until`, with `name:password`. After a wrong password, the right one has to wait.
    pub(crate) fn until_as(&self, path: &str, who: &str, status: u16) -> Result<Answer> {
        self.until_by(path, Some(who), status)
    }

    fn until_by(&self, path: &str, who: Option<&str>, status: u16) -> Result<Answer> {
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = self.get_as(path, who);
            if let Ok(answer) = &answer
                && answer.status == status
            {
                return Ok(Answer { status, body: answer.body.clone() });
            }
            ensure!(Instant::now() < end, "{path}: {answer:?}\n{}", self.logs()?);
            thread::sleep(LOOK);
        }
    }

    /// The ID of the first process, and all processes as the kernel reports them.
    pub(crate) fn processes(&self) -> Result<(String, Vec<Process>)> {
        let mut inspect =
            self.engine.podman(&["inspect", "--format", "{{.State.Pid}}", &self.name]);
        let first = said(&mut inspect)?.trim().to_owned();
        let (mut waiting, mut all) = (vec![first.clone()], Vec::new());
        while let Some(pid) = waiting.pop() {
            let folder = Path::new("/proc").join(&pid);
            let name = fs::read_to_string(folder.join("comm"))?.trim().to_owned();
            let mut process = Process { name, threads: Vec::new(), files: Vec::new() };
            for task in fs::read_dir(folder.join("task"))? {
                let task = task?.path();
                // A thread may have ended in the meantime.
                let Ok(status) = fs::read_to_string(task.join("status")) else { continue };
                process.threads.push(status);
                let children = fs::read_to_string(task.join("children")).unwrap_or_default();
                waiting.extend(children.split_whitespace().map(str::to_owned));
            }
            for file in fs::read_dir(folder.join("fd"))? {
                process.files.extend(fs::read_link(file?.path()));
            }
            all.push(process);
        }
        Ok((first, all))
    }

    /// The interfaces of its namespace, which outlives the container.
    pub(crate) fn interfaces(&self) -> Result<String> {
        said(&mut self.inside.run(&["ip", "-details", "-oneline", "link"]))
    }

    /// Stops it as an engine does; returns its exit status.
    pub(crate) fn stop(&self, seconds: u32) -> Result<i32> {
        said(&mut self.engine.podman(&["stop", "--time", &seconds.to_string(), &self.name]))?;
        self.wait()
    }

    /// Waits for its end; returns its exit status.
    pub(crate) fn wait(&self) -> Result<i32> {
        let end = Instant::now() + PATIENCE;
        let form = ["inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", &self.name];
        loop {
            let state = said(&mut self.engine.podman(&form))?;
            if let Some(("exited", status)) = state.trim().split_once(' ') {
                return Ok(status.parse()?);
            }
            ensure!(Instant::now() < end, "still {state}\n{}", self.logs()?);
            thread::sleep(LOOK);
        }
    }

    /// How often the engine has restarted it.
    pub(crate) fn restarts(&self) -> Result<u32> {
        let form = ["inspect", "--format", "{{.RestartCount}}", &self.name];
        Ok(said(&mut self.engine.podman(&form))?.trim().parse()?)
    }

    /// Its log.
    pub(crate) fn logs(&self) -> Result<String> {
        let output = self.engine.podman(&["logs", &self.name]).output()?;
        let [out, err] = [output.stdout, output.stderr];
        Ok(format!("{}{}", String::from_utf8_lossy(&out), String::from_utf8_lossy(&err)))
    }

    /// A text file of the volume.
    pub(crate) fn read(&self, name: &str) -> Result<String> {
        let path = self.volume.path().join(name);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    /// Runs a command in it; returns its exit status and output.
    pub(crate) fn run(&self, words: &[&str]) -> Result<(i32, String)> {
        let words = [&["exec", &self.name][..], words].concat();
        let output = self.engine.podman(&words).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok((output.status.code().unwrap_or(-1), text))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        said(&mut self.engine.podman(&["rm", "--force", "--time", "0", &self.name])).ok();
    }
}

/// Copies bytes in both directions until either end closes.
fn carry(near: &TcpStream, far: &TcpStream) -> io::Result<()> {
    for (from, to) in [(near, far), (far, near)] {
        let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
        thread::spawn(move || {
            io::copy(&mut from, &mut to).ok();
            to.shutdown(Shutdown::Both).ok();
        });
    }
    Ok(())
}
