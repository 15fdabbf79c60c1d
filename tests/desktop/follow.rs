//! A display whose size follows the window of a viewer, from firmware to Linux and back.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transom_tests::desk::{Desk, PASSWORD};
use transom_tests::guest::{Guest, Running};
use transom_tests::lab;
use transom_tests::linux::Linux;
use transom_tests::say;
use transom_tests::sight::Sight;
use transom_tests::uefi;
use transom_tests::viewer::{Viewer, Xvfb};
use vmm::screenshot::Picture;

use crate::{BOOT, LAB, SOON};

/// Part of libdrm. It shows a test picture in any mode until its input is closed.
const MODETEST: &str = "/usr/bin/modetest";
/// The monitor's preferred size at first, and the sizes of the window: smaller and larger.
const FIRST: &str = "800x600";
const WINDOWS: [(u16, u16); 2] = [(731, 519), (1001, 703)];

/// The guest's part of the test: reports firmware's frame buffer and the driver, then shows a test
/// picture in each mode that becomes the preferred one. Like a desktop's program, it reads the
/// modes when the driver reports a change (uevent). It takes no commands, because the lab has no
/// input: a window of 640x480 makes it restart.
const FOLLOWER: &str = r#"
dmesg | grep -E 'efifb: mode|simple-framebuffer|simpledrm'
echo "driver $(cat /sys/class/graphics/fb0/name)"
id=$(modetest -M virtio_gpu -c | awk '$3 == "connected" { print $1; exit }')
shown=$(head -n 1 /sys/class/drm/*-Virtual-1/modes)
echo "at first $shown"
events=$(cat /sys/kernel/uevent_seqnum)
while :; do
  now=$(cat /sys/kernel/uevent_seqnum)
  if [ "$now" != "$events" ]; then
    events=$now
    echo detect > "$(echo /sys/class/drm/*-Virtual-1/status)"
  fi
  mode=$(head -n 1 /sys/class/drm/*-Virtual-1/modes)
  if [ "$mode" != "$shown" ]; then
    shown=$mode
    [ "$mode" != 640x480 ] || reboot -f
    killall -q modetest sleep
    [ -p "/$mode" ] || mkfifo "/$mode"
    sleep 1000 > "/$mode" &
    modetest -M virtio_gpu -s "$id:$mode" < "/$mode" > /said 2>&1 &
    echo "shows $mode"
  fi
  usleep 300000
done
"#;

/// Firmware and the start of Linux draw into the linear frame buffer; then Linux' driver for
/// virtio-gpu takes the display over, and follows the window of TigerVNC's viewer. After a restart,
/// firmware has its picture again, in the window's size.
pub(crate) fn firmware_and_linux_follow_the_window() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset("OVMF_VARS_13")?, folder.path())?;
    let guest = Guest::transom().firmware(lab::asset("OVMF_CODE_13")?, vars);
    let guest = guest.display(&format!("{FIRST},adapter=virtio"));
    let linux = Linux::new(guest, &lab::asset("BZIMAGE_GENERIC")?)
        .modules(&lab::asset("MODULES_GENERIC")?, &["virtio-pci", "virtio-gpu"])
        .program(MODETEST)?
        .cmdline("fbcon=nodefer vt.global_cursor_default=0")
        .first(FOLLOWER);
    let mut desk = Desk::start(&LAB, linux.guest()?, BOOT)?;
    let xvfb = Xvfb::new()?;
    // Lossless, so that colors can be compared.
    let words = ["-RemoteResize=1", "-AutoSelect=0", "-PreferredEncoding=ZRLE", "-NoJPEG=1"];
    let mut command = xvfb.viewer(&format!("127.0.0.1:{}", desk.vnc), &words);
    let mut viewer = Viewer::open(&xvfb, command.env("VNC_PASSWORD", PASSWORD))?;
    takes_over_from_firmware(&mut desk.running, FIRST)?;
    for (width, height) in WINDOWS {
        viewer.resize(width, height)?;
        desk.running.expect(&format!("shows {width}x{height}\n"), SOON)?;
        shows_the_test_picture(&mut viewer, (width, height))?;
    }
    // A restart takes as long as all else.
    if lab::everything() {
        viewer.resize(640, 480)?;
        takes_over_from_firmware(&mut desk.running, "640x480")?;
    }
    Ok(())
}

/// Waits for Linux, and checks the frame buffer that firmware reported to it, and that the driver
/// replaced it in the same size.
fn takes_over_from_firmware(running: &mut Running, size: &str) -> anyhow::Result<()> {
    let said = running.expect(&format!("at first {size}\n"), BOOT)?;
    let said = said.rsplit(">>>transom begin").next().unwrap_or_default();
    ensure!(
        said.contains(&format!("mode={size}x32")) || said.contains(&format!("mode is {size}x32")),
        "firmware has no {size}: {said}"
    );
    ensure!(said.contains("driver virtio_gpudrmfb"), "the display has another driver: {said}");
    say!("from firmware, then from Linux' driver: {size}");
    Ok(())
}

/// Waits until the test picture fills the window: its first color bar is gray, the last one blue.
fn shows_the_test_picture(viewer: &mut Viewer, (width, height): (u16, u16)) -> anyhow::Result<()> {
    let size = Picture { width: width.into(), height: height.into() };
    let end = Instant::now() + SOON;
    loop {
        let (picture, pixels) = viewer.inside()?.context("the window was moved")?;
        let (lines, _) = pixels.as_chunks::<4>();
        let line: Vec<_> =
            lines.iter().take(width.into()).map(|it| [it[0], it[1], it[2]]).collect();
        let bars = line.chunk_by(|one, other| one == other).count();
        let ends = (line.first(), line.last());
        let filled = bars == 7 && ends == (Some(&[192; 3]), Some(&[192, 0, 0]));
        // The last line is of other bars, and not the viewer's background.
        let last = lines.last().is_some_and(|it| it[..3] != [0; 3]);
        if picture == size && filled && last {
            let kept = Sight::new(picture, pixels)?.keep(&format!("follow-{width}x{height}"))?;
            say!("the window of {width}x{height} is full: {kept}");
            return Ok(());
        }
        if Instant::now() > end {
            let kept = Sight::new(picture, pixels)?.keep("follow")?;
            anyhow::bail!("{bars} bars in {picture:?}, {ends:?}; the picture is in {kept}");
        }
        sleep(Duration::from_millis(300));
    }
}
