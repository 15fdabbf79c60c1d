//! The machine on Intel's extensions, in a lab that emulates such a processor: the probe, Linux and
//! UEFI firmware, also on processors that lack what old ones lack.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use transom_tests::enlightened::{Enlightened, Provider};
use transom_tests::enlightened_linux::{a_panic_is_reported, uses_the_interface};
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::Linux;
use transom_tests::program::{findings, report, run_in};
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi::{self, Shell};

const BOOT: Duration = Duration::from_secs(300);
/// The limit for a command, or the end of a process.
const SOON: Duration = Duration::from_secs(60);

const ASSETS: [&str; 7] =
    ["BZIMAGE_12", "MSR_12", "BZIMAGE_13", "MSR_13", "OVMF_CODE_12", "OVMF_VARS_12", "BUSYBOX"];

/// The words of Linux about each part of the interface that it uses.
const USES_HYPERV: [&str; 4] = [
    "Hypervisor detected: Microsoft Hyper-V",
    "Switched to clocksource hyperv_clocksource_tsc_page",
    "Hyper-V: Using hypercall for remote TLB flush",
    "Hyper-V: Using IPI hypercalls",
];

/// Parameters of kvm_intel for processors without an extension: nested paging, real mode in a
/// guest, tags of the TLB and what came with them.
const OLD: [(&str, &str); 3] = [
    ("nested_paging", "ept=0"),
    ("unrestricted_guests", "unrestricted_guest=0"),
    ("tags", "vpid=0 flexpriority=0 preemption_timer=0 eptad=0 vnmi=0"),
];

fn main() -> ExitCode {
    let mut tests = vec![
        Test::new("doctor_finds_full_kvm", doctor_finds_full_kvm),
        Test::new("the_probe_passes", || the_probe_passes(&[])),
        Test::new("the_probe_passes_with_hyperv_on_12_processors", || {
            the_probe_passes(&["--hyperv", "on", "--cpus", "12,sockets=2,cores=3,threads=2"])
        }),
        Test::new("the_probe_uses_hyperv_of_kvm", || uses_hyperv(Provider::Kvm)),
        Test::new("the_probe_uses_hyperv_of_ours", || uses_hyperv(Provider::Own)).thorough(),
        Test::new("linux_12_reboots_on_1_processor", || linux_reboots("12", "1", &[])).thorough(),
        Test::new("linux_12_reboots_on_2_processors_as_a_guest_of_hyperv", || {
            linux_reboots("12", "2", &Provider::Kvm.words())
        }),
        Test::new("linux_13_reboots_on_2_processors_as_a_guest_of_hyperv", || {
            linux_reboots("13", "2", &Provider::Kvm.words())
        })
        .thorough(),
        Test::new("cpuid_describes_the_layout", cpuid_describes_the_layout),
        Test::new("ovmf_restarts_after_each_reset", ovmf_restarts_after_each_reset),
    ];
    for provider in [Provider::Kvm, Provider::Own] {
        for release in ["12", "13"] {
            let name = format!("linux_{release}_uses_the_interface_of_{}", provider.name());
            let test = move || uses_the_interface(provider, release, 2);
            tests.push(Test::new(name, test).thorough());
        }
        let name = format!("a_panic_is_reported_by_{}", provider.name());
        tests.push(Test::new(name, move || a_panic_is_reported(provider)).thorough());
    }
    for (extension, parameters) in OLD {
        tests.push(Test::new(format!("the_probe_passes_without_{extension}"), move || {
            on_old_processor(parameters, || the_probe_passes(&["--cpus", "2"]))
        }));
        let all = move || {
            linux_reboots("12", "2", &[])?;
            ovmf_restarts_after_each_reset()
        };
        let name = format!("linux_and_ovmf_run_without_{extension}");
        tests.push(Test::new(name, move || on_old_processor(parameters, all)).thorough());
    }
    Suite { lab: Lab { mib: 2048, seconds: 1500, assets: &ASSETS }, tests }.main_on_intel()
}

fn doctor_finds_full_kvm() -> Result<()> {
    let ended = run_in(Path::new("/"), &["doctor"])?;
    ensure!(ended.status == 0, "{ended:?}");
    let flags = fs::read_to_string("/proc/cpuinfo")?;
    ensure!(flags.split_whitespace().any(|flag| flag == "vmx"), "no VMX: {flags}");
    Ok(())
}

/// All sections, with a device of each kind that needs nothing of the host.
fn the_probe_passes(words: &[&str]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk.img");
    fs::File::create(&disk)?.set_len(1 << 20)?;
    let nvme = format!("nvme,path={}", disk.display());
    let devices = ["edu", "virtio-net,to=none", "xhci", &nvme];
    let devices = devices.into_iter().flat_map(|device| ["--device", device]);
    let words: Vec<_> = ["run"].into_iter().chain(words.iter().copied()).chain(devices).collect();
    let ended = run_in(Path::new("/"), &words)?;
    ensure!(ended.status == 0, "{words:?}: {ended:?}");
    let report = report(&ended.stdout)?;
    ensure!(report["ok"] == true && report["dropped"] == 0, "{words:?}: {}", ended.stdout);
    for name in ["local-apic", "timer", "processors", "nmi", "edu"] {
        let found = findings(&report, name);
        ensure!(found.len() == 1 && found[0]["verdict"] == "pass", "{name}: {}", ended.stdout);
    }
    Ok(())
}

/// All checks of Hyper-V's interface.
fn uses_hyperv(provider: Provider) -> Result<()> {
    let mut it = Enlightened::start(provider, 2, "hyperv=1 then=halt")?;
    it.runs(1)?;
    it.end()
}

