//! The Compose files of projects that start the reference image, each started with Podman: the
//! lines and pages that their scripts look for are there.

use std::fs::{self, File};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use container::pod::SHUT_DOWN;
use serde_json::Value;
use transom_tests::lab;
use transom_tests::program::said;
use transom_tests::python::PYTHON;
use transom_tests::rehearsal::Log;
use transom_tests::rehearsal::steps::{BOOT, INSTALL_BAT};

use super::host::{Host, OURS};

/// The files of `container/tests/reference/compose`.
pub(crate) const FILES: [&str; 9] = [
    "kvm-off",
    "linoffice",
    "omarchy",
    "opensandbox",
    "opensandbox-command",
    "winapps",
    "winboat",
    "winpodx",
    "winpodx-max",
];
/// Firmware's words. Those about an installed Windows come later; `manifests.rs` looks for them.
const FIRMWARE: &str = "BdsDxe: ";
/// LinOffice takes these words in the log for a broken container.
const BROKEN: [&str; 3] = ["error", "failed", "fatal"];
const GRACE: &str = "120";
/// Sends the first argument to the port that is the second, and shows the answers.
const NC: &str = "printf %s \"$1\" | timeout 60 nc -N 127.0.0.1 \"$2\"";
/// WinBoat's requests, none of which ends with a line feed.
const QMP: &str = "{\"execute\":\"qmp_capabilities\"}{\"execute\":\"query-commands\"}\
    {\"execute\":\"query-status\"}\
    {\"execute\":\"human-monitor-command\",\"arguments\":{\"command-line\":\"info qtree\"}}\
    {\"execute\":\"device_add\",\"arguments\":{\"driver\":\"usb-host\",\"id\":\"1133:49970\",\
    \"vendorid\":1133,\"productid\":49970,\"hostdevice\":\"/dev/bus/usb/001/004\"}}\
    {\"execute\":\"device_del\",\"arguments\":{\"id\":\"1133:49970\"}}";

pub(crate) fn starts(host: &Host, file: &'static str) -> anyhow::Result<()> {
    let compose = read(file)?;
    let pod = Pod::start(host, file, &compose["services"]["windows"])?;
    let mut log = host.log(file)?;
    let mut reached = Log::default();
    reached.reach(&mut log, "Downloading Windows 1")?;
    pod.has("/msg.html", "HTTP/1.1 200", "Downloading Windows 1")?;
    let wanted = words(&compose["x-test"]["log"]);
    let (started, earlier): (Vec<_>, Vec<_>) =
        wanted.iter().filter(|it| !it.starts_with(FIRMWARE)).partition(|it| it.contains("started"));
    for words in started {
        reached.reach(&mut log, words)?;
    }
    let text = log.stdout.text();
    for words in earlier.into_iter().chain(&words(&compose["x-test"]["warnings"])) {
        ensure!(text.contains(words.as_str()), "no {words:?}: {text}");
    }
    if let Some(port) = compose["x-test"]["qmp"].as_str() {
        let service = &compose["services"]["windows"];
        pod.answers_winboat(&host_port(service, port).context("no port of QMP")?)?;
    }
    // Tools take a missing message as the sign that there is a screen.
    pod.has("/msg.html", "HTTP/1.1 404", "")?;
    pod.has("/vnc.html?autoconnect=true&resize=remote", "HTTP/1.1 307", "location: ./")?;
    said(&mut host.engine.podman(&["stop", "--time", GRACE, file]))?;
    log.wait(BOOT)?;
    let text = log.stdout.text();
    ensure!(text.contains(SHUT_DOWN), "no {SHUT_DOWN}: {text}");
    let broken = |line: &&str| BROKEN.iter().any(|word| line.to_lowercase().contains(word));
    let line = text.lines().find(broken);
    ensure!(line.is_none(), "{line:?} looks like a failure");
    Ok(())
}

/// Reads a Compose file.
fn read(file: &str) -> anyhow::Result<Value> {
    const PROGRAM: &str =
        "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)";
    let folder = lab::repository().join("container/tests/reference/compose");
    let yaml =
        File::open(folder.join(file).with_extension("yaml")).with_context(|| file.to_owned())?;
    Ok(serde_json::from_str(&said(Command::new(PYTHON).args(["-c", PROGRAM]).stdin(yaml))?)?)
}

/// Another version in place of one whose file has a known length, which the fake Microsoft's has
/// not.
fn other_version(service: &Value) -> Vec<String> {
    let fixed = service["environment"]["VERSION"] == "10l";
    fixed.then(|| "VERSION=10".to_owned()).into_iter().collect()
}

