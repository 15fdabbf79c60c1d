//! Linux as a guest of Hyper-V's interface: a witness for what Windows needs. It takes this
//! interface only if KVM's own leaves are hidden.
#![forbid(unsafe_code)]

#[path = "hyperv_linux/nested.rs"]
mod nested;

use std::process::ExitCode;

use anyhow::ensure;
use transom_tests::enlightened::Provider;
use transom_tests::enlightened_linux::{
    BOOT, Facts, SOON, a_panic_is_reported, crashes, guest, linux, uses_the_interface,
};
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::suite::{Suite, Test};

const ASSETS: &[&str] = &[
    "BZIMAGE_12",
    "MSR_12",
    "BZIMAGE_13",
    "MODULES_13",
    "MSR_13",
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BUSYBOX",
];

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for provider in [Provider::Kvm, Provider::Own] {
        for release in ["12", "13"] {
            for cpus in [1, 2, 4] {
                let name = format!(
                    "linux_{release}_on_{cpus}_cpus_uses_the_interface_of_{}",
                    provider.name()
                );
                let test = Test::new(name, move || uses_the_interface(provider, release, cpus));
                // `a_panic_is_reported` has the other provider, and the suite `intel` the other
                // kernel.
                let due = (provider, release, cpus) == (Provider::Kvm, "13", 4);
                tests.push(if due { test } else { test.thorough() });
            }
        }
    }
    // Unit tests of `cpuid` find both hidden.
    let hidden = Test::new("a_hidden_enlightenment_is_not_used", hides_single_enlightenments);
    tests.push(hidden.thorough());
    let hidden = Test::new("a_hidden_hypervisor_is_not_seen", hides_the_hypervisor);
    tests.push(hidden.thorough());
    for provider in [Provider::Kvm, Provider::Own] {
        let name = format!("a_panic_is_reported_by_{}", provider.name());
        let test = Test::new(name, move || a_panic_is_reported(provider));
        // `reports_of_crashes_are_limited` has KVM's.
        tests.push(if provider == Provider::Own { test } else { test.thorough() });
    }
    tests.push(Test::new("reports_of_crashes_are_limited", reports_of_crashes_are_limited));
    let off = Test::new("nested_virtualization_is_off_by_default", nested::is_off_by_default);
    // Unit tests of `cpuid` find the extensions hidden.
    tests.push(off.thorough());
    for release in ["13", "12"] {
        let name = |says| format!("a_guest_on_linux_{release}_{says}");
        let probe = move || nested::runs_the_probe_also_after_a_reset(release);
        tests.push(Test::new(name("runs_the_probe_also_after_a_reset"), probe).thorough());
        let linux = move || nested::runs_linux(release);
        tests.push(Test::new(name("runs_linux"), linux).thorough());
    }
    Suite { lab: Lab { mib: 4096, seconds: 900, assets: ASSETS }, tests }.main()
}

fn hides_single_enlightenments() -> anyhow::Result<()> {
    let words = "without=kvm:hv-stimer:hv-ipi:hv-tlbflush";
    let guest = Guest::transom().cpus("2").word("--hyperv").word("on");
    let linux = linux(guest.word("--features").word(words), "13")?;
    let load = lab::hyperv_load()?;
    let mut booted = linux.program(&load)?.boot(BOOT)?;
    booted.run(&format!("{load} 1"), SOON)?;
    let facts = Facts::of(&mut booted)?;
    // The count that stays 0 with hypercalls.
    ensure!(facts.number("TLB")? > 0.0, "no flush interrupted a processor");
    facts.is("clock source", "hyperv_clocksource_tsc_page")?;
    facts.is("flush", "0")?;
    facts.is("IPI", "0")?;
    let event = facts.word("clock event 0");
    ensure!(event.starts_with("lapic"), "the clock event is {event:?}");
    Ok(())
}

fn hides_the_hypervisor() -> anyhow::Result<()> {
    let guest = Guest::transom().word("--hyperv").word("on");
    let guest = guest.word("--features").word("without=hypervisor:kvm");
    let mut booted = linux(guest, "13")?.boot(BOOT)?;
    Facts::of(&mut booted)?.is("hypervisor", "")?;
    let said = booted.try_run("grep -wc hypervisor /proc/cpuinfo", SOON)?.output;
    ensure!(said.trim() == "0", "the flag `hypervisor` is there");
    Ok(())
}

/// Reports many crashes, as a hostile guest would.
const CRASHES: &str = r#"
write() {
  printf "$2" |
    dd of=/dev/cpu/0/msr bs=8 count=1 oflag=seek_bytes conv=notrunc seek=$(($1)) 2> /dev/null
}
for parameter in 0 1 2 3 4; do
  write $((0x40000100 + parameter)) "\\$parameter\\0\\0\\0\\0\\0\\0\\0"
done
for round in $(seq 200); do
  write 0x40000105 '\0\0\0\0\0\0\0\200'
done
"#;

fn reports_of_crashes_are_limited() -> anyhow::Result<()> {
    let linux = linux(guest(Provider::Kvm, 1), "12")?.file("crashes.sh", CRASHES);
    let mut booted = linux.boot(BOOT)?;
    booted.run("sh /crashes.sh", BOOT)?;
    let codes = crashes(&booted, 1)?;
    ensure!(codes[0] == "0x0 0x1 0x2 0x3 0x4", "{codes:?}");
    ensure!(codes.len() <= 20, "{} of 200 crashes are in the log", codes.len());
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}
