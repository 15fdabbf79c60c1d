//! The pod with QEMU's guest agent, used as a person in the container does: `transom exec`,
//! `status`, `logs`, `probe`, and what other tools receive at the web port.
//!
//! The machine runs the probe, but its agent port leads to an agent on this host. Everything except
//! the guest is the real pod. The test needs root for its namespaces, and Debian's
//! `qemu-guest-agent` and `python3-websockets`.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{Seek as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use transom_tests::program::{PATIENCE, Running, not_run, vmm};
use transom_tests::python::PYTHON;
use vmm::kvm::KvmSupport;

/// The interval of polls.
const POLL: Duration = Duration::from_millis(50);

/// The machine, with an agent of this host at the pod's socket. The agent must not shut down this
/// host: /sbin/shutdown is another script in this mount namespace, or the command is blocked.
const MACHINE: &str = r#"#!/bin/sh
config=FOLDER/config.json
cat > $config
if [ -e FOLDER/agent ]; then
  socket=$(sed 's/.*"socket:\([^"]*\)".*/\1/' $config)
  sed -i 's/"socket:[^"]*"/"none"/' $config
  [ -e /sbin/shutdown ] && may= || may="-b guest-shutdown"
  qemu-ga -m unix-listen -p "$socket" -t FOLDER $may &
fi
exec VMM "$@" < $config
"#;

/// The script that the agent runs for a shutdown.
const DOWN: &str = "#!/bin/sh
echo \"$@\" >> FOLDER/down
";

/// Starts the pod without conflicts with this host.
const START: &str = "mount -t tmpfs none /run && ip link set lo up &&
if [ -e /sbin/shutdown ]; then mount --bind FOLDER/down.sh /sbin/shutdown; fi &&
exec FOLDER/transom pod";

/// A WebSocket client that prints each message on a line.
const LISTENER: &str = "
import asyncio, sys, websockets
async def main():
    async with websockets.connect(sys.argv[1]) as socket:
        async for message in socket:
            print(message, flush=True)
asyncio.run(main())
";

/// Whether a test can run on this host. Reports it as skipped otherwise.
fn runs_here(test: &str) -> bool {
    let is = |program: &str| Path::new("/usr/sbin").join(program).exists();
    let reason = if KvmSupport::of_this_host() == KvmSupport::None {
        "there is no usable /dev/kvm"
    } else if !rustix::process::geteuid().is_root() {
        "namespaces need root"
    } else if !is("qemu-ga") {
        "there is no qemu-ga"
    } else {
        return true;
    };
    not_run(test, reason);
    false
}

/// A pod in its own namespaces.
struct Pod {
    folder: TempDir,
    running: Running,
    /// The pod's process ID on this host.
    pid: Pid,
}

