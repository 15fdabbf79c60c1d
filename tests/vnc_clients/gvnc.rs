//! gtk-vnc: its library in each encoding, format and security type that it has, and its program
//! `gvnccapture`.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use transom_tests::print::Picture;
use transom_tests::program::finish;
use transom_tests::python::PYTHON;

use crate::eye::{Eye, NO_POINTER, is_here};
use crate::hands::follows;
use crate::machine::Machine;
use crate::picture::Near;
use crate::{CERTIFICATE, JPEG, KEY, PAGE, PATTERN, can, text_file};

/// Its encodings: the number, and our name.
const ENCODINGS: [(i32, &str); 4] = [(0, "raw"), (2, "rre"), (5, "hextile"), (16, "zrle")];
/// DesktopSize, ExtendedDesktopSize, LastRect, DesktopName, LED State, Pointer Motion Change,
/// Cursor.
const CAN: &str = "-223,-308,-224,-307,-261,-257,-239";

fn found(test: &str) -> bool {
    let script = "import gi; gi.require_version('GVnc', '1.0'); from gi.repository import GVnc";
    can(test, "no gir1.2-gtk-vnc-2.0", || is_here(PYTHON, &["-c", script]))
}

fn look(address: &str, encodings: &str, (bits, order): (u32, &str), security: &str) -> Command {
    let mut command = Command::new(PYTHON);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("vnc_clients/gvnc.py");
    command.arg(script).args([address, encodings, &bits.to_string(), order, security]);
    command
}

#[test]
fn gtk_vnc_shows_the_same_picture_in_all_encodings_and_formats() -> Result<()> {
    if !found("gtk_vnc_shows_the_same_picture_in_all_encodings_and_formats") {
        return Ok(());
    }
    for draw in [PATTERN, PAGE] {
        let mut machine = Machine::at_a_path(draw, "1366x770")?;
        // Tight without a level of quality is lossless.
        for (number, ours) in ENCODINGS.into_iter().chain([(7, "tight")]) {
            let formats: &[_] = if draw == PAGE {
                &[(32, "little")]
            } else {
                &[(32, "little"), (16, "little"), (8, "little"), (32, "big"), (16, "big")]
            };
            for format in formats {
                let numbers = format!("{number},{CAN}");
                let mut eye = Eye::open(&mut look(&machine.address, &numbers, *format, "1"))?;
                eye.settle(&mut machine, Near::bits(format.0).cut())?;
                let viewer = machine.viewer()?;
                ensure!(viewer["encoding"] == ours, "{number}: {viewer}");
                drop(eye);
                machine.is_left()?;
            }
        }
    }
    Ok(())
}

#[test]
fn gtk_vnc_shows_jpeg_in_the_requested_quality() -> Result<()> {
    if !found("gtk_vnc_shows_jpeg_in_the_requested_quality") {
        return Ok(());
    }
    let (draw, bounds) = JPEG[0];
    let mut machine = Machine::at_a_path(draw, "1280x800")?;
    for quality in [0, 5, 9] {
        let numbers = format!("7,{},{CAN}", quality - 32);
        let mut eye = Eye::open(&mut look(&machine.address, &numbers, (32, "little"), "1"))?;
        eye.settle(&mut machine, Near::Decibels(bounds[usize::try_from(quality)?]))?;
        drop(eye);
        machine.is_left()?;
    }
    Ok(())
}

#[test]
fn gtk_vnc_logs_in_and_rejects_unknown_certificates() -> Result<()> {
    if !found("gtk_vnc_logs_in_and_rejects_unknown_certificates") {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let file = |name: &str, text: &str| text_file(folder.path(), name, text);
    let password = format!(",password={}", file("password", "secret")?);
    let known = |machine: &Machine, kind: &str| -> Result<Command> {
        let address = format!("localhost:{}", machine.port()?);
        let mut command = look(&address, &format!("16,{CAN}"), (32, "little"), kind);
        command.envs([("VNC_USER", "me"), ("VNC_PASSWORD", "secret")]);
        Ok(command)
    };
    let mut machine = Machine::at_a_port(PATTERN, "1280x800", &password)?;
    let mut command = known(&machine, "2")?;
    let mut eye = Eye::open(&mut command)?;
    eye.settle(&mut machine, Near::Same)?;
    ensure!(machine.viewer()?["security"] == "vnc");
    Eye::refused(command.env("VNC_PASSWORD", "Secret"))?;
    // It trusts only certificates in its user's folder, where ours is missing.
    let tls = format!(",tls-cert={},tls-key={}", file("c", CERTIFICATE)?, file("k", KEY)?);
    let machine = Machine::at_a_port(PATTERN, "1280x800", &(tls + &password))?;
    for kind in ["19.261", "19.262"] {
        let said = Eye::refused(&mut known(&machine, kind)?)?;
        ensure!(said.contains("The certificate is not trusted"), "{said}");
    }
    Ok(())
}

#[test]
fn gtk_vnc_follows_drawing_and_resizing() -> Result<()> {
    if !found("gtk_vnc_follows_drawing_and_resizing") {
        return Ok(());
    }
    for (number, bits) in [(0, 32), (5, 8), (7, 32), (16, 16)] {
        let mut machine = Machine::at_a_path(PAGE, "1280x800")?;
        let numbers = format!("{number},{CAN}");
        let mut eye = Eye::open(&mut look(&machine.address, &numbers, (bits, "little"), "1"))?;
        follows(&mut eye, &mut machine, Near::bits(bits).cut(), Some((1024, 768)))?;
        ensure!(eye.ask("cursor")? == NO_POINTER);
    }
    Ok(())
}

#[test]
fn gvnccapture_writes_the_same_picture() -> Result<()> {
    let name = "gvnccapture_writes_the_same_picture";
    if !can(name, "no gvncviewer", || is_here("gvnccapture", &["--help"])) {
        return Ok(());
    }
    for draw in [PATTERN, PAGE] {
        let mut machine = Machine::at_a_port(draw, "1366x770", "")?;
        let (display, file) = (machine.port()?.checked_sub(5900), machine.path("seen.png"));
        let display = display.context("a port above 5900")?;
        let mut capture = Command::new("gvnccapture");
        let ended = finish(capture.arg(format!("localhost:{display}")).arg(&file))?;
        ensure!(ended.status == 0, "{ended:?}");
        Near::Same.check(&png_file(&file)?, &machine.screenshot()?)?;
    }
    Ok(())
}

/// Reads a PNG file with three or four bytes per pixel.
fn png_file(path: &Path) -> Result<Picture> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut reader = png::Decoder::new(BufReader::new(file)).read_info()?;
    let mut bytes = vec![0; reader.output_buffer_size().context("a picture")?];
    let info = reader.next_frame(&mut bytes)?;
    let count = info.color_type.samples();
    ensure!(count >= 3, "{:?}", info.color_type);
    let pixels = bytes.chunks_exact(count).flat_map(|it| [it[2], it[1], it[0], 0]);
    Ok(Picture { width: info.width.try_into()?, pixels: pixels.collect() })
}
