//! Makes an installed machine the base of others (`BASE`): its guest gives up its identity and
//! shuts down, and its volume is marked.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use host::uuid::Uuid;
use serde_json::Value;

use super::{Pod, exec};
use crate::agent::guest::Ended;
use crate::disks::{self, original};
use crate::files;
use crate::pod::inquiry::Question;
use crate::pod::volume::Volume;
use crate::settings::Settings;
use crate::status::{Failure, Status};

/// How long all of it may take. Windows needs minutes.
pub const TIMEOUT: Duration = Duration::from_secs(1800);

/// The options of the command.
#[derive(Debug)]
pub struct Options {
    /// The guest keeps its identity, or has given it up already.
    pub as_it_is: bool,
    /// The answer file of each clone's first start: its path in Windows.
    pub unattend: Option<String>,
    pub wait: Duration,
}

/// Windows' tool, its mark of a success, and its tests.
const SYSPREP: &str = r"C:\Windows\System32\Sysprep\sysprep.exe";
const SUCCEEDED: &str = r"C:\Windows\System32\Sysprep\Sysprep_succeeded.tag";
/// Linux: each clone makes at its first start what is removed here.
const FORGET: &str = r#"set -e
[ ! -e /etc/machine-id ] || : > /etc/machine-id
[ -L /var/lib/dbus/machine-id ] || rm -rf /var/lib/dbus/machine-id
rm -rf /var/lib/systemd/random-seed /var/lib/systemd/credential.secret /boot/efi/loader/random-seed
rm -rf /var/lib/dhcp/*.leases /var/lib/NetworkManager/*.lease /var/lib/NetworkManager/secret_key
if command -v cloud-init > /dev/null; then
  cloud-init clean --logs
fi
if [ -d /etc/ssh ] && command -v ssh-keygen > /dev/null; then
  rm -rf /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub
  if [ -d /etc/systemd/system ]; then
    mkdir -p /etc/systemd/system/multi-user.target.wants
    printf '%s\n' '[Unit]' 'Description=Make the SSH keys of this machine' \
      'Before=ssh.service sshd.service' \
      'ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key' '[Service]' 'Type=oneshot' \
      'ExecStart=/usr/bin/env ssh-keygen -A' > /etc/systemd/system/ssh-keys.service
    ln -sf ../ssh-keys.service /etc/systemd/system/multi-user.target.wants/
  fi
fi
sync
"#;

/// Seals the machine of the pod that runs here.
pub fn run(
    settings: &Settings,
    options: &Options,
    mut tell: impl FnMut(&str),
) -> anyhow::Result<()> {
    let late = || Failure::new(Status::Usage, "--wait: it is too long");
    let start = Instant::now();
    let end = start.checked_add(options.wait).ok_or_else(late)?;
    let mark = check(settings, Path::new("/"))?;
    let mut pod = Pod::find()?;
    pod.ask(&Question::Wake)?;
    if !options.as_it_is {
        let state: Value = serde_json::from_slice(&pod.ask(&Question::State)?)?;
        let Some(system) = state["agent"]["system"].as_str() else {
            let sentence = "no agent answers in the guest, which cannot give up its identity: \
                            install qemu-guest-agent there, or prepare the guest and add \
                            --as-it-is";
            return Err(Failure::new(Status::Agent, sentence));
        };
        tell(&format!("{system} gives up its identity…"));
        match (system.contains("Windows"), &options.unattend) {
            (true, _) => forget_windows(options, end)?,
            (false, None) => succeed("sh", &["-c", FORGET], end)?,
            (false, Some(_)) => {
                let sentence = format!("--unattend is for Windows, not for {system}: leave it out");
                return Err(Failure::new(Status::Usage, sentence));
            }
        }
    }
    tell("the guest shuts down…");
    pod.ask(&Question::Shutdown { wait: true })?;
    let status = pod.wait_until_off(start, options.wait)?;
    let gone = "the container ended before its guest was off: start it, and seal it again";
    let status = status.context(gone)?;
    // The pod waits until this connection ends.
    ensure!(
        status == 0,
        "the machine ended (status {status}) before its guest was off: start it, and seal it again"
    );
    // A machine that has moved to another pod is not off.
    let locked = Volume::lock_first_disk(settings, Path::new("/"));
    let locked = locked.context("the machine is not off, and is not sealed")?;
    let _locked = locked.context("its disk is gone")?;
    write(&mark).with_context(|| mark.display().to_string())
}

/// The file that marks the volume, if it can become a base.
fn check(settings: &Settings, root: &Path) -> anyhow::Result<PathBuf> {
    let refuse = |why: &str| Err(Failure::new(Status::Disk, format!("it cannot be sealed: {why}")));
    if settings.disk.ephemeral {
        return refuse("EPHEMERAL=Y throws away what its guest writes");
    }
    if (1..disks::MAX_DISKS)
        .any(|number| matches!(disks::find(number, settings, root), Ok(Some(_))))
    {
        return refuse("it has further disks, and others would get only the first");
    }
    match disks::find(0, settings, root)? {
        Some(found) if !found.own => refuse("its disk is not a file on the volume"),
        Some(found) if found.disk.base.is_some() => refuse(
            "its disk has only the changes to BASE: copy it with `qemu-img convert`, and \
                    seal the copy",
        ),
        Some(_) => Ok(original::mark(settings, root)),
        None => refuse("it has no disk"),
    }
}

fn forget_windows(options: &Options, end: Instant) -> anyhow::Result<()> {
    let tag = format!("if exist {SUCCEEDED} del {SUCCEEDED}");
    succeed("cmd.exe", &["/c", &tag], end)?;
    let unattend = options.unattend.as_ref().map(|path| format!("/unattend:{path}"));
    let words = ["/generalize", "/oobe", "/mode:vm", "/quit", "/quiet"];
    let words = [&words[..], &unattend.as_deref().into_iter().collect::<Vec<_>>()].concat();
    succeed(SYSPREP, &words, end)?;
    let log = r"C:\Windows\System32\Sysprep\Panther\setuperr.log";
    let tag = format!("if not exist {SUCCEEDED} exit 1");
    succeed("cmd.exe", &["/c", &tag], end)
        .with_context(|| format!("sysprep has failed: see {log} in the guest"))
}

/// Runs a program in the guest.
fn succeed(program: &str, words: &[&str], end: Instant) -> anyhow::Result<()> {
    let words: Vec<_> = words.iter().map(|&word| word.to_owned()).collect();
    let left = end.saturating_duration_since(Instant::now());
    let Ended { status, errors, .. } = exec::run(program, &words, None, Some(left))?;
    if status != 0 {
        let said = String::from_utf8_lossy(&errors);
        let said: String = said.chars().filter(|it| !it.is_control()).take(300).collect();
        bail!("{program} in the guest ended with status {status}: {said}");
    }
    Ok(())
}

/// Marks the volume with a new identity of the base.
fn write(mark: &Path) -> anyhow::Result<()> {
    let id = Uuid::random()?;
    Ok(files::write_for_owner(mark, |file| writeln!(file, "{id}"))?)
}