impl Pod {
    /// Starts a pod with these variables, with or without an agent in the guest.
    fn start(agent: bool, variables: &[(&str, &str)]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let at = folder.path().to_str().context("a path in words")?;
        let fill =
            |text: &str| text.replace("FOLDER", at).replace("VMM", &vmm().display().to_string());
        // Processes of an unnamed user read files here.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        fs::copy(transom()?, folder.path().join("transom"))?;
        for (name, text) in [("vmm", MACHINE), ("down.sh", DOWN)] {
            let path = folder.path().join(name);
            fs::write(&path, fill(text))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        if agent {
            fs::write(folder.path().join("agent"), "")?;
        }
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        unshare.args(["sh", "-c", &fill(START)]);
        unshare.env_clear().env("PATH", "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin");
        let usual = [("VERSION", "probe"), ("NETWORK", "N"), ("RAM_SIZE", "256M")];
        unshare.envs(usual.iter().chain(variables).copied());
        let running = Running::spawn(&mut unshare)?;
        let pid = child(running.pid())?;
        Ok(Self { folder, running, pid })
    }

    /// A command in the pod's namespaces.
    fn inside(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        let target = self.pid.as_raw_nonzero().to_string();
        command.args(["--target", &target, "--mount", "--net", "--pid", "--"]).args(words);
        command
    }

    /// Runs `transom` with these words in the pod.
    fn transom(&self, words: &[&str]) -> Result<Output> {
        self.transom_reads(words, b"")
    }

    /// Like `transom`, with `input` as standard input.
    fn transom_reads(&self, words: &[&str], input: &[u8]) -> Result<Output> {
        let mut file = tempfile::tempfile()?;
        file.write_all(input)?;
        file.rewind()?;
        let program = self.folder.path().join("transom").display().to_string();
        Ok(self.inside(&[&[&program[..]], words].concat()).stdin(file).output()?)
    }

    /// Repeats a command until its status is 0, and returns its output.
    fn until(&self, words: &[&str]) -> Result<String> {
        self.until_says(words, |_| true)
    }

    /// Like `until`, but also waits until `enough` accepts the output.
    fn until_says(&self, words: &[&str], enough: impl Fn(&str) -> bool) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let output = self.transom(words)?;
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            if output.status.success() && enough(&said) {
                return Ok(said);
            }
            ensure!(Instant::now() < end, "{words:?}: {output:?}\n{}", self.running.stdout.text());
            thread::sleep(POLL);
        }
    }

    fn state(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.until(&["status"])?)?)
    }

    /// Prints the messages of a WebSocket at the web port.
    fn listen(&self, path: &str) -> Result<Running> {
        let place = format!("ws://127.0.0.1:8006{path}");
        Running::spawn(&mut self.inside(&[PYTHON, "-c", LISTENER, &place]))
    }

    fn ask(&self) -> Result<()> {
        Ok(kill_process(self.pid, Signal::TERM)?)
    }
}

/// The only child of a process, once it exists.
fn child(parent: Pid) -> Result<Pid> {
    let pid = parent.as_raw_nonzero();
    let end = Instant::now() + PATIENCE;
    loop {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let number = children.split_whitespace().next().and_then(|it| it.parse().ok());
        if let Some(child) = number.and_then(Pid::from_raw) {
            return Ok(child);
        }
        ensure!(Instant::now() < end, "the process has no child");
        thread::sleep(POLL);
    }
}

/// The `transom` program, which is built with `vmm` and lies beside it.
fn transom() -> Result<PathBuf> {
    let program = vmm().with_file_name("transom");
    ensure!(program.exists(), "{} is missing: cargo build --workspace", program.display());
    Ok(program)
}

