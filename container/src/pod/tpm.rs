//! The TPM: swtpm(8), a process beside that of the machine, with a file on the volume. It ends when
//! the machine hangs up, or with the pod.
//!
//! Threats: it reads what guests write, so it may be anybody's. Where the pod is root, it is a user
//! to whom nothing belongs but that file; and it has that file open from its start, so that it need
//! not reach the volume. Where the volume gives no files away it stays who we are, without rights.
//! What it says is ours to log, and how much of it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::fchown;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;
use std::{io, thread};

use anyhow::Context as _;
use jail::watch::{self, Rights};
use tokio::io::{AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::runtime::Handle;

use super::lines::line;
use crate::log::Few;
use crate::status::{Failure, Status};

/// Who it is where the pod is root: not the user of the machine's process.
const USER: u32 = 10002;
/// It says no more in a minute.
const LINES: u32 = 10;

/// The process. Dropping it ends it.
pub struct Tpm {
    process: Child,
}

impl Tpm {
    /// Starts it with this memory, to be asked at this socket.
    ///
    /// # Errors
    ///
    /// When there is no `swtpm`, or it cannot be started.
    pub fn start(memory: File, socket: &Path) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(socket).with_context(|| socket.display().to_string())?;
        let mut swtpm = Command::new("swtpm");
        swtpm.args(["socket", "--tpm2", "--terminate"]);
        // Both are open already, as its standard input and output.
        swtpm.args(["--tpmstate", "backend-uri=file:///proc/self/fd/0"]);
        swtpm.args(["--ctrl", "type=unixio,fd=1"]);
        swtpm.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        // Who cannot give files away has them on a volume of its own, as the same user.
        let root = rustix::process::geteuid().is_root();
        let given = root.then(|| fchown(&memory, Some(USER), Some(USER)));
        swtpm.stdin(memory).stdout(OwnedFd::from(listener)).stderr(Stdio::piped());
        swtpm.process_group(0).kill_on_drop(true);
        let started = match given {
            Some(Ok(())) => {
                swtpm.uid(USER).gid(USER);
                // It passes on to children, and is ours before the guest's first instruction.
                rustix::thread::set_no_new_privs(true).context("no new privileges")?;
                swtpm.spawn()
            }
            given => {
                if let Some(Err(error)) = given {
                    tracing::warn!("TPM: its file stays root's ({error}), and so does swtpm");
                }
                without_rights(swtpm)?
            }
        };
        let mut process = started.map_err(|error| missing(&error))?;
        let errors = process.stderr.take().context("no standard error")?;
        tokio::spawn(repeat(errors));
        Ok(Self { process })
    }

    /// Its number, while it lives.
    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }
}

/// Starts it from a thread that has no rights, as we still have them: programs inherit those.
fn without_rights(mut program: Command) -> anyhow::Result<io::Result<Child>> {
    let runtime = Handle::current();
    let start = move || {
        watch::keep_for_programs(Rights::empty())?;
        let _runtime = runtime.enter();
        Ok(program.spawn())
    };
    let started = thread::Builder::new().name("tpm".into()).spawn(start)?.join();
    started.map_err(|_| anyhow::anyhow!("a thread for swtpm"))?
}

/// Repeats what it says of its mistakes, to its end: it waits for nobody who reads the log.
async fn repeat(errors: impl AsyncRead + Unpin) {
    let (mut errors, mut few) = (BufReader::new(errors), Few::new(LINES));
    while let Ok(Some(said)) = line(&mut errors).await {
        let said: String = said.chars().filter(|it| !it.is_control()).collect();
        if few.take(Instant::now()) {
            tracing::warn!("TPM: {said}");
        } else {
            tracing::debug!("TPM: {said}");
        }
    }
}

fn missing(error: &io::Error) -> anyhow::Error {
    let out = match error.kind() {
        io::ErrorKind::NotFound => "take the image as it is, or install it",
        _ => "let the container change users (SETUID, SETGID)",
    };
    Failure::new(Status::Boot, format!("TPM: swtpm: {error}: {out}, or say TPM=N"))
}

#[cfg(test)]
mod test {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::super::volume::TPM_MAGIC;
    use super::*;

    /// What its control channel answers to one of its commands (`tpm_ioctl.h`).
    fn ask<const N: usize>(control: &mut UnixStream, command: &[u32]) -> [u8; N] {
        let bytes: Vec<u8> = command.iter().flat_map(|number| number.to_be_bytes()).collect();
        control.write_all(&bytes).unwrap();
        let mut answer = [0xff; N];
        control.read_exact(&mut answer).unwrap();
        answer
    }

    /// A place for its memory and its socket.
    fn start(folder: &Path) -> Tpm {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let memory = options.open(folder.join("windows_secure.tpm")).unwrap();
        Tpm::start(memory, &folder.join("tpm.sock")).unwrap()
    }

    #[test]
    fn who_cannot_be_another_user_has_no_rights() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // What holds for the thread of this test would hold for the next one.
        let alone = || {
            watch::keep_for_programs(Rights::all() - Rights::CHOWN).unwrap();
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
    async fn what_it_says_is_logged_and_how_much_is_ours_to_say() {
        let said = tempfile::NamedTempFile::new().unwrap();
        let writer = std::sync::Arc::new(said.reopen().unwrap());
        let log = tracing_subscriber::fmt().json().with_writer(writer).finish();
        let _log = tracing::subscriber::set_default(log);
        repeat("swtpm: \u{1b}no\n".repeat(1000).as_bytes()).await;
        let said = std::fs::read_to_string(said.path()).unwrap();
        assert_eq!(said.lines().count(), LINES as usize, "{said}");
        for line in said.lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(line["level"], "WARN");
            assert_eq!(line["fields"]["message"], "TPM: swtpm: no");
        }
    }

    #[tokio::test]
    async fn it_keeps_what_it_knows_in_the_file() {
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
