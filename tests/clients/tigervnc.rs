//! TigerVNC's viewer as people start it, on an X server without a screen, whose frame buffer is a
//! file.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use transom_tests::print::Picture;
use transom_tests::program::{Running, finish};

use crate::eye::{settle, stir};
use crate::hands::{Hand, hands};
use crate::machine::Machine;
use crate::picture::{Near, part};
use crate::{CERTIFICATE, JPEG, KEY, PAGE, PATTERN, can, resize, text_file};

/// What Debian calls it.
const VIEWER: &str = "xtigervncviewer";
const SIZE: &str = "1600x1000x24";

fn found(test: &str) -> bool {
    can(test, "tigervnc-viewer, xvfb or xdotool is missing", || {
        let all = ["/usr/bin/xtigervncviewer", "/usr/bin/Xvfb", "/usr/bin/xdotool"];
        all.into_iter().all(|it| Path::new(it).exists())
    })
}

/// An X server.
struct Desk {
    _server: Running,
    folder: TempDir,
    display: String,
}

impl Desk {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut command = Command::new("Xvfb");
        command.args(["-displayfd", "1", "-screen", "0", SIZE, "-nocursor", "-nolisten", "tcp"]);
        let mut server = Running::spawn(command.arg("-fbdir").arg(folder.path()))?;
        server.says("\n", 1)?;
        let display = format!(":{}", server.stdout.text().trim());
        Ok(Self { _server: server, folder, display })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("DISPLAY", &self.display).env("HOME", self.folder.path());
        command
    }

    /// A viewer; what it asks is in the environment.
    fn viewer(&self, address: &str, words: &[&str]) -> Command {
        let mut command = self.command(VIEWER);
        let always = ["-AlertOnFatalError=0", "-ReconnectOnError=0", "-MenuKey=", "-Shared"];
        // An address with a port in it has two colons.
        let address = match address.rsplit_once(':') {
            Some((host, port)) => format!("{host}::{port}"),
            None => address.to_owned(),
        };
        command.args(always).args(words).arg(address);
        command
    }

    /// All that is on the screen: a file as `xwd` writes them.
    fn screen(&self) -> Result<Picture> {
        let bytes = fs::read(self.folder.path().join("Xvfb_screen0"))?;
        let field = |at: usize| -> Result<usize> {
            let four = bytes.get(4 * at..4 * at + 4).context("a header")?;
            Ok(u32::from_be_bytes(four.try_into()?).try_into()?)
        };
        // Header, depth, size, bits of a pixel, bytes of a line, entries of 12 bytes.
        let (header, depth) = (field(0)?, field(3)?);
        let (width, height, bits, stride) = (field(4)?, field(5)?, field(11)?, field(12)?);
        ensure!((depth, bits, stride) == (24, 32, 4 * width), "{depth} {bits} {stride}");
        let start = header + 12 * field(19)?;
        let pixels = bytes.get(start..start + stride * height).context("a picture")?;
        Ok(Picture { width, pixels: pixels.to_vec() })
    }

    /// Where the viewer's window is.
    fn place(&self) -> Result<(usize, usize)> {
        let words = "search --onlyvisible --name TigerVNC getwindowgeometry --shell";
        let said = self.xdotool(words)?;
        let number = |name: &str| {
            let line = said.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|it| it.parse().ok()).with_context(|| said.clone())
        };
        Ok((number("X=")?, number("Y=")?))
    }

    /// What the viewer shows, if it has a window as large as the picture.
    fn shown(&self, machine: &mut Machine) -> Result<Picture> {
        let wanted = machine.screenshot()?;
        let nothing = Picture { width: 1, pixels: Vec::new() };
        let Ok(place) = self.place() else { return Ok(nothing) };
        Ok(part(&self.screen()?, place, &wanted).unwrap_or(nothing))
    }

    fn settle(&self, machine: &mut Machine, near: Near) -> Result<Picture> {
        settle(machine, near, |machine| self.shown(machine))
    }

    fn xdotool(&self, words: &str) -> Result<String> {
        let ended = finish(self.command("xdotool").args(words.split(' ')))?;
        ensure!(ended.status == 0, "{words}: {ended:?}");
        Ok(ended.stdout)
    }
}

#[test]
fn tigervnc_shows_the_same_picture_in_all_encodings_and_colours() -> Result<()> {
    if !found("tigervnc_shows_the_same_picture_in_all_encodings_and_colours") {
        return Ok(());
    }
    let desk = Desk::new()?;
    for draw in [PATTERN, PAGE] {
        let mut machine = Machine::at_a_path(draw, "1366x770")?;
        for encoding in ["Raw", "Hextile", "ZRLE", "Tight"] {
            for (colours, near) in [
                ("-FullColor", Near::Same),
                ("-LowColorLevel=2", Near::Levels([7, 7, 3])),
                ("-LowColorLevel=1", Near::Levels([3; 3])),
                ("-LowColorLevel=0", Near::Levels([1; 3])),
            ] {
                let preferred = format!("-PreferredEncoding={encoding}");
                let full = if colours == "-FullColor" { "-FullColor=1" } else { "-FullColor=0" };
                let words = ["-AutoSelect=0", "-NoJPEG", &preferred, full, colours];
                let running = Running::spawn(&mut desk.viewer(&machine.address, &words))?;
                let seen = desk.settle(&mut machine, near);
                seen.with_context(|| format!("{encoding} {colours}"))?;
                let viewer = machine.viewer()?;
                ensure!(viewer["encoding"] == encoding.to_lowercase(), "{viewer}");
                drop(running);
                machine.is_left()?;
            }
        }
    }
    Ok(())
}

