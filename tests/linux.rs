//! Debian's cloud kernels as guests.

use std::process::ExitCode;
use std::time::Duration;

use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::Linux;
use transom_tests::suite::{Suite, Test};

const BOOT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let assets = &["BZIMAGE_12", "VMLINUX_12", "BZIMAGE_13", "VMLINUX_13", "BUSYBOX"];
    let tests = vec![Test::new("try", first)];
    Suite { lab: Lab { mib: 6144, seconds: 900, assets }, tests }.main()
}

fn first() -> anyhow::Result<()> {
    for (cpus, memory) in [("1", "256M"), ("8,sockets=2,cores=2,threads=2", "5G")] {
        for kernel in ["BZIMAGE_12", "VMLINUX_12", "BZIMAGE_13", "VMLINUX_13"] {
            let start = std::time::Instant::now();
            let guest = Guest::transom().cpus(cpus).memory(memory);
            let linux = Linux::new(guest, &lab::asset(kernel)?).program("/usr/bin/lscpu")?;
            let mut booted = linux.boot(BOOT)?;
            println!("{cpus} {memory} {kernel}: {:?}", start.elapsed());
            let start = std::time::Instant::now();
            println!("{}", booted.run("lscpu; cat /proc/iomem; for i in /sys/firmware/memmap/*; do echo map $(cat $i/start $i/end $i/type); done; cat /proc/meminfo | grep MemTotal; cat /sys/devices/system/memory/block_size_bytes; grep . /sys/devices/system/memory/memory*/online | wc -l; dmesg -r | grep '^<[0-3]>'; nproc", BOOT)?);
            println!("{:?}", start.elapsed());
            let start = std::time::Instant::now();
            booted.running.send("poweroff -f")?;
            booted.running.ends_with(0, BOOT)?;
            println!("{:?}", start.elapsed());
        }
    }
    Ok(())
}
