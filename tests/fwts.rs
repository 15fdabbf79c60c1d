//! Runs the firmware test suite (fwts) in the same Linux guest on QEMU's q35 and on our machine.
//! Every serious failure on our machine must also occur on QEMU. With `TRANSOM_TESTS=all`, every
//! test of fwts runs, or is in `fwts/left_out.txt` with the reason why not.
#![forbid(unsafe_code)]

use std::cell::OnceCell;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, ensure};
use transom_tests::compare::expected;
use transom_tests::fwts::{self, Report};
use transom_tests::guest::{Guest, Machine};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::Linux;
use transom_tests::recorded;
use transom_tests::suite::{Suite, Test};
use transom_tests::tpm::Swtpm;
use transom_tests::uefi;

const BOOT: Duration = Duration::from_secs(300);
const TESTS_LIMIT: Duration = Duration::from_secs(200);
const ALL_TESTS_LIMIT: Duration = Duration::from_secs(1200);
/// The last one is needed by tests that run only with `TRANSOM_TESTS=all`.
const ASSETS: [&str; 8] = [
    "BZIMAGE_12",
    "MODULES_12",
    "OVMF_CODE_12",
    "OVMF_VARS_12",
    "BUSYBOX",
    "QEMU",
    "FWTS",
    "EFI_TEST_12",
];
/// All ACPI tests, and other tests of data that we write: windows of the host bridge, SMBIOS,
/// memory types, routing.
const TESTS: &str = "--acpitests apicedge crs dmicheck ebda mtrr osilinux pciirq uniqueid";
/// All that need nobody at the machine, and those of UEFI.
const ALL_TESTS: &str = "--batch --batch-experimental --uefitests";
/// The tests of fwts that do not run, or find nothing to test, each with the reason.
const LEFT_OUT: &str = include_str!("fwts/left_out.txt");
/// The results of `TESTS` on QEMU, in an earlier run.
const QEMU_SHOWED: &str = include_str!("fwts/qemu.txt");

/// Only headlines, results and reasons for skipping are printed, each on one line.
const SCRIPT: &str = "\
mount -t efivarfs efivarfs /sys/firmware/efi/efivars
mount -t securityfs securityfs /sys/kernel/security
[ ! -e /efi_test.ko ] || insmod /efi_test.ko || exit 1
cd /tmp
/usr/bin/fwts -q -w 1000 -r log $@
grep -h -E -B 1 '^(-{200,}$|PASSED|FAILED|SKIPPED|ABORTED)|skipping' log* |
  sed -E 's/^-{200,}$/----------/'
";

fn main() -> ExitCode {
    let ours = Rc::new(OnceCell::new());
    let [first, second, third] = [ours.clone(), ours.clone(), ours];
    let tests = vec![
        Test::new("fwts_runs_on_transom", move || {
            first.set(run(Machine::Transom)?).ok().context("fwts ran twice")
        }),
        Test::new("transom_fails_no_test_that_qemu_passes", move || {
            let transom = second.get().context("fwts did not run")?;
            let record = || Report::read(QEMU_SHOWED);
            recorded::or_live(record, || run(Machine::Qemu), |qemu| compare(qemu, transom))
        }),
        Test::new("every_test_of_fwts_runs_or_has_a_reason", move || {
            left_out(third.get().context("fwts did not run")?)
        })
        .thorough(),
    ];
    let (seconds, assets) =
        if lab::everything() { (3600, &ASSETS[..]) } else { (1800, &ASSETS[..7]) };
    Suite { lab: Lab { mib: 6144, seconds, assets }, tests }.main()
}

