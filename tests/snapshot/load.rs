//! Linux under load of every kind goes on in other processes, at random moments: disks, USB,
//! memory, network, screen, sound and TPM, each of which finds its own faults.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use host::testutil::noise::Noise;
use transom_tests::guest::Guest;
use transom_tests::lab;
use transom_tests::linux::{Booted, Linux};
use transom_tests::program::said as said_by;
use transom_tests::say;
use transom_tests::sound::{self, FORMAT, FRAME_BYTES};
use transom_tests::tpm::Swtpm;

use super::network::{self, Host};
use super::{AWAY, BOOT, migrated, moved};

/// An emulated guest answers late under such a load.
const SOON: Duration = Duration::from_secs(180);
/// Snapshots and moves, and with `TRANSOM_TESTS=all`.
const MOVES: [u32; 2] = [3, 200];
/// The longest time between two, in milliseconds.
const LONGEST: u64 = 1500;
/// Frames of the sound that the guest plays again and again: two seconds.
const FRAMES: u32 = 96_000;
/// The pictures that it shows one after another, each of one grey, and the step between them.
const PICTURES: u8 = 8;
const STEP: u8 = 30;
/// The driver copies what is drawn to the display later, so a picture may have parts of earlier
/// ones.
const MOST_GREYS: usize = 3;

const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "virtio_balloon",
    "virtio-rng",
    "nvme",
    "ahci",
    "sd_mod",
    "crc32c_generic",
    "ext4",
    "xhci-pci",
    "usbhid",
    "hid-generic",
    "usb-storage",
    "virtio_net",
    "bochs",
    "snd-hda-codec-generic",
    "snd-hda-intel",
];

/// Numbers that are written one by one, files and memory that are compared again and again, a
/// measurement that only this script changes, and a clock that never goes back. /wrong has faults.
const LOAD: &str = r#"
set -e
while [ ! -e /dev/sdb ]; do usleep 100000; done
for disk in numbers.disk nvme0n1 sda sdb; do
  [ -e /dev/$disk ] || ln -s /$disk /dev/$disk
  /usr/sbin/mke2fs -q -t ext4 /dev/$disk
  mkdir -p /mnt/$disk
  mount -t ext4 /dev/$disk /mnt/$disk
done
mkdir -p /memory
mount -t tmpfs none /memory
head -c 12582912 /dev/urandom > /memory/data
sum=$(md5sum < /memory/data)
mkdir -p /pictures
for i in $(seq 1 PICTURES); do
  head -c 3145728 /dev/zero | tr '\000' "\\$(printf %o $((i * STEP)))" > /pictures/$i
done
touch /wrong
(
  i=0
  file=/mnt/numbers.disk/numbers
  while [ ! -e /stop ]; do i=$((i + 1)); echo $i >> $file; sync $file; done
  touch /stopped.numbers
) &
for disk in nvme0n1 sda sdb; do (
  while [ ! -e /stop ]; do
    head -c 3145728 /dev/urandom > /data.$disk
    cp /data.$disk /mnt/$disk/data
    sync
    echo 3 > /proc/sys/vm/drop_caches
    cmp /data.$disk /mnt/$disk/data >> /wrong 2>&1 || true
  done
  touch /stopped.$disk
) & done
(
  while [ ! -e /stop ]; do
    [ "$(md5sum < /memory/data)" = "$sum" ] || echo "memory has changed" >> /wrong
  done
  touch /stopped.memory
) &
(
  # TPM2_PCR_Extend of the SHA-256 register 16.
  head='\200\002\000\000\000\101\000\000\001\202\000\000\000\020'
  head=$head'\000\000\000\011\100\000\000\011\000\000\000\000\000\000\000\000\001\000\013'
  register=/sys/class/tpm/tpm0/pcr-sha256/16
  exec 3<> /dev/tpm0
  before=$(cat $register)
  while [ ! -e /stop ]; do
    printf "$head"'MEASURED' >&3 || echo "the TPM takes no command" >> /wrong
    answer=$(head -c 19 <&3 | od -v -A n -t x1 | tr -d ' \n')
    [ "$answer" = 80020000001300000000000000000000010000 ] || echo "the TPM: $answer" >> /wrong
    now=$(cat $register)
    [ "$now" != "$before" ] || echo "$register has not changed" >> /wrong
    before=$now
    echo "$now" >> /measured
    usleep 20000
  done
  touch /stopped.tpm
) &
(
  before=$(cut -d . -f 1 /proc/uptime)
  while [ ! -e /stop ]; do
    usleep 100000
    now=$(cut -d . -f 1 /proc/uptime)
    [ $now -ge $before ] || echo "from $before s to $now s" >> /wrong
    before=$now
  done
  touch /stopped.clock
) &
(
  i=0
  while [ ! -e /stop ]; do
    i=$((i % PICTURES + 1))
    cat /pictures/$i > /dev/fb0
    echo $i > /picture
    usleep 200000
  done
  touch /stopped.screen
) &
(
  while [ ! -e /stop ]; do
    echo start >> /played
    chroot /tools aplay -D hw:0,0 FORMAT --buffer-time=500000 - < /played.disk >> /played 2>&1 ||
      echo "aplay: $?: $(tail -n 3 /played)" >> /wrong
  done
  touch /stopped.sound
) &
"#;

