//! Tests of all kinds of images: sends the same requests to an image and to a model in memory.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::driver::{Driver, piece};
use super::*;
use crate::size::Size;
use crate::testutil::noise::Noise;

pub(super) fn sparse(folder: &TempDir, name: &str, size: u64) -> PathBuf {
    let path = folder.path().join(name);
    File::create(&path).unwrap().set_len(size).unwrap();
    path
}

/// Whether `qemu-img` is installed. If not, reports `test` as skipped.
pub(super) fn qemu_img(test: &str) -> bool {
    let there = Command::new("qemu-img").arg("--version").output().is_ok();
    if !there {
        skip::not_run(test, "there is no qemu-img here (package qemu-utils)");
    }
    there
}

/// Runs a command of `qemu-img`, and again while a lock is the reason of its failure. `qemu-img`
/// does not wait for locks, and a child process that another test starts holds all files of this
/// process, with their locks, until it calls `exec`.
pub(super) fn retry_while_locked(command: &mut Command) -> Output {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        if !said.contains("lock") || Instant::now() > end {
            return output;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Creates an image with `qemu-img create`.
pub(super) fn create(path: &Path, options: &[&str], size: &str) {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]).args(options).arg(path).arg(size);
    let done = retry_while_locked(&mut command);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Runs `qemu-img check` and returns its output. Leaked clusters are fine, because a kill may leave
/// them; any other finding is damage.
pub(super) fn check(path: &Path) -> String {
    let mut command = Command::new("qemu-img");
    let check = retry_while_locked(command.args(["check", "-f", "qcow2"]).arg(path));
    let said = String::from_utf8_lossy(&check.stdout) + String::from_utf8_lossy(&check.stderr);
    // 0: no errors. 3: leaks only.
    assert!(matches!(check.status.code(), Some(0 | 3)), "{:?}: {said}", check.status);
    said.into_owned()
}

fn buffered(path: PathBuf) -> Config {
    Config { direct: Direct::Off, ..Config::new(path) }
}

/// A request in flight and its data.
struct Step {
    tag: u64,
    operation: Operation,
    range: std::ops::Range<usize>,
    data: Vec<u8>,
}

/// Pushes a random request within lane `number`, a range of `lane` bytes.
fn propose(driver: &mut Driver, dice: &mut Noise, number: u64, lane: u64) -> Step {
    let start = dice.below(lane / 512) * 512;
    let most = if dice.below(4) == 0 { 200_000 } else { 20_000 };
    let length = (dice.below(most) / 512 * 512).min(lane - start);
    let offset = number * lane + start;
    let range = usize::try_from(offset).unwrap()..usize::try_from(offset + length).unwrap();
    let data: Vec<u8> = range.clone().map(|_| dice.below(256).to_le_bytes()[0]).collect();
    let operation = match dice.below(12) {
        0..4 => Operation::Read,
        4..8 => Operation::Write { durable: dice.below(8) == 0 },
        8 => Operation::Flush,
        9 => Operation::Discard,
        other => Operation::WriteZeroes { unmap: other == 10 },
    };
    let mut pieces = Vec::new();
    if matches!(operation, Operation::Read | Operation::Write { .. }) {
        // Scattered over memory, at addresses that are aligned for direct I/O or not.
        let skew = [0, 0, 512, 4][usize::try_from(dice.below(4)).unwrap()];
        let mut address = number * (2 << 20) + skew;
        let mut rest = data.as_slice();
        while !rest.is_empty() {
            let part = rest.len().min(512 * (1 + usize::try_from(dice.below(40)).unwrap()));
            let (bytes, after) = rest.split_at(part);
            driver.memory.write(address, bytes).unwrap();
            pieces.push(piece(address, part));
            address += part as u64 + dice.below(3) * 4096;
            rest = after;
        }
    }
    let tag = driver.push(operation, offset, length, &pieces);
    Step { tag, operation, range, data }
}

/// Compares the answer with the model, or applies the request to the model.
fn settle(
    image: &Arc<dyn Image>,
    memory: &Memory,
    model: &mut [u8],
    step: Step,
    answer: &Completion,
) {
    let Step { operation, range, data, .. } = step;
    assert_eq!(answer.result, Ok(()), "{operation:?} {range:?}");
    match operation {
        Operation::Read => {
            let mut read = Vec::new();
            for it in &answer.pieces {
                let start = read.len();
                read.resize(start + it.length as usize, 0);
                memory.read(it.address, &mut read[start..]).unwrap();
            }
            assert!(read == model[range.clone()], "{range:?}");
        }
        Operation::Write { .. } => model[range].copy_from_slice(&data),
        Operation::WriteZeroes { .. } => model[range].fill(0),
        Operation::Flush => {}
        Operation::Discard => {
            // Each block is unchanged or zero.
            let now = driver_read(image, &range);
            for (block, now) in range.step_by(512).zip(now.chunks(512)) {
                let before = &mut model[block..block + 512];
                assert!(now == before || now.iter().all(|it| *it == 0), "{block}");
                before.copy_from_slice(now);
            }
        }
    }
}

/// Sends random requests to the image, many at once in separate ranges, and compares it with the
/// model.
pub(super) fn rehearse(image: &Arc<dyn Image>, model: &mut [u8], seed: u64, rounds: u64) {
    let mut driver = Driver::new(image);
    let mut dice = Noise::new(seed);
    for _ in 0..rounds {
        let lanes = 1 + dice.below(6);
        let lane = model.len() as u64 / lanes / 512 * 512;
        let mut steps = Vec::new();
        for number in 0..lanes {
            steps.push(propose(&mut driver, &mut dice, number, lane));
            if dice.below(3) == 0 {
                driver.channel.submit();
            }
        }
        driver.channel.submit();
        for answer in driver.wait(steps.len()) {
            let found = steps.iter().position(|step| step.tag == answer.tag).unwrap();
            settle(image, &driver.memory, model, steps.swap_remove(found), &answer);
        }
    }
    driver.flush().unwrap();
    compare(image, model);
}

fn driver_read(image: &Arc<dyn Image>, range: &std::ops::Range<usize>) -> Vec<u8> {
    Driver::new(image).read(range.start as u64, range.len()).unwrap()
}

pub(super) fn compare(image: &Arc<dyn Image>, model: &[u8]) {
    let mut driver = Driver::new(image);
    for (number, part) in model.chunks(1 << 20).enumerate() {
        let read = driver.read((number << 20) as u64, part.len()).unwrap();
        let wrong = read.iter().zip(part).position(|(one, two)| one != two);
        assert_eq!(wrong, None, "at MiB {number}");
    }
}

const SIZE: usize = 9 << 20;

/// Runs [`rehearse`] twice, opening the file anew each time, and compares again after opening.
fn against_model(open: impl Fn() -> Arc<dyn Image>, start: &[u8], rounds: u64) {
    let mut model = start.to_vec();
    for seed in 0..2 {
        rehearse(&open(), &mut model, seed, rounds);
        compare(&open(), &model);
    }
}

#[test]
fn raw_matches_the_model() {
    let folder = tempfile::tempdir().unwrap();
    for direct in [Direct::Auto, Direct::Off] {
        let path = sparse(&folder, "disk", SIZE as u64);
        let config = Config { direct, ..Config::new(path) };
        against_model(|| open(&config, None).unwrap(), &vec![0; SIZE], 60);
    }
}

#[test]
fn raw_by_threads_matches_the_model() {
    let folder = tempfile::tempdir().unwrap();
    for direct in [Direct::Auto, Direct::Off] {
        let path = sparse(&folder, "disk", SIZE as u64);
        let config = Config { direct, ..Config::new(path) };
        let open = || config::File::by_threads(&config).unwrap();
        against_model(open, &vec![0; SIZE], 60);
    }
}

#[test]
fn an_overlay_matches_the_model_and_does_not_change_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let before: Vec<u8> = (0..SIZE).map(|at| u8::try_from(at % 251).unwrap()).collect();
    std::fs::write(&path, &before).unwrap();
    let config = Config { overlay: Changes::Writes, ..Config::new(path.clone()) };
    rehearse(&open(&config, None).unwrap(), &mut before.clone(), 1, 60);
    assert!(std::fs::read(&path).unwrap() == before);
    compare(&open(&config, None).unwrap(), &before);
    rehearse(&memory(SIZE as u64), &mut vec![0; SIZE], 2, 60);
}

