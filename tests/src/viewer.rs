//! TigerVNC's viewer on an X server without a monitor, with hands of xdotool: all of them
//! Debian's.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;
use vmm::screenshot::Picture;

use crate::desk::{Key, NAME, PASSWORD, Sitter};
use crate::program::PATIENCE;
use crate::sight::Sight;

/// The monitor has room for what is looked at, and not much more.
const MONITOR: (u32, u32) = (1400, 1060);

/// A viewer, and the X server that it draws on.
pub struct Viewer {
    server: Child,
    client: Option<Child>,
    display: String,
    folder: TempDir,
    /// The guest's picture is in the upper left corner.
    size: (u32, u32),
}

impl Viewer {
    /// Starts it, with these further words, to look at a port of this host.
    ///
    /// # Errors
    ///
    /// When one of the programs is not here.
    pub fn new(port: u16, words: &[&str]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let screen = format!("{}x{}x24", MONITOR.0, MONITOR.1);
        let mut command = Command::new("Xvfb");
        command.args(["-displayfd", "1", "-screen", "0", &screen, "-fbdir"]);
        command.arg(folder.path()).args(["-nolisten", "tcp", "-noreset"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = command.spawn().context("Xvfb, which is in the package xvfb")?;
        let said = server.stdout.take().context("no output")?;
        let mut viewer =
            Self { server, client: None, display: String::new(), folder, size: MONITOR };
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        ensure!(!line.trim().is_empty(), "Xvfb has no display");
        viewer.display = format!(":{}", line.trim());
        let log = fs::File::create(viewer.log())?;
        let mut command = Command::new("xtigervncviewer");
        // No question is asked in a window, and the guest's size is the guest's.
        command.args(["-ReconnectOnError=0", "-AlertOnFatalError=0", "-RemoteResize=0"]);
        command.args(["-Shared", "-MenuKey=", "-Log=*:stderr:30"]).args(words);
        command.arg(format!("127.0.0.1::{port}"));
        command.env("DISPLAY", &viewer.display).env("HOME", viewer.folder.path());
        command.env("VNC_PASSWORD", PASSWORD).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(log);
        let client = command.spawn().context("xtigervncviewer, of tigervnc-viewer")?;
        viewer.client = Some(client);
        viewer.sit_down()?;
        Ok(viewer)
    }

    /// Waits for its window, and does what a window manager would: the window gets the keys, and
    /// its place. The pointer leaves it.
    fn sit_down(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        let window = loop {
            self.is_there()?;
            // Nothing that is found is an error to it.
            let found = self.hands(&["search", "--onlyvisible", "--name", NAME]);
            match found.as_ref().map(|it| it.split_whitespace().last()) {
                Ok(Some(window)) => break window.to_owned(),
                _ if Instant::now() < end => sleep(Duration::from_millis(50)),
                _ => bail!("no window: {found:?}, {}", self.said()),
            }
        };
        self.hands(&["windowmove", &window, "0", "0", "windowfocus", &window])?;
        self.step_aside()
    }

    fn is_there(&mut self) -> anyhow::Result<()> {
        let client = self.client.as_mut().context("no viewer")?;
        ensure!(client.try_wait()?.is_none(), "the viewer ended: {}", self.said());
        Ok(())
    }

    /// So that nothing is seen but what the guest shows.
    fn step_aside(&self) -> anyhow::Result<()> {
        let corner = [MONITOR.0 - 1, MONITOR.1 - 1].map(|it| it.to_string());
        self.hands(&["mousemove", &corner[0], &corner[1]]).map(drop)
    }

    /// The size of the guest's picture, without which all of the monitor is seen.
    pub fn look_at(&mut self, width: u32, height: u32) {
        self.size = (width, height);
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// What it said.
    pub fn said(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    fn hands(&self, words: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new("xdotool");
        command.args(words).env("DISPLAY", &self.display).stdin(Stdio::null());
        let output = command.output().context("xdotool, which is in a package of that name")?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{command:?}: {complaint}{}", self.said());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Sitter for Viewer {
    fn see(&mut self) -> anyhow::Result<Sight> {
        self.is_there()?;
        let file = self.folder.path().join("Xvfb_screen0");
        let bytes = fs::read(&file).with_context(|| file.display().to_string())?;
        dump(&bytes, self.size)
    }

    fn type_text(&mut self, text: &str) -> anyhow::Result<()> {
        self.hands(&["type", "--delay", "30", text]).map(drop)
    }

    fn press(&mut self, key: Key) -> anyhow::Result<()> {
        let name = match key {
            Key::Enter => "Return",
            Key::Escape => "Escape",
            Key::Down => "Down",
            Key::Up => "Up",
            Key::F10 => "F10",
        };
        self.hands(&["key", name]).map(drop)
    }

    fn click(&mut self, x: u16, y: u16) -> anyhow::Result<()> {
        let (x, y) = (x.to_string(), y.to_string());
        self.hands(&["mousemove", &x, &y, "mousedown", "1"])?;
        // A finger takes a while, and the viewer collects what comes at once.
        self.hands(&["sleep", "0.1", "mouseup", "1", "sleep", "0.1"])?;
        self.step_aside()
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        for child in self.client.iter_mut().chain([&mut self.server]) {
            // That it is gone already is fine.
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// The upper left corner of a dump of an X window (`XWDFile.h`), whose header is big-endian.
fn dump(bytes: &[u8], (width, height): (u32, u32)) -> anyhow::Result<Sight> {
    let number = |index: usize| {
        let word = bytes.get(4 * index..4 * index + 4).context("a short dump")?;
        anyhow::Ok(u32::from_be_bytes(word.try_into()?) as usize)
    };
    let (header, colours) = (number(0)?, number(19)?);
    let (bits, stride) = (number(11)?, number(12)?);
    ensure!(number(1)? == 7 && bits == 32, "no dump of 32 bits for each pixel");
    let mut pixels = Vec::with_capacity(4 * width as usize * height as usize);
    let first = header + 12 * colours;
    for line in 0..height as usize {
        let at = first + line * stride;
        let line = bytes.get(at..at + 4 * width as usize).context("a short dump")?;
        pixels.extend(line);
    }
    Sight::new(Picture { width, height }, pixels)
}
