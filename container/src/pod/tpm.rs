//! The TPM: swtpm(8), a process beside that of the machine, with a file on the volume. It ends when
//! the machine hangs up, or with the pod.
//!
//! Threats: it reads what guests write, so it may be anybody's. Where the pod is root, it is a user
//! to whom nothing belongs but that file; and it has that file open from its start, so that it need
//! not reach the volume.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::fchown;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;

use anyhow::Context as _;
use tokio::process::{Child, Command};

use crate::status::{Failure, Status};

/// Who it is where the pod is root: not the user of the machine's process.
const USER: u32 = 10002;

/// The process. Dropping it ends it.
pub struct Tpm {
    _process: Child,
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
        if root && fchown(&memory, Some(USER), Some(USER)).is_ok() {
            swtpm.uid(USER).gid(USER);
        }
        // It passes on to children, and is ours before the guest's first instruction anyway.
        rustix::thread::set_no_new_privs(true).context("no new privileges")?;
        swtpm.stdin(memory).stdout(OwnedFd::from(listener)).stderr(Stdio::inherit());
        let started = swtpm.process_group(0).kill_on_drop(true).spawn();
        Ok(Self { _process: started.map_err(|error| missing(&error))? })
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

    #[tokio::test]
    async fn it_keeps_what_it_knows_in_the_file() {
        const GET_CAPABILITY: u32 = 1;
        const INIT: u32 = 2;
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("windows_secure.tpm");
        for _ in 0..2 {
            let socket = folder.path().join("tpm.sock");
            std::fs::remove_file(&socket).ok();
            let mut options = File::options();
            let options = options.read(true).write(true).create(true).truncate(false);
            let tpm = Tpm::start(options.open(&memory).unwrap(), &socket).unwrap();
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
