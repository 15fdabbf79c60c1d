//! The small virtio devices under Linux: a balloon that returns memory to the host and takes it
//! back, a named port, and the clipboard's agent.
#![forbid(unsafe_code)]

#[path = "virtio/clipboard.rs"]
mod clipboard;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use host::size::Size;
use serde_json::Value;
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::program::resident_kib;
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use vmm::control::Command;

const BOOT: Duration = Duration::from_secs(180);
/// The limit for a guest that touches or frees most of its memory.
const WORK: Duration = Duration::from_secs(240);
const SOON: Duration = Duration::from_secs(60);

const RELEASES: [&str; 2] = ["12", "13"];
const ASSETS: &[&str] =
    &["BZIMAGE_12", "MODULES_12", "BZIMAGE_13", "MODULES_13", "BUSYBOX", "CLIPBOARD_TOOLS"];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The guest's memory.
const MEMORY: u64 = 2 * GIB;
/// The change that the host must see when a gibibyte is freed or taken back.
const MIN_CHANGE: u64 = 900 * MIB;

fn main() -> ExitCode {
    let test = |release: &'static str, says: &str, body: fn(&str) -> anyhow::Result<()>| {
        Test::new(format!("linux_{release}_{says}"), move || body(release))
    };
    // A guest that fills its memory takes minutes in the lab, so one kernel must be enough.
    let mut tests = Vec::new();
    for release in RELEASES {
        let of_it = [
            test(release, "talks_through_a_named_port", talks_through_a_named_port),
            test(release, "shares_its_clipboard_with_viewers", clipboard::is_shared_with_viewers),
            test(release, "reports_free_memory", reports_free_memory),
            // Windows' driver inflates and deflates the balloon in the suite `windrv`.
            test(release, "returns_memory_and_reclaims_it", gives_memory_back).thorough(),
        ];
        tests.extend(of_it.map(|it| if release == RELEASES[0] { it.thorough() } else { it }));
    }
    Suite { lab: Lab { mib: 4096, seconds: 1200, assets: ASSETS }, tests }.main()
}

fn linux(guest: Guest, release: &str, module: &str) -> anyhow::Result<Linux> {
    let kernel = lab::asset(&format!("BZIMAGE_{release}"))?;
    let modules = lab::asset(&format!("MODULES_{release}"))?;
    Ok(Linux::new(guest, &kernel).modules(&modules, &["virtio_pci", module]))
}

/// The resident memory of the machine's process in bytes.
fn resident(booted: &Booted) -> anyhow::Result<u64> {
    Ok(resident_kib(booted.running.pid())? << 10)
}

/// Waits until the process's memory satisfies a condition.
fn wait(booted: &Booted, patience: Duration, wanted: impl Fn(u64) -> bool) -> anyhow::Result<u64> {
    let start = Instant::now();
    loop {
        let found = resident(booted)?;
        if wanted(found) {
            return Ok(found);
        }
        ensure!(start.elapsed() < patience, "the process still has {} MiB", found / MIB);
        sleep(Duration::from_millis(200));
    }
}

/// Makes the guest touch 1400 MiB and free them.
fn touch(booted: &mut Booted) -> anyhow::Result<()> {
    booted.run("dd if=/dev/zero of=/memory/file bs=1M count=1400", WORK)?;
    ensure!(resident(booted)? > 1400 * MIB, "the process has {} bytes", resident(booted)?);
    booted.run("rm /memory/file", SOON)?;
    Ok(())
}

fn balloon(booted: &Booted, size: Option<u64>) -> anyhow::Result<Value> {
    booted.running.ask(&Command::Balloon { size: size.map(Size) })
}

/// Lets processors cache few free pages. By default they cache up to an eighth of memory while
/// nothing happens, and these pages fragment blocks.
const PREPARE: &str = "mkdir /memory && mount -t tmpfs -o size=1500m none /memory && \
                       echo 1000 > /proc/sys/vm/percpu_pagelist_high_fraction";

/// Whether the guest has reported the memory that it freed.
fn is_small(bytes: u64) -> bool {
    bytes < 1400 * MIB - MIN_CHANGE
}

