//! Prints the page of evidence (`docs/evidence.md`) from the output of `./test` in a file.
#![forbid(unsafe_code)]

use std::process::Command;

use anyhow::Context;
use transom_tests::program::said;
use transom_tests::{evidence, lab};

fn main() -> anyhow::Result<()> {
    let output = std::env::args_os().nth(1).context("usage: evidence FILE")?;
    let output = std::fs::read(output).context("the output of ./test")?;
    let list = lab::repository().join("tests/evidence");
    let list = std::fs::read_to_string(list).context("tests/evidence")?;
    let commit = said(Command::new("git").args(["log", "-1", "--format=commit %h of %cs"]))?;
    let kvm = match vmm::kvm::KvmSupport::of_this_host() {
        vmm::kvm::KvmSupport::Full => "a complete KVM",
        vmm::kvm::KvmSupport::Paravirtual => "a KVM that only emulates kernels",
        vmm::kvm::KvmSupport::None => "no KVM",
    };
    let run = format!("{}, on a host with {kvm}", commit.trim());
    let outcomes = evidence::read(&String::from_utf8_lossy(&output));
    transom_tests::say!("{}", evidence::page(&list, &outcomes, &run)?.trim_end());
    Ok(())
}
