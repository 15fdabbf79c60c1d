//! The client of the guest's agent: tests with QEMU's agent on this host, and with malicious ones.
//!
//! It needs Debian's package `qemu-guest-agent`.
#![forbid(unsafe_code)]

mod bad;
mod freeze;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use container::agent::guest::{Ended, Outcome};
use container::agent::{Agent, AgentError};
use container::story::Story;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

/// Busy hosts are slow. This timeout is for agents that hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// QEMU's agent. It listens on a socket, as the machine does, and cannot shut this host down.
struct Qga {
    child: Child,
}

impl Qga {
    async fn start(socket: &Path) -> Self {
        std::fs::remove_file(socket).ok();
        let folder = socket.parent().expect("it is in a folder");
        let mut command = Command::new("qemu-ga");
        command.args(["-m", "unix-listen", "-b", "guest-shutdown,guest-suspend-disk", "-p"]);
        command.arg(socket).arg("-t").arg(folder).stderr(Stdio::null()).stdout(Stdio::null());
        // The `PATH` of an administrator's shell, where the agent looks for programs.
        let child = command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").spawn();
        let child = child.expect("qemu-ga is there: apt-get install qemu-guest-agent");
        let start = Instant::now();
        while !listens(socket) {
            assert!(start.elapsed() < PATIENCE, "qemu-ga does not listen");
            sleep(Duration::from_millis(5)).await;
        }
        Self { child }
    }
}

/// Whether a socket of this name exists and accepts connections.
fn listens(socket: &Path) -> bool {
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("Linux lists its sockets");
    let name = socket.to_str().expect("a path in words");
    sockets.lines().any(|line| line.ends_with(name) && line.contains(" 00010000 "))
}

impl Drop for Qga {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn temporary_socket() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("agent.sock");
    (folder, socket)
}

async fn start(agent: &Agent, words: &[&str]) -> Result<i64, AgentError> {
    let call = json!({ "path": words[0], "arg": words[1..], "capture-output": true });
    let started = agent.ask("guest-exec", call).await?;
    Ok(started["pid"].as_i64().expect("a number"))
}

