//! A pod in the lab, or on this host, that browsers of this host reach.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use transom_tests::desk::{PASSWORD, free_ports};
use transom_tests::lab;

use crate::{BOOT, LAB, SOON};

/// The account for its page and its guest.
pub(crate) const USER: &str = "ada";

/// Settings of every pod: a small machine, which is not Windows.
const WORDS: [(&str, &str); 8] = [
    ("USERNAME", USER),
    ("PASSWORD", PASSWORD),
    ("CPU_CORES", "1"),
    ("RAM_SIZE", "768M"),
    ("RAM_MINIMUM", "768M"),
    ("DISK_SIZE", "1G"),
    ("DISK_MINIMUM", "64M"),
    ("MANUAL", "Y"),
];

/// Dropping it ends the pod.
pub(crate) struct Pod {
    child: Child,
    pub(crate) web: u16,
}

impl Pod {
    /// Starts a pod and waits for its web port. The volume at `/mnt/storage` is empty at first. The
    /// shell's line `prepare` runs in its mount namespace, and `run` runs the pod by `pod`.
    pub(crate) fn start(words: &[(&str, &str)], prepare: &str, run: &str) -> anyhow::Result<Self> {
        let lacks = lab::lacks()?;
        let program = lab::vmm()?.with_file_name("transom");
        let [vnc, web] = free_ports()?;
        let ports = [("VNC_PORT", vnc.to_string()), ("WEB_PORT", web.to_string())];
        let words = WORDS.iter().chain(words).map(|(name, value)| format!("{name}='{value}'"));
        let ports = ports.iter().map(|(name, value)| format!("{name}={value}"));
        let words: Vec<_> = words.chain(ports).collect();
        let script = format!(
            "mount -t tmpfs none /mnt && mkdir /mnt/storage && {prepare} && \
             pod() {{ exec env STORAGE=/mnt/storage {} {} pod; }} && {run}",
            words.join(" "),
            program.display()
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]);
        if lacks.is_some() {
            command = LAB.around(&command, &[vnc, web])?;
        }
        let child = command.stdin(Stdio::null()).spawn().context("the pod")?;
        let mut pod = Self { child, web };
        let end = Instant::now() + BOOT;
        while !pod.answers().unwrap_or(false) {
            ensure!(pod.child.try_wait()?.is_none(), "the pod has ended");
            ensure!(Instant::now() < end, "the web port does not answer");
            sleep(Duration::from_millis(200));
        }
        Ok(pod)
    }

    /// Whether the web port answers. In the lab, the port is open before anything listens.
    fn answers(&self) -> anyhow::Result<bool> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.web))?;
        stream.set_read_timeout(Some(SOON))?;
        write!(stream, "GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.starts_with("HTTP/1.") && answer.contains(" 200 "))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // SIGTERM makes the lab end its emulator.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).ok();
        }
        self.child.wait().ok();
    }
}
