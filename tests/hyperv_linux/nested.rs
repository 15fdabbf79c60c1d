//! A guest in a guest: Linux on our machine runs our machine.

use anyhow::ensure;
use transom_tests::guest::Guest;
use transom_tests::lab;
use transom_tests::linux::{Booted, Linux};
use vmm::control::Command;

use crate::{BOOT, SOON};

/// A Linux with KVM, with nested virtualization or without. It has `vmm`, and the kernel as
/// `/kernel`.
fn host(release: &str, features: &str) -> anyhow::Result<Linux> {
    // Debian 12's cloud kernel has no KVM.
    let kind = if release == "12" { "GENERIC" } else { release };
    let kernel = lab::asset(&format!("BZIMAGE_{kind}"))?;
    let modules = lab::asset(&format!("MODULES_{kind}"))?;
    let guest = Guest::transom().cpus("2").memory("1G").word("--jail").word("on");
    let guest = guest.word("--features").word(features);
    let linux = Linux::new(guest, &kernel).modules(&modules, &["kvm_amd", "kvm_intel"]);
    let vmm = lab::vmm()?;
    linux.add(&kernel, "/kernel").program(&vmm.display().to_string())
}

fn vmm() -> anyhow::Result<String> {
    Ok(format!("{} run --cpus 2", lab::vmm()?.display()))
}

/// Runs the probe in the guest's machine, with its checks, except the punctuality of the timer:
/// with an emulator below three levels, ticks are late.
fn runs_the_probe(booted: &mut Booted) -> anyhow::Result<()> {
    let said = booted.try_run(&format!("{} 2>&1", vmm()?), BOOT)?;
    let failed = |line: &&str| line.starts_with("fail") && !line.starts_with("fail  timer");
    let failures: Vec<_> = said.output.lines().filter(failed).collect();
    let complete = said.status == 0 && said.output.contains("{\"probe\":1");
    ensure!(complete && failures.is_empty(), "it ended with {}: {}", said.status, said.output);
    Ok(())
}

pub(crate) fn runs_the_probe_also_after_a_reset(release: &str) -> anyhow::Result<()> {
    let mut booted = host(release, "nested")?.boot(BOOT)?;
    runs_the_probe(&mut booted)?;
    // The processors are in the inner guest most of the time: the reset takes them out of it.
    booted.running.send(&format!("{} --cmdline then=reset > /inner & sleep 4", vmm()?))?;
    booted.running.expect(">>>transom done 0\n", SOON)?;
    let runs = booted.run("grep -c '^transom probe' /inner", SOON)?;
    ensure!(runs.trim().parse::<u32>()? > 0, "the inner guest did not run: {runs}");
    booted.running.ask(&Command::Reset)?;
    booted.ready(BOOT)?;
    runs_the_probe(&mut booted)?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// Makes an initial RAM disk, and starts the kernel with it.
const INNER: &str = r#"
mkdir -p /inside/bin
cp /bin/busybox /inside/bin
printf '%s\n' '#!/bin/busybox sh' '/bin/busybox mount -t devtmpfs dev /dev' \
  'echo "inner $(/bin/busybox nproc)" > /dev/console' '/bin/busybox poweroff -f' > /inside/init
chmod +x /inside/init
mkdir -p /inside/dev
(cd /inside && find . | cpio -o -H newc 2> /dev/null) > /inner.cpio
"#;

pub(crate) fn runs_linux(release: &str) -> anyhow::Result<()> {
    let mut booted = host(release, "nested")?.file("inner.sh", INNER).boot(BOOT)?;
    booted.run("sh /inner.sh", SOON)?;
    let words =
        "--memory 256M --kernel /kernel --initrd /inner.cpio --cmdline 'console=ttyS0 quiet'";
    let said = booted.run(&format!("{} {words} 2>&1", vmm()?), 2 * BOOT)?;
    ensure!(said.contains("inner 2"), "the inner Linux did not run: {said}");
    Ok(())
}

pub(crate) fn is_off_by_default() -> anyhow::Result<()> {
    let mut booted = host("13", "nested=off")?.boot(BOOT)?;
    let said = booted.try_run("grep -wcE 'svm|vmx' /proc/cpuinfo; ls /dev/kvm", SOON)?;
    ensure!(said.output.starts_with("0\n") && said.status != 0, "{said:?}");
    Ok(())
}