async fn end(agent: &Agent, pid: i64) -> Ended {
    let start = Instant::now();
    loop {
        let answer = agent.outcome(pid).await.expect("an answer");
        match Outcome::read(&answer).expect("an outcome") {
            Outcome::Ended(ended) => return ended,
            Outcome::Runs => assert!(start.elapsed() < PATIENCE, "it does not end"),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

async fn run(agent: &Agent, words: &[&str]) -> Ended {
    end(agent, start(agent, words).await.expect("it starts")).await
}

#[tokio::test]
async fn programs_run_and_their_output_arrives_whole() {
    let (_folder, socket) = temporary_socket();
    let _qga = Qga::start(&socket).await;
    let agent = Agent::new(socket);
    assert!(!agent.answers());
    agent.ask("guest-ping", Value::Null).await.unwrap();
    assert!(agent.answers());
    let said = run(&agent, &["sh", "-c", "echo out; echo err >&2; exit 7"]).await;
    let is = Ended { status: 7, output: b"out\n".into(), errors: b"err\n".into(), ..said };
    assert_eq!(run(&agent, &["sh", "-c", "echo out; echo err >&2; exit 7"]).await, is);
    assert_eq!(run(&agent, &["sh", "-c", "kill -9 $$"]).await.status, 137);
    assert_eq!(run(&agent, &["true"]).await, Ended::default());
    // Arguments and output arrive unchanged.
    let odd = "a b'\"\\ \n$HOME é";
    assert_eq!(run(&agent, &["printf", "%s", odd]).await.output, odd.as_bytes());
    let bytes = run(&agent, &["head", "-c", "7000001", "/dev/zero"]).await;
    assert_eq!((bytes.output.len(), bytes.cut), (7_000_001, false));
    assert!(bytes.output.iter().all(|byte| *byte == 0));
    // The agent keeps 16 MiB.
    let more = run(&agent, &["head", "-c", "20000000", "/dev/zero"]).await;
    assert_eq!((more.output.len(), more.cut, more.status), (16 << 20, true, 0));
}

#[tokio::test]
async fn failed_commands_return_the_agents_error() {
    let (_folder, socket) = temporary_socket();
    let _qga = Qga::start(&socket).await;
    let agent = Agent::new(socket);
    let Err(AgentError::Refused(why)) = start(&agent, &["/no/such/program"]).await else {
        panic!("there is no such program")
    };
    assert!(why.contains("No such file"), "{why}");
    for (command, arguments) in [
        ("guest-nonsense", Value::Null),
        ("guest-exec", json!({ "path": 7 })),
        ("guest-exec-status", json!({ "pid": 1 })),
        ("guest-shutdown", json!({ "mode": "powerdown" })),
    ] {
        let asked = agent.ask(command, arguments).await;
        assert!(matches!(asked, Err(AgentError::Refused(_))), "{command}: {asked:?}");
    }
    assert!(matches!(agent.outcome(1).await, Err(AgentError::Refused(_))));
    // Its refusal arrives immediately.
    assert!(matches!(agent.shut_down().await, Err(AgentError::Refused(_))));
    assert!(agent.answers());
}

#[tokio::test]
async fn reports_the_name_and_addresses_of_the_guest() {
    let (_folder, socket) = temporary_socket();
    let _qga = Qga::start(&socket).await;
    let guest = Agent::new(socket).guest().await;
    let release = std::fs::read_to_string("/etc/os-release").unwrap();
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap();
    assert_eq!(guest.system.as_deref(), Some(name.trim_matches('"')));
    assert!(guest.addresses.iter().all(|address| !address.is_loopback()));
}

#[tokio::test]
async fn concurrent_callers_get_their_own_answers() {
    let (_folder, socket) = temporary_socket();
    let _qga = Qga::start(&socket).await;
    let agent = Arc::new(Agent::new(socket));
    let asked: Vec<_> = (0..12)
        .map(|number| {
            let agent = agent.clone();
            tokio::spawn(async move {
                let text = number.to_string();
                let ended = run(&agent, &["sh", "-c", &format!("sleep 0.1; echo {text}")]).await;
                assert_eq!(ended.output, format!("{text}\n").as_bytes());
            })
        })
        .collect();
    // A canceled request must not leave an answer that others take for theirs.
    for _ in 0..50 {
        let impatient = agent.ask("guest-get-osinfo", Value::Null);
        timeout(Duration::from_micros(500), impatient).await.ok();
    }
    for one in asked {
        one.await.unwrap();
    }
}

#[tokio::test]
async fn a_restarted_agent_is_found_again() {
    let (_folder, socket) = temporary_socket();
    let agent = Arc::new(Agent::new(socket.clone()));
    assert!(matches!(agent.ask("guest-ping", Value::Null).await, Err(AgentError::Absent(_))));
    let first = Qga::start(&socket).await;
    let story = Story::new();
    let kept = tokio::spawn(agent.clone().monitor(story.clone()));
    let until = async |answers: bool| {
        let start = Instant::now();
        while agent.answers() != answers {
            assert!(start.elapsed() < PATIENCE, "it is not found out: {answers}");
            sleep(Duration::from_millis(20)).await;
        }
    };
    until(true).await;
    let pid = start(&agent, &["sleep", "1000"]).await.unwrap();
    drop(first);
    assert!(matches!(agent.ask("guest-ping", Value::Null).await, Err(AgentError::Absent(_))));
    assert!(!agent.answers());
    let _second = Qga::start(&socket).await;
    until(true).await;
    assert!(
        matches!(agent.outcome(pid).await, Err(AgentError::Refused(_))),
        "it knows of no such program"
    );
    kept.abort();
    let said: Vec<_> = story.lines(0).0.into_iter().map(|line| line.text).collect();
    assert!(said[0].starts_with("the guest's agent answers: it is "), "{said:?}");
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(),
        rustix::process::Signal::KILL,
    )
    .ok();
}
