//! Manifests of a user of the reference image, of which only `image:` is changed.

use std::fs::{self, File};
use std::io::Read as _;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use container::pod::SHUT_DOWN;
use serde_json::json;
use transom_tests::program::{Running, said};
use transom_tests::rehearsal::Log;
use transom_tests::rehearsal::steps::{CLIENT, PASSWORD, in_the_log};
use transom_tests::say;

use super::host::{Host, OURS};

const DEPLOYMENT: &str = include_str!("manifests/deployment.yml");
const CLAIM: &str = include_str!("manifests/pvc.yml");
/// Podman has neither. It publishes the ports of a pod.
const OTHERS: [&str; 2] =
    [include_str!("manifests/service.yml"), include_str!("manifests/ingress.yml")];
const SCRIPTS: &str = include_str!("scripts.yml");
const SECRET: &str = "windows-user-credential-secret";
/// The names that Podman gives the Deployment's pod and container.
const POD: &str = "windows-deployment-pod-0";
const CONTAINER: &str = "windows-deployment-pod-0-windows";
/// terminationGracePeriodSeconds of the Deployment.
const GRACE: Duration = Duration::from_secs(120);
const PAGE: &str = "127.0.0.1:8006";

const STARTED: [&str; 2] = ["Downloading Windows 11", "Windows started successfully"];

/// Up to Windows Setup, which reads the user's settings. Then the pod ends, and starts again
/// without a download.
pub(crate) fn start(host: &Host) -> anyhow::Result<()> {
    let manifests = Manifests::apply(host)?;
    let (mut log, mut reached) = (manifests.start()?, Log::default());
    STARTED.iter().try_for_each(|words| reached.reach(&mut log, words))?;
    for words in &CLIENT.steps()[..3] {
        reached.reach(&mut log, words)?;
    }
    let (ready, status) = (host.page(&format!("{PAGE}/readyz"))?, manifests.status()?);
    ensure!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    ensure!(status.contains("\"stage\": "), "{status}");
    manifests.stop()?;
    let mut log = manifests.start()?;
    Log::default().reach(&mut log, STARTED[1])?;
    ensure!(!log.stdout.text().contains(STARTED[0]), "{}", log.stdout.text());
    manifests.stop()
}

/// From the download to the desktop, and from the installed disk.
pub(crate) fn install(host: &Host) -> anyhow::Result<()> {
    let manifests = Manifests::apply(host)?;
    let (mut log, mut reached) = (manifests.start()?, Log::default());
    STARTED.iter().try_for_each(|words| reached.reach(&mut log, words))?;
    for words in CLIENT.steps() {
        reached.reach(&mut log, in_the_log(&words))?;
    }
    // The number that Windows' entry gets on the machine of the reference image: tools count it.
    let entry = "BdsDxe: starting Boot0004 \"Windows Boot Manager\"";
    ensure!(log.stdout.text().contains(entry), "no {entry}: {}", log.stdout.text());
    let (ready, status) = (host.page(&format!("{PAGE}/readyz"))?, manifests.status()?);
    ensure!(ready.starts_with("HTTP/1.1 200"), "{ready}");
    ensure!(status.contains("\"stage\": \"ready\""), "{status}");
    manifests.stop()?;
    let mut log = manifests.start()?;
    let mut reached = Log::default();
    for words in CLIENT.again() {
        reached.reach(&mut log, &words)?;
    }
    ensure!(!log.stdout.text().contains("Downloading"), "{}", log.stdout.text());
    manifests.stop()
}

/// The manifests of a user, in files.
struct Manifests<'a> {
    host: &'a Host,
    deployment: String,
    scripts: String,
}

impl<'a> Manifests<'a> {
    /// Makes the secret and the volume.
    fn apply(host: &'a Host) -> anyhow::Result<Self> {
        let write = |name: &str, text: &str| {
            let path = host.folder.path().join(name);
            fs::write(&path, text)?;
            anyhow::Ok(path.display().to_string())
        };
        let ours = DEPLOYMENT.replace("image: dockurr/windows", &format!("image: {OURS}"));
        let deployment = write("deployment.yml", &[&ours, OTHERS[0], OTHERS[1]].join("\n---\n"))?;
        let [user, password] = ["ada", PASSWORD].map(|it| BASE64_STANDARD.encode(it));
        let secret = json!({ "username": user, "password": password }).to_string();
        said(&mut host.engine.podman(&["secret", "create", SECRET, &write("secret", &secret)?]))?;
        said(&mut host.engine.podman(&["kube", "play", &write("pvc.yml", CLAIM)?]))?;
        Ok(Self { host, deployment, scripts: write("scripts.yml", SCRIPTS)? })
    }

    fn podman(&self, words: &[&str]) -> Command {
        self.host.engine.podman(words)
    }

    /// Starts the pod, and returns its log.
    fn start(&self) -> anyhow::Result<Running> {
        let play = ["kube", "play", "--configmap", &self.scripts, &self.deployment];
        said(&mut self.podman(&play))?;
        self.host.log(CONTAINER)
    }

    fn status(&self) -> anyhow::Result<String> {
        said(&mut self.podman(&["exec", CONTAINER, "/usr/bin/transom", "status"]))
    }

    /// Ends the pod as `kubectl delete` does. `kube down` of Podman 4 kills its containers at once.
    fn stop(&self) -> anyhow::Result<()> {
        // Open, the file outlives its container, and has more than those who follow it get.
        let form = ["inspect", "--format", "{{.HostConfig.LogConfig.Path}}", CONTAINER];
        let mut log = File::open(said(&mut self.podman(&form))?.trim())?;
        let start = Instant::now();
        let grace = GRACE.as_secs().to_string();
        said(&mut self.podman(&["pod", "stop", "--time", &grace, POD]))?;
        said(&mut self.podman(&["kube", "down", &self.deployment]))?;
        let (took, mut text) = (start.elapsed(), String::new());
        log.read_to_string(&mut text)?;
        ensure!(text.contains(SHUT_DOWN), "no {SHUT_DOWN} after {took:?}: {text}");
        ensure!(!text.contains("killing it") && took < GRACE, "after {took:?}: {text}");
        say!("{:6.1} s: kube down", took.as_secs_f64());
        Ok(())
    }
}

/// The next test begins without secret and volume.
impl Drop for Manifests<'_> {
    fn drop(&mut self) {
        said(&mut self.podman(&["pod", "rm", "--all", "--force", "--time", "0"])).ok();
        said(&mut self.podman(&["secret", "rm", SECRET])).ok();
        said(&mut self.podman(&["volume", "rm", "--all", "--force"])).ok();
    }
}
