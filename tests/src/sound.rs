//! Sound that Linux plays: a signal of which no frame is silent and each has its number, and the
//! programs for it.

use std::ops::Range;
use std::time::Duration;

use crate::linux::Booted;

pub const FRAME_BYTES: usize = 4;
/// The format of the card, without a file header.
pub const FORMAT: &str = "-t raw -f S16_LE -r 48000 -c 2";
/// The first frame of a signal.
const FIRST: u32 = 0x0001_0001;

/// Links the disks `NAMES` by their serial numbers, because their drivers may find them in any
/// order and after a while.
const LINKS: &str = r"
set -e
for name in NAMES; do
  while [ ! -e /$name.disk ]; do
    for disk in /sys/block/vd*; do
      [ ! -e $disk/serial ] || [ $(tr -dc '!-~' < $disk/serial) != $name ] ||
        ln -sf /dev/${disk##*/} /$name.disk
    done
    sleep 0.1
  done
done
mkdir -p /tools
mount -t ext4 -o ro /tools.disk /tools
for folder in dev proc sys; do mount --bind /$folder /tools/$folder; done
";

/// A script for a guest whose disk `tools` has the asset SOUND_TOOLS, and which has other disks.
pub fn links(names: &[&str]) -> String {
    LINKS.replace("NAMES", &names.join(" "))
}

/// Frames with their number, of which none is silent.
pub fn signal(numbers: Range<u32>) -> Vec<u8> {
    numbers.flat_map(|it| (it + FIRST).to_le_bytes()).collect()
}

/// The number of a frame of a signal.
pub fn number(frame: [u8; FRAME_BYTES]) -> Option<u32> {
    u32::from_le_bytes(frame).checked_sub(FIRST)
}

fn tool(booted: &mut Booted, command: &str, within: Duration) -> anyhow::Result<String> {
    booted.run(&format!("chroot /tools {command} 2>&1"), within)
}

/// Full volume, which changes no sample.
pub fn full_volume(booted: &mut Booted, within: Duration) -> anyhow::Result<()> {
    tool(booted, "amixer -q -c 0 sset Master 100% unmute", within)?;
    tool(booted, "amixer -q -c 0 sset Capture 100% cap", within).map(drop)
}
