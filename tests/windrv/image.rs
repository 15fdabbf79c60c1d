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

/// The image, built once; `None` where it cannot be built or run, which is reported once.
pub(crate) fn image() -> Result<Option<&'static Path>> {
    static IMAGE: OnceLock<Result<Option<PathBuf>>> = OnceLock::new();
    match IMAGE.get_or_init(build) {
        Ok(image) => Ok(image.as_deref()),
        Err(error) => Err(anyhow!("{error:#}")),
    }
}

/// The image's path; each suite has its own, because they may run at the same time.
pub(crate) fn place() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME")).join("windrv.elf")
}

fn build() -> Result<Option<PathBuf>> {
    if KvmSupport::of_this_host() == KvmSupport::None {
        not_run(SUITE, "there is no usable /dev/kvm");
        return Ok(None);
    }
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let told = env::var_os(VARIABLE).map(PathBuf::from);
    let sources = told.clone().unwrap_or_else(|| tests.join("../../shared/virtio-win"));
    if !sources.join("viostor").is_dir() {
        let missing = format!("no sources of virtio-win at {}", sources.display());
        ensure!(told.is_none(), "{VARIABLE}: {missing}");
        not_run(SUITE, &format!("{missing}: set {VARIABLE}"));
        return Ok(None);
    }
    if Command::new(COMPILER).arg("--version").output().is_err() {
        not_run(SUITE, "no g++-mingw-w64-x86-64-win32");
        return Ok(None);
    }
    let image = place();
    let folder = image.parent().context("a folder")?;
    said(Command::new(tests.join("windrv/build")).args([sources.as_path(), folder]))?;
    Ok(Some(image))
}
