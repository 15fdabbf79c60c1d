//! Clients of other protocols that connect to the screen: each gets an explanation, and other
//! viewers are not affected.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use transom_tests::print::Picture;
use transom_tests::program::PATIENCE;

use crate::machine::{Machine, until};
use crate::picture::Near;
use crate::{CERTIFICATE, KEY, PATTERN, can, text_file};

/// A viewer that knows only Raw, and follows the protocol.
struct RawViewer {
    line: TcpStream,
    size: (u16, u16),
}

impl RawViewer {
    /// Connects to a machine without a password.
    fn open(machine: &Machine) -> Result<Self> {
        let mut line = connect(machine)?;
        ensure!(take::<12>(&mut line)? == *b"RFB 003.008\n");
        line.write_all(b"RFB 003.008\n")?;
        ensure!(take(&mut line)? == [1, 1]);
        line.write_all(&[1])?;
        ensure!(take(&mut line)? == [0; 4]);
        line.write_all(&[1])?;
        let [a, b, c, d] = take(&mut line)?;
        take::<16>(&mut line)?;
        let mut name = vec![0; u32::from_be_bytes(take(&mut line)?).try_into()?];
        line.read_exact(&mut name)?;
        Ok(Self { line, size: (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])) })
    }

    fn encodings(&mut self, numbers: &[i32]) -> Result<()> {
        let mut out = vec![2, 0];
        out.extend(u16::try_from(numbers.len())?.to_be_bytes());
        numbers.iter().for_each(|number| out.extend(number.to_be_bytes()));
        Ok(self.line.write_all(&out)?)
    }

    /// Requests and reads the whole picture.
    fn look(&mut self) -> Result<Picture> {
        let (width, height) = self.size;
        let mut out = vec![3, 0, 0, 0, 0, 0];
        out.extend([width.to_be_bytes(), height.to_be_bytes()].concat());
        self.line.write_all(&out)?;
        let width = usize::from(width);
        let mut pixels = vec![0; 4 * width * usize::from(height)];
        let [kind, _, a, b] = take(&mut self.line)?;
        ensure!(kind == 0, "a message of type {kind}");
        for _ in 0..u16::from_be_bytes([a, b]) {
            let place: [u8; 8] = take(&mut self.line)?;
            ensure!(take(&mut self.line)? == [0; 4], "it is Raw");
            let number = |at: usize| usize::from(u16::from_be_bytes([place[at], place[at + 1]]));
            let (x, y, wide, high) = (number(0), number(2), number(4), number(6));
            for row in y..y + high {
                let at = 4 * (row * width + x);
                self.line.read_exact(pixels.get_mut(at..at + 4 * wide).context("a place")?)?;
            }
        }
        Ok(Picture { width, pixels })
    }

    fn sees(&mut self, machine: &mut Machine) -> Result<()> {
        Near::Same.check(&self.look()?, &machine.screenshot()?)
    }
}

fn connect(machine: &Machine) -> Result<TcpStream> {
    let line = TcpStream::connect(("localhost", machine.port()?))?;
    line.set_read_timeout(Some(PATIENCE))?;
    Ok(line)
}

fn take<const N: usize>(line: &mut TcpStream) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    line.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Sends `said`; returns all that the machine sends until it closes the connection.
fn answer(machine: &Machine, said: &[u8]) -> Result<String> {
    let mut line = connect(machine)?;
    line.write_all(said)?;
    let mut heard = Vec::new();
    // The machine may close the connection without reading everything.
    line.read_to_end(&mut heard).ok();
    Ok(String::from_utf8_lossy(&heard).into_owned())
}

/// Waits until a line of the machine's log contains these words.
fn logs(machine: &Machine, words: &str) -> Result<()> {
    until(words, || {
        let line = machine.log().lines().find(|line| line.contains(words)).map(|_| ());
        Ok(line)
    })
    .with_context(|| machine.log())
}

/// Bytes sent to the VNC port, a part of the answer, and a part of the log line.
const STRANGERS: [(&[u8], &str, &str); 6] = [
    (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a browser\r\n\r\n",
        "HTTP/1.1 400 Bad Request\r\n",
        "was not admitted: it speaks HTTP: this port is for VNC viewers",
    ),
    (
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\na=b",
        "This port speaks VNC (RFB), not HTTP: open it with a VNC viewer.",
        "was not admitted: it speaks HTTP: this port is for VNC viewers",
    ),
    (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03", "", "not admitted: it speaks TLS at once"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "RFB 003.008\n", "was not admitted: it sent `SSH-2.0-Open`"),
    (b"RFB 003.008\n\x13", "RFB 003.008\n\x01\x01", "security type 19: only 1 is offered"),
    (b"RFB 003.008\n\x01\x01\x63", "RFB 003.008\n", "disconnected: unknown message type 99"),
];

#[test]
fn other_protocols_get_an_error_and_viewers_are_unaffected() -> Result<()> {
    if !can("other_protocols_get_an_error_and_viewers_are_unaffected", "", || true) {
        return Ok(());
    }
    let mut machine = Machine::at_a_port(PATTERN, "800x600", "")?;
    let mut viewer = RawViewer::open(&machine)?;
    viewer.encodings(&[0])?;
    viewer.sees(&mut machine)?;
    for (said, heard, log) in STRANGERS {
        let back = answer(&machine, said)?;
        ensure!(back.contains(heard), "{}: {back}", said.escape_ascii());
        logs(&machine, log)?;
        viewer.sees(&mut machine)?;
    }
    let peers = machine.viewer()?;
    ensure!(peers["access"] == "full", "{peers}");
    Ok(())
}

#[test]
fn unknown_encodings_do_not_prevent_a_picture() -> Result<()> {
    if !can("unknown_encodings_do_not_prevent_a_picture", "", || true) {
        return Ok(());
    }
    let mut machine = Machine::at_a_port(PATTERN, "800x600", "")?;
    let many: Vec<i32> = (20_000..80_000).collect();
    // Ultra, ZYWRLE, H.264, and unknown numbers; with Raw among them, and without.
    let lists = [&[9, 17, 50, i32::MIN, i32::MAX, -1, 0x7fff][..], &[1000, 0, 1001], &[], &many];
    for numbers in lists {
        let mut viewer = RawViewer::open(&machine)?;
        viewer.encodings(numbers)?;
        viewer.sees(&mut machine)?;
        let status = machine.viewer()?;
        ensure!(status["encoding"] == "raw", "{status}");
        drop(viewer);
        machine.is_left()?;
    }
    Ok(())
}

#[test]
fn the_web_port_answers_other_protocols_with_an_error() -> Result<()> {
    if !can("the_web_port_answers_other_protocols_with_an_error", "", || true) {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let file = |name: &str, text: &str| text_file(folder.path(), name, text);
    let tls = format!(",tls-cert={},tls-key={}", file("c", CERTIFICATE)?, file("k", KEY)?);
    for (words, said, heard) in [
        ("", &b"RFB 003.008\n\r\n"[..], "HTTP/1.1 400 Bad Request\r\n"),
        (
            "",
            b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            "no such page",
        ),
        (
            "",
            b"GET /websockify HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            "HTTP/1.1 403 Forbidden",
        ),
        (&tls, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "its address begins with https://"),
    ] {
        let machine = Machine::for_browsers(PATTERN, "800x600", words)?;
        let back = answer(&machine, said)?;
        ensure!(back.contains(heard), "{}: {back}", said.escape_ascii());
        // The server still works: a second client gets the same answer.
        let back = answer(&machine, said)?;
        ensure!(back.contains(heard), "{}: {back}", said.escape_ascii());
    }
    Ok(())
}
