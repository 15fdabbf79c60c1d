//! SPICE's agent for Linux, in an X session of the guest, and a viewer with the clipboard of
//! RFC 6143.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use transom_tests::guest::Guest;
use transom_tests::lab;
use transom_tests::linux::{Booted, Linux};
use transom_tests::say;

use crate::{BOOT, SOON, WORK};

const MODULES: &[&str] = &["virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "virtio_console"];
/// Starts an X server without a screen, and both parts of the agent, which finds its port as udev
/// names it. The daemon cannot ask systemd for the session (-X), and needs no tablet (-f).
const START: &str = r"
set -e
mkdir -p /tools
mount -t ext4 -o ro /dev/vda /tools
for folder in proc sys dev; do mount --bind /$folder /tools/$folder; done
for folder in tmp run; do mount -t tmpfs none /tools/$folder; done
mkdir /tools/run/spice-vdagentd
for port in /sys/class/virtio-ports/*; do
  [ $(cat $port/name) != com.redhat.spice.0 ] || link=${port##*/}
done
mkdir /dev/virtio-ports
ln -s ../$link /dev/virtio-ports/com.redhat.spice.0
chroot /tools Xvfb :0 -screen 0 320x200x24 -extension GLX -nolisten tcp > /xvfb.log 2>&1 &
while [ ! -e /tools/tmp/.X11-unix/X0 ]; do sleep 0.2; done
chroot /tools spice-vdagentd -x -X -f -u /dev/null -d > /daemon.log 2>&1 &
while [ ! -e /tools/run/spice-vdagentd/spice-vdagent-sock ]; do sleep 0.2; done
DISPLAY=:0 chroot /tools spice-vdagent -x -d > /agent.log 2>&1 &
while ! grep -q 'max clipboard' /daemon.log; do sleep 0.2; done
";
/// The texts' checksums by md5sum, because the console is slow.
const SHORT_SUM: &str = "0a477fea7e5d416624ac0970a964edcc";
const LONG_SUM: &str = "eafa53c6e59a568fb8402cf4d96a7e81";
/// ServerCutText and ClientCutText.
const FROM_SERVER: u8 = 3;
const FROM_CLIENT: u8 = 6;

/// A viewer that reads no picture.
struct Viewer(UnixStream);

impl Viewer {
    fn connect(path: &Path) -> Result<Self> {
        let mut viewer = Self(UnixStream::connect(path).context("the screen's socket")?);
        viewer.0.set_read_timeout(Some(SOON))?;
        viewer.read(12)?;
        viewer.0.write_all(b"RFB 003.008\n")?;
        let count = viewer.read(1)?[0];
        ensure!(viewer.read(count.into())?.contains(&1), "the viewer needs no password");
        viewer.0.write_all(&[1])?;
        ensure!(viewer.read(4)? == [0; 4], "the viewer is refused");
        viewer.0.write_all(&[1])?;
        let init = viewer.read(24)?;
        viewer.read(init[23].into())?;
        Ok(viewer)
    }

    fn read(&mut self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn copy(&mut self, text: &str) -> Result<()> {
        let length = u32::try_from(text.len())?.to_be_bytes();
        let message = [&[FROM_CLIENT, 0, 0, 0][..], &length, text.as_bytes()].concat();
        Ok(self.0.write_all(&message)?)
    }

    /// The next text that the guest copies.
    fn text(&mut self) -> Result<String> {
        let head = self.read(8)?;
        ensure!(head[0] == FROM_SERVER, "an unexpected message: {head:?}");
        let length = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        Ok(String::from_utf8(self.read(length as usize)?)?)
    }
}

/// Waits until a program in the guest pastes this text.
fn pastes(booted: &mut Booted, wanted: &str) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let paste = "DISPLAY=:0 chroot /tools timeout 5 xclip -o -selection clipboard | md5sum";
        let found = booted.try_run(paste, SOON)?;
        if found.output.starts_with(wanted) {
            return Ok(start.elapsed());
        }
        ensure!(start.elapsed() < SOON, "the guest pastes something else: {}", logs(booted)?);
        sleep(Duration::from_millis(200));
    }
}

fn logs(booted: &mut Booted) -> Result<String> {
    booted.run("tail -n 20 /xvfb.log /daemon.log /agent.log 2>&1", SOON)
}

pub(crate) fn is_shared_with_viewers(release: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let screen = folder.path().join("screen");
    let tools = lab::asset("CLIPBOARD_TOOLS")?;
    let guest = Guest::transom()
        .display("640x480")
        .word("--vnc")
        .word(format!("unix:{}", screen.display()))
        .word("--device")
        .word(format!("virtio-blk,path={},readonly", tools.display()))
        .word("--device")
        .word("virtio-serial,to=clipboard");
    let kernel = lab::asset(&format!("BZIMAGE_{release}"))?;
    let modules = lab::asset(&format!("MODULES_{release}"))?;
    let linux = Linux::new(guest, &kernel).modules(&modules, MODULES);
    let mut booted = linux.file("start.sh", START).boot(BOOT)?;
    booted.run("sh /start.sh", WORK)?;
    let mut viewer = Viewer::connect(&screen)?;
    let long = "One of many lines that a person copies.\n".repeat(5_000);
    for (text, sum) in [("Hello, guest!\n", SHORT_SUM), (long.as_str(), LONG_SUM)] {
        viewer.copy(text)?;
        let time = pastes(&mut booted, sum)?;
        say!("{} bytes arrived in the guest in {time:?}", text.len());
    }
    let start = Instant::now();
    booted.run("echo Hello, viewer | DISPLAY=:0 chroot /tools xclip -selection clipboard", SOON)?;
    let text = viewer.text()?;
    ensure!(text == "Hello, viewer\n", "the viewer pastes `{text}`: {}", logs(&mut booted)?);
    say!("the viewer had the guest's text after {:?}", start.elapsed());
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}
