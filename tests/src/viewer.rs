//! TigerVNC's viewer on an X server without a monitor, with hands of xdotool: all of them
//! Debian's.

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

/// The monitor has room for what is looked at, and not much more.
const MONITOR: (u32, u32) = (1400, 1060);

/// What Debian calls it.
const PROGRAM: &str = "xtigervncviewer";

/// Whether all three programs are here.
pub fn is_here() -> bool {
    let here = |name: &&str| Path::new("/usr/bin").join(name).exists();
    [PROGRAM, "Xvfb", "xdotool"].iter().all(here)
}

/// An X server, whose frame buffer is a file.
pub struct Xvfb {
    _server: Running,
    display: String,
    folder: TempDir,
}

impl Xvfb {
    /// Starts one.
    ///
    /// # Errors
    ///
    /// When it is not here, or does not start.
    pub fn new() -> anyhow::Result<Rc<Self>> {
        let folder = tempfile::tempdir()?;
        let screen = format!("{}x{}x24", MONITOR.0, MONITOR.1);
        let mut command = Command::new("Xvfb");
        // Without the last word it starts anew whenever the last program of its users ends, which
        // is each hand of xdotool as long as the viewer has no window; and who comes then is lost.
        command.args(["-displayfd", "1", "-screen", "0", &screen, "-nolisten", "tcp", "-noreset"]);
        let server = Running::spawn(command.arg("-fbdir").arg(folder.path()));
        let mut server = server.context("Xvfb, which is in the package xvfb")?;
        server.says("\n", 1)?;
        let display = format!(":{}", server.stdout.text().trim());
        Ok(Rc::new(Self { _server: server, display, folder }))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("DISPLAY", &self.display).env("HOME", self.folder.path());
        command
    }

    /// The viewer, as it is called for a place: HOST:PORT, or the path of a socket.
    pub fn viewer(&self, address: &str, words: &[&str]) -> Command {
        let mut command = self.command(PROGRAM);
        // No question is asked in a window.
        command.args(["-AlertOnFatalError=0", "-ReconnectOnError=0", "-Shared", "-MenuKey="]);
        command.args(["-Log=*:stderr:30"]).args(words);
        // An address with a port in it has two colons.
        command.arg(match address.rsplit_once(':') {
            Some((host, port)) => format!("{host}::{port}"),
            None => address.to_owned(),
        });
        command
    }

    fn hands(&self, words: &[&str]) -> anyhow::Result<String> {
        let mut command = self.command("xdotool");
        let ended = finish(command.args(words));
        let ended = ended.context("xdotool, which is in a package of that name")?;
        ensure!(ended.status == 0, "{words:?}: {ended:?}");
        Ok(ended.stdout)
    }

    /// The upper left corner of all that is shown. The file is a dump of an X window
    /// (`XWDFile.h`), whose header is big-endian.
    fn corner(&self, (width, height): (u32, u32)) -> anyhow::Result<Vec<u8>> {
        let file = self.folder.path().join("Xvfb_screen0");
        let bytes = fs::read(&file).with_context(|| file.display().to_string())?;
        let number = |index: usize| {
            let word = bytes.get(4 * index..4 * index + 4).context("a short dump")?;
            anyhow::Ok(u32::from_be_bytes(word.try_into()?) as usize)
        };
        let (header, colours) = (number(0)?, number(19)?);
        let (bits, stride) = (number(11)?, number(12)?);
        ensure!(number(1)? == 7 && bits == 32, "no dump of 32 bits for each pixel");
        ensure!(width <= MONITOR.0, "{width} pixels are wider than the monitor");
        let mut pixels = Vec::with_capacity(4 * width as usize * height as usize);
        let first = header + 12 * colours;
        for line in 0..height as usize {
            let at = first + line * stride;
            let line = bytes.get(at..at + 4 * width as usize).context("a short dump")?;
            pixels.extend(line);
        }
        Ok(pixels)
    }
}

/// A viewer whose window is in the upper left corner of its X server; it ends when this is dropped.
pub struct Viewer {
    xvfb: Rc<Xvfb>,
    client: Running,
    window: String,
    /// What of it is looked at.
    size: (u32, u32),
}

impl Viewer {
    /// Starts it, with these further words, to look at a desk at a port of this host.
    ///
    /// # Errors
    ///
    /// When one of the programs is not here.
    pub fn new(port: u16, words: &[&str]) -> anyhow::Result<Self> {
        let xvfb = Xvfb::new()?;
        // The guest's size is the guest's.
        let words = [&["-RemoteResize=0"], words].concat();
        let mut command = xvfb.viewer(&format!("127.0.0.1:{port}"), &words);
        Self::open(&xvfb, command.env("VNC_PASSWORD", PASSWORD))
    }

    /// Starts what [`Xvfb::viewer`] gave, and waits for its window.
    ///
    /// # Errors
    ///
    /// When it ends, or has no window in time.
    pub fn open(xvfb: &Rc<Xvfb>, command: &mut Command) -> anyhow::Result<Self> {
        let client = Running::spawn(command).context("it is of the package tigervnc-viewer")?;
        let (xvfb, window) = (xvfb.clone(), String::new());
        let mut viewer = Self { xvfb, client, window, size: MONITOR };
        viewer.sit_down()?;
        Ok(viewer)
    }

    /// Waits for its window, and does what a window manager would: the window gets the keys, and
    /// its place. The pointer leaves it.
    fn sit_down(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        // A window of one that ended just before may still be there.
        let process = self.client.pid().as_raw_nonzero().to_string();
        self.window = loop {
            self.is_there()?;
            // Nothing that is found is an error to it.
            let found = self.xvfb.hands(&["search", "--onlyvisible", "--pid", &process]);
            match found.as_ref().map(|it| it.split_whitespace().last()) {
                Ok(Some(window)) => break window.to_owned(),
                _ if Instant::now() < end => sleep(Duration::from_millis(20)),
                _ => bail!("no window: {found:?}, {}", self.said()),
            }
        };
        let window = &self.window;
        self.xvfb.hands(&["windowmove", window, "0", "0", "windowfocus", window])?;
        self.step_aside()
    }

    fn is_there(&mut self) -> anyhow::Result<()> {
        ensure!(self.client.wait(Duration::ZERO).is_err(), "the viewer ended: {}", self.said());
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

    /// What is in its window, if that is where it belongs: its size and its pixels.
    ///
    /// # Errors
    ///
    /// When it ended.
    pub fn inside(&mut self) -> anyhow::Result<Option<(Picture, Vec<u8>)>> {
        self.is_there()?;
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

    /// Makes its window larger or smaller.
    ///
    /// # Errors
    ///
    /// When it ended.
    pub fn resize(&self, width: u16, height: u16) -> anyhow::Result<()> {
        let [width, height] = [width, height].map(|it| it.to_string());
        self.hands(&["windowsize", &self.window, &width, &height]).map(drop)
    }

    /// What it said.
    pub fn said(&self) -> String {
        self.client.stderr.text()
    }

    /// Moves, presses and types, in words of xdotool.
    ///
    /// # Errors
    ///
    /// When it did not understand.
    pub fn hands(&self, words: &[&str]) -> anyhow::Result<String> {
        self.xvfb.hands(words).with_context(|| self.said())
    }
}

impl Sitter for Viewer {
    fn see(&mut self) -> anyhow::Result<Sight> {
        self.is_there()?;
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
        // A finger takes a while, and the viewer collects what comes at once.
        self.hands(&["sleep", "0.1", "mouseup", "1", "sleep", "0.1"])?;
        self.step_aside()
    }
}
