//! Windows' drivers, as in the suite `windrv`, on a complete KVM: on our machine, and on QEMU's
//! q35, whose result tells whether a check that fails here is our device's fault.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use transom_tests::guest::Machine;
use transom_tests::lab::{self, Lab};
use transom_tests::program::not_run;
use transom_tests::suite::{Suite, Test};

#[path = "windrv/image.rs"]
mod image;

/// The drivers and their modes. The others run only with `TRANSOM_TESTS=all`.
const ALWAYS: &[(&str, &str)] =
    &[("vioserial", "msix"), ("vioserial", "wire"), ("viostor", "msix4"), ("netkvm", "msix1")];
const OTHERS: &[(&str, &[&str])] = &[
    ("viostor", &["late4", "msix1", "few", "one", "wire", "dump"]),
    ("vioscsi", &["msix4", "late4", "msix1", "few", "one", "wire", "dump"]),
    ("netkvm", &["msix4", "two", "one", "wire"]),
    ("viorng", &["msix", "wire"]),
    ("balloon", &["wire"]),
];

fn main() -> ExitCode {
    let others =
        OTHERS.iter().flat_map(|(driver, modes)| modes.iter().map(move |it| (*driver, *it)));
    let runs = ALWAYS.iter().map(|it| (*it, true)).chain(others.map(|it| (it, false)));
    let tests = runs.flat_map(|((driver, mode), always)| {
        [(Machine::Transom, "transom"), (Machine::Qemu, "qemu")].map(|(machine, name)| {
            let test =
                Test::new(format!("{driver}_{mode}_on_{name}"), move || run(machine, driver, mode));
            if always && (machine == Machine::Transom || driver == "vioserial") {
                test
            } else {
                test.thorough()
            }
        })
    });
    let suite =
        Suite { lab: Lab { mib: 4096, seconds: 2400, assets: &["QEMU"] }, tests: tests.collect() };
    suite.main_after(prepare)
}

/// The image is built on the host of the lab, where compilers are fast.
fn prepare() -> Result<()> {
    if image::image()?.is_none() {
        // So that the tests do not use an old one.
        fs::remove_file(image::place()).ok();
    }
    Ok(())
}

fn run(machine: Machine, driver: &str, mode: &str) -> Result<()> {
    let image = image::place();
    if !image.exists() {
        not_run(image::SUITE, "the guest was not built: set TRANSOM_VIRTIO_WIN");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(tests.join("windrv/run"));
    command.arg(image).arg(folder.path());
    match machine {
        Machine::Transom => command.arg(lab::vmm()?),
        Machine::Qemu => command.arg("qemu").env("QEMU", qemu()?).env("ACCELERATOR", "kvm"),
    };
    command.args([format!("driver={driver}"), format!("mode={mode}")]);
    let ended = command.output().with_context(|| format!("{command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (output, log) = (text(&ended.stdout), text(&ended.stderr));
    ensure!(ended.status.success(), "{}:\n{output}\n{log}", ended.status);
    Ok(())
}

/// QEMU from its unpacked packages, with its own libraries.
fn qemu() -> Result<String> {
    let tree = lab::asset("QEMU")?;
    let at = |path: &str| tree.join(path).display().to_string();
    Ok([
        at("lib64/ld-linux-x86-64.so.2"),
        "--library-path".into(),
        at("usr/lib/x86_64-linux-gnu"),
        at("usr/bin/qemu-system-x86_64"),
        "-L".into(),
        at("usr/share/qemu"),
        "-L".into(),
        at("usr/share/seabios"),
    ]
    .join(" "))
}
