//! TigerVNC's viewer on an X server without a monitor, operated by xdotool. All of them come from
//! Debian.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;
use vmm::screenshot::Picture;

use crate::desk::{Key, PASSWORD, Sitter};
use crate::program::{PATIENCE, Running, finish};
use crate::sight::Sight;

/// Large enough for the tests' pictures.
const MONITOR: (u32, u32) = (1400, 1060);

/// The program's name on Debian.
const PROGRAM: &str = "xtigervncviewer";

/// Whether all three programs are installed.
pub fn is_here() -> bool {
    let here = |name: &&str| Path::new("/usr/bin").join(name).exists();
    [PROGRAM, "Xvfb", "xdotool"].iter().all(here)
}

/// An X server whose frame buffer is a file.
pub struct Xvfb {
    _server: Running,
    display: String,
    folder: TempDir,
}

impl Xvfb {
    pub fn new() -> anyhow::Result<Rc<Self>> {
        let folder = tempfile::tempdir()?;
        let screen = format!("{}x{}x24", MONITOR.0, MONITOR.1);
        let mut command = Command::new("Xvfb");
        // Without -noreset, the server restarts whenever its last client ends, which every call of
        // xdotool does until the viewer has a window. A client that connects at that moment is
        // lost.
        command.args(["-displayfd", "1", "-screen", "0", &screen, "-nolisten", "tcp", "-noreset"]);
        let server = Running::spawn(command.arg("-fbdir").arg(folder.path()));
        let mut server = server.context("Xvfb (package xvfb)")?;
        server.says("\n", 1)?;
        let display = format!(":{}", server.stdout.text().trim());
        Ok(Rc::new(Self { _server: server, display, folder }))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("DISPLAY", &self.display).env("HOME", self.folder.path());
        command
    }

    /// The command that starts the viewer for an address: HOST:PORT, or the path of a socket.
    pub fn viewer(&self, address: &str, words: &[&str]) -> Command {
        let mut command = self.command(PROGRAM);
        // Errors must not open a window that waits for an answer.
        command.args(["-AlertOnFatalError=0", "-ReconnectOnError=0", "-Shared", "-MenuKey="]);
        command.args(["-Log=*:stderr:30"]).args(words);
        // The viewer wants two colons between host and port.
        command.arg(match address.rsplit_once(':') {
            Some((host, port)) => format!("{host}::{port}"),
            None => address.to_owned(),
        });
        command
    }

    fn xdotool(&self, words: &[&str]) -> anyhow::Result<String> {
        let mut command = self.command("xdotool");
        let ended = finish(command.args(words));
        let ended = ended.context("xdotool (package xdotool)")?;
        ensure!(ended.status == 0, "{words:?}: {ended:?}");
        Ok(ended.stdout)
    }

    /// The upper left corner of the screen. The file is an X window dump (`XWDFile.h`) with a
    /// big-endian header.
    fn corner(&self, (width, height): (u32, u32)) -> anyhow::Result<Vec<u8>> {
        let file = self.folder.path().join("Xvfb_screen0");
        let bytes = fs::read(&file).with_context(|| file.display().to_string())?;
        let number = |index: usize| {
            let word = bytes.get(4 * index..4 * index + 4).context("a short dump")?;
            anyhow::Ok(u32::from_be_bytes(word.try_into()?) as usize)
        };
        let (header, colors) = (number(0)?, number(19)?);
        let (bits, stride) = (number(11)?, number(12)?);
        ensure!(number(1)? == 7 && bits == 32, "not a dump with 32 bits for each pixel");
        ensure!(width <= MONITOR.0, "{width} pixels are wider than the monitor");
        let mut pixels = Vec::with_capacity(4 * width as usize * height as usize);
        let first = header + 12 * colors;
        for line in 0..height as usize {
            let at = first + line * stride;
            let line = bytes.get(at..at + 4 * width as usize).context("a short dump")?;
            pixels.extend(line);
        }
        Ok(pixels)
    }
}

/// A viewer with its window in the upper left corner of its X server. Dropping it ends the viewer.
pub struct Viewer {
    xvfb: Rc<Xvfb>,
    client: Running,
    window: String,
    /// The part of the screen that tests look at.
    size: (u32, u32),
}

