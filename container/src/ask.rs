//! Commands for people and hooks that run in the pod's container and query the running pod.

pub mod exec;
pub mod seal;
pub mod snapshot;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::mem::forget;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use vmm::control::Client;

use crate::pod::child::program;
use crate::pod::inquiry::{LogLines, Question};
use crate::pod::runtime_folder::RuntimeFolder;
use crate::pod::{departure, doze};
use crate::settings::Settings;
use crate::status::{Failure, Status};
use crate::story::Line;
use crate::web::Health;

/// Timeout of an answer: the pod's own longest wait, and some more.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
const MIN_TIMEOUT: Duration = Duration::from_millis(1);
const MAX_ANSWER: u64 = 64 << 20;
/// This is also the state of a pod that could not start: it shows the reason, and has not opened
/// its socket yet.
const NO_POD: &str = "no machine runs in this container: `transom pod` has not been started, or \
                      could not start: see the container's log";
const OK_PREFIX: &[u8] = b"{\"ok\":";
const OK_SUFFIX: &[u8] = b"}\n";

/// Connection to the pod that runs in this container.
struct Pod(BufReader<UnixStream>);

#[derive(Deserialize)]
struct Refusal {
    error: String,
    status: u8,
}

impl Pod {
    fn find() -> anyhow::Result<Self> {
        let runtime_folder = RuntimeFolder::find().context(NO_POD)?;
        let stream = UnixStream::connect(runtime_folder.pod()).context(NO_POD)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sets the timeout of answers: at most `ANSWER_TIMEOUT`, which is also the default.
    fn within(&self, time: Option<Duration>) -> anyhow::Result<()> {
        // A socket timeout of zero means no timeout.
        let time = time.unwrap_or(ANSWER_TIMEOUT).clamp(MIN_TIMEOUT, ANSWER_TIMEOUT);
        Ok(self.0.get_ref().set_read_timeout(Some(time))?)
    }

    /// Returns the answer's JSON.
    fn ask(&mut self, question: &Question) -> anyhow::Result<Vec<u8>> {
        let question = format!("{}\n", serde_json::to_string(question)?);
        self.0.get_mut().write_all(question.as_bytes()).context("the container has ended")?;
        let mut line = Vec::new();
        (&mut self.0).take(MAX_ANSWER).read_until(b'\n', &mut line).context("the pod")?;
        if let Some(answer) = line.strip_prefix(OK_PREFIX).and_then(|it| it.strip_suffix(OK_SUFFIX))
        {
            let end = OK_PREFIX.len() + answer.len();
            line.truncate(end);
            line.drain(..OK_PREFIX.len());
            return Ok(line);
        }
        let no: Refusal = serde_json::from_slice(&line).context("the container has ended")?;
        Err(Failure::new(Status::of_code(no.status), no.error))
    }

    /// Waits until the machine is off, at most this long since `start`. Returns its exit status, or
    /// `None` if the pod is gone, and its machine with it.
    fn wait_until_off(&mut self, start: Instant, wait: Duration) -> anyhow::Result<Option<u8>> {
        loop {
            let left = wait.saturating_sub(start.elapsed());
            ensure!(!left.is_zero(), "the guest is not off after {} s", wait.as_secs());
            self.within(Some(left))?;
            match self.ask(&Question::Off) {
                Ok(answer) => match serde_json::from_slice(&answer)? {
                    None => {}
                    status => return Ok(status),
                },
                Err(refused) if refused.is::<Failure>() => return Err(refused),
                Err(_) if start.elapsed() < wait => return Ok(None),
                // It is late, and the machine may still run.
                Err(_) => {}
            }
        }
    }
}

/// State of the machine and its guest, as JSON.
pub fn status() -> anyhow::Result<String> {
    let mut state: Value = serde_json::from_slice(&Pod::find()?.ask(&Question::State)?)?;
    let mut machine = state["machine"].take();
    let doing = state["pod"]["doing"].as_str().unwrap_or_default();
    let object = machine.as_object_mut();
    let object = object.with_context(|| format!("the machine does not run yet: {doing}"))?;
    for name in ["agent", "step", "idle"] {
        object.insert(name.into(), state[name].take());
    }
    for name in ["installation", "share_restarts"] {
        if let Some(value) = state["pod"].get_mut(name) {
            object.insert(name.into(), value.take());
        }
    }
    Ok(format!("{machine:#}\n"))
}

/// State of the pod and its guest in a few lines, for people.
pub fn status_text() -> anyhow::Result<String> {
    Ok(text(&serde_json::from_slice(&Pod::find()?.ask(&Question::State)?)?))
}

fn text(state: &Value) -> String {
    let (pod, guest) = (&state["pod"], &state["agent"]);
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let percent = pod["thousandths"].as_u64().map(|it| format!(" ({}.{} %)", it / 10, it % 10));
    let doing = format!("{}{}", word(&pod["doing"]), percent.unwrap_or_default());
    let mut rows = vec![
        ("name", word(&state["name"])),
        ("phase", word(&pod["phase"])),
        ("step", doing),
        ("uptime", format!("{} min", state["uptime"].as_u64().unwrap_or_default() / 60)),
        ("machine", word(&state["machine"]["state"])),
        ("idle", doze::line(&state["idle"])),
        ("installation", word(&pod["installation"]["stage"])),
        ("failed", word(&pod["installation"]["failed"])),
    ];
    if let Some(status) = pod["installation"]["install_status"].as_i64() {
        rows.push(("install.bat", format!("ended with status {status}")));
    }
    if let Some(count) = pod["share_restarts"].as_u64() {
        rows.push(("share", format!("its server crashed: {count} times started again")));
    }
    rows.push(("guest", word(&guest["system"])));
    let addresses = guest["addresses"].as_array().into_iter().flatten().map(word);
    rows.push(("addresses", addresses.collect::<Vec<_>>().join(", ")));
    let known = rows.iter().filter(|(_, value)| !value.is_empty());
    known.map(|(name, value)| format!("{name:<13} {value}\n")).collect()
}

/// Asks the guest to shut down. With `wait`, waits at most this long until the machine is off.
pub fn shutdown(wait: Option<Duration>) -> anyhow::Result<()> {
    let mut pod = Pod::find()?;
    pod.ask(&Question::Shutdown { wait: wait.is_some() })?;
    let Some(wait) = wait else { return Ok(()) };
    pod.wait_until_off(Instant::now(), wait)?;
    // The pod ends, and everything in its container with it, when this connection closes. So the
    // kernel must close it, after our exit status is known.
    forget(pod);
    Ok(())
}

/// Moves the machine to another pod, and returns what is known of that.
pub fn migrate(wait: Duration, within: Option<Duration>) -> anyhow::Result<String> {
    let mut pod = Pod::find()?;
    // It takes as long as the machine's memory needs.
    pod.0.get_ref().set_read_timeout(None)?;
    let question =
        Question::Migrate { wait: wait.as_secs(), within: within.map(|it| it.as_secs()) };
    let moved = serde_json::from_slice(&pod.ask(&question)?)?;
    Ok(format!("{}\n", departure::sentence(&moved)))
}

/// USB devices of the host, one per line, with the machine's name of those that are attached.
pub fn usb() -> anyhow::Result<String> {
    let listed: Value = serde_json::from_slice(&Pod::find()?.ask(&Question::Usb)?)?;
    Ok(usb_table(&listed))
}

fn usb_table(listed: &Value) -> String {
    let rows = |key: &str| listed[key].as_array().cloned().unwrap_or_default();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (found, configured) = (rows("host"), rows("configured"));
    let mut text = String::new();
    for it in &found {
        let at = [&it["bus"], &it["address"]];
        let of = configured.iter().find(|entry| [&entry["at"][0], &entry["at"][1]] == at);
        let number = |key: &str| it[key].as_u64().unwrap_or_default();
        writeln!(
            text,
            "{:<12} vendorid={:#06x},productid={:#06x}  hostbus={},hostport={}  {}",
            of.map_or_else(|| "-".to_owned(), |entry| word(&entry["name"])),
            number("vendor"),
            number("product"),
            number("bus"),
            word(&it["port"]),
            word(&it["name"]),
        )
        .expect("a string takes all");
    }
    for entry in configured.iter().filter(|entry| entry["at"].is_null()) {
        let reason = entry["error"].as_str().unwrap_or("not plugged in");
        writeln!(text, "{:<12} {}  {reason}", "-", word(&entry["device"]))
            .expect("a string takes all");
    }
    for device in rows("waiting") {
        let reason = "waits until Windows first starts from its own disk";
        writeln!(text, "{:<12} {}  {reason}", "-", word(&device)).expect("a string takes all");
    }
    text
}

/// Returns the machine's name of the device, or says that it is not plugged in.
pub fn attach_usb(device: &str) -> anyhow::Result<String> {
    let device = device.to_owned();
    let answer: Value =
        serde_json::from_slice(&Pod::find()?.ask(&Question::AttachUsb { device })?)?;
    Ok(match answer["name"].as_str() {
        Some(name) => format!("{name}\n"),
        None => "attached when it is plugged in\n".to_owned(),
    })
}

pub fn detach_usb(device: &str) -> anyhow::Result<()> {
    let device = device.to_owned();
    Pod::find()?.ask(&Question::DetachUsb { device }).map(|_| ())
}

/// Connects to the control socket of the pod's machine.
fn machine() -> anyhow::Result<Client> {
    let runtime_folder =
        RuntimeFolder::find().context("no machine runs here: `transom pod` has not started one")?;
    Client::connect_timeout(&runtime_folder.control(), ANSWER_TIMEOUT)
}

/// Writes a PNG file.
pub fn screenshot(path: &Path) -> anyhow::Result<()> {
    let png = machine()?.png()?;
    std::fs::write(path, png).with_context(|| path.display().to_string())
}

/// Names of the probes on the command line.
pub const PROBES: [(&str, Health); 3] =
    [("live", Health::Live), ("started", Health::Started), ("ready", Health::Ready)];

/// Returns the pod's explanation, or fails with it if the pod is not healthy.
pub fn probe(of: Health) -> anyhow::Result<String> {
    Ok(serde_json::from_slice(&Pod::find()?.ask(&Question::Health { of })?)?)
}

/// Passes each line of the pod's log to `tell`, with its number: the lines that are kept, then with
/// `follow` the new ones. Ends when `tell` returns an error, such as that of a closed pipe.
/// A connection that fails after the first lines counts as the end of the pod, not as an error.
pub fn logs(
    follow: bool,
    mut tell: impl FnMut(u64, &Line) -> std::io::Result<()>,
) -> anyhow::Result<()> {
    let mut pod = Pod::find()?;
    let mut after = 0;
    loop {
        let news = match pod.ask(&Question::Log { after, wait: follow }) {
            Ok(news) => news,
            // A pod that was killed does not announce its end.
            Err(_) if after > 0 => return Ok(()),
            Err(error) => return Err(error),
        };
        let LogLines { lines, count, last } = serde_json::from_slice(&news)?;
        let first = count.saturating_sub(lines.len() as u64);
        for (number, line) in (first + 1..).zip(&lines) {
            if tell(number, line).is_err() {
                return Ok(());
            }
        }
        if !follow {
            return Ok(());
        }
        if last {
            // As in `shutdown`: the pod waits until this process has ended.
            forget(pod);
            return Ok(());
        }
        after = count;
    }
}

/// The report of `doctor --run` on the volume.
const REPORT: &str = "transom-doctor.json";

/// Replaces this process with `vmm doctor`, which examines this host and the volume.
pub fn doctor(settings: &Settings, words: &[String]) -> anyhow::Result<u8> {
    let program = program();
    let mut doctor = process::Command::new(&program);
    doctor.arg("doctor").args(words).args(doctor_options(&settings.storage.folder, words));
    Err(doctor.exec()).with_context(|| program.display().to_string())
}

/// Options that name the volume, if there is one, unless the command line has them.
fn doctor_options(folder: &Path, words: &[String]) -> Vec<OsString> {
    let is = |word: &String, name: &str| word.split('=').next() == Some(name);
    let has = |name: &str| words.iter().any(|word| is(word, name));
    let mut options = Vec::new();
    if folder.is_dir() && !has("--disk") {
        options.extend(["--disk".into(), folder.into()]);
    }
    if folder.is_dir() && has("--run") && !has("--report") {
        options.extend(["--report".into(), folder.join(REPORT).into()]);
    }
    options
}

/// The password of the screen, and in further lines those for VNC viewers, if VNC is enabled, and
/// of Windows' account, if it is a generated one and another. Without any, the error is the reason.
pub fn password() -> anyhow::Result<String> {
    password_of(RuntimeFolder::find().as_ref())
}

fn password_of(runtime_folder: Option<&RuntimeFolder>) -> anyhow::Result<String> {
    let runtime_folder = runtime_folder.context(NO_POD)?;
    let read = |path: PathBuf| match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => text.map(Some).with_context(|| path.display().to_string()),
    };
    let screen = read(runtime_folder.password())?;
    let account =
        read(runtime_folder.account_password())?.filter(|text| screen.as_ref() != Some(text));
    let vnc = read(runtime_folder.vnc_password())?.map(|vnc| format!("VNC: {vnc}\n"));
    let account = account.map(|text| format!("Windows: {text}\n"));
    if screen.is_none() && account.is_none() {
        match read(runtime_folder.open())? {
            Some(why) => bail!("the screen asks for no password: {why}"),
            None => bail!("the container is still starting: try again in a second"),
        }
    }
    let screen = screen.map(|text| format!("{text}\n"));
    Ok([screen, vnc, account].into_iter().flatten().collect())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn usb_devices_are_listed_with_their_names_in_the_machine() {
        let device = |address: u8, port: &str| {
            serde_json::json!({ "bus": 1, "address": address, "port": port, "vendor": 0x403,
                "product": 0x6001, "name": "FTDI Serial", "speed": "12" })
        };
        let attached = serde_json::json!({ "device": "vendorid=0x0403", "name": "usb-host",
            "at": [1, 7], "error": null });
        let absent = serde_json::json!({ "device": "hostbus=2,hostport=1", "name": null,
            "at": null, "error": null });
        let listed = serde_json::json!({ "host": [device(7, "1.4"), device(8, "2")],
            "configured": [attached, absent], "waiting": ["vendorid=0x1234"] });
        assert_eq!(
            usb_table(&listed),
            "usb-host     vendorid=0x0403,productid=0x6001  hostbus=1,hostport=1.4  FTDI Serial\n\
             -            vendorid=0x0403,productid=0x6001  hostbus=1,hostport=2  FTDI Serial\n\
             -            hostbus=2,hostport=1  not plugged in\n\
             -            vendorid=0x1234  waits until Windows first starts from its own disk\n"
        );
    }