/// Ends the load, and checks the numbers.
const CHECK: &str = r#"
touch /stop
waits=0
for it in numbers nvme0n1 sda sdb memory tpm clock screen sound; do
  while [ ! -e /stopped.$it ]; do
    usleep 100000
    waits=$((waits + 1))
    [ $waits -lt 400 ] || { echo "$it does not end: $(cat /wrong)"; dmesg | tail -n 30; exit 1; }
  done
done
umount /mnt/numbers.disk
mount -t ext4 -o ro /numbers.disk /mnt/numbers.disk
seq 1 $(wc -l < /mnt/numbers.disk/numbers) | cmp - /mnt/numbers.disk/numbers >> /wrong 2>&1 || true
wc -l < /mnt/numbers.disk/numbers
cat /wrong
"#;

/// The content that the guest measures, again and again.
const MEASURED: &str = "0123456789abcdef0123456789abcdef";

/// The guest's TPM has all of its measurements, and no other.
fn has_measured_everything(booted: &mut Booted) -> anyhow::Result<()> {
    let said = booted.run("wc -l < /measured; tail -n 1 /measured", SOON)?;
    let (count, last) = said.trim().split_once('\n').context("no measurements")?;
    let count: u32 = count.parse().with_context(|| said.clone())?;
    let mut register = "0".repeat(64);
    let file = tempfile::NamedTempFile::new()?;
    for _ in 0..count {
        let content = [&host::hex::decode(&register)?, MEASURED.as_bytes()].concat();
        fs::write(file.path(), content)?;
        let sum = said_by(process::Command::new("sha256sum").arg(file.path()))?;
        register = sum.split_whitespace().next().context("a sum")?.to_owned();
    }
    ensure!(last.trim().to_lowercase() == register, "after {count} measurements: {last}");
    say!("{count} measurements");
    Ok(())
}

/// The guest's disks and devices, whose files are in a folder.
fn guest(folder: &Path) -> anyhow::Result<Guest> {
    let played = folder.join("played");
    fs::write(&played, sound::signal(0..FRAMES))?;
    let mut guest = Guest::transom().cpus("2").memory("640M").display("1024x768");
    for (kind, how) in
        [("virtio-blk", ",serial=numbers"), ("nvme", ""), ("ahci-disk", ""), ("usb-storage", "")]
    {
        let path = folder.join(kind);
        File::create(&path)?.set_len(128 << 20)?;
        // A USB disk is at a controller, which comes first.
        if kind == "usb-storage" {
            guest = guest.word("--device").word("xhci");
        }
        guest = guest.word("--device").word(format!("{kind},path={}{how}", path.display()));
    }
    let read_only = |path: PathBuf, serial| {
        format!("virtio-blk,path={},readonly,serial={serial}", path.display())
    };
    let (tools, played) =
        (read_only(lab::asset("SOUND_TOOLS")?, "tools"), read_only(played, "played"));
    let card = format!("hda,speaker={}", speaker(folder).display());
    let network = network::device("virtio-net");
    let others = ["virtio-rng", "virtio-balloon", "usb-tablet", &tools, &played, &card, &network];
    Ok(others.iter().fold(guest, |guest, device| guest.word("--device").word(*device)))
}

