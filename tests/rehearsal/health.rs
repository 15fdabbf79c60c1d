//! Reports of the pod during an installation: its events, its health pages, the page for people,
//! and `transom status`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, ensure};
use container::story::installation::STAGES;
use serde_json::Value;
use transom_tests::patience::Patience;
use transom_tests::program::{Running, said};
use transom_tests::{lab, say};

use super::pod::{ADDRESS, Place};
use super::steps::BOOT;

const WEB: u16 = 8006;
/// Maximum bytes of a page.
const MAX_PAGE: u64 = 1 << 20;

/// A viewer of a pod's page, from the pod's start to its end.
pub(crate) struct Health<'a> {
    place: &'a Place,
    /// The scenes that the page shows, in their order.
    scenes: Arc<Mutex<Vec<Value>>>,
}

impl<'a> Health<'a> {
    /// Watches the pod that has just been started.
    pub(crate) fn watch(place: &'a Place) -> anyhow::Result<Self> {
        let scenes = Arc::<Mutex<Vec<Value>>>::default();
        let mut patience = Patience::new(BOOT);
        let mut stream = loop {
            match place.connect(WEB) {
                Ok(stream) => break stream,
                Err(error) => ensure!(patience.rest(), "port {WEB}: {error:#}"),
            }
        };
        let kept = scenes.clone();
        // The pod ends each connection some time, and browsers come again.
        place.inside(move || -> anyhow::Result<()> {
            loop {
                keep(&stream, &kept)?;
                stream = TcpStream::connect((ADDRESS, WEB))?;
            }
        })?;
        Ok(Self { place, scenes })
    }

    fn scenes(&self) -> Vec<Value> {
        self.scenes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until this percentage of the medium is there.
    pub(crate) fn downloads(&self, percent: u64) -> anyhow::Result<()> {
        let mut patience = Patience::new(BOOT);
        loop {
            let scenes = self.scenes();
            let done = |scene: &Value| scene["thousandths"].as_u64().unwrap_or(0) >= 10 * percent;
            if scenes.iter().any(|scene| scene["transfer"].is_object() && done(scene)) {
                return Ok(());
            }
            ensure!(patience.rest(), "no {percent} %: {:?}", scenes.last());
        }
    }

    /// Asks as programs do, in the middle of an installation.
    pub(crate) fn ask(&self, pod: &Running) -> anyhow::Result<()> {
        let (status, why) = page(self.place, "/readyz")?;
        match status {
            200 => ensure!(pod.stdout.text().contains("Windows is ready"), "ready too early"),
            _ => ensure!(status == 503 && !why.trim().is_empty(), "/readyz: {status}: {why}"),
        }
        let told = told(pod)?;
        ensure!(told.contains("phase") && told.contains("step"), "transom status: {told}");
        Ok(())
    }

    /// Waits until the pod says that the guest is ready.
    pub(crate) fn is_ready(&self, pod: &Running) -> anyhow::Result<()> {
        let mut patience = Patience::new(BOOT);
        loop {
            match page(self.place, "/readyz") {
                Ok((200, _)) => return Ok(()),
                other => ensure!(patience.rest(), "/readyz: {other:?}: {}", pod.stdout.text()),
            }
        }
    }

    /// Checks all reports of a whole installation, at its end.
    pub(crate) fn reported_all(&self, pod: &Running, downloaded: bool) -> anyhow::Result<()> {
        let scenes = self.scenes();
        self.is_ready(pod)?;
        let told = told(pod)?;
        for words in ["running", "ready", "ended with status 3"] {
            ensure!(told.contains(words), "transom status has no {words:?}: {told}");
        }
        let (status, text) = page(self.place, "/progress")?;
        ensure!(status == 200 && text.contains("\"pod/status.js\""), "/progress: {status}: {text}");
        let (status, script) = page(self.place, "/pod/status.js")?;
        ensure!(
            status == 200 && script.contains("EventSource(\"events\")"),
            "status.js: {status}: {script}"
        );
        let phases = different(&scenes, |scene| &scene["phase"]);
        ensure!(phases == ["preparing", "booting", "running"], "{phases:?}");
        let stages = different(&scenes, |scene| &scene["installation"]["stage"]);
        let number = |stage: &String| STAGES.iter().position(|(_, name, _)| name == stage);
        ensure!(stages.is_sorted_by_key(number), "{stages:?}");
        for stage in ["windows-pe", "applied", "specialize", "ready"] {
            ensure!(stages.iter().any(|it| it == stage), "no {stage}: {stages:?}");
        }
        let bytes = different(&scenes, |scene| &scene["transfer"]["bytes"]);
        ensure!(downloaded == (bytes.len() > 3), "the download at {bytes:?} bytes");
        say!("{} scenes, a download at {} places, {stages:?}", scenes.len(), bytes.len());
        Ok(())
    }
}

/// Keeps the scenes of a connection until its end.
fn keep(stream: &TcpStream, kept: &Mutex<Vec<Value>>) -> anyhow::Result<()> {
    stream.set_read_timeout(None)?;
    ask(stream, "/events")?;
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        if let Some(scene) = line.strip_prefix("data: ") {
            let scene = serde_json::from_str(scene)?;
            kept.lock().unwrap_or_else(PoisonError::into_inner).push(scene);
        }
    }
    Ok(())
}

/// The values of a field, each once where it does not change.
fn different(scenes: &[Value], field: impl Fn(&Value) -> &Value) -> Vec<String> {
    let values = scenes.iter().map(field).filter(|value| !value.is_null());
    let mut texts: Vec<_> =
        values.map(|it| it.as_str().map_or_else(|| it.to_string(), str::to_owned)).collect();
    texts.dedup();
    texts
}

/// The words of `transom status --text` in the pod's container.
fn told(pod: &Running) -> anyhow::Result<String> {
    let transom = lab::vmm()?.with_file_name("transom");
    let pid = pod.pid().as_raw_nonzero().to_string();
    let mut command = Command::new("nsenter");
    said(command.args(["--target", &pid, "--mount"]).arg(transom).args(["status", "--text"]))
}

/// The status and the text of a page.
fn page(place: &Place, path: &str) -> anyhow::Result<(u16, String)> {
    let stream = place.connect(WEB)?;
    ask(&stream, path)?;
    let mut answer = Vec::new();
    stream.take(MAX_PAGE).read_to_end(&mut answer).with_context(|| path.to_owned())?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|number| number.parse().ok());
    let text = answer.split_once("\r\n\r\n").map_or("", |(_, text)| text).to_owned();
    Ok((status.with_context(|| format!("{path}: {answer:?}"))?, text))
}

fn ask(mut stream: &TcpStream, path: &str) -> anyhow::Result<()> {
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {ADDRESS}:{WEB}\r\nConnection: close\r\n\r\n");
    Ok(stream.write_all(request.as_bytes())?)
}
