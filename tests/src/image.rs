//! Checks disk images with `qemu-img`, from the asset `QEMU_IMG`.

use std::path::Path;
use std::process::Output;

use anyhow::{Context, ensure};

use crate::lab;

pub fn qemu_img(words: &[&str], image: &Path, more: &[&str]) -> anyhow::Result<String> {
    let output = run(words, image, more)?;
    ensure!(output.status.success(), "{}", complaint(words, image, &output));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The exit status of `qemu-img check` when clusters are leaked, and nothing worse.
const LEAKS: i32 = 3;

/// Returns the number of leaked clusters. Any other fault of the image is an error.
pub fn check(image: &Path) -> anyhow::Result<u64> {
    let words = ["check", "--force-share", "-f", "qcow2"];
    let output = run(&words, image, &[])?;
    let sound = output.status.success() || output.status.code() == Some(LEAKS);
    ensure!(sound, "{}", complaint(&words, image, &output));
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find_map(|line| line.split_once(" leaked clusters"));
    line.map_or(Ok(0), |(count, _)| count.parse().context("leaked clusters"))
}

fn complaint(words: &[&str], image: &Path, output: &Output) -> String {
    let [said, complaints] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    let (image, status) = (image.display(), output.status);
    format!("qemu-img {words:?} {image}: {status}: {said}{complaints}")
}

fn run(words: &[&str], image: &Path, more: &[&str]) -> anyhow::Result<Output> {
    let mut command = lab::unpacked("QEMU_IMG", "usr/bin/qemu-img")?;
    command.args(words).arg(image).args(more).output().context("qemu-img")
}