fn run(machine: Machine) -> anyhow::Result<Report> {
    let work = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset("OVMF_VARS_12")?, work.path())?;
    let tpm = Swtpm::start()?;
    let guest = Guest::on(machine).cpus("2,sockets=1,cores=2,threads=1").memory("3072M");
    let mut guest = guest.tpm(&tpm.path()).firmware(lab::asset("OVMF_CODE_12")?, vars);
    if machine == Machine::Qemu {
        guest = guest.word("-M").word("smm=off,hpet=off");
    }
    let mut linux = Linux::new(guest, &lab::asset("BZIMAGE_12")?)
        .cmdline("nokaslr tsc=reliable cryptomgr.notests norandmaps")
        .cmdline("rcupdate.rcu_cpu_stall_suppress=1 iomem=relaxed")
        .modules(&lab::asset("MODULES_12")?, &["msr", "efivarfs"])
        .file("fwts.sh", SCRIPT);
    let tree = lab::asset("FWTS")?;
    let mut files = program(&tree, "fwts")?;
    files.extend(program(&tree, "lspci")?);
    files.extend(
        ["klog", "clog", "olog", "syntaxcheck"]
            .map(|it| tree.join(format!("usr/share/fwts/{it}.json"))),
    );
    files.sort_unstable();
    files.dedup();
    for file in files {
        let inside = format!("/{}", file.strip_prefix(&tree)?.display());
        linux = linux.add(&file, &inside);
    }
    if lab::everything() {
        linux = linux.add(&lab::asset("EFI_TEST_12")?, "/efi_test.ko");
    }
    let (tests, limit) =
        if lab::everything() { (ALL_TESTS, ALL_TESTS_LIMIT) } else { (TESTS, TESTS_LIMIT) };
    let mut booted = linux.boot(BOOT)?;
    let said = booted.run(&format!("sh /fwts.sh {tests}"), limit)?;
    fs::write(lab::shared()?.join(format!("fwts-on-{machine:?}.log")), &said)?;
    let report = Report::read(&said)?;
    eprintln!("{report}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, BOOT)?;
    Ok(report)
}

/// A program and its libraries, from a tree of another system.
fn program(tree: &Path, name: &str) -> anyhow::Result<Vec<PathBuf>> {
    let program = tree.join("usr/bin").join(name);
    let text = loaded(tree, &["--list".as_ref(), program.as_ref()])?;
    let mut files: Vec<_> = text
        .split_ascii_whitespace()
        .map(PathBuf::from)
        .filter(|it| it.starts_with(tree))
        .collect();
    let loader = loader(tree);
    files.retain(|file| *file != loader);
    files.extend([program, loader]);
    Ok(files)
}

fn loader(tree: &Path) -> PathBuf {
    tree.join("lib64/ld-linux-x86-64.so.2")
}

/// The output of the tree's loader with these words.
fn loaded(tree: &Path, words: &[&OsStr]) -> anyhow::Result<String> {
    let libraries = tree.join("usr/lib/x86_64-linux-gnu");
    let path = format!("{0}:{0}/fwts", libraries.display());
    let loader = loader(tree);
    let output = Command::new(&loader).args(["--library-path", &path]).args(words).output();
    let output = output.with_context(|| loader.display().to_string())?;
    ensure!(output.status.success(), "{}: {words:?}: {}", loader.display(), output.status);
    String::from_utf8(output.stdout).context("the output of a program from the tree")
}

/// Every test of fwts had a result on our machine, or is on the list, and no test is both.
fn left_out(ours: &Report) -> anyhow::Result<()> {
    let tree = lab::asset("FWTS")?;
    let program = tree.join("usr/bin/fwts");
    let list = loaded(&tree, &[program.as_ref(), "--show-tests-categories".as_ref()])?;
    let all = fwts::names(&list)?;
    let missing: Vec<_> = all.iter().filter(|it| !ours.has(it)).cloned().collect();
    eprintln!("{} of {} tests of fwts ran", all.len() - missing.len(), all.len());
    expected::check(&missing, &expected::read(LEFT_OUT)?)
}

fn compare(qemu: &Report, transom: &Report) -> anyhow::Result<()> {
    let reasons = expected::read(LEFT_OUT)?;
    let mut missing = qemu.tests_not_in(transom);
    missing.retain(|test| !reasons.iter().any(|it| it.pattern == *test));
    ensure!(missing.is_empty(), "these tests ran on QEMU only: {missing:?}");
    let own = transom.failures_not_in(qemu);
    own.iter().for_each(|failure| eprintln!("fails only on our machine: {failure}"));
    let serious: Vec<_> = own.iter().filter(|failure| failure.is_serious()).collect();
    ensure!(serious.is_empty(), "{} serious failures only on our machine", serious.len());
    Ok(())
}
