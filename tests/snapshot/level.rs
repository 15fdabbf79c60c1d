//! A machine with the features of a level of processors goes on where the processor has more. A
//! machine with those of a higher level is refused where only the lower one is offered.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use transom_tests::guest::{Guest, Running};
use transom_tests::lab;
use transom_tests::linux::{Booted, Linux};

use super::{BOOT, SOON, answers, saves};

const LEVEL: &str = "level=x86-64-v2";
const HIGHER: &str = "level=x86-64-v3";
/// The exit status of a machine whose snapshot is refused.
const REFUSED: i32 = 66;
const FACTS: &str = "grep -m 1 '^flags' /proc/cpuinfo; grep -m 1 '^address sizes' /proc/cpuinfo; \
                     cat /proc/sys/kernel/random/boot_id";

pub(crate) fn goes_on_where_the_processor_has_as_much() -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder")?;
    let dir = folder.path().join("snapshot");
    let mut booted = boot(LEVEL)?;
    let facts = booted.run(FACTS, SOON)?;
    ensure!(["sse4_2", "aes"].iter().all(|it| has(&facts, it)), "{facts}");
    ensure!(!["avx", "pdpe1gb"].iter().any(|it| has(&facts, it)), "{facts}");
    ensure!(facts.contains("39 bits physical"), "{facts}");
    saves(&mut booted.running, &dir)?;
    let mut booted = Booted { running: restored(&dir, "nested=off")? };
    answers(&booted.running, Instant::now())?;
    let after = booted.run(FACTS, SOON)?;
    ensure!(after == facts, "{facts}, then {after}");
    drop(booted);
    // The lab loses the guest's XCR0, so that Linux has no AVX there.
    let mut booted = boot(HIGHER)?;
    let facts = booted.run(FACTS, SOON)?;
    ensure!(["bmi2", "movbe"].iter().all(|it| has(&facts, it)), "{facts}");
    ensure!(!["adx", "clflushopt"].iter().any(|it| has(&facts, it)), "{facts}");
    let other = folder.path().join("other");
    saves(&mut booted.running, &other)?;
    let mut refused = restored(&other, LEVEL)?;
    refused.ends_with(REFUSED, SOON)?;
    let said = refused.stderr();
    ensure!(said.contains("lacks features that the guest uses"), "{said}");
    Ok(())
}

fn boot(features: &str) -> anyhow::Result<Booted> {
    let guest = Guest::transom().memory("256M").word("--features").word(features);
    Linux::new(guest, &lab::asset("BZIMAGE_13")?).boot(BOOT)
}

/// Whether the facts have this word.
fn has(facts: &str, word: &str) -> bool {
    facts.split_ascii_whitespace().any(|it| it == word)
}

fn restored(dir: &Path, features: &str) -> anyhow::Result<Running> {
    Guest::restored(dir.display().to_string()).word("--features").word(features).start()
}
