//! Compiles the guest programs, so that `src/lib.rs` can embed them: the probe in `guest`, and the
//! first process of a small Linux in `init`.
//!
//! Both are freestanding code for the build host's architecture, so the compiler of the other
//! crates can build them: no further target has to be installed.

mod font;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result, ensure};

/// Paths relative to this package.
const PROBE: &str = "guest";
const INIT: &str = "init";

const FLAGS: [&str; 10] = [
    "--edition=2024",
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
    match embed_programs() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn embed_programs() -> Result<()> {
    let package = PathBuf::from(env::var("CARGO_MANIFEST_DIR").context("not started by cargo")?);
    let out = PathBuf::from(env::var("OUT_DIR").context("not started by cargo")?);
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=font.rs");
    font::write(&out)?;
    let [probe, init] = [PROBE, INIT].map(|folder| package.join(folder));
    rerun_for_changes(&probe)?;
    rerun_for_changes(&init)?;
    compile("probe", &probe, &out, Some(&probe.join("link.ld")))?;
    compile("init", &init, &out, None)
}

/// The folder reports files that are added or removed; each file reports its own changes.
fn rerun_for_changes(sources: &Path) -> Result<()> {
    println!("cargo::rerun-if-changed={}", sources.display());
    let files = fs::read_dir(sources).with_context(|| format!("reading {}", sources.display()))?;
    for file in files {
        println!("cargo::rerun-if-changed={}", file?.path().display());
    }
    Ok(())
}

/// Compiles `main.rs` in a folder to `NAME.elf`, with a linker script or the linker's own layout.
fn compile(name: &str, sources: &Path, out: &Path, script: Option<&Path>) -> Result<()> {
    let rustc = env::var_os("RUSTC").context("cargo names no compiler")?;
    let mut command = Command::new(&rustc);
    command.arg(format!("--crate-name={name}"));
    command.args(FLAGS).args(LINK.map(|argument| format!("-Clink-arg={argument}")));
    command.args(script.map(|script| format!("-Clink-arg=-Wl,-T,{}", script.display())));
    // Panic messages contain paths. Remap them, so that the image does not depend on the build
    // folder.
    command.arg(format!("--remap-path-prefix={}={name}", sources.display()));
    command.arg("-o").arg(out.join(format!("{name}.elf"))).arg(sources.join("main.rs"));
    // Flags for programs of the host (sanitizers, coverage) do not apply to guests.
    command.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
    let status = command.status();
    let status = status.with_context(|| format!("starting {} for {name}", rustc.display()))?;
    ensure!(status.success(), "{name} ({}) does not compile: {status}", sources.display());
    Ok(())
}