#[test]
fn limits_and_waits_change_only_the_timing() {
    let folder = tempfile::tempdir().unwrap();
    let path = sparse(&folder, "disk", SIZE as u64);
    let bandwidth = Some(Size(1 << 30));
    let config = Config { iops: Some(20_000), bandwidth, ..Config::new(path) };
    against_model(|| open(&config, None).unwrap(), &vec![0; SIZE], 30);
}

#[test]
fn qcow2_matches_the_model_and_qemu() {
    if !qemu_img("qcow2_matches_the_model_and_qemu") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for options in ["cluster_size=65536", "cluster_size=4096", "cluster_size=512", "compat=0.10"] {
        for direct in [Direct::Auto, Direct::Off] {
            let path = folder.path().join("disk.qcow2");
            create(&path, &["-o", options], "9M");
            let config = Config { direct, ..Config::new(path.clone()) };
            let open = || open(&config, None).unwrap();
            against_model(open, &vec![0; SIZE], 40);
            let said = check(&path);
            assert!(!said.contains("leaked"), "{options}: {said}");
            same_for_qemu(&path, &folder);
        }
    }
}

/// Checks that QEMU reads the same data as this crate.
fn same_for_qemu(path: &Path, folder: &TempDir) {
    let raw = folder.path().join("converted");
    let convert = ["convert", "-f", "qcow2", "-O", "raw"];
    let mut command = Command::new("qemu-img");
    assert!(retry_while_locked(command.args(convert).arg(path).arg(&raw)).status.success());
    compare(&open(&Config::new(path), None).unwrap(), &std::fs::read(&raw).unwrap());
}

