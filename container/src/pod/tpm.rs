//! The TPM: swtpm(8), a process beside the machine's, with a file on the volume. It ends when the
//! machine disconnects, or with the pod.
//!
//! Threats: it reads data that guests write, so a guest may take it over. If the pod is root, it
//! runs as a user that owns only this file. It gets the file opened, so that it needs no access to
//! the volume. If the owner of the file cannot be changed, it keeps the pod's user, without any
//! rights. The pod limits how many of its messages are logged.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::fchown;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;
use std::{io, thread};

use anyhow::Context as _;
use jail::watch::{self, Capabilities};
use tokio::io::{AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::runtime::Handle;

use super::lines::line;
use crate::log::{LineLimit, printable};
use crate::status::{Failure, Status};

/// User ID of swtpm if the pod is root. The machine's process has another.
const USER: u32 = 10002;
/// Maximum warnings per minute.
const MAX_LINES: u32 = 10;

/// Dropping this ends swtpm.
pub struct Tpm {
    process: Child,
}

impl Tpm {
    /// `socket` is for swtpm's control channel.
    pub fn start(memory: File, socket: &Path) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(socket).with_context(|| socket.display().to_string())?;
        let mut swtpm = Command::new("swtpm");
        swtpm.args(["socket", "--tpm2", "--terminate"]);
        // Both are passed as open files, as its standard input and output.
        swtpm.args(["--tpmstate", "backend-uri=file:///proc/self/fd/0"]);
        swtpm.args(["--ctrl", "type=unixio,fd=1"]);
        swtpm.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        // A pod that is not root owns its volume, so swtpm can be the same user.
        let root = rustix::process::geteuid().is_root();
        let given = root.then(|| fchown(&memory, Some(USER), Some(USER)));
        swtpm.stdin(memory).stdout(OwnedFd::from(listener)).stderr(Stdio::piped());
        swtpm.process_group(0).kill_on_drop(true);
        let started = match given {
            Some(Ok(())) => {
                swtpm.uid(USER).gid(USER);
                // Children inherit it. It is set for the pod before the guest's first instruction
                // anyway.
                rustix::thread::set_no_new_privs(true).context("no new privileges")?;
                swtpm.spawn()
            }
            given => {
                if let Some(Err(error)) = given {
                    tracing::warn!(
                        "TPM: the owner of its file cannot be changed: {error}: swtpm runs as \
                         root, without rights"
                    );
                }
                without_rights(swtpm)?
            }
        };
        let mut process = started.map_err(|error| missing(&error))?;
        let errors = process.stderr.take().context("no standard error")?;
        tokio::spawn(repeat(errors));
        Ok(Self { process })
    }

    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }
}

/// Starts a program from a thread without rights: programs inherit them, and the main thread still
/// has some.
fn without_rights(mut program: Command) -> anyhow::Result<io::Result<Child>> {
    let runtime = Handle::current();
    let start = move || {
        watch::keep_for_programs(Capabilities::empty())?;
        let _runtime = runtime.enter();
        Ok(program.spawn())
    };
    let started = thread::Builder::new().name("tpm".into()).spawn(start)?.join();
    started.map_err(|_| anyhow::anyhow!("a thread for swtpm"))?
}

/// Logs its error messages until its end, without waiting for readers of the log.
async fn repeat(errors: impl AsyncRead + Unpin) {
    let (mut errors, mut limit) = (BufReader::new(errors), LineLimit::new(MAX_LINES));
    while let Ok(Some(message)) = line(&mut errors).await {
        let message = printable(&message);
        if limit.take(Instant::now()) {
            tracing::warn!("TPM: {message}");
        } else {
            tracing::debug!("TPM: {message}");
        }
    }
}

fn missing(error: &io::Error) -> anyhow::Error {
    let out = match error.kind() {
        io::ErrorKind::NotFound => "use the original image, or install swtpm",
        _ => "give the container SETUID and SETGID",
    };
    Failure::new(Status::Boot, format!("TPM: swtpm: {error}: {out}, or set TPM=N"))
}

#[cfg(test)]
mod test {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::super::volume::TPM_MAGIC;
    use super::*;

    /// Sends a command to the control channel and reads the answer (`tpm_ioctl.h`).
    fn ask<const N: usize>(control: &mut UnixStream, command: &[u32]) -> [u8; N] {
        let bytes: Vec<u8> = command.iter().flat_map(|number| number.to_be_bytes()).collect();
        control.write_all(&bytes).unwrap();
        let mut answer = [0xff; N];
        control.read_exact(&mut answer).unwrap();
        answer
    }

    /// Starts swtpm with its memory and its socket in this folder.
    fn start(folder: &Path) -> Tpm {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let memory = options.open(folder.join("windows_secure.tpm")).unwrap();
        Tpm::start(memory, &folder.join("tpm.sock")).unwrap()
    }

    #[test]
    fn without_the_right_to_switch_users_it_drops_all_rights() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // A thread of its own: the rights of this test's thread stay as they are.
        let alone = || {
            watch::keep_for_programs(Capabilities::all() - Capabilities::CHOWN).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let tpm = start(folder.path());
                let of = |id: u32| std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
                let status = of(tpm.id().unwrap());
                for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                    assert!(status.contains(&format!("{name}:\t0000000000000000\n")), "{status}");
                }
                assert!(status.contains("Uid:\t0\t") && status.contains("NoNewPrivs:\t1"));
                let ours = of(std::process::id());
                assert!(!ours.contains("CapEff:\t0000000000000000"), "{ours}");
            });
        };
        thread::spawn(alone).join().unwrap();
    }

    #[tokio::test]
    async fn swtpm_output_is_logged_with_a_limit() {
        let said = tempfile::NamedTempFile::new().unwrap();
        let writer = std::sync::Arc::new(said.reopen().unwrap());
        let log = tracing_subscriber::fmt().json().with_writer(writer).finish();
        let _log = tracing::subscriber::set_default(log);
        repeat("swtpm: \u{1b}no\n".repeat(1000).as_bytes()).await;
        let said = std::fs::read_to_string(said.path()).unwrap();
        assert_eq!(said.lines().count(), MAX_LINES as usize, "{said}");
        for line in said.lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(line["level"], "WARN");
            assert_eq!(line["fields"]["message"], "TPM: swtpm: no");
        }
    }

    #[tokio::test]
    async fn the_tpm_keeps_its_state_in_the_file() {
        const GET_CAPABILITY: u32 = 1;
        const INIT: u32 = 2;
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("windows_secure.tpm");
        for _ in 0..2 {
            let socket = folder.path().join("tpm.sock");
            std::fs::remove_file(&socket).ok();
            let tpm = start(folder.path());
            let mut control = UnixStream::connect(&socket).unwrap();
            control.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            assert_ne!(ask(&mut control, &[GET_CAPABILITY]), [0; 8]);
            assert_eq!(ask(&mut control, &[INIT, 0]), [0; 4], "the memory cannot be used");
            drop(tpm);
            let kept = std::fs::read(&memory).unwrap();
            assert!(kept.starts_with(TPM_MAGIC), "{:?}", &kept[..8]);
        }
    }
}