fn says(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_program_runs_in_the_guest_and_the_guest_is_reported() -> Result<()> {
    if !runs_here("the pod with an agent") {
        return Ok(());
    }
    let mut pod = Pod::start(true, &[])?;
    pod.until_says(&["logs"], |said| said.contains("the guest's agent answers: it is "))?;
    let ran = says(&pod.transom(&["exec", "sh", "-c", "echo out; echo err >&2; exit 7"])?);
    ensure!(ran == (Some(7), "out\n".into(), "err\n".into()), "{ran:?}");
    // Words after the program belong to the program.
    let ran = says(&pod.transom(&["exec", "--timeout", "60", "--", "echo", "--help", "-h"])?);
    ensure!(ran == (Some(0), "--help -h\n".into(), String::new()), "{ran:?}");
    let ran = says(&pod.transom_reads(&["exec", "-i", "sh", "-c", "cat; exit 3"], b"in\n")?);
    ensure!(ran == (Some(3), "in\n".into(), String::new()), "{ran:?}");
    let much = vec![b'x'; 1 << 20];
    let ran = pod.transom_reads(&["exec", "-i", "--", "cat"], &much)?;
    ensure!(ran.status.success() && ran.stdout == much, "{} bytes", ran.stdout.len());
    // Without -i, the program does not get standard input.
    let ran = says(&pod.transom_reads(&["exec", "cat"], b"in\n")?);
    ensure!(ran == (Some(0), String::new(), String::new()), "{ran:?}");
    let ran = pod.transom(&["exec", "head", "-c", "5000001", "/dev/zero"])?;
    ensure!(ran.status.success() && ran.stdout == vec![0; 5_000_001], "{}", ran.stdout.len());
    let start = Instant::now();
    for (words, status) in [
        (&["exec", "/no/such/program"][..], 127),
        (&["exec", "/etc"], 126),
        (&["exec", "--timeout", "1", "sleep", "1000"], 124),
        (&["exec", "sh", "-c", "kill -15 $$"], 143),
    ] {
        let (ended, out, err) = says(&pod.transom(words)?);
        let lines = if status == 143 { 0 } else { 1 };
        ensure!(
            ended == Some(status) && out.is_empty() && err.lines().count() == lines,
            "{words:?}: {ended:?} {out} {err}"
        );
    }
    ensure!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    // Several commands at once: each gets its own answer.
    let answers: Vec<_> = thread::scope(|scope| {
        let run = |number: u32| {
            let (pod, text) = (&pod, format!("sleep 0.2; echo {number}"));
            scope.spawn(move || pod.transom(&["exec", "sh", "-c", &text]))
        };
        let running: Vec<_> = (0..8).map(run).collect();
        running.into_iter().map(|one| one.join().expect("no panic")).collect()
    });
    for (number, answer) in answers.into_iter().enumerate() {
        let said = says(&answer?);
        ensure!(said == (Some(0), format!("{number}\n"), String::new()), "{said:?}");
    }
    let state = pod.state()?;
    ensure!(state["state"] == "running", "{state}");
    ensure!(state["agent"]["system"].as_str().is_some_and(|it| !it.is_empty()), "{state}");
    ensure!(state["agent"]["addresses"].is_array(), "{state}");
    // On SIGTERM, the agent is asked, and the button of the probe is pressed.
    pod.ask()?;
    let status = pod.running.wait(PATIENCE)?;
    let said = pod.running.stdout.text();
    ensure!(status == 143, "{status}: {said}");
    ensure!(said.contains("the guest is asked to shut down"), "{said}");
    Ok(())
}

#[test]
fn the_agent_is_asked_to_shut_down() -> Result<()> {
    const TEST: &str = "the pod that asks the agent to shut down";
    if !runs_here(TEST) {
        return Ok(());
    }
    if !Path::new("/sbin/shutdown").exists() {
        not_run(TEST, "there is no /sbin/shutdown to stand in for");
        return Ok(());
    }
    let pod = Pod::start(true, &[])?;
    pod.until(&["exec", "true"])?;
    // The paused probe ignores the button, so that only the agent can shut it down.
    let pause = r#"{"action":"pause"}"#;
    let [kind, origin] = ["Content-Type: application/json", "Origin: http://127.0.0.1:8006"];
    let place = "http://127.0.0.1:8006/api/v1/power";
    let curl = ["curl", "-sf", "-H", kind, "-H", origin, "--data", pause, place];
    let paused = pod.inside(&curl).output()?;
    ensure!(paused.status.success(), "{paused:?}");
    pod.until(&["shutdown"])?;
    let end = Instant::now() + PATIENCE;
    let down = pod.folder.path().join("down");
    loop {
        if let Ok(words) = fs::read_to_string(&down)
            && words.ends_with('\n')
        {
            ensure!(words.starts_with("-h -P +0") || words.starts_with("-P -h +0"), "{words}");
            return Ok(());
        }
        ensure!(Instant::now() < end, "the agent was not asked\n{}", pod.running.stdout.text());
        thread::sleep(POLL);
    }
}

#[test]
fn without_an_agent_commands_fail_at_once_with_the_reason() -> Result<()> {
    if !runs_here("the pod without an agent") {
        return Ok(());
    }
    // This pod has no web port.
    let mut pod = Pod::start(false, &[("WEB", "N"), ("TIMEOUT", "30")])?;
    ensure!(pod.until(&["probe", "ready"])? == "ok\n");
    let start = Instant::now();
    let (status, out, err) = says(&pod.transom(&["exec", "true"])?);
    ensure!(status == Some(125) && out.is_empty(), "{status:?} {out} {err}");
    ensure!(err.lines().count() == 1 && err.contains("qemu-guest-agent"), "{err}");
    ensure!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    ensure!(pod.state()?["agent"].is_null());
    // `logs --follow` starts at the beginning of the log and ends with it.
    let program = pod.folder.path().join("transom").display().to_string();
    let mut follows = Running::spawn(&mut pod.inside(&[&program, "logs", "--follow"]))?;
    follows.says(" INFO The probe runs", 1)?;
    let json = pod.until(&["logs", "--json"])?;
    for (number, line) in (1..).zip(json.lines()) {
        let line: Value = serde_json::from_str(line)?;
        ensure!(line["number"] == number && line["seconds"].is_number(), "{line}");
        ensure!(line["level"].is_string() && line["text"].is_string(), "{line}");
    }
    // The JSON log also has lines of lower levels.
    ensure!(json.matches(", 256M of memory").count() == 1, "{json}");
    // A slow reader also gets the end: the pod waits, because its end would kill the reader.
    let slow = child(follows.pid())?;
    kill_process(slow, Signal::STOP)?;
    let start = Instant::now();
    pod.ask()?;
    pod.running.says("Stopping the probe…", 1)?;
    thread::sleep(Duration::from_millis(500));
    kill_process(slow, Signal::CONT)?;
    // `nsenter` stops together with its stopped child.
    follows.signal(Signal::CONT)?;
    let status = pod.running.wait(PATIENCE)?;
    ensure!(status == 143, "{status}: {}", pod.running.stdout.text());
    ensure!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let status = follows.wait(PATIENCE)?;
    ensure!(status == 0, "{status}: {}", follows.stderr.text());
    let said = follows.stdout.text();
    ensure!(said.contains("Stopping the probe…"), "{said}");
    let (status, _, err) = says(&Command::new(transom()?).args(["exec", "true"]).output()?);
    ensure!(
        status == Some(1) && err.contains("no machine runs in this container"),
        "{status:?} {err}"
    );
    Ok(())
}

#[test]
fn the_reference_images_web_port_works_for_its_tools() -> Result<()> {
    if !runs_here("the web port of the reference image") {
        return Ok(());
    }
    let mut pod = Pod::start(false, &[("DISPLAY", "web")])?;
    pod.until(&["probe", "ready"])?;
    let mut seen = pod.listen("/status")?;
    seen.says("c: vnc", 1)?;
    let audio = pod.listen("/audio")?;
    let mut audio = audio;
    ensure!(audio.wait(PATIENCE)? != 0 && audio.stderr.text().contains("404"));
    pod.ask()?;
    seen.says("s: Stopping the probe…", 1)?;
    ensure!(pod.running.wait(PATIENCE)? == 143);
    Ok(())
}

#[test]
fn a_listener_of_sound_has_no_other_right() -> Result<()> {
    if !runs_here("a listener of the pod's sound") {
        return Ok(());
    }
    let pod = Pod::start(false, &[("DISPLAY", "web"), ("AUDIO", "Y")])?;
    pod.until(&["probe", "ready"])?;
    let _audio = pod.listen("/audio")?;
    let said = pod.until_says(&["status"], |it| it.contains(", sound (web)"))?;
    let state: Value = serde_json::from_str(&said)?;
    // With full access it would get what the guest copies, and have a place among the viewers.
    ensure!(state["viewers"][0]["access"] == "view", "{said}");
    Ok(())
}

#[test]
fn status_events_are_served_without_a_screen() -> Result<()> {
    if !runs_here("the status of a guarded pod") {
        return Ok(());
    }
    let words = [("DISPLAY", "vnc"), ("PROTECT", "Y"), ("PASSWORD", "a long word")];
    let pod = Pod::start(false, &words)?;
    pod.until(&["probe", "ready"])?;
    // This one has no screen to connect to.
    pod.listen("/status")?.says("s: The probe runs", 1)?;
    let mut audio = pod.listen("/audio")?;
    ensure!(audio.wait(PATIENCE)? != 0 && audio.stderr.text().contains("401"));
    // All listeners are notified of the end of the machine.
    let mut seen = pod.listen("/status")?;
    seen.says("s: The probe runs", 1)?;
    let kill = "kill -9 $(pidof vmm)";
    pod.inside(&["sh", "-c", kill]).status()?;
    seen.says("e: the probe was ended by signal 9", 1)?;
    Ok(())
}
