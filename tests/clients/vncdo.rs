//! vncdotool, which is fetched as the list beside it says, and `vncsnapshot`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

use anyhow::{Result, ensure};
use transom_tests::print::Picture;
use transom_tests::program::finish;

use crate::eye::{Eye, is_here, settle};
use crate::machine::Machine;
use crate::picture::{Near, ppm};
use crate::{PAGE, PATTERN, PYTHON, can, text_file};

/// Where its module is; nothing where it cannot be had.
fn module() -> Option<&'static Path> {
    static MODULE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        let needed = "import twisted, PIL, cryptography, pip";
        is_here(PYTHON, &["-c", needed]).then(|| fetch().expect("vncdotool"))
    };
    MODULE.get_or_init(make).as_deref()
}

/// Fetches it once, for as long as the list stays as it is.
fn fetch() -> Result<PathBuf> {
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/requirements.txt");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vncdotool");
    let (wanted, stamp) = (fs::read(&list)?, folder.join("installed"));
    if fs::read(&stamp).is_ok_and(|it| it == wanted) {
        return Ok(folder);
    }
    let mut pip = Command::new(PYTHON);
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--upgrade"]);
    pip.args(["--disable-pip-version-check", "--root-user-action=ignore", "--only-binary=:all:"]);
    let ended = finish(pip.arg("--target").arg(&folder).arg("--requirement").arg(&list))?;
    ensure!(ended.status == 0, "{}", ended.stderr);
    fs::write(&stamp, wanted)?;
    Ok(folder)
}

fn found(test: &str) -> Option<&'static Path> {
    let reason = "python3-twisted, python3-pil or python3-pip is missing";
    can(test, reason, || module().is_some()).then(module)?
}

fn look(module: &Path, address: &str, encoding: i32) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/vncdo.py");
    let mut command = Command::new(PYTHON);
    command.arg(script).args([address, &encoding.to_string()]).env("PYTHONPATH", module);
    command
}

/// All of the picture, asked for anew.
fn picture(eye: &mut Eye, machine: &Machine) -> Result<Picture> {
    let path = machine.path("seen");
    eye.ask(&format!("picture {}", path.display()))?;
    ppm(&fs::read(path)?)
}

#[test]
fn vncdotool_comes_in_with_a_password() -> Result<()> {
    let Some(module) = found("vncdotool_comes_in_with_a_password") else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let words = format!(",password={}", text_file(folder.path(), "password", "secret")?);
    let mut machine = Machine::at_a_port(PATTERN, "1280x800", &words)?;
    let address = format!("localhost:{}", machine.port()?);
    let mut command = look(module, &address, 16);
    let mut eye = Eye::open(command.env("VNC_PASSWORD", "secret"))?;
    settle(&mut machine, Near::Same, |machine| picture(&mut eye, machine))?;
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
    // With Tight it says that it knows LastRect, and then waits for more behind it.
    for encoding in ["raw", "corre", "hextile", "zlib"] {
        let (jpeg, plain) = (machine.path("seen.jpg"), machine.path("seen.ppm"));
        let mut snapshot = Command::new("vncsnapshot");
        // The file that it writes is JPEG as well.
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
