//! Kubernetes manifests of the reference image's users, run with `podman kube play`.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use transom_tests::engine::{Engine, IMAGE, Namespace};
use transom_tests::program::{PATIENCE, said};

use super::runs_here;

/// The Deployment of a user, and the ConfigMap that it mounts.
const DEPLOYMENT: &str = include_str!("../kube/manifests/deployment.yml");
const SCRIPTS: &str = include_str!("../kube/scripts.yml");
const SECRET: &str = "windows-user-credential-secret";
/// The secret's values in base64, the form that Podman expects for pods.
const WORDS: &str = r#"{"username":"YWRh","password":"YSBsb25nIHdvcmQ="}"#;
/// The name that Podman gives the Deployment's container.
const CONTAINER: &str = "windows-deployment-pod-0-windows";

/// A network namespace in which Podman runs the manifests.
struct Host {
    engine: Engine,
    space: Namespace,
    folder: TempDir,
}

impl Host {
    fn new(engine: &Engine, version: &str) -> Result<Self> {
        let space = Namespace::make(&format!("transom-{}-kube", std::process::id()))?;
        said(&mut space.run(&["ip", "link", "set", "lo", "up"]))?;
        let folder = tempfile::tempdir()?;
        let text = DEPLOYMENT.replace("dockurr/windows", IMAGE).replace("'11'", version);
        fs::write(folder.path().join("all.yaml"), format!("{SCRIPTS}---\n{text}"))?;
        fs::write(folder.path().join("secret"), WORDS)?;
        let host = Self { engine: engine.within(&space), space, folder };
        // Remove the remains of a killed run.
        host.clear();
        let secret = host.path("secret");
        said(&mut host.engine.podman(&["secret", "create", SECRET, &secret]))?;
        said(&mut host.engine.podman(&["kube", "play", &host.path("all.yaml")]))?;
        Ok(host)
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn clear(&self) {
        said(&mut self.engine.podman(&["kube", "down", &self.path("all.yaml")])).ok();
        said(&mut self.engine.podman(&["secret", "rm", SECRET])).ok();
        said(&mut self.engine.podman(&[
            "volume",
            "rm",
            "--force",
            "windows-persistent-volume-claim",
        ]))
        .ok();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Repeats a command until its output contains `word`.
fn until(mut ask: impl FnMut() -> Command, word: &str) -> Result<String> {
    let end = Instant::now() + PATIENCE;
    loop {
        let output = ask().output()?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        if text.contains(word) {
            return Ok(text);
        }
        ensure!(Instant::now() < end, "no {word} in {text}");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn manifests_of_the_reference_image_work_unchanged() -> Result<()> {
    if !runs_here("manifests") {
        return Ok(());
    }
    let engine = Engine::get()?;
    // The pod reports that this Windows is not downloaded, and the engine restarts it again and
    // again.
    let host = Host::new(engine, "tiny11")?;
    let sentence = "mount it as /custom.iso";
    until(|| host.engine.podman(&["logs", CONTAINER]), sentence)?;
    drop(host);
    let host = Host::new(engine, "probe")?;
    let form = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}";
    let infra = said(&mut host.engine.podman(&["inspect", "--format", "{{.Pod}}", CONTAINER]))?;
    let infra = format!("{}-infra", infra.trim().get(..12).context("a pod")?);
    let address = said(&mut host.engine.podman(&["inspect", "--format", form, &infra]))?;
    let address = address.split_whitespace().next().context("an address")?.to_owned();
    let page = |path: &str, more: &[&str]| {
        let place = format!("http://{address}:8006{path}");
        let words = [&["curl", "--silent", "--include", "--max-time", "20"][..], more, &[&place]];
        host.space.run(&words.concat())
    };
    until(|| page("/readyz", &[]), "HTTP/1.1 200")?;
    let state = said(&mut page("/api/v1/state", &["--user", "ada:a long word"]))?;
    ensure!(state.contains("\"phase\":\"running\""), "{state}");
    Ok(())
}