fn reports_free_memory(release: &str) -> anyhow::Result<()> {
    let guest = Guest::transom().memory("2G").word("--device").word("virtio-balloon");
    let mut booted = linux(guest, release, "virtio_balloon")?.boot(BOOT)?;
    booted.run(PREPARE, SOON)?;
    let before = resident(&booted)?;
    touch(&mut booted)?;
    let start = Instant::now();
    let mut after = wait(&booted, WORK / 4, is_small);
    // Linux reports whole blocks, and fragmentation may keep some. A guest that misses the
    // completion of a report never reports again.
    for _ in 0..2 {
        if let Err(error) = &after {
            say!("{error:#}: {}", booted.run("cat /proc/buddyinfo /proc/zoneinfo", SOON)?);
            touch(&mut booted)?;
            after = wait(&booted, WORK / 4, is_small);
        }
    }
    let after = after?;
    say!("{} MiB before, {} MiB after {:?}", before / MIB, after / MIB, start.elapsed());
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

fn gives_memory_back(release: &str) -> anyhow::Result<()> {
    let guest = Guest::transom().memory("2G").word("--device").word("virtio-balloon,reporting=off");
    let mut booted = linux(guest, release, "virtio_balloon")?.boot(BOOT)?;
    booted.run(PREPARE, SOON)?;
    touch(&mut booted)?;
    sleep(Duration::from_secs(5));
    let full = resident(&booted)?;
    ensure!(full > 1400 * MIB, "{} MiB: the guest returned memory without a request", full / MIB);
    let state = news(&booted)?;
    let whole = state["target"] == MEMORY && state["actual"] == MEMORY;
    ensure!(whole, "{state}");
    let free = state["statistics"]["free-memory"].as_u64().with_context(|| format!("{state}"))?;
    ensure!((1500 * MIB..MEMORY).contains(&free), "{state}");

    let start = Instant::now();
    balloon(&booted, Some(GIB))?;
    let small = wait(&booted, WORK, |now| now + MIN_CHANGE < full)?;
    say!("{} MiB, then {} MiB after {:?}", full / MIB, small / MIB, start.elapsed());
    reach(&booted, GIB)?;
    let state = news(&booted)?;
    // Free and total memory besides the balloon.
    let statistic =
        |name: &str| state["statistics"][name].as_u64().with_context(|| format!("{name}: {state}"));
    let (left, all) = (statistic("free-memory")?, statistic("total-memory")?);
    ensure!(left < free && left + GIB < all, "{state}");
    ensure!(
        balloon(&booted, Some(MEMORY + 1)).is_err(),
        "a balloon size above the memory was accepted"
    );

    balloon(&booted, Some(MEMORY))?;
    reach(&booted, MEMORY)?;
    touch(&mut booted)?;
    let again = resident(&booted)?;
    ensure!(again > small + MIN_CHANGE, "{} MiB", again / MIB);
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// A balloon report that is newer than this call. Until the guest answers, the machine returns the
/// last one.
fn news(booted: &Booted) -> anyhow::Result<Value> {
    let start = Instant::now();
    loop {
        let passed = start.elapsed();
        let state = balloon(booted, None)?;
        if state["age"].as_f64().is_some_and(|age| age < passed.as_secs_f64()) {
            return Ok(state);
        }
        ensure!(passed < SOON, "the report is not updated: {state}");
        sleep(Duration::from_millis(200));
    }
}

/// Waits until the guest reports this size.
fn reach(booted: &Booted, size: u64) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let state = balloon(booted, None)?;
        if state["actual"] == size {
            return Ok(());
        }
        ensure!(start.elapsed() < WORK, "not {size}: {state}");
        sleep(Duration::from_millis(200));
    }
}

const PORT: &str = "org.qemu.guest_agent.0";
/// Bytes sent through the port in each direction.
const LENGTH: usize = 1_000_000;

/// Echoes the input of the port.
const ECHO: &str = r#"
set -e
for port in /sys/class/virtio-ports/*; do
  [ "$(cat $port/name)" = org.qemu.guest_agent.0 ] && ln -sf /dev/${port##*/} /port
done
exec 3<>/port
echo open
head -c 1000000 <&3 > /came
cat /came >&3
"#;

fn talks_through_a_named_port(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("agent");
    let words = format!("virtio-serial,name={PORT},to=socket:{}", path.display());
    let guest = Guest::transom().word("--device").word(words);
    let guest = guest.word("--device").word("virtio-serial,to=none");
    let linux = linux(guest, release, "virtio_console")?.file("echo.sh", ECHO);
    let mut booted = linux.boot(BOOT)?;
    let connect = || -> anyhow::Result<UnixStream> {
        let client = UnixStream::connect(&path).context("the port's socket")?;
        client.set_read_timeout(Some(WORK))?;
        client.set_write_timeout(Some(WORK))?;
        Ok(client)
    };
    let client = connect()?;
    booted.running.send("sh /echo.sh")?;
    booted.running.expect("open\n", SOON)?;
    let sent: Vec<u8> = (0..=250).cycle().take(LENGTH).collect();
    let mut got = vec![0; LENGTH];
    let start = Instant::now();
    scope(|scope| {
        let writer = scope.spawn(|| (&client).write_all(&sent));
        (&client).read_exact(&mut got).context("data from the guest")?;
        writer.join().expect("a writer does not panic").context("data for the guest")
    })?;
    ensure!(got == sent, "the data came back changed");
    say!("{LENGTH} bytes there and back in {:?}", start.elapsed());
    booted.running.expect(">>>transom done 0\n", SOON)?;

    // Without a client the guest waits; the next client is served.
    drop(client);
    sleep(Duration::from_secs(1));
    booted.running.send("echo again > /port")?;
    let mut next = connect()?;
    let mut word = [0; 6];
    next.read_exact(&mut word)?;
    ensure!(&word == b"again\n", "{word:?}");
    booted.running.expect(">>>transom done 0\n", SOON)?;
    // The other device is a console: hvc0.
    booted.run("echo hello > /dev/hvc0", SOON)?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}