fn speaker(folder: &Path) -> PathBuf {
    folder.join("speaker")
}

/// A guest under load, at one of two hosts, which has been saved and moved several times.
struct Traveller {
    folder: tempfile::TempDir,
    hosts: [Host; 2],
    at: usize,
    booted: Booted,
    tpm: Swtpm,
    /// The time in which no process had it.
    away: Duration,
}

impl Traveller {
    fn boot(kernel: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("a folder")?;
        let (tpm, hosts) = (Swtpm::start()?, network::hosts()?);
        let guest = guest(folder.path())?.tpm(&tpm.path());
        let modules = lab::asset(&format!("MODULES{kernel}"))?;
        let load = LOAD.replace("MEASURED", MEASURED).replace("FORMAT", FORMAT);
        let load = load.replace("PICTURES", &PICTURES.to_string());
        let load = load.replace("STEP", &STEP.to_string());
        let linux = Linux::new(guest, &lab::asset(&format!("BZIMAGE{kernel}"))?)
            .modules(&modules, MODULES)
            .cmdline("fbcon=nodefer vt.global_cursor_default=0")
            .program("/usr/sbin/mke2fs")?
            .file("links.sh", &sound::links(&["numbers", "tools", "played"]))
            .file("load.sh", &load)
            .file("check.sh", CHECK);
        let mut booted = hosts[0].space.run(|| linux.boot(BOOT))?;
        booted.run("sh /links.sh", SOON)?;
        sound::full_volume(&mut booted, SOON)?;
        booted.run("sh /load.sh > /said 2>&1 || { cat /said; exit 1; }", SOON)?;
        booted.run("dmesg -c > /dev/null", SOON)?;
        Ok(Self { folder, hosts, at: 0, booted, tpm, away: Duration::ZERO })
    }

    /// Goes on in another process, with another TPM that continues this one, and at the other host
    /// if it is moved while it runs.
    fn travels(self, how: &str) -> anyhow::Result<Self> {
        let Self { folder, hosts, mut at, booted: Booted { running }, mut tpm, mut away } = self;
        let next = Swtpm::start()?;
        let running = if how == "migrate" {
            at = 1 - at;
            hosts[at].space.run(|| migrated(running, folder.path(), Some(&next)))?
        } else {
            away += AWAY;
            hosts[at].space.run(|| moved(running, folder.path(), how, Some(&next)))?
        };
        tpm.ends(SOON)?;
        Ok(Self { folder, hosts, at, booted: Booted { running }, tpm: next, away })
    }

    fn has_no_faults(&mut self) -> anyhow::Result<()> {
        let wrong = self.booted.run("head -c 4000 /wrong", SOON)?;
        if !wrong.trim().is_empty() {
            let said = self.booted.try_run("dmesg | tail -n 40", SOON)?.output;
            bail!("{wrong}\n{said}\n{}", self.booted.running.stderr());
        }
        logs_no_errors(&mut self.booted)?;
        let greys = self.greys()?;
        ensure!(greys.len() <= MOST_GREYS, "too many pictures at once: {greys:?}");
        let start = Instant::now();
        while self.greys()? == greys {
            ensure!(start.elapsed() < SOON, "the screen stands still: {greys:?}");
        }
        Ok(())
    }

    /// The greys on the screen, as numbers of pictures.
    fn greys(&self) -> anyhow::Result<Vec<u8>> {
        let (_, pixels) = self.booted.running.screenshot()?;
        let (pixels, _) = pixels.as_chunks::<4>();
        let mut greys: Vec<_> = pixels.iter().map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect();
        greys.sort_unstable();
        greys.dedup();
        let number = |[blue, green, red]: [u8; 3]| {
            ensure!(blue == green && green == red && blue % STEP == 0, "{blue} {green} {red}");
            Ok(blue / STEP)
        };
        greys.into_iter().map(number).collect()
    }

