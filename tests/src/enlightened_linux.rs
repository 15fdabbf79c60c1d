//! Linux as a guest of Hyper-V's interface: what it takes, how it works under load and across
//! resets, and how it reports a panic.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::enlightened::Provider;
use crate::guest::Guest;
use crate::lab;
use crate::linux::{Booted, Linux};
use crate::say;

/// Long enough for a kernel with many processors in a lab on a busy machine.
pub const BOOT: Duration = Duration::from_secs(180);
/// The limit for a command, or the end of a process.
pub const SOON: Duration = Duration::from_secs(60);

/// A guest that tells its [`Facts`]. The suite has the assets `BZIMAGE_` and `MSR_`.
pub fn linux(guest: Guest, release: &str) -> anyhow::Result<Linux> {
    let linux = Linux::new(guest, &lab::asset(&format!("BZIMAGE_{release}"))?);
    let linux = linux.add(&lab::asset(&format!("MSR_{release}"))?, "/msr.ko");
    Ok(linux.first("insmod /msr.ko").file("facts.sh", FACTS))
}

pub fn guest(provider: Provider, cpus: usize) -> Guest {
    let guest = Guest::transom().cpus(&cpus.to_string()).word("--jail").word("on");
    provider.words().into_iter().fold(guest, |guest, word| guest.word(word))
}

/// Prints what the kernel has taken, in lines `NAME: VALUE`; registers as bytes.
const FACTS: &str = r#"
register() {
  dd if=/dev/cpu/$1/msr bs=8 count=1 iflag=skip_bytes skip=$(($2)) 2> /dev/null |
    od -v -A n -t x1 | tr -d ' \n'
}
dmesg | sed -n 's/.*Hypervisor detected: /hypervisor: /p'
echo "clock source: $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
echo "flush: $(dmesg | grep -c 'Hyper-V: Using hypercall for remote TLB flush')"
echo "IPI: $(dmesg | grep -c 'Hyper-V: Using IPI hypercalls')"
for kind in TLB RES; do
  awk -v kind=$kind: '$1 == kind { for (i = 2; $i ~ /^[0-9]/; i++) n += $i; print kind, n + 0 }' \
    /proc/interrupts
done
echo "up: $(cut -d ' ' -f 1 /proc/uptime)"
cpu=0
while [ -e /sys/devices/system/cpu/cpu$cpu ]; do
  echo "clock event $cpu: $(cat /sys/devices/system/clockevents/clockevent$cpu/current_device)"
  ticks=$(awk -v column=$((cpu + 2)) '$1 == "HVS:" { print $column }' /proc/interrupts)
  echo "stimer0 $cpu: $ticks"
  for index in 0x40000000 0x40000001 0x40000002 0x40000021 0x40000073 0x400000b0 0x40000105; do
    echo "$index $cpu: $(register $cpu $index)"
  done
  cpu=$((cpu + 1))
done
"#;

pub struct Facts(BTreeMap<String, String>);

impl Facts {
    pub fn of(booted: &mut Booted) -> anyhow::Result<Self> {
        let said = booted.run("sh /facts.sh", SOON)?;
        say!("{said}");
        let pairs = said.lines().filter_map(|line| line.split_once(": "));
        Ok(Self(pairs.map(|(name, value)| (name.into(), value.trim().into())).collect()))
    }

