//! The machine that all clients connect to, and the picture that they should show.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;
use std::{thread, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use transom_tests::print::Picture;
use transom_tests::program::{PATIENCE, Running, connect};
use vmm::control::{Client, Command};

/// A machine that runs the probe, with its screen served.
pub(crate) struct Machine {
    running: Running,
    control: Client,
    folder: TempDir,
    /// Address of its screen: HOST:PORT, a path, or a URL.
    pub(crate) address: String,
}

/// The end of the probe's report.
const LAST: &str = "]}\n";

impl Machine {
    /// Starts a machine whose screen is at a Unix socket.
    pub(crate) fn at_a_path(draw: &str, display: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("screen").display().to_string();
        let mut machine = Self::start(folder, draw, ["--vnc", &format!("unix:{path}")], display)?;
        machine.address = path;
        Ok(machine)
    }

    /// Starts a machine whose screen is at a port; `words` are further options of `--vnc`.
    pub(crate) fn at_a_port(draw: &str, display: &str, words: &str) -> Result<Self> {
        let vnc = format!("127.0.0.1:0{words}");
        Self::start(tempfile::tempdir()?, draw, ["--vnc", &vnc], display)
    }

    /// Starts a machine for browsers, whose address is a URL; `words` are further options of
    /// `--web`.
    pub(crate) fn for_browsers(draw: &str, display: &str, words: &str) -> Result<Self> {
        let web = format!("127.0.0.1:0{words}");
        Self::start(tempfile::tempdir()?, draw, ["--web", &web], display)
    }

    fn start(folder: TempDir, draw: &str, [kind, place]: [&str; 2], display: &str) -> Result<Self> {
        let control = folder.path().join("control");
        let (words, socket) = (format!("then=halt {draw}"), control.display().to_string());
        let all = ["run", "--cmdline", &words, "--display", display, "--control", &socket];
        let mut running = Running::vmm(&[&all[..], &[kind, place]].concat())?;
        running.says(LAST, 1)?;
        let said = running.stderr.text();
        let address = said.split_once(": listening at ").context("it listens")?.1;
        let address = address.lines().next().context("an address")?.to_owned();
        Ok(Self { running, control: connect(&control)?, folder, address })
    }

    /// Starts a machine that shows a scene, with its screen at a Unix socket. Each press or release
    /// of a key shows the next frame.
    pub(crate) fn on_stage(scene: &[u8], display: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name).display().to_string();
        let [kernel, module, control, address] = ["kernel", "scene", "control", "screen"].map(path);
        fs::write(&kernel, probe::IMAGE).context("the probe")?;
        fs::write(&module, scene).context("a scene")?;
        let (serial, vnc) = (format!("socket:{}", path("serial")), format!("unix:{address}"));
        let words = "checks=none then=halt show=yes";
        let own = ["run", "--accept-emulation", "--kernel", &kernel, "--initrd", &module];
        let seen = ["--display", display, "--vnc", &vnc, "--cmdline", words];
        let heard = ["--serial", &serial, "--control", &control];
        let running = Running::vmm(&[&own[..], &seen, &heard].concat())?;
        let line = path("serial");
        let machine = Self { running, control: connect(control.as_ref())?, folder, address };
        begin(&line).with_context(|| machine.log())?;
        Ok(machine)
    }

    /// The port of its screen.
    pub(crate) fn port(&self) -> Result<u16> {
        let port =
            self.address.rsplit(':').next().and_then(|it| it.trim_end_matches('/').parse().ok());
        port.with_context(|| self.address.clone())
    }

    /// A file of this machine's folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Sends a control command.
    pub(crate) fn ask(&mut self, command: &Command) -> Result<Value> {
        self.control.ask(command)
    }

    /// The picture on its display.
    pub(crate) fn screenshot(&mut self) -> Result<Picture> {
        let (size, pixels) = self.control.screenshot()?;
        Ok(Picture { width: size.width.try_into()?, pixels })
    }

    /// Presses the reset button, and waits until the probe has reported again.
    pub(crate) fn reset(&mut self) -> Result<()> {
        let before = self.running.stdout.text().matches(LAST).count();
        self.ask(&Command::Reset)?;
        self.running.says(LAST, before + 1)
    }

    /// The status of the only client.
    pub(crate) fn viewer(&mut self) -> Result<Value> {
        let status = self.ask(&Command::Status)?;
        let viewers = status["viewers"].as_array().context("viewers")?;
        ensure!(viewers.len() == 1, "not exactly one viewer: {status}");
        Ok(viewers[0].clone())
    }

    /// Waits until no client is connected.
    pub(crate) fn is_left(&mut self) -> Result<()> {
        until("the last client's end", || {
            let status = self.ask(&Command::Status)?;
            Ok(status["viewers"].as_array().context("viewers")?.is_empty().then_some(()))
        })
    }

    /// Its log.
    pub(crate) fn log(&self) -> String {
        self.running.stderr.text()
    }
}

/// Starts the scene as soon as the guest answers.
fn begin(line: &str) -> Result<()> {
    let mut line = until("the serial port", || Ok(UnixStream::connect(line).ok()))?;
    line.set_read_timeout(Some(Duration::from_millis(100)))?;
    let mut said = Vec::new();
    until("the first frame", || {
        line.write_all(b"a")?;
        let mut bytes = [0; 4096];
        let count = line.read(&mut bytes).unwrap_or(0);
        said.extend(&bytes[..count]);
        Ok(String::from_utf8_lossy(&said).contains("scene 0\n").then_some(()))
    })
}

/// Repeats `look` until it returns a value.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        ensure!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(10));
    }
}
