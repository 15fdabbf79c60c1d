//! Commands for people and for hooks, in the container where the pod runs.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use vmm::control::{Client, Command};

use crate::pod::child::program;
use crate::pod::room::Room;
use crate::settings::Settings;

/// How long `shutdown --wait` waits between two looks.
const LOOK: Duration = Duration::from_millis(200);

/// An answer comes within, and is no longer.
const ANSWER: Duration = Duration::from_secs(5);
const LONGEST: u64 = 64 << 10;

/// A connection to the machine of the pod.
fn machine() -> anyhow::Result<Client> {
    let room = Room::find().context("no machine runs here: `transom pod` has not started one")?;
    Client::connect(&room.control())
}

/// How the machine is, as JSON.
///
/// # Errors
///
/// When none runs here.
pub fn status() -> anyhow::Result<String> {
    let answer = machine()?.ask(&Command::Status)?;
    Ok(format!("{answer:#}\n"))
}

/// Asks the guest to shut down; with a time, waits until it is off.
///
/// # Errors
///
/// When it cannot be asked, or is not off in time.
pub fn shutdown(wait: Option<Duration>) -> anyhow::Result<()> {
    machine()?.ask(&Command::PowerButton)?;
    let Some(wait) = wait else { return Ok(()) };
    let start = Instant::now();
    while start.elapsed() < wait {
        if machine().is_err() {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
    bail!("the guest is not off after {} s", wait.as_secs())
}

/// Writes what the screen shows as a PNG file.
///
/// # Errors
///
/// When nothing is shown, or the file cannot be written.
pub fn screenshot(path: &Path) -> anyhow::Result<()> {
    let png = machine()?.png()?;
    std::fs::write(path, png).with_context(|| path.display().to_string())
}

/// What probes can ask, as words and as pages of the web port.
pub const PROBES: [(&str, &str); 3] =
    [("live", "/healthz"), ("started", "/startupz"), ("ready", "/readyz")];

/// Asks the web port of the pod for one of its pages of health, and tells what it says.
///
/// # Errors
///
/// What it says, when that is no.
pub fn probe(settings: &Settings, page: &str) -> anyhow::Result<String> {
    ensure!(settings.screen.web, "WEB=N: there is no web port to ask");
    let port = u16::try_from(settings.screen.web_port.0)?;
    let place = format!("port {port}");
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context(place.clone())?;
    stream.set_read_timeout(Some(ANSWER))?;
    write!(stream, "GET {page} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(LONGEST).read_to_string(&mut answer).context(place)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer of HTTP")?;
    let status = head.split(' ').nth(1).unwrap_or_default();
    ensure!(status == "200", "{}", body.trim_end());
    Ok(body.to_owned())
}

/// Becomes `vmm doctor`, which looks at this host and at the volume.
///
/// # Errors
///
/// When there is no `vmm`.
pub fn doctor(settings: &Settings, words: &[String]) -> anyhow::Result<u8> {
    let program = program();
    let mut doctor = process::Command::new(&program);
    doctor.arg("doctor").args(words);
    if settings.storage.folder.is_dir() && !words.iter().any(|word| word == "--disk") {
        doctor.arg("--disk").arg(&settings.storage.folder);
    }
    Err(doctor.exec()).with_context(|| program.display().to_string())
}

/// The password of the screen.
///
/// # Errors
///
/// When the screen asks for none.
pub fn password() -> anyhow::Result<String> {
    let file = Room::find().map(|room| room.password());
    let text = file.as_ref().and_then(|path: &PathBuf| std::fs::read_to_string(path).ok());
    let text = text.context("no pod runs here, or its screen asks for no password")?;
    Ok(format!("{text}\n"))
}