    pub fn word(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    pub fn number(&self, name: &str) -> anyhow::Result<f64> {
        let value = self.word(name);
        value.parse().with_context(|| format!("{name}: {value:?}"))
    }

    /// A register of a processor. Reading it faults if it does not exist, and then nothing is
    /// printed.
    fn register(&self, index: u32, cpu: usize) -> anyhow::Result<u64> {
        let bytes = self.word(&format!("{index:#x} {cpu}"));
        let value = u64::from_str_radix(bytes, 16).map(u64::swap_bytes);
        value.with_context(|| format!("register {index:#x} of processor {cpu}: {bytes:?}"))
    }

    pub fn is(&self, name: &str, wanted: &str) -> anyhow::Result<()> {
        let found = self.word(name);
        ensure!(found == wanted, "{name} is {found:?}, not {wanted:?}");
        Ok(())
    }

    /// Fails where the kernel did not take what the provider offers.
    fn show_the_interface(&self, provider: Provider, cpus: usize) -> anyhow::Result<()> {
        self.is("hypervisor", "Microsoft Hyper-V")?;
        self.is("clock source", "hyperv_clocksource_tsc_page")?;
        ensure!(self.register(GUEST_OS_ID, 0)? != 0, "the guest has no identity");
        ensure!(self.register(HYPERCALL, 0)? & 1 == 1, "there is no hypercall page");
        ensure!(self.register(REFERENCE_TSC, 0)? & 1 == 1, "there is no reference page");
        for cpu in 0..cpus {
            let index = self.register(VP_INDEX, cpu)?;
            ensure!(index == cpu as u64, "processor {cpu} has the index {index}");
            if !provider.is_whole() {
                continue;
            }
            let assist = self.register(VP_ASSIST_PAGE, cpu)?;
            ensure!(assist & 1 == 1, "processor {cpu} has no assist page: {assist:#x}");
            self.is(&format!("clock event {cpu}"), "Hyper-V clockevent")?;
            let timer = self.register(STIMER0_CONFIG, cpu)?;
            let (direct, vector) = (timer >> 12 & 1, timer >> 4 & 0xff);
            ensure!(direct == 1 && vector > 31, "timer of processor {cpu}: {timer:#x}");
            let ticks = self.number(&format!("stimer0 {cpu}"))?;
            ensure!(ticks > 10.0, "processor {cpu} had {ticks} timer interrupts");
        }
        if provider.is_whole() {
            self.is("flush", "1")?;
            self.is("IPI", "1")?;
        }
        Ok(())
    }
}

const GUEST_OS_ID: u32 = 0x4000_0000;
const HYPERCALL: u32 = 0x4000_0001;
const VP_INDEX: u32 = 0x4000_0002;
const REFERENCE_TSC: u32 = 0x4000_0021;
const VP_ASSIST_PAGE: u32 = 0x4000_0073;
const STIMER0_CONFIG: u32 = 0x4000_00b0;
const CRASH_CTL: u32 = 0x4000_0105;

pub fn uses_the_interface(provider: Provider, release: &str, cpus: usize) -> anyhow::Result<()> {
    let linux = linux(guest(provider, cpus), release)?;
    let mut booted = linux.program(&lab::hyperv_load()?)?.boot(BOOT)?;
    works_under_load(&mut booted, provider, cpus)?;
    // By default the suite `intel` restarts such a guest, and `hyperv` checks all after resets.
    let resets = if lab::everything() { 2 } else { 0 };
    for reset in 1..=resets {
        booted.running.send("reboot -f")?;
        booted.ready(BOOT)?;
        ensure!(booted.running.resets()? == reset, "not {reset} resets");
        works_under_load(&mut booted, provider, cpus)?;
    }
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// Seconds of load.
const BUSY: u64 = 4;
/// The largest difference of the guest's clock from the host's over one load, in seconds. Includes
/// the time in which the guest starts programs.
const DRIFT: f64 = 0.5;

fn works_under_load(booted: &mut Booted, provider: Provider, cpus: usize) -> anyhow::Result<()> {
    let before = Facts::of(booted)?;
    before.show_the_interface(provider, cpus)?;
    let (clock, host) = (booted.uptime(SOON)?, Instant::now());
    let said = booted.run(&format!("{} {BUSY}", lab::hyperv_load()?), SOON)?;
    say!("{said}");
    let (passed, real) = (booted.uptime(SOON)? - clock, host.elapsed().as_secs_f64());
    ensure!((passed - real).abs() < DRIFT, "{passed} s passed in the guest, {real} s on the host");
    let after = Facts::of(booted)?;
    after.show_the_interface(provider, cpus)?;
    let counts = Facts(pairs(&said));
    let [unmapped, woken, slept, late] =
        ["unmapped", "woken", "slept", "late"].map(|name| counts.number(name));
    let (unmapped, woken, slept, late) = (unmapped?, woken?, slept?, late?);
    let least = (cpus * 10) as f64;
    ensure!(unmapped >= least && woken >= least && slept >= least, "too little was done: {said}");
    ensure!(late < 2000.0, "a timer was late: {said}");
    if cpus > 1 && provider.is_whole() {
        let grown = |name: &str| Ok::<_, anyhow::Error>(after.number(name)? - before.number(name)?);
        // Linux counts only flushes that interrupt a processor.
        let interrupts = grown("TLB")?;
        ensure!(interrupts < unmapped / 10.0, "{interrupts} flushes by interrupt: {said}");
        ensure!(grown("RES")? > 0.0, "no processor woke another one");
    }
    Ok(())
}

/// Words and numbers in turn.
fn pairs(text: &str) -> BTreeMap<String, String> {
    let words: Vec<_> = text.split_whitespace().collect();
    words.chunks_exact(2).map(|pair| (pair[0].into(), pair[1].into())).collect()
}

/// The kernel of Debian 12 reports a panic only with a VMBus, which is not there.
pub fn a_panic_is_reported(provider: Provider) -> anyhow::Result<()> {
    let mut booted = linux(guest(provider, 2), "13")?.boot(BOOT)?;
    let facts = Facts::of(&mut booted)?;
    let notify = facts.register(CRASH_CTL, 0)?;
    ensure!(notify == 1 << 63, "the guest can report {notify:#x}");
    let identity = facts.register(GUEST_OS_ID, 0)?;
    booted.running.send("echo c > /proc/sysrq-trigger")?;
    let codes = crashes(&booted, 1)?;
    let codes: Vec<_> = codes[0].split_whitespace().collect();
    // The second one is what the guest said of itself (`hyperv_report_panic`).
    ensure!(codes.len() == 5 && codes[1] == format!("{identity:#x}"), "{identity:#x}: {codes:?}");
    ensure!(booted.running.resets()? == 0, "the machine was reset");
    Ok(())
}

/// The codes of crashes in the machine's log. Waits until there are `count`.
pub fn crashes(booted: &Booted, count: usize) -> anyhow::Result<Vec<String>> {
    let deadline = Instant::now() + SOON;
    loop {
        let log = booted.running.stderr();
        let codes = log.lines().filter_map(|line| line.split_once("the guest crashed: "));
        let codes: Vec<_> = codes.map(|(_, codes)| codes.trim().to_owned()).collect();
        if codes.len() >= count {
            return Ok(codes);
        }
        ensure!(Instant::now() < deadline, "{} crashes, not {count}: {log}", codes.len());
        sleep(Duration::from_millis(100));
    }
}
