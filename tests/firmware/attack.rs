//! Root and the kernel of a guest try to change a variable, or to read or write SMRAM.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use anyhow::{Context, bail, ensure};
use transom_tests::attack::{self, TSEG};
use transom_tests::lab;
use transom_tests::linux::{Booted, Linux};

use super::{BOOT, MOVE, Stock};

/// Shell functions with which root reaches the hardware: bytes of configuration space,
/// commands of the flash, and DMA of `edu`, whose BAR is at `$edu`, between its buffer and memory.
const REACH: &str = r#"
. /attack
byte() { printf "\\$(printf %03o $(($1)))"; }
config() { echo /sys/bus/pci/devices/0000:$1/config; }
poke() { byte $3 | dd of=$(config $1) bs=1 seek=$(($2)) conv=notrunc 2> /dev/null; }
peek() { dd if=$(config $1) bs=1 skip=$(($2)) count=1 2> /dev/null | hexdump -e '1/1 "%02x\n"'; }
device=$(dirname $(grep -l 0x11e8 /sys/bus/pci/devices/*/device))
edu=$(head -c 18 $device/resource)
slot=${device##*0000:}
poke $slot 4 6
dma() {
  devmem $((edu + 0x80)) 32 $1
  devmem $((edu + 0x88)) 32 $2
  devmem $((edu + 0x90)) 32 4
  devmem $((edu + 0x98)) 32 $3
  sleep 0.2
}
load() { dma $1 0x40000 1; }
store() { dma 0x40000 $1 3; }
long() {
  printf "\\$(printf %03o $(($3 & 255)))\\$(printf %03o $(($3 >> 8 & 255)))" > /word
  printf "\\$(printf %03o $(($3 >> 16 & 255)))\\$(printf %03o $(($3 >> 24)))" >> /word
  dd if=/word of=$(config $1) bs=4 seek=$(($2 / 4)) conv=notrunc 2> /dev/null
}
program() {
  old=$(devmem $1 8)
  for command in 0x10 0 0x20 0xd0 0x70; do
    devmem $1 8 $command
    [ $old = $(devmem $1 8) ] || echo $1 changed by $command
  done
}
"#;

/// Attempts of root, in shell, and their output when they have no effect.
const BY_ROOT: &[(&str, &str)] = &[
    // D_OPEN, T_EN, and SMI_LOCK.
    ("poke 00:00.0 0x9d 0x48; peek 00:00.0 0x9d", "1a"),
    ("poke 00:00.0 0x9e 0x38; peek 00:00.0 0x9e", "3f"),
    ("poke 00:1f.0 0xa0 0; peek 00:1f.0 0xa0", "10"),
    ("devmem 0x1f000000; devmem 0x1ffffff0; devmem 0xa0000", "0xFFFFFFFF 0xFFFFFFFF 0xFFFFFFFF"),
    ("devmem 0x1f800000 32 0; devmem 0xa8000 32 0; devmem 0x1f800000", "0xFFFFFFFF"),
    ("program 0xffc00100; program 0xfff00000; echo same", "same"),
    // DMA works between the device's buffer and other memory. With SMRAM, it moves nothing.
    ("devmem 0x10000000 32 0x11111111; load 0x10000000; store 0x10000004; devmem 0x10000004", MARK),
    ("for at in 0x1f000000 0x1ffff000 0xa8000; do load $at; store $at; done", ""),
    ("store 0x10000008; devmem 0x10000008", MARK),
    // A BAR over SMRAM: processors outside of SMM find the device there, as in a PC.
    (
        "long $slot 0x10 0x1f000000; devmem 0x1f000000; devmem 0x1f000004 32 7; attack once",
        "0x010000ED done",
    ),
    ("devmem 0x1f000004; long $slot 0x10 $edu; devmem $edu", "0xFFFFFFF8 0x010000ED"),
    // PCIEXBAR over low RAM and SMRAM: there is no bus 0xf0.
    (
        "long 00:00.0 0x60 0x10000001; devmem 0x1f000000; devmem 0x1f000000 32 0; attack once",
        "0xFFFFFFFF done",
    ),
    ("long 00:00.0 0x60 0xe0000001; peek 00:00.0 0x63", "e0"),
];
const MARK: &str = "0x11111111";
/// A guest-physical address, and the bytes of TSEG and RAM.
const MARKED: u64 = 0x1000_0000;
const TSEG_BYTES: usize = 16 << 20;
const RAM_BYTES: u64 = TSEG + TSEG_BYTES as u64;
/// The memory that the attempt `pages` names.
const PAGES_BYTES: usize = 16 << 12;

/// Sets a variable through the firmware's services, and prints it.
const CREATE: &str = r#"
variables=/sys/firmware/efi/efivars
create() {
  variable=$variables/Transom-$1-5ac0ffee-0000-4000-8000-7472616e736f
  grep -q efivarfs /proc/mounts || mount -t efivarfs efivarfs $variables
  printf "\\007\\000\\000\\000$1" > $variable && tail -c ${#1} $variable
}
"#;
const SECOND: &str = "/sys/devices/system/cpu/cpu1/online";

/// The firmware's own services still create a variable after each attempt of the module.
pub(crate) fn keeps_root_out(stock: &Stock) -> anyhow::Result<()> {
    let guest = stock.guest.clone().memory(attack::MEMORY).word("--device").word("edu");
    let linux = Linux::new(guest, &lab::asset("BZIMAGE_13")?);
    let linux = linux.modules(&lab::asset("MODULES_13")?, &["efivarfs"]);
    let linux = linux.cmdline("iomem=relaxed memmap=1M$0x10000000");
    let linux = linux.add(&lab::asset("ATTACK_13")?, attack::MODULE);
    let linux = linux.file("attack", &attack::function());
    let mut booted = linux.file("reach", REACH).file("create", CREATE).boot(MOVE)?;
    let before = fs::read(stock.store())?;
    for (attempt, expected) in BY_ROOT {
        let said = booted.run(&format!(". /reach; {attempt}"), BOOT)?;
        let words: Vec<_> = said.split_whitespace().collect();
        ensure!(words.join(" ") == *expected, "{attempt}: {said}");
        ensure!(fs::read(stock.store())? == before, "{attempt}: the variables changed");
    }
    for (attempt, expected) in attack::ATTEMPTS {
        let before = fs::read(stock.store())?;
        let said = booted.run(&format!(". /attack; attack {attempt}"), BOOT)?;
        ensure!(fs::read(stock.store())? == before, "{attempt}: the variables changed: {said}");
        creates(stock, &mut booted, attempt).with_context(|| format!("{attempt}: {said}"))?;
        ensure!(said.trim() == *expected, "{attempt}: {said}");
    }
    keeps_kvm_out(&mut booted)?;
    creates(stock, &mut booted, "pages")?;
    let rounds = if lab::everything() { 30 } else { 5 };
    let attack = format!(". /attack; attack inits {TSEG} rounds={rounds}");
    let inits = format!("echo 0 > {SECOND}; {attack}; echo 1 > {SECOND}; nproc");
    let said = booted.run(&inits, BOOT)?;
    ensure!(said.split_whitespace().eq(["done", "2"]), "the second processor: {said}");
    creates(stock, &mut booted, "inits")?;
    booted.begin(". /attack; attack reset")?;
    booted.ready(MOVE)?;
    ensure!(booted.running.resets()? == 1, "{} resets", booted.running.resets()?);
    creates(stock, &mut booted, "reset")?;
    booted.running.kill()
}

/// Timers fire all the time while the guest takes many SMIs: it goes on, and its locks are free.
pub(crate) fn goes_on_through_many_smis(stock: &Stock) -> anyhow::Result<()> {
    const ROUNDS: u32 = 20;

    let linux = Linux::new(stock.guest.clone().memory(attack::MEMORY), &lab::asset("BZIMAGE_13")?);
    let linux = linux.add(&lab::asset("ATTACK_13")?, attack::MODULE);
    let mut booted = linux.file("attack", &attack::function()).boot(MOVE)?;
    for pause in ["0.001", "0.002", "0.003"] {
        booted.run(&format!("(while sleep {pause}; do :; done) > /dev/null 2>&1 &"), BOOT)?;
    }
    for round in 0..ROUNDS {
        let said = booted.run(&format!(". /attack; attack commands {TSEG}"), BOOT)?;
        ensure!(said.trim() == "done", "round {round}: {said}");
    }
    booted.running.kill()
}

/// KVM writes to other memory, but not to SMRAM, when the guest's kernel gives it addresses there.
fn keeps_kvm_out(booted: &mut Booted) -> anyhow::Result<()> {
    let Some(memory) = Memory::of(booted)? else { return Ok(()) };
    let other = MARKED + PAGES_BYTES as u64;
    ensure!(!is_kept(booted, &memory, other)?, "KVM writes nowhere: the attempt is without effect");
    let smram = memory.read(TSEG, TSEG_BYTES)?;
    let unused = smram.chunks_exact(PAGES_BYTES).position(|part| part.iter().all(|it| *it == 0));
    let at = TSEG + (unused.context("no unused part of TSEG")? * PAGES_BYTES) as u64;
    ensure!(is_kept(booted, &memory, at)?, "KVM wrote to SMRAM at {at:#x}");
    Ok(())
}

/// Whether KVM leaves pages alone that the guest's kernel gives it.
fn is_kept(booted: &mut Booted, memory: &Memory, at: u64) -> anyhow::Result<bool> {
    let before = memory.read(at, PAGES_BYTES)?;
    let said = booted.run(&format!(". /attack; attack pages {at:#x}"), BOOT)?;
    ensure!(said.trim() == "done", "pages: {said}");
    Ok(memory.read(at, PAGES_BYTES)? == before)
}

/// The guest's memory as this host sees it.
struct Memory {
    file: fs::File,
    ram: u64,
}

impl Memory {
    /// `None` if this user may not see it.
    fn of(booted: &Booted) -> anyhow::Result<Option<Self>> {
        let process = format!("/proc/{}", booted.running.pid());
        let file = match fs::File::open(format!("{process}/mem")) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                skip::not_run_in_part("keeps_kvm_out", "only root may read a machine's memory");
                return Ok(None);
            }
            other => other.context("the machine's memory")?,
        };
        for line in fs::read_to_string(format!("{process}/maps"))?.lines() {
            let (start, rest) = line.split_once('-').context("a mapping")?;
            let end = rest.split(' ').next().context("a mapping")?;
            let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16));
            // RAM begins at a huge page. Root has left a mark in it.
            let ram = start?.next_multiple_of(2 << 20);
            let mut mark = [0; 4];
            if end? >= ram.saturating_add(RAM_BYTES)
                && file.read_exact_at(&mut mark, ram + MARKED).is_ok()
                && mark == [0x11; 4]
            {
                return Ok(Some(Self { file, ram }));
            }
        }
        bail!("no mapping of the machine is its RAM")
    }

    fn read(&self, at: u64, length: usize) -> anyhow::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, self.ram + at)?;
        Ok(bytes)
    }
}

/// Creates a variable by the firmware's services, and finds it in the store.
fn creates(stock: &Stock, booted: &mut Booted, value: &str) -> anyhow::Result<()> {
    let said = booted.run(&format!(". /create; create {value}"), BOOT)?;
    ensure!(said.trim() == value, "the variable is {said}, not {value}");
    let store = fs::read(stock.store())?;
    let found = store.windows(value.len()).any(|it| it == value.as_bytes());
    ensure!(found, "{value}: the variable is not in the store");
    Ok(())
}
