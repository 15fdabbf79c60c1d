//! TigerVNC's viewer as users start it: each encoding and number of colors, keyboard and mouse, and
//! the security types that both sides have.

use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use transom_tests::print::Picture;
use transom_tests::program::finish;
use transom_tests::viewer::{Viewer, Xvfb, is_here};

use crate::eye::settle;
use crate::hands::{Client, Hand, follows};
use crate::machine::{Machine, until};
use crate::picture::Near;
use crate::{CERTIFICATE, JPEG, KEY, PAGE, PATTERN, can, text_file};

const ENCODINGS: [&str; 4] = ["Raw", "Hextile", "ZRLE", "Tight"];

/// Its numbers of colors: all, 256, 64 and 8.
const COLOURS: [(&str, Near); 4] = [
    ("-FullColor=1", Near::Same),
    ("-LowColorLevel=2", Near::Levels([7, 7, 3])),
    ("-LowColorLevel=1", Near::Levels([3; 3])),
    ("-LowColorLevel=0", Near::Levels([1; 3])),
];

fn found(test: &str) -> bool {
    can(test, "tigervnc-viewer, xvfb or xdotool is missing", is_here)
}

/// A viewer with fixed settings that does not change the guest's size.
fn open(xvfb: &Rc<Xvfb>, machine: &Machine, words: &[&str]) -> Result<Viewer> {
    let words = [&["-AutoSelect=0", "-RemoteResize=0"], words].concat();
    Viewer::open(xvfb, &mut xvfb.viewer(&machine.address, &words))
}

fn picture(viewer: &mut Viewer) -> Result<Picture> {
    let inside = until("the viewer's window in its place", || viewer.inside());
    let (size, pixels) = inside.with_context(|| viewer.said())?;
    Ok(Picture { width: size.width.try_into()?, pixels })
}

impl Client for Viewer {
    fn picture(&mut self, _: &Machine) -> Result<Picture> {
        picture(self)
    }

    fn send(&mut self, what: Hand) -> Result<()> {
        match what {
            Hand::Key(0xffc2) => self.hands(&["key", "F5"]),
            Hand::Key(symbol) => {
                let letter = char::from_u32(symbol).context("a letter")?;
                self.hands(&["key", &letter.to_string()])
            }
            Hand::Pointer(x, y, buttons) => {
                let (x, y) = (x.to_string(), y.to_string());
                // The viewer sends the pointer's entry into the window only with a click.
                let way: &[_] = match buttons {
                    0 => &["mouseup", "1", "click", "2"],
                    _ => &["mousedown", "1"],
                };
                self.hands(&[&["mousemove", &x, &y], way].concat())
            }
        }
        .map(drop)
    }

    /// Resizes its window, as a user does.
    fn ask_for(&mut self, width: u16, height: u16) -> Result<()> {
        self.resize(width, height)
    }
}

#[test]
fn tigervnc_shows_the_same_picture_in_all_encodings_and_colours() -> Result<()> {
    if !found("tigervnc_shows_the_same_picture_in_all_encodings_and_colours") {
        return Ok(());
    }
    let xvfb = Xvfb::new()?;
    for (draw, colours) in [(PATTERN, &COLOURS[..]), (PAGE, &COLOURS[..1])] {
        let mut machine = Machine::at_a_path(draw, "1366x770")?;
        for (encoding, (level, near)) in
            ENCODINGS.iter().flat_map(|it| colours.iter().map(move |level| (it, level)))
        {
            let preferred = format!("-PreferredEncoding={encoding}");
            let few = if *level == COLOURS[0].0 { *level } else { "-FullColor=0" };
            let words = ["-NoJPEG", &preferred, few, level];
            let mut viewer = open(&xvfb, &machine, &words)?;
            settle(&mut machine, *near, |_| picture(&mut viewer))
                .with_context(|| format!("{words:?}: {}", viewer.said()))?;
            let status = machine.viewer()?;
            ensure!(status["encoding"] == encoding.to_lowercase(), "{status}");
            drop(viewer);
            machine.is_left()?;
        }
    }
    Ok(())
}

#[test]
fn tigervnc_shows_jpeg_in_the_requested_quality() -> Result<()> {
    if !found("tigervnc_shows_jpeg_in_the_requested_quality") {
        return Ok(());
    }
    let xvfb = Xvfb::new()?;
    for (draw, bounds) in JPEG {
        let mut machine = Machine::at_a_path(draw, "1280x800")?;
        for level in [0, 4, 8, 9] {
            let quality = format!("-QualityLevel={level}");
            let words = ["-PreferredEncoding=Tight", &quality];
            let mut viewer = open(&xvfb, &machine, &words)?;
            settle(&mut machine, Near::Decibels(bounds[level]), |_| picture(&mut viewer))
                .with_context(|| quality.clone())?;
            drop(viewer);
            machine.is_left()?;
        }
    }
    Ok(())
}

#[test]
fn tigervnc_logs_in_with_every_security_type() -> Result<()> {
    if !found("tigervnc_logs_in_with_every_security_type") {
        return Ok(());
    }
    let xvfb = Xvfb::new()?;
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
        (format!(",{tls},user=me,{password}"), "X509Plain", "x509-plain"),
    ] {
        let mut machine = Machine::at_a_port(PATTERN, "640x480", &words)?;
        let address = format!("localhost:{}", machine.port()?);
        let (kinds, trusted) = (format!("-SecurityTypes={kind}"), format!("-X509CA={certificate}"));
        let mut command = xvfb.viewer(&address, &[&kinds, &trusted, "-RemoteResize=0"]);
        command.env("VNC_USERNAME", "me");
        if words.contains("password") {
            let ended = finish(command.env("VNC_PASSWORD", "Secret"))?;
            ensure!(ended.stderr.contains("failure: wrong password"), "{kind}: {ended:?}");
            machine.is_left()?;
        }
        let mut viewer = Viewer::open(&xvfb, command.env("VNC_PASSWORD", "secret"))?;
        // The viewer may choose a lossy encoding.
        settle(&mut machine, Near::Decibels(JPEG[0].1[8]), |_| picture(&mut viewer))
            .with_context(|| viewer.said())?;
        let status = machine.viewer()?;
        ensure!(status["security"] == security, "{words}: {status}");
    }
    Ok(())
}

#[test]
fn tigervnc_follows_drawing_and_resizing() -> Result<()> {
    if !found("tigervnc_follows_drawing_and_resizing") {
        return Ok(());
    }
    let xvfb = Xvfb::new()?;
    for encoding in ENCODINGS {
        let mut machine = Machine::at_a_path(PAGE, "1280x800")?;
        let preferred = format!("-PreferredEncoding={encoding}");
        let words = ["-AutoSelect=0", "-NoJPEG", &preferred];
        let mut command = xvfb.viewer(&machine.address, &words);
        let mut viewer = Viewer::open(&xvfb, &mut command)?;
        follows(&mut viewer, &mut machine, Near::Same, Some((1024, 768)))
            .with_context(|| format!("{encoding}: {}", viewer.said()))?;
    }
    Ok(())
}