#[test]
fn qcow2_with_backing_files_matches_the_model() {
    if !qemu_img("qcow2_with_backing_files_matches_the_model") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let noise: Vec<u8> = (0..SIZE).map(|at| u8::try_from(at / 3 % 253).unwrap()).collect();
    // Shorter than the image on top of it, and not a whole number of clusters.
    let short = SIZE - (1 << 20) - 512;
    let raw = folder.path().join("below.raw");
    std::fs::write(&raw, &noise[..short]).unwrap();
    let packed = folder.path().join("packed.qcow2");
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2"];
    let status = Command::new("qemu-img").args(convert).arg(&raw).arg(&packed).status().unwrap();
    assert!(status.success());
    let mut model = noise[..short].to_vec();
    model.resize(SIZE, 0);
    for (name, format, version) in [("below.raw", "raw", "1.1"), ("packed.qcow2", "qcow2", "0.10")]
    {
        let path = folder.path().join("top.qcow2");
        let compat = format!("compat={version}");
        create(&path, &["-o", &compat, "-b", name, "-F", format], "9M");
        let open = || open(&Config::new(path.clone()), None).unwrap();
        against_model(open, &model, 40);
        let said = check(&path);
        assert!(!said.contains("leaked"), "{said}");
        same_for_qemu(&path, &folder);
    }
    // Writes to the compressed image itself.
    let open = || open(&Config::new(packed.clone()), None).unwrap();
    let size = usize::try_from(open().geometry().size).unwrap();
    against_model(open, &model[..size], 40);
    let said = check(&packed);
    assert!(!said.contains("leaked"), "{said}");
}

#[test]
fn block_devices_match_the_model() {
    let test = "block_devices_match_the_model";
    let folder = tempfile::tempdir().unwrap();
    let path = sparse(&folder, "disk", SIZE as u64);
    let found = Command::new("losetup").args(["--find", "--show"]).arg(&path).output();
    let Some(device) = found.ok().filter(|it| it.status.success()) else {
        skip::not_run(test, "loop devices need root and /dev/loop-control");
        return;
    };
    let device = PathBuf::from(String::from_utf8(device.stdout).unwrap().trim());
    let config = Config::new(device.clone());
    let outcome = std::panic::catch_unwind(|| {
        against_model(|| open(&config, None).unwrap(), &vec![0; SIZE], 60);
        let image = open(&config, None).unwrap();
        let mut driver = Driver::new(&image);
        driver.write(0, &vec![1; 4 << 20]).unwrap();
        driver.flush().unwrap();
        let before = path.metadata().unwrap().blocks();
        driver.execute(Operation::Discard, 0, 4 << 20, &[]).unwrap();
        driver.flush().unwrap();
        assert!(path.metadata().unwrap().blocks() < before - 4096, "nothing was freed");
    });
    Command::new("losetup").arg("-d").arg(&device).status().unwrap();
    outcome.unwrap();
}