/// A list of words, which may also be written as one text.
fn words(value: &Value) -> Vec<String> {
    match value {
        Value::Array(all) => all.iter().filter_map(|it| Some(it.as_str()?.to_owned())).collect(),
        Value::String(text) => text.split(' ').map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

/// The names and values of a mapping, as `NAME=VALUE`.
fn pairs(value: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let all = value.as_object().into_iter().flatten();
    all.map(|(name, value)| format!("{name}={}", text(value).replace("${HOME}", "/root"))).collect()
}

/// A container with the options of a Compose file, named after the file.
struct Pod<'a> {
    host: &'a Host,
    name: &'static str,
    /// Where its web port is published.
    address: String,
}

impl<'a> Pod<'a> {
    fn start(host: &'a Host, name: &'static str, service: &Value) -> anyhow::Result<Self> {
        let mut run: Vec<_> = ["run", "--detach", "--name", name].map(str::to_owned).into();
        let mut add = |option: &str, values: Vec<String>| {
            run.extend(values.into_iter().flat_map(|value| [option.to_owned(), value]));
        };
        let address = format!("127.0.0.1:{}", host_port(service, "8006").context("no web port")?);
        add("--env", pairs(&service["environment"]));
        add("--env", other_version(service));
        add("--annotation", pairs(&service["annotations"]));
        add("--cap-add", words(&service["cap_add"]));
        // A host without USB has no folder of its devices.
        let devices = words(&service["devices"]).into_iter();
        add("--device", devices.filter(|it| fs::exists(it).unwrap_or(false)).collect());
        add("--volume", volumes(host, name, service)?);
        add("--restart", words(&service["restart"]));
        add("--publish", published(service));
        if service["entrypoint"].is_array() {
            add("--entrypoint", vec![service["entrypoint"].to_string()]);
        }
        if service["privileged"] == true {
            run.push("--privileged".into());
        }
        run.push(OURS.into());
        run.extend(words(&service["command"]));
        let pod = Self { host, name, address };
        said(host.engine.podman(&[]).args(run))?;
        Ok(pod)
    }

    /// Checks the start of a page's answer, and words in it.
    fn has(&self, path: &str, status: &str, words: &str) -> anyhow::Result<()> {
        let page = self.host.page(&format!("{}{path}", self.address))?;
        ensure!(page.starts_with(status) && page.contains(words), "{path}: {page}");
        Ok(())
    }

    /// Makes WinBoat's calls.
    fn answers_winboat(&self, port: &str) -> anyhow::Result<()> {
        let text = said(&mut self.host.space.run(&["sh", "-c", NC, "sh", QMP, port]))?;
        let answers: Result<Vec<Value>, _> = text.lines().map(serde_json::from_str).collect();
        let mut answers = answers.context(text.clone())?;
        answers.retain(|it| it["event"].is_null());
        let [greeting, negotiated, commands, status, tree, added, removed] = &answers[..] else {
            bail!("{text}");
        };
        ensure!(greeting["QMP"].is_object() && negotiated["return"].is_object(), "{text}");
        let commands = commands["return"].as_array().context("no commands")?;
        ensure!(commands.iter().all(|it| it["name"].is_string()), "{text}");
        ensure!(status["return"]["running"] == true, "{text}");
        let tree = tree["return"].as_str().context("no tree")?;
        ensure!(tree.contains("usb-tablet") && !tree.contains("usb-host, id"), "{text}");
        // It listens at all addresses, where strangers must not attach the host's devices.
        let reason = added["error"]["desc"].as_str().unwrap_or_default();
        ensure!(reason.contains("or use `transom usb`"), "{text}");
        ensure!(removed["error"]["class"] == "DeviceNotFound", "{text}");
        Ok(())
    }
}

impl Drop for Pod<'_> {
    fn drop(&mut self) {
        let remove = ["rm", "--force", "--volumes", "--time", "0", self.name];
        said(&mut self.host.engine.podman(&remove)).ok();
        said(&mut self.host.engine.podman(&["volume", "prune", "--force"])).ok();
    }
}

/// The published ports: Docker chooses one of a range, and here it is the first.
fn published(service: &Value) -> Vec<String> {
    let first = |part: &str| part.split('-').next().unwrap_or_default().to_owned();
    let port = |port: &String| port.split(':').map(first).collect::<Vec<_>>().join(":");
    words(&service["ports"]).iter().map(port).collect()
}

/// The port of the host where a port of the container is published.
fn host_port(service: &Value, port: &str) -> Option<String> {
    let of = |it: &String| {
        let (from, to) = it.trim_end_matches("/tcp").rsplit_once(':')?;
        let host = from.rsplit(':').next().unwrap_or(from);
        (to == port).then(|| host.to_owned())
    };
    published(service).iter().find_map(of)
}

/// The volumes: folders of the host are below that of the tests, with a script in `/oem`.
fn volumes(host: &Host, name: &str, service: &Value) -> anyhow::Result<Vec<String>> {
    let root = host.folder.path().join(name);
    let volume = |volume: &String| {
        let (from, to) = volume.split_once(":/").context("a volume has a source")?;
        if !from.starts_with(['.', '/', '$']) {
            return Ok(format!("{name}-{volume}"));
        }
        let folder = root.join(from.trim_matches(['.', '/', '$']));
        fs::create_dir_all(&folder)?;
        if to.starts_with("oem") {
            fs::write(folder.join("install.bat"), INSTALL_BAT)?;
        }
        Ok(format!("{}:/{to}", folder.display()))
    };
    words(&service["volumes"]).iter().map(volume).collect()
}
