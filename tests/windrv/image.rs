//! Builds the guest with Windows' drivers, if their sources are available.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, ensure};
use transom_tests::program::{not_run, said};
use vmm::kvm::KvmSupport;

pub(crate) const SUITE: &str = "the suite of Windows' drivers";
const VARIABLE: &str = "TRANSOM_VIRTIO_WIN";
const COMPILER: &str = "x86_64-w64-mingw32-g++";

/// The image, built once. `None` where it cannot be built or run, which each test reports.
pub(crate) fn image() -> Result<Option<&'static Path>> {
    static IMAGE: OnceLock<Result<Result<PathBuf, String>>> = OnceLock::new();
    match IMAGE.get_or_init(build) {
        Ok(Ok(image)) => Ok(Some(image)),
        Ok(Err(why)) => {
            not_run(&this_test(), why);
            Ok(None)
        }
        Err(error) => Err(anyhow!("{error:#}")),
    }
}

/// The name of the test that runs, as libtest writes it.
pub(crate) fn this_test() -> String {
    let thread = std::thread::current();
    thread.name().filter(|name| name.contains("::")).unwrap_or(SUITE).to_owned()
}

/// The image's path; each suite has its own, because they may run at the same time.
pub(crate) fn place() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME")).join("windrv.elf")
}

/// Returns the reason if it cannot be built here.
fn build() -> Result<Result<PathBuf, String>> {
    if KvmSupport::of_this_host() == KvmSupport::None {
        return Ok(Err("there is no usable /dev/kvm".into()));
    }
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let told = env::var_os(VARIABLE).map(PathBuf::from);
    let sources = told.clone().unwrap_or_else(|| tests.join("../../shared/virtio-win"));
    if !sources.join("viostor").is_dir() {
        let missing = format!("no sources of virtio-win at {}", sources.display());
        ensure!(told.is_none(), "{VARIABLE}: {missing}");
        return Ok(Err(format!("{missing}: set {VARIABLE}")));
    }
    if Command::new(COMPILER).arg("--version").output().is_err() {
        return Ok(Err("no g++-mingw-w64-x86-64-win32".into()));
    }
    let image = place();
    let folder = image.parent().context("a folder")?;
    said(Command::new(tests.join("windrv/build")).args([sources.as_path(), folder]))?;
    Ok(Ok(image))
}