    #[test]
    fn the_state_is_shown_in_lines() {
        let state = serde_json::json!({
            "name": "Windows", "uptime": 700, "machine": { "state": "running" }, "agent": null,
            "pod": { "phase": "running", "doing": "Copying Windows to the disk", "lines": 9,
                "thousandths": 430, "installation": { "stage": "apply-image", "percent": 43 } },
        });
        let lines = text(&state);
        let wanted = "name          Windows\nphase         running\n\
                      step          Copying Windows to the disk (43.0 %)\n\
                      uptime        11 min\nmachine       running\n\
                      installation  apply-image\n";
        assert_eq!(lines, wanted);
        let ended = serde_json::json!({ "pod": { "installation": { "install_status": 3 } } });
        assert!(text(&ended).contains("install.bat   ended with status 3\n"));
        let again = serde_json::json!({ "pod": { "share_restarts": 2 } });
        assert!(text(&again).contains("share         its server crashed: 2 times started again\n"));
    }

    #[test]
    fn doctor_examines_the_volume_and_leaves_its_report_there() {
        let folder = tempfile::tempdir().unwrap();
        let options = |words: &str, folder: &Path| -> Vec<_> {
            let words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
            let options = doctor_options(folder, &words).into_iter();
            options.map(|word| word.into_string().unwrap()).collect()
        };
        let volume = folder.path().to_str().unwrap();
        let report = format!("{volume}/{REPORT}");
        let both = ["--disk", volume, "--report", &report];
        assert_eq!(options("--json", folder.path()), both[..2]);
        assert_eq!(options("--run", folder.path()), both);
        assert_eq!(options("--run --disk=/x", folder.path()), both[2..]);
        assert_eq!(options("--run --report r", folder.path()), both[..2]);
        assert!(options("--run", &folder.path().join("gone")).is_empty());
    }

