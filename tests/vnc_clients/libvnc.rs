//! LibVNC's client library, in each encoding, format and security type that it has.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use transom_tests::program::finish;
use vmm::control;

use crate::eye::{Eye, NO_POINTER};
use crate::hands::follows;
use crate::machine::Machine;
use crate::picture::{Near, decibels};
use crate::{CERTIFICATE, JPEG, KEY, PAGE, PATTERN, can, text_file};

/// The encodings that we send: its name, and ours.
const ENCODINGS: [(&str, &str); 8] = [
    ("raw", "raw"),
    ("rre", "rre"),
    ("corre", "corre"),
    ("hextile", "hextile"),
    ("zlib", "zlib"),
    ("trle", "trle"),
    ("zrle", "zrle"),
    ("tight", "tight"),
];

/// The viewer, compiled once; `None` without the library's headers.
fn viewer() -> Option<&'static Path> {
    static VIEWER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        let header = Path::new("/usr/include/rfb/rfbclient.h");
        header.exists().then(|| compile().expect("a program in C"))
    };
    VIEWER.get_or_init(make).as_deref()
}

fn compile() -> Result<PathBuf> {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libvnc");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("vnc_clients/libvnc.c");
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"]).args([&program, &source]);
    let ended = finish(gcc.arg("-lvncclient")).context("gcc")?;
    ensure!(ended.status == 0, "{}", ended.stderr);
    Ok(program)
}

/// The viewer; without it, the test is reported as not run.
fn found(test: &str) -> Option<&'static Path> {
    can(test, "no libvncserver-dev", || viewer().is_some()).then(viewer)?
}

/// The viewer's command for an encoding and a number of bits per pixel.
fn look(viewer: &Path, address: &str, encoding: &str, bits: u32) -> Command {
    order(viewer, address, encoding, (bits, "little"))
}

fn order(viewer: &Path, address: &str, encoding: &str, (bits, order): (u32, &str)) -> Command {
    let mut command = Command::new(viewer);
    command.args([address, encoding, &bits.to_string(), order, "none", "1"]);
    command
}

#[test]
fn libvnc_shows_the_same_picture_in_all_encodings_and_formats() -> Result<()> {
    let Some(viewer) = found("libvnc_shows_the_same_picture_in_all_encodings_and_formats") else {
        return Ok(());
    };
    // Sizes that are not a multiple of the tiles, and one wider than Tight's rectangles.
    for (draw, display) in [(PATTERN, "1366x770"), (PAGE, "1280x800"), (PATTERN, "2560x1440")] {
        let mut machine = Machine::at_a_path(draw, display)?;
        let formats: &[_] = match display {
            "2560x1440" => &[(32, "little")],
            _ => &[(32, "little"), (16, "little"), (8, "little"), (32, "big"), (16, "big")],
        };
        for ((name, ours), format) in
            ENCODINGS.iter().flat_map(|it| formats.iter().map(move |format| (it, *format)))
        {
            // In these encodings, the library reads pixels in its host's byte order.
            if format == (32, "big") && ["trle", "zrle", "tight"].contains(name) {
                continue;
            }
            let mut eye = Eye::open(&mut order(viewer, &machine.address, name, format))?;
            eye.settle(&mut machine, Near::bits(format.0))?;
            let viewer = machine.viewer()?;
            ensure!(viewer["encoding"] == *ours, "{name}: {viewer}");
            drop(eye);
            machine.is_left()?;
        }
    }
    Ok(())
}

#[test]
fn libvnc_shows_jpeg_in_the_requested_quality() -> Result<()> {
    let Some(viewer) = found("libvnc_shows_jpeg_in_the_requested_quality") else { return Ok(()) };
    for (draw, bounds) in JPEG {
        let mut machine = Machine::at_a_path(draw, "1280x800")?;
        for (quality, least) in (0..).zip(bounds) {
            let mut command = Command::new(viewer);
            let quality = quality.to_string();
            command.args([&machine.address, "tight", "32", "little", &quality, "1"]);
            let mut eye = Eye::open(&mut command)?;
            let seen = eye.settle(&mut machine, Near::Decibels(least))?;
            let ratio = decibels(&seen, &machine.screenshot()?);
            eprintln!("{draw:?} at level {quality}: {ratio:.1} dB, at least {least} dB");
            drop(eye);
            machine.is_left()?;
        }
    }
    Ok(())
}