    /// Ends the load, and checks all that is left of it.
    fn arrives(mut self) -> anyhow::Result<()> {
        let found = self.booted.run("sh /check.sh", SOON)?;
        let numbers = found.trim().parse::<u64>();
        let numbers = numbers.with_context(|| format!("more than a number: {found}"))?;
        ensure!(numbers > 20, "only {numbers} numbers were written");
        say!("{numbers} numbers");
        has_measured_everything(&mut self.booted)?;
        let last = self.booted.run("cat /picture", SOON)?;
        let start = Instant::now();
        while self.greys()? != [last.trim().parse::<u8>()?] {
            ensure!(start.elapsed() < SOON, "{:?}, not picture {last}", self.greys()?);
        }
        let played = self.booted.run("cat /played", SOON)?;
        was_heard(&fs::read(speaker(self.folder.path()))?, &played)?;
        logs_no_errors(&mut self.booted)?;
        self.booted.running.send("poweroff -f")?;
        self.booted.running.ends_with(0, SOON)
    }
}

/// Compares what was heard with what `aplay` says that it played. An emulated guest may be too slow
/// for its own sound, which `aplay` notices; every other sound is whole, in one piece and once.
fn was_heard(heard: &[u8], played: &str) -> anyhow::Result<()> {
    let count = |word| played.matches(word).count();
    let (starts, underruns) = (count("start\n"), count("underrun"));
    let (frames, _) = heard.as_chunks::<FRAME_BYTES>();
    let (mut whole, mut begun, mut next) = (0, 0, 0);
    for frame in frames {
        match sound::number(*frame) {
            Some(number) if number == next => next += 1,
            other => next = u32::from(other == Some(0)),
        }
        begun += usize::from(next == 1);
        if next == FRAMES {
            (whole, next) = (whole + 1, 0);
        }
    }
    say!("{starts} sounds, {underruns} times too slow: {begun} begun and {whole} whole");
    ensure!(whole <= starts && whole + underruns >= starts, "some of them were not whole");
    ensure!(whole > 0, "no sound was whole: {played}");
    Ok(())
}

pub(crate) fn linux_goes_on(kernel: &str) -> anyhow::Result<()> {
    let mut traveller = Traveller::boot(kernel)?;
    let mut line = network::connects(&mut traveller.booted)?;
    let stop = AtomicBool::new(false);
    scope(|scope| {
        let echo = || network::echoes(&mut line, 0, || !stop.load(Ordering::Relaxed));
        let echo = scope.spawn(echo);
        let travelled = travels_often(traveller);
        stop.store(true, Ordering::Relaxed);
        let echoed = echo.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (traveller, (count, gap)) = (travelled?, echoed?);
        say!("{count} numbers came back through the network, the longest after {gap:?}");
        traveller.arrives()
    })
}

fn travels_often(mut traveller: Traveller) -> anyhow::Result<Traveller> {
    let (start, before) = (Instant::now(), traveller.booted.uptime(SOON)?);
    let mut random = Noise::new(19);
    for round in 0..MOVES[usize::from(lab::everything())] {
        sleep(Duration::from_millis(random.below(LONGEST)));
        let how = random.choose(&["", "migrate", ",copy", "migrate", ",check=off"]);
        traveller = traveller.travels(how).with_context(|| format!("round {round}"))?;
        traveller.has_no_faults().with_context(|| format!("after round {round}, {how:?}"))?;
    }
    let ran = traveller.booted.uptime(SOON)? - before;
    let at_most = (start.elapsed() - traveller.away).as_secs_f64();
    ensure!(ran < at_most, "the guest's clock went on by {ran} s, but it ran for {at_most} s");
    Ok(traveller)
}

fn logs_no_errors(booted: &mut Booted) -> anyhow::Result<()> {
    let words = "unstable|skew|stall|lockup|hung|blocked for|timed out|timeout|i/o error|\
                 call trace|ext4-fs error|bug:|lost|reset controller";
    let find = format!("dmesg | grep -iE -B 10 -A 30 '{words}'");
    let complaints = booted.try_run(&find, SOON)?.output;
    ensure!(complaints.trim().is_empty(), "the kernel complains: {complaints}");
    Ok(())
}
