//! vncdotool, in the version of `requirements.txt`, and `vncsnapshot`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};
use transom_tests::print::Picture;
use transom_tests::program::finish;
use transom_tests::python::{PYTHON, fetch};

use crate::eye::{Eye, is_here, settle};
use crate::hands::{Client, Hand, follows};
use crate::machine::Machine;
use crate::picture::{Near, ppm};
use crate::{PAGE, PATTERN, can, text_file};

/// Its encodings: the number, and our name.
const ENCODINGS: [(i32, &str); 5] =
    [(0, "raw"), (2, "rre"), (4, "corre"), (5, "hextile"), (16, "zrle")];

/// A small display, because vncdotool decodes each pixel in Python.
const SIZE: &str = "640x480";

/// The folder of its Python module; `None` where the module cannot be installed.
fn module() -> Option<&'static Path> {
    static MODULE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        let needed = "import twisted, PIL, cryptography, pip";
        is_here(PYTHON, &["-c", needed]).then(|| {
            let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("vnc_clients/requirements.txt");
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vncdotool");
            fetch(&list, &folder).expect("vncdotool");
            folder
        })
    };
    MODULE.get_or_init(make).as_deref()
}

fn found(test: &str) -> Option<&'static Path> {
    let reason = "python3-twisted, python3-pil or python3-pip is missing";
    can(test, reason, || module().is_some()).then(module)?
}

fn look(module: &Path, address: &str, encoding: i32) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("vnc_clients/vncdo.py");
    let mut command = Command::new(PYTHON);
    command.arg(script).args([address, &encoding.to_string()]).env("PYTHONPATH", module);
    command
}

/// A program that uses vncdotool.
struct Script(Eye);

impl Client for Script {
    /// Requests the whole picture.
    fn picture(&mut self, machine: &Machine) -> Result<Picture> {
        let path = machine.path("seen");
        self.0.ask(&format!("picture {}", path.display()))?;
        ppm(&fs::read(path)?)
    }

    fn send(&mut self, what: Hand) -> Result<()> {
        match what {
            Hand::Key(0xffc2) => self.0.ask("press f5"),
            Hand::Key(symbol) => {
                self.0.ask(&format!("press {}", char::from_u32(symbol).context("a letter")?))
            }
            Hand::Pointer(x, y, buttons) => {
                self.0.ask(&format!("move {x} {y}"))?;
                self.0.ask(if buttons == 0 { "up 1" } else { "down 1" })
            }
        }
        .map(drop)
    }

    fn ask_for(&mut self, _: u16, _: u16) -> Result<()> {
        bail!("vncdotool cannot request a size")
    }
}

#[test]
fn vncdotool_shows_the_same_picture_in_all_encodings() -> Result<()> {
    let test = "vncdotool_shows_the_same_picture_in_all_encodings";
    let Some(module) = found(test) else { return Ok(()) };
    let mut machine = Machine::at_a_path(PATTERN, SIZE)?;
    for (number, ours) in ENCODINGS {
        let mut script = Script(Eye::open(&mut look(module, &machine.address, number))?);
        settle(&mut machine, Near::Same, |machine| script.picture(machine)).context(ours)?;
        let viewer = machine.viewer()?;
        ensure!(viewer["encoding"] == ours, "{number}: {viewer}");
        drop(script);
        machine.is_left()?;
    }
    Ok(())
}

#[test]
fn vncdotool_types_points_and_follows_drawing() -> Result<()> {
    let Some(module) = found("vncdotool_types_points_and_follows_drawing") else {
        return Ok(());
    };
    // It cannot read CoRRE rectangles with subrectangles, which this picture has.
    for (number, ours) in ENCODINGS.into_iter().filter(|it| it.1 != "corre") {
        let mut machine = Machine::at_a_path(PAGE, SIZE)?;
        let mut script = Script(Eye::open(&mut look(module, &machine.address, number))?);
        // No change of size: vncdotool would still request only the old size's part.
        follows(&mut script, &mut machine, Near::Same, None).context(ours)?;
    }
    Ok(())
}

#[test]
fn vncdotool_logs_in_with_a_password() -> Result<()> {
    let Some(module) = found("vncdotool_logs_in_with_a_password") else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let words = format!(",password={}", text_file(folder.path(), "password", "secret")?);
    let mut machine = Machine::at_a_port(PATTERN, SIZE, &words)?;
    let address = format!("localhost:{}", machine.port()?);
    let mut command = look(module, &address, 16);
    let mut script = Script(Eye::open(command.env("VNC_PASSWORD", "secret"))?);
    settle(&mut machine, Near::Same, |machine| script.picture(machine))?;
    ensure!(machine.viewer()?["security"] == "vnc");
    Ok(())
}

#[test]
fn vncsnapshot_writes_nearly_the_same_picture() -> Result<()> {
    let test = "vncsnapshot_writes_nearly_the_same_picture";
    let convert = "import sys; from PIL import Image; \
                   Image.open(sys.argv[1]).convert('RGB').save(sys.argv[2], format='PPM')";
    let here = || {
        Path::new("/usr/bin/vncsnapshot").exists() && is_here(PYTHON, &["-c", "import PIL.Image"])
    };
    if !can(test, "vncsnapshot or python3-pil is missing", here) {
        return Ok(());
    }
    let mut machine = Machine::at_a_port(PAGE, "1366x770", "")?;
    let place = format!("localhost::{}", machine.port()?);
    // Not with Tight: it claims to know LastRect, but then waits for more data after it.
    for encoding in ["raw", "corre", "hextile", "zlib"] {
        let (jpeg, plain) = (machine.path("seen.jpg"), machine.path("seen.ppm"));
        let mut snapshot = Command::new("vncsnapshot");
        // The file is always JPEG; `-nojpeg` only affects the transfer.
        snapshot.args(["-encodings", encoding, "-quality", "100", "-nojpeg", &place]).arg(&jpeg);
        let ended = finish(&mut snapshot)?;
        ensure!(ended.status == 0, "{encoding}: {ended:?}");
        let mut python = Command::new(PYTHON);
        let ended = finish(python.args(["-c", convert]).args([&jpeg, &plain]))?;
        ensure!(ended.status == 0, "{encoding}: {ended:?}");
        let seen = ppm(&fs::read(&plain)?)?;
        Near::Decibels(40.0).check(&seen, &machine.screenshot()?)?;
    }
    Ok(())
}