impl Viewer {
    /// Starts the viewer with further words, for a desk at a port of this host.
    pub fn new(port: u16, words: &[&str]) -> anyhow::Result<Self> {
        let xvfb = Xvfb::new()?;
        // The viewer must not change the guest's resolution.
        let words = [&["-RemoteResize=0"], words].concat();
        let mut command = xvfb.viewer(&format!("127.0.0.1:{port}"), &words);
        Self::open(&xvfb, command.env("VNC_PASSWORD", PASSWORD))
    }

    /// Starts a command of [`Xvfb::viewer`], and waits for the window.
    pub fn open(xvfb: &Rc<Xvfb>, command: &mut Command) -> anyhow::Result<Self> {
        let client =
            Running::spawn(command).context("xtigervncviewer (package tigervnc-viewer)")?;
        let (xvfb, window) = (xvfb.clone(), String::new());
        let mut viewer = Self { xvfb, client, window, size: MONITOR };
        viewer.take_window()?;
        Ok(viewer)
    }

    /// Waits for the window and does the work of a window manager: moves it to the corner and gives
    /// it the keyboard focus. Then moves the pointer away.
    fn take_window(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        // A window of an earlier viewer may still exist, so only this process's windows count.
        let process = self.client.pid().as_raw_nonzero().to_string();
        self.window = loop {
            self.is_running()?;
            // xdotool fails if it finds no window.
            let found = self.xvfb.xdotool(&["search", "--onlyvisible", "--pid", &process]);
            match found.as_ref().map(|it| it.split_whitespace().last()) {
                Ok(Some(window)) => break window.to_owned(),
                _ if Instant::now() < end => sleep(Duration::from_millis(20)),
                _ => bail!("no window: {found:?}, {}", self.said()),
            }
        };
        let window = &self.window;
        self.xvfb.xdotool(&["windowmove", window, "0", "0", "windowfocus", window])?;
        self.move_pointer_away()
    }

    fn is_running(&mut self) -> anyhow::Result<()> {
        ensure!(self.client.wait(Duration::ZERO).is_err(), "the viewer ended: {}", self.said());
        Ok(())
    }

    /// Moves the pointer to the monitor's corner, so that it does not cover the guest's picture.
    fn move_pointer_away(&self) -> anyhow::Result<()> {
        let corner = [MONITOR.0 - 1, MONITOR.1 - 1].map(|it| it.to_string());
        self.hands(&["mousemove", &corner[0], &corner[1]]).map(drop)
    }

    /// Sets the size of the guest's picture. Before, tests see the whole monitor.
    pub fn look_at(&mut self, width: u32, height: u32) {
        self.size = (width, height);
    }

    /// The size and the pixels of the window, if it is in the corner.
    pub fn inside(&mut self) -> anyhow::Result<Option<(Picture, Vec<u8>)>> {
        self.is_running()?;
        let said = self.hands(&["getwindowgeometry", "--shell", &self.window])?;
        let number = |name: &str| -> anyhow::Result<u32> {
            let line = said.lines().find_map(|line| line.strip_prefix(name));
            Ok(line.with_context(|| said.clone())?.parse()?)
        };
        if (number("X=")?, number("Y=")?) != (0, 0) {
            return Ok(None);
        }
        let (width, height) = (number("WIDTH=")?, number("HEIGHT=")?);
        Ok(Some((Picture { width, height }, self.xvfb.corner((width, height))?)))
    }

    pub fn resize(&self, width: u16, height: u16) -> anyhow::Result<()> {
        let [width, height] = [width, height].map(|it| it.to_string());
        self.hands(&["windowsize", &self.window, &width, &height]).map(drop)
    }

    /// The viewer's standard error.
    pub fn said(&self) -> String {
        self.client.stderr.text()
    }

    /// Runs xdotool with these words: moves the pointer, presses buttons, types.
    pub fn hands(&self, words: &[&str]) -> anyhow::Result<String> {
        self.xvfb.xdotool(words).with_context(|| self.said())
    }
}

impl Sitter for Viewer {
    fn see(&mut self) -> anyhow::Result<Sight> {
        self.is_running()?;
        let (width, height) = self.size;
        Sight::new(Picture { width, height }, self.xvfb.corner(self.size)?)
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
        // Wait as a finger does, because the viewer merges events that come at once.
        self.hands(&["sleep", "0.1", "mouseup", "1", "sleep", "0.1"])?;
        self.move_pointer_away()
    }
}