/// The variable that makes a test process the victim: the path of its disk.
const VICTIM: &str = "TRANSOM_TEST_DISK";
const SLOTS: u64 = 96;
const SLOT: u64 = 24 << 10;

/// The victim's write with this number: its slot, and whether it writes zeros.
fn act(number: u64) -> (u64, bool) {
    let mut dice = Noise::new(number);
    (dice.below(SLOTS), dice.below(5) == 0)
}

fn victim(config: &Config) {
    let image = open(config, None).unwrap();
    let mut driver = Driver::new(&image);
    let first: u64 = std::env::var("TRANSOM_TEST_FIRST").unwrap().parse().unwrap();
    let mut out = std::io::stderr();
    for number in first.. {
        let (slot, zero) = act(number);
        let at = slot * SLOT;
        if zero {
            driver.execute(Operation::WriteZeroes { unmap: true }, at, SLOT, &[]).unwrap();
        } else {
            let data = number.to_le_bytes().repeat(usize::try_from(SLOT / 8).unwrap());
            driver.write(at, &data).unwrap();
        }
        if Noise::new(number ^ 77).below(6) == 0 {
            driver.flush().unwrap();
            out.write_all(format!("durable {number}\n").as_bytes()).unwrap();
        }
    }
}

/// Kills a writing process `rounds` times. Checks each time that all writes are on the disk that
/// were reported as durable.
fn kill_often(test: &str, config: &Config, rounds: u64) {
    if std::env::var_os(VICTIM).is_some_and(|path| Path::new(&path) == config.path) {
        return victim(config);
    }
    let mut durable = vec![None; usize::try_from(SLOTS).unwrap()];
    let mut first = 1;
    for round in 0..rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("disk::rehearsal::{test}"), "--nocapture"])
            .env(VICTIM, &config.path)
            .env("TRANSOM_TEST_FIRST", first.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut last = first - 1;
        let mut end = None;
        for line in lines {
            let line = line.unwrap();
            let Some(number) = line.strip_prefix("durable ") else { continue };
            last = number.parse().unwrap();
            let limit = Duration::from_millis(20 + Noise::new(round).below(150));
            let end = *end.get_or_insert_with(|| Instant::now() + limit);
            if Instant::now() >= end {
                child.kill().ok();
            }
        }
        child.wait().unwrap();
        assert!(last >= first, "the victim did nothing");
        for number in first..=last {
            durable[usize::try_from(act(number).0).unwrap()] = Some(number);
        }
        verify(config, &durable, last);
        if config.path.extension().is_some() {
            check(&config.path);
        }
        // Writes after the last flush may be on the disk or not, so no number is used twice.
        first = last + 1000;
        let image = open(config, None).unwrap();
        let mut driver = Driver::new(&image);
        for slot in 0..SLOTS {
            let (mark, zeros) = (first + slot, vec![0; 8]);
            let bytes = if slot % 7 == 0 { zeros } else { mark.to_le_bytes().to_vec() };
            let data = bytes.repeat(usize::try_from(SLOT / 8).unwrap());
            driver.write(slot * SLOT, &data).unwrap();
            durable[usize::try_from(slot).unwrap()] = None;
        }
        driver.flush().unwrap();
        first += 1000;
        durable.fill(None);
    }
}

