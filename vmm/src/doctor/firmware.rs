//! Starts stock UEFI firmware, with a copy of its variable store in memory, until it looks for a
//! system to boot.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};

use super::equipment::{memory_file, path_of, processors};
use super::machine::{Limits, Machine, last_error};

/// Folders of Debian's and Fedora's packages.
const FOLDERS: [&str; 2] = ["/usr/share/OVMF", "/usr/share/edk2/ovmf"];
const CODE: &str = "OVMF_CODE_4M.fd";
const VARS: &str = "OVMF_VARS_4M.fd";
/// Firmware prints these on the serial port when it has initialized the machine.
const MARKS: [&str; 2] = ["BdsDxe: ", "UEFI Interactive Shell"];

/// Code and variable store; or a sentence that says where they were not found.
pub(super) fn find() -> Result<[PathBuf; 2], String> {
    let folders =
        FOLDERS.iter().map(|folder| [CODE, VARS].map(|name| Path::new(folder).join(name)));
    let found = folders.into_iter().find(|files| files.iter().all(|file| file.is_file()));
    let place = FOLDERS[0];
    found.ok_or_else(|| format!("there is no firmware in {place}: install Debian's package ovmf"))
}

/// Returns the sentence of a firmware that started.
pub(super) fn run([code, vars]: &[PathBuf; 2], limits: Limits) -> anyhow::Result<String> {
    let bytes = std::fs::read(vars).with_context(|| vars.display().to_string())?;
    let mut store = memory_file("vars")?;
    store.write_all(&bytes).context("a variable store in memory")?;
    let code = code.to_str().context("a path that is text")?;
    let (vars, processors) = (path_of(&store), processors().to_string());
    let options = ["--firmware", code, "--vars", &vars, "--cpus", &processors, "--memory", "256M"];
    let start = Instant::now();
    let mut machine = Machine::start(&options.map(str::to_owned), limits)?;
    while let Some(line) = machine.next_line()? {
        if MARKS.iter().any(|mark| line.contains(mark)) {
            let seconds = start.elapsed().as_secs_f64();
            return Ok(format!("{CODE} looked for a system to boot after {seconds:.1} s"));
        }
    }
    let (_, log) = machine.end()?;
    bail!(last_error(&log))
}