/// Debian 12's kernel is the lab's own.
fn linux(guest: Guest, release: &str) -> Result<Linux> {
    Ok(Linux::new(guest.memory("256M"), &lab::asset(&format!("BZIMAGE_{release}"))?))
}

fn linux_reboots(release: &str, cpus: &str, words: &[&str]) -> Result<()> {
    let guest = words.iter().fold(Guest::transom().cpus(cpus), |guest, word| guest.word(*word));
    let mut booted = linux(guest, release)?.boot(BOOT)?;
    for resets in [0, 1] {
        ensure!(booted.running.resets()? == resets, "not {resets} resets");
        let found = booted.run("nproc", SOON)?;
        ensure!(found.trim() == cpus, "{found} processors, not {cpus}");
        let log = booted.run("dmesg", SOON)?;
        // RETBleed has a warning too: the emulated processor lacks the mitigation.
        for fault in ["unchecked MSR", "WARNING: CPU", "BUG:", "Hardware Error"] {
            ensure!(!log.contains(fault), "{fault}: {log}");
        }
        for part in USES_HYPERV.iter().filter(|_| words == Provider::Kvm.words()) {
            ensure!(log.contains(part), "Linux does not say {part:?}: {log}");
        }
        if resets == 0 {
            booted.running.send("reboot -f")?;
            booted.ready(BOOT)?;
        }
    }
    let said = booted.running.stderr();
    ensure!(!said.contains("unknown MSR"), "{said}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// Prints one line for each processor and leaf: processor, leaf, subleaf, EAX, EBX, ECX, EDX.
const LEAVES: &str = r#"for cpu in 0 1 2 3 4 5; do
  for leaf in "1 0" "4 0" "4 1" "4 2" "4 3" "11 0" "11 1" "11 2"; do
    set -- $leaf
    printf "$cpu $leaf "
    dd if=/dev/cpu/$cpu/cpuid bs=16 count=1 skip=$(($2 << 32 | $1)) iflag=skip_bytes 2> /dev/null |
      hexdump -v -e '4/4 "%u " "\n"'
  done
done
"#;

/// Threads and cores that no power of two describes, so that the numbers of processors have gaps.
fn cpuid_describes_the_layout() -> Result<()> {
    let guest = Guest::transom().cpus("6,sockets=1,cores=3,threads=2");
    let linux = linux(guest, "12")?.add(Path::new("/modules/cpuid.ko"), "/cpuid.ko");
    let mut booted = linux.first("insmod /cpuid.ko").file("leaves.sh", LEAVES).boot(BOOT)?;
    let said = booted.run("sh /leaves.sh", BOOT)?;
    for line in said.lines() {
        let numbers = line.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>();
        let numbers = numbers.with_context(|| line.to_owned())?;
        let [cpu, leaf, subleaf, registers @ ..] = &numbers[..] else { continue };
        let found = registers.try_into().with_context(|| line.to_owned())?;
        leaf_is_right(*cpu, (*leaf, *subleaf), found).with_context(|| line.to_owned())?;
    }
    ensure!(said.lines().count() == 6 * 8, "not all leaves: {said}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// Intel SDM 2A, CPUID: a thread has one bit of an APIC ID, and a core two.
fn leaf_is_right(cpu: u32, leaf: (u32, u32), registers: [u32; 4]) -> Result<()> {
    let [eax, ebx, ecx, edx] = registers;
    match leaf {
        (1, _) => {
            ensure!(ebx >> 24 == cpu, "the initial APIC ID is not {cpu}");
            ensure!(ebx >> 16 & 0xff == 8 && edx >> 28 & 1 == 1, "not 8 IDs in the package");
        }
        // The caches: of a core, and of the package.
        (4, _) => {
            let level = eax >> 5 & 7;
            let shares = if level == 3 { 8 } else { 2 };
            ensure!(eax & 0x1f != 0 && (1..=3).contains(&level), "no cache");
            ensure!((eax >> 14 & 0xfff) + 1 == shares, "not {shares} IDs share the cache");
            ensure!((eax >> 26) + 1 == 4, "not 4 IDs of cores");
        }
        (11, 0) => ensure!([eax, ebx, ecx, edx] == [1, 2, 0x100, cpu], "not the threads"),
        (11, 1) => ensure!([eax, ebx, ecx, edx] == [3, 6, 0x201, cpu], "not the cores"),
        _ => ensure!([eax, ebx] == [0, 0], "not the end of the list"),
    }
    Ok(())
}

fn ovmf_restarts_after_each_reset() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset("OVMF_VARS_12")?, folder.path())?;
    let guest = Guest::transom().memory("256M").firmware(lab::asset("OVMF_CODE_12")?, vars);
    let mut shell = Shell::start(&guest, BOOT)?;
    shell.running.send("reset")?;
    shell.prompt(BOOT)?;
    ensure!(shell.running.resets()? == 1, "not one reset");
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}

/// Runs `test` on a kvm_intel with these parameters, and loads it as it was before.
fn on_old_processor(parameters: &str, test: impl FnOnce() -> Result<()>) -> Result<()> {
    load_kvm(parameters)?;
    for parameter in parameters.split(' ') {
        let name = parameter.trim_end_matches("=0");
        let value = fs::read_to_string(format!("/sys/module/kvm_intel/parameters/{name}"));
        let value = value.context(name.to_owned())?;
        ensure!(["N", "0"].contains(&value.trim()), "{name} is {value}");
    }
    let outcome = test();
    load_kvm("")?;
    outcome
}

/// The script is of the lab.
fn load_kvm(parameters: &str) -> Result<()> {
    let status = Command::new("/load-kvm").args(parameters.split_whitespace()).status();
    let status = status.context("/load-kvm")?;
    ensure!(status.success(), "/load-kvm {parameters}: {status}");
    Ok(())
}