fn verify(config: &Config, durable: &[Option<u64>], last: u64) {
    let image = open(&Config { readonly: true, ..config.clone() }, None).unwrap();
    let mut driver = Driver::new(&image);
    for (slot, durable) in (0..).zip(durable) {
        let Some(durable) = *durable else { continue };
        let data = driver.read(slot * SLOT, usize::try_from(SLOT).unwrap()).unwrap();
        // Any part of later writes that were not flushed may be on the disk.
        for bytes in data.chunks(512) {
            let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let later = |it: u64| it >= durable && act(it).0 == slot;
            let sound = if number == 0 {
                (durable..last + 200).any(|it| later(it) && act(it).1)
            } else {
                later(number) && !act(number).1
            };
            assert!(sound, "slot {slot} has {number}, but {durable} was durable");
        }
    }
}

#[test]
fn raw_keeps_durable_data_through_kills() {
    let path = match std::env::var_os(VICTIM) {
        Some(path) => PathBuf::from(path),
        None => sparse(&tempfile::tempdir().unwrap(), "disk", 0),
    };
    let folder = path.parent().unwrap().to_owned();
    if std::env::var_os(VICTIM).is_none() {
        std::fs::create_dir_all(&folder).unwrap();
        File::create(&path).unwrap().set_len(SLOTS * SLOT).unwrap();
    }
    kill_often("raw_keeps_durable_data_through_kills", &buffered(path), 10);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn qcow2_keeps_durable_data_through_kills_and_stays_consistent() {
    let test = "qcow2_keeps_durable_data_through_kills_and_stays_consistent";
    if !qemu_img(test) {
        return;
    }
    if let Some(path) = std::env::var_os(VICTIM) {
        return kill_often(test, &Config::new(path), 0);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    // Small clusters make many tables and refcount blocks.
    create(&path, &["-o", "cluster_size=4096"], "16M");
    kill_often(test, &Config::new(path), 10);
}

#[test]
fn qcow2_survives_a_power_loss_at_any_point() {
    use raw::Event;

    let test = "qcow2_survives_a_power_loss_at_any_point";
    if !qemu_img(test) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    create(&path, &["-o", "cluster_size=512"], "4M");
    let before = std::fs::read(&path).unwrap();
    let (image, journal) = qcow2::journaled(&path);
    let mut model = vec![0; 4 << 20];
    // Numbers of events with the model that is durable after them.
    let mut durable = Vec::new();
    for seed in 0..12 {
        rehearse(&image, &mut model, seed, 5);
        durable.push((journal().len(), model.clone()));
    }
    let journal: Vec<Event> = journal();
    drop(image);
    let mut dice = Noise::new(3);
    let cut = folder.path().join("cut.qcow2");
    for (end, model) in durable {
        lose_power(&cut, &before, &journal[..end], &mut dice);
        compare(&open(&buffered(cut.clone()), None).unwrap(), &model);
        assert!(!check(&cut).contains("leaked"), "{}", check(&cut));
    }
    let mut leaks = 0;
    for _ in 0..60 {
        let end = usize::try_from(dice.below(journal.len() as u64)).unwrap();
        lose_power(&cut, &before, &journal[..end], &mut dice);
        leaks += u32::from(check(&cut).contains("leaked"));
        drop(open(&buffered(cut.clone()), None).unwrap());
        assert!(!check(&cut).contains("leaked"), "{}", check(&cut));
    }
    assert!(leaks > 10, "{leaks}");
}

/// Writes the file as a power loss after these events may leave it, and checks it.
fn lose_power(path: &Path, before: &[u8], events: &[raw::Event], dice: &mut Noise) {
    use raw::Event;

    let flushed = |event: &Event| matches!(event, Event::Flushed);
    let synced = events.iter().rposition(flushed).unwrap_or(0);
    std::fs::write(path, before).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    for (number, event) in events.iter().enumerate() {
        // Writes that were not flushed may have reached the disk or not, in any order.
        if number > synced && dice.below(2) == 0 {
            continue;
        }
        match event {
            Event::Wrote(at, bytes) => file.write_all_at(bytes, *at).unwrap(),
            Event::Punched(at, length) => {
                use rustix::fs::FallocateFlags;

                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, punch, *at, *length).unwrap();
            }
            Event::Flushed => {}
        }
    }
    drop(file);
    check(path);
}