#[test]
fn libvnc_logs_in_with_every_security_type() -> Result<()> {
    let Some(viewer) = found("libvnc_logs_in_with_every_security_type") else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let file = |name: &str, text: &str| text_file(folder.path(), name, text);
    let (short, long) = (file("short", "secret")?, file("long", "a longer secret")?);
    let tls = format!("tls-cert={},tls-key={}", file("c", CERTIFICATE)?, file("k", KEY)?);
    for (words, security, password) in [
        (String::new(), "none", ""),
        (format!(",password={short}"), "vnc", "secret"),
        (format!(",{tls}"), "x509-none", ""),
        (format!(",{tls},password={short}"), "x509-plain", "secret"),
        (format!(",{tls},user=me,password={long}"), "x509-plain", "a longer secret"),
    ] {
        let mut machine = Machine::at_a_port(PATTERN, "1280x800", &words)?;
        let address = format!("localhost:{}", machine.port()?);
        let known = |password: &str| {
            let mut command = look(viewer, &address, "zrle", 32);
            command.envs([("VNC_USER", "me"), ("VNC_PASSWORD", password)]);
            command.env("VNC_CA", folder.path().join("c"));
            command
        };
        if !password.is_empty() {
            Eye::refused(&mut known("Secret"))?;
        }
        let mut eye = Eye::open(&mut known(password))?;
        eye.settle(&mut machine, Near::Same)?;
        let viewer = machine.viewer()?;
        ensure!(viewer["security"] == security, "{words}: {viewer}");
        ensure!(viewer["access"] == "full", "{words}: {viewer}");
    }
    Ok(())
}

#[test]
fn libvnc_follows_drawing_and_resizing() -> Result<()> {
    let Some(viewer) = found("libvnc_follows_drawing_and_resizing") else { return Ok(()) };
    for (name, bits) in [("raw", 32), ("hextile", 16), ("zlib", 32), ("zrle", 8), ("tight", 32)] {
        let mut machine = Machine::at_a_path(PAGE, "1280x800")?;
        let mut eye = Eye::open(&mut look(viewer, &machine.address, name, bits))?;
        follows(&mut eye, &mut machine, Near::bits(bits), Some((1024, 768)))?;
        ensure!(eye.ask("cursor")? == NO_POINTER);
    }
    Ok(())
}

/// Height in pixels of a line of the scrolling text.
const LINE: usize = 20;

/// A scene for the probe: a page of 800x600 that scrolls by one line in each of 40 frames.
fn page_that_scrolls() -> Vec<u8> {
    let (width, height, frames) = (800, 600, 40);
    let mut noise = 1_u32;
    let mut random = move || {
        noise ^= noise << 13;
        noise ^= noise >> 17;
        noise ^= noise << 5;
        noise
    };
    let mut pixels = vec![0x00ff_ffff_u32; width * (height + frames * LINE)];
    for line in pixels.chunks_mut(width * LINE) {
        // Lines have different lengths.
        let end = 100 + random() as usize % 700;
        // Pixels of letters are two rows high.
        for rows in line.chunks_mut(2 * width).take(8) {
            for x in 8..end {
                let ink = random().is_multiple_of(3);
                rows[x] = if ink { 0x0020_3040 } else { 0x00ff_ffff };
                rows[width + x] = rows[x];
            }
        }
    }
    let (first, stride) = (4096, 4 * width);
    let mut numbers = vec![1, width, height, 0, 0, width, height, first, stride, frames];
    numbers.extend([stride * LINE, 0, first]);
    let mut scene: Vec<u8> =
        numbers.iter().flat_map(|it| u32::try_from(*it).unwrap_or(0).to_le_bytes()).collect();
    scene.resize(first, 0);
    scene.extend(pixels.iter().flat_map(|pixel| pixel.to_le_bytes()));
    scene
}

#[test]
fn libvnc_moves_scrolled_areas() -> Result<()> {
    let Some(viewer) = found("libvnc_moves_scrolled_areas") else { return Ok(()) };
    let mut machine = Machine::on_stage(&page_that_scrolls(), "800x600")?;
    for (encodings, bits) in
        [("copyrect raw", 32), ("zrle copyrect", 32), ("copyrect tight", 16), ("zrle", 32)]
    {
        let mut eye = Eye::open(&mut look(viewer, &machine.address, encodings, bits))?;
        eye.settle(&mut machine, Near::bits(bits))?;
        for _ in 0..8 {
            // The key's press and its release draw one frame each.
            machine.ask(&control::Command::Type { text: "a".into() })?;
            eye.settle(&mut machine, Near::bits(bits))?;
        }
        let said = eye.ask("moved")?;
        let moved: usize = said.trim_start_matches("moved ").parse().context(said)?;
        eprintln!("{encodings}: {moved} pixels were moved");
        // The number depends on when the server looks at the guest's picture.
        let wanted = if encodings.contains("copyrect") { 1..usize::MAX } else { 0..1 };
        ensure!(wanted.contains(&moved), "{encodings}: {moved} pixels were moved");
        drop(eye);
        machine.is_left()?;
    }
    Ok(())
}