    #[test]
    fn asking_for_a_missing_password_gives_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let runtime_folder = RuntimeFolder::within(folder.path());
        let no = |runtime_folder| password_of(runtime_folder).unwrap_err().to_string();
        assert!(no(None).starts_with("no machine runs in this container"));
        assert!(no(Some(&runtime_folder)).starts_with("the container is still starting"));
        runtime_folder.write(runtime_folder.open(), "PROTECT=N disables it").unwrap();
        assert!(no(Some(&runtime_folder)).contains("no password: PROTECT=N"));
        runtime_folder.write(runtime_folder.password(), "hush").unwrap();
        assert_eq!(password_of(Some(&runtime_folder)).unwrap(), "hush\n");
        runtime_folder.write(runtime_folder.vnc_password(), "other").unwrap();
        assert_eq!(password_of(Some(&runtime_folder)).unwrap(), "hush\nVNC: other\n");
        runtime_folder.write(runtime_folder.account_password(), "hush").unwrap();
        assert_eq!(password_of(Some(&runtime_folder)).unwrap(), "hush\nVNC: other\n");
        runtime_folder.write(runtime_folder.account_password(), "made").unwrap();
        let all = "hush\nVNC: other\nWindows: made\n";
        assert_eq!(password_of(Some(&runtime_folder)).unwrap(), all);
        std::fs::remove_file(runtime_folder.password()).unwrap();
        assert_eq!(password_of(Some(&runtime_folder)).unwrap(), "VNC: other\nWindows: made\n");
    }
}