#[test]
fn tigervnc_shows_jpeg_as_good_as_it_asked_for() -> Result<()> {
    if !found("tigervnc_shows_jpeg_as_good_as_it_asked_for") {
        return Ok(());
    }
    let desk = Desk::new()?;
    for (draw, bounds) in JPEG {
        let mut machine = Machine::at_a_path(draw, "1280x800")?;
        for level in [0, 4, 8, 9] {
            let quality = format!("-QualityLevel={level}");
            let words = ["-AutoSelect=0", "-PreferredEncoding=Tight", &quality];
            let viewer = Running::spawn(&mut desk.viewer(&machine.address, &words))?;
            let seen = desk.settle(&mut machine, Near::Decibels(bounds[level]));
            seen.with_context(|| quality.clone())?;
            drop(viewer);
            machine.is_left()?;
        }
    }
    Ok(())
}

#[test]
fn tigervnc_comes_in_by_all_kinds_of_security() -> Result<()> {
    if !found("tigervnc_comes_in_by_all_kinds_of_security") {
        return Ok(());
    }
    let desk = Desk::new()?;
    let folder = tempfile::tempdir()?;
    let file = |name: &str, text: &str| text_file(folder.path(), name, text);
    let password = format!("password={}", file("password", "secret")?);
    let certificate = file("c", CERTIFICATE)?;
    let tls = format!("tls-cert={certificate},tls-key={}", file("k", KEY)?);
    for (words, kind, security) in [
        (String::new(), "None", "none"),
        (format!(",{password}"), "VncAuth", "vnc"),
        (format!(",{tls}"), "X509None", "x509-none"),
        (format!(",{tls},{password}"), "X509Vnc", "x509-vnc"),
        (format!(",{tls},{password}"), "X509Plain", "x509-plain"),
    ] {
        let mut machine = Machine::at_a_port(PATTERN, "1280x800", &words)?;
        let address = format!("localhost:{}", machine.port()?);
        let kinds = format!("-SecurityTypes={kind}");
        let trusted = format!("-X509CA={certificate}");
        let command = || {
            let words = ["-AutoSelect=0", "-PreferredEncoding=ZRLE", &kinds, &trusted];
            let mut command = desk.viewer(&address, &words);
            command.env("VNC_USERNAME", "me");
            command
        };
        let viewer = Running::spawn(command().env("VNC_PASSWORD", "secret"))?;
        desk.settle(&mut machine, Near::Same).with_context(|| viewer.stderr.text())?;
        let status = machine.viewer()?;
        ensure!(status["security"] == security, "{words}: {status}");
        drop(viewer);
        machine.is_left()?;
        if words.contains("password") {
            let ended = finish(command().env("VNC_PASSWORD", "Secret"))?;
            ensure!(ended.stderr.contains("failure: wrong password"), "{ended:?}");
        }
    }
    Ok(())
}

#[test]
fn tigervnc_follows_what_is_drawn_and_the_size() -> Result<()> {
    if !found("tigervnc_follows_what_is_drawn_and_the_size") {
        return Ok(());
    }
    let desk = Desk::new()?;
    for encoding in ["Tight", "ZRLE", "Hextile", "Raw"] {
        let mut machine = Machine::at_a_path(PAGE, "1280x800")?;
        let preferred = format!("-PreferredEncoding={encoding}");
        // It asks for this size as soon as it is in.
        let words = ["-AutoSelect=0", "-NoJPEG", &preferred, "-DesktopSize=1024x768"];
        let _viewer = Running::spawn(&mut desk.viewer(&machine.address, &words))?;
        desk.settle(&mut machine, Near::Same)?;
        let (left, top) = desk.place()?;
        // There is nobody else who would.
        desk.xdotool("search --onlyvisible --name TigerVNC windowfocus")?;
        hands(&mut machine, |sent| {
            let words = match sent {
                Hand::Key(0xffc2) => vec!["key F5".to_owned()],
                Hand::Key(symbol) => {
                    vec![format!("key {}", char::from_u32(symbol).context("a letter")?)]
                }
                Hand::Pointer(x, y, buttons) => {
                    let (x, y) = (left + usize::from(x), top + usize::from(y));
                    // It keeps a move for itself until a button makes it tell.
                    let button = if buttons == 0 { "mouseup 1 click 2" } else { "mousedown 1" };
                    vec![format!("mousemove {x} {y}"), button.to_owned()]
                }
            };
            words.iter().try_for_each(|words| desk.xdotool(words).map(|_| ()))
        })?;
        stir(&mut machine)?;
        desk.settle(&mut machine, Near::Same)?;
        resize(&mut machine, (1024, 768))?;
        desk.settle(&mut machine, Near::Same).with_context(|| encoding)?;
    }
    Ok(())
}
