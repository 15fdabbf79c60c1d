//! Each of Windows' drivers in each mode, run by `tests/windrv/run`.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::report::Report;

pub(crate) struct Driver {
    pub(crate) name: &'static str,
    /// The modes (see `windrv/README.md`).
    pub(crate) modes: &'static [&'static str],
    /// The minimum number of checks in each mode.
    checks: usize,
    /// Further checks in the modes `smp…`.
    more: usize,
}

pub(crate) const DRIVERS: &[Driver] = &[
    Driver { name: "viorng", modes: KMDF, checks: 18, more: 2 },
    Driver { name: "balloon", modes: &["wire", "smp_wire4"], checks: 30, more: 0 },
    Driver { name: "vioserial", modes: KMDF, checks: 40, more: 4 },
    Driver {
        name: "netkvm",
        modes: &["msix4", "msix1", "two", "one", "wire", "smp2", "smp4"],
        checks: 42,
        more: 26,
    },
    Driver { name: "viostor", modes: STORAGE, checks: 64, more: 0 },
    Driver { name: "vioscsi", modes: STORAGE, checks: 63, more: 0 },
    Driver { name: "stdvga", modes: &["modes"], checks: 27, more: 0 },
];
pub(crate) const KMDF: &[&str] = &["msix", "wire", "smp2", "smp4", "smp_wire4"];
pub(crate) const STORAGE: &[&str] =
    &["msix4", "late4", "msix1", "few", "one", "wire", "smp2", "smp4", "smp_late4"];

/// The number of processors that the machine has in a mode.
pub(crate) fn processors(mode: &str) -> u32 {
    match mode {
        "smp2" => 2,
        "smp4" | "smp_late4" | "smp_wire4" => 4,
        _ => 1,
    }
}

impl Driver {
    /// Runs the guest on `program`, which is a `vmm` or `qemu`. `settings` are variables of the
    /// environment.
    pub(crate) fn run(
        &self,
        mode: &str,
        image: &Path,
        program: &Path,
        settings: &[(&OsStr, &OsStr)],
    ) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(tests.join("windrv/run"));
        command.arg(image).arg(folder.path()).arg(program).envs(settings.iter().copied());
        command.env("CPUS", processors(mode).to_string());
        command.args([format!("driver={}", self.name), format!("mode={mode}")]);
        let ended = command.output().with_context(|| format!("{command:?}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (output, log) = (text(&ended.stdout), text(&ended.stderr));
        let everything = || format!("{} {mode}: {}:\n{output}\n{log}", self.name, ended.status);
        let least = self.checks + if mode.starts_with("smp") { self.more } else { 0 };
        Report::read(&output).and_then(|it| it.judge(least)).with_context(everything)?;
        ensure!(ended.status.success(), everything());
        Ok(())
    }
}
