//! Compiles the probe, the guest program in `guest`, so that `src/lib.rs` can embed it.
//!
//! The probe is freestanding code for the build host's architecture, so the compiler of the other
//! crates can build it: no further target has to be installed.

mod font;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result, ensure};

/// Path relative to this package.
const SOURCES: &str = "guest";

const FLAGS: [&str; 11] = [
    "--edition=2024",
    "--crate-name=probe",
    "--crate-type=bin",
    // Ring 3 of the guest starts like a Linux process, including SSE2. Nothing is relocated or
    // unwound.
    "--target=x86_64-unknown-linux-gnu",
    "-Cpanic=abort",
    "-Crelocation-model=static",
    "-Copt-level=s",
    "-Ccodegen-units=1",
    "-Clto=fat",
    "-Cstrip=symbols",
    "-Dwarnings",
];

const LINK: [&str; 6] = [
    "-nostartfiles",
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,--build-id=none",
    "-Wl,--gc-sections",
];

fn main() -> ExitCode {
    match embed_probe() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn embed_probe() -> Result<()> {
    let package = PathBuf::from(env::var("CARGO_MANIFEST_DIR").context("not started by cargo")?);
    let sources = package.join(SOURCES);
    rerun_for_changes(&sources)?;
    let out = PathBuf::from(env::var("OUT_DIR").context("not started by cargo")?);
    font::write(&out)?;
    compile(&sources, &out.join("probe.elf"))
}

/// The folder reports files that are added or removed; each file reports its own changes.
fn rerun_for_changes(sources: &Path) -> Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=font.rs");
    println!("cargo::rerun-if-changed={}", sources.display());
    let files = fs::read_dir(sources).with_context(|| format!("reading {}", sources.display()))?;
    for file in files {
        println!("cargo::rerun-if-changed={}", file?.path().display());
    }
    Ok(())
}

fn compile(sources: &Path, image: &Path) -> Result<()> {
    let rustc = env::var_os("RUSTC").context("cargo names no compiler")?;
    let script = sources.join("link.ld");
    let mut command = Command::new(&rustc);
    command.args(FLAGS).args(LINK.map(|argument| format!("-Clink-arg={argument}")));
    command.arg(format!("-Clink-arg=-Wl,-T,{}", script.display()));
    // Panic messages contain paths. Remap them, so that the image does not depend on the build
    // folder.
    command.arg(format!("--remap-path-prefix={}=probe", sources.display()));
    command.arg("-o").arg(image).arg(sources.join("main.rs"));
    // Flags for programs of the host (sanitizers, coverage) do not apply to the guest.
    command.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
    let status =
        command.status().with_context(|| format!("starting {} for the probe", rustc.display()))?;
    ensure!(status.success(), "the probe ({}) does not compile: {status}", sources.display());
    Ok(())
}
