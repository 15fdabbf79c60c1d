//! Runs the firmware test suite (fwts) in the same Linux guest on QEMU's q35 and on our machine.
//! Every serious failure on our machine must also occur on QEMU.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, ensure};
use transom_tests::fwts::Report;
use transom_tests::guest::{Guest, Machine};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::Linux;
use transom_tests::suite::{Suite, Test};
use transom_tests::tpm::Swtpm;
use transom_tests::uefi;

const BOOT: Duration = Duration::from_secs(300);
const TESTS: Duration = Duration::from_secs(200);

/// All ACPI tests, and other tests of data that we write: windows of the host bridge, SMBIOS,
/// memory types, routing. Only headlines and results are printed, each on one line.
const SCRIPT: &str = "\
cd /tmp
/usr/bin/fwts -q -w 1000 -r log --acpitests apicedge crs dmicheck ebda mtrr osilinux pciirq uniqueid
grep -h -E -B 1 '^(-{200,}$|PASSED|FAILED)' log* | sed -E 's/^-{200,}$/----------/'
";

/// The reports of fwts on each machine.
type Reports = Rc<RefCell<Vec<(Machine, Report)>>>;

fn main() -> ExitCode {
    let assets =
        &["BZIMAGE_12", "MODULES_12", "OVMF_CODE_12", "OVMF_VARS_12", "BUSYBOX", "QEMU", "FWTS"];
    let reports = Reports::default();
    let on = |machine, reports: &Reports| {
        let reports = reports.clone();
        move || {
            let report = run(machine)?;
            reports.borrow_mut().push((machine, report));
            Ok(())
        }
    };
    let tests = vec![
        Test::new("fwts_runs_on_qemu", on(Machine::Qemu, &reports)),
        Test::new("fwts_runs_on_transom", on(Machine::Transom, &reports)),
        Test::new("transom_fails_no_test_that_qemu_passes", move || compare(&reports.borrow())),
    ];
    Suite { lab: Lab { mib: 6144, seconds: 1800, assets }, tests }.main()
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
        .cmdline("rcupdate.rcu_cpu_stall_suppress=1")
        .modules(&lab::asset("MODULES_12")?, &["msr"])
        .file("fwts.sh", SCRIPT);
    let tree = lab::asset("FWTS")?;
    for file in program(&tree)? {
        let inside = format!("/{}", file.strip_prefix(&tree)?.display());
        linux = linux.add(&file, &inside);
    }
    let mut booted = linux.boot(BOOT)?;
    let said = booted.run("sh /fwts.sh", TESTS)?;
    fs::write(lab::shared()?.join(format!("fwts-on-{machine:?}.log")), &said)?;
    let report = Report::read(&said)?;
    eprintln!("{report}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, BOOT)?;
    Ok(report)
}

/// The program and its libraries, from a tree of another system.
fn program(tree: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let libraries = tree.join("usr/lib/x86_64-linux-gnu");
    let program = tree.join("usr/bin/fwts");
    let loader = tree.join("lib64/ld-linux-x86-64.so.2");
    let path = format!("{0}:{0}/fwts", libraries.display());
    let mut command = Command::new(&loader);
    let output = command.args(["--library-path", &path, "--list"]).arg(&program).output();
    let output = output.with_context(|| loader.display().to_string())?;
    ensure!(output.status.success(), "{}: {}", program.display(), output.status);
    let text = String::from_utf8(output.stdout).context("the libraries of fwts")?;
    let mut files: Vec<_> = text
        .split_ascii_whitespace()
        .map(PathBuf::from)
        .filter(|it| it.starts_with(tree))
        .collect();
    files.retain(|file| *file != loader);
    files.extend([program, loader]);
    Ok(files)
}

fn compare(reports: &[(Machine, Report)]) -> anyhow::Result<()> {
    let on = |machine| {
        let found = reports.iter().find(|it| it.0 == machine);
        found.map(|it| &it.1).with_context(|| format!("fwts did not run on {machine:?}"))
    };
    let (qemu, transom) = (on(Machine::Qemu)?, on(Machine::Transom)?);
    let missing = qemu.tests_not_in(transom);
    ensure!(missing.is_empty(), "these tests ran on QEMU only: {missing:?}");
    let own = transom.failures_not_in(qemu);
    own.iter().for_each(|failure| eprintln!("fails only on our machine: {failure}"));
    let serious: Vec<_> = own.iter().filter(|failure| failure.is_serious()).collect();
    ensure!(serious.is_empty(), "{} serious failures only on our machine", serious.len());
    Ok(())
}
