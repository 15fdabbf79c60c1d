//! Volumes that the reference image left, finished and unfinished.

use anyhow::{Context as _, Result, ensure};

use super::runs_here;
use super::world::{Files, World, each};

/// A volume, by a script that makes it; the variables; the machine that starts there; and the
/// next step.
struct Row {
    volume: &'static str,
    words: &'static [(&'static str, &'static str)],
    machine: &'static str,
    step: &'static str,
}

const fn row(
    volume: &'static str,
    words: &'static [(&'static str, &'static str)],
    machine: &'static str,
    step: &'static str,
) -> Row {
    Row { volume, words, machine, step }
}

/// The machine of an installation that begins again.
const AGAIN: &str =
    "nvme data.img > ahci-cdrom win11x64.iso + usb-storage set-up | new windows_secure.vars TPM";
const BOOTED: &str = "boot: it has booted before";
/// The files of every installation of the reference image whose disk has booted.
const FINISHED: &str = "echo win11x64.iso > windows.base; echo 6.05 > windows.ver; \
    : > windows.boot; echo 02:AA:BB:CC:DD:EE > windows.mac; STORE windows";
/// The same amid the installation: the medium and the set-up disk are there, the mark is not.
const BEGUN: &str = "echo win11x64.iso > windows.base; echo 6.05 > windows.ver; \
    echo 02:AA:BB:CC:DD:EE > windows.mac; cp $D/win11.iso win11x64.iso; \
    truncate -s 64M setup.img; STORE windows";
/// The firmware and its variables, which differ from an empty store.
const STORE: &str = "store() { cp /usr/share/OVMF/OVMF_VARS_4M.fd $1.vars; \
    printf mine | dd of=$1.vars bs=1 seek=4096 conv=notrunc status=none; \
    cp /usr/share/OVMF/OVMF_CODE_4M.fd $1.rom; }; store ";

const ROWS: &[Row] = &[
    // Finished, with each way to write the state files.
    row("cp $D/installed data.img; FINISHED", &[], "virtio-scsi data.img | windows.vars", BOOTED),
    row(
        "cp $D/installed data.img; FINISHED",
        &[("NETWORK", "user")],
        "virtio-scsi data.img + 02:aa:bb:cc:dd:ee | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; printf '02-aa-bb-cc-dd-ee\\r\\n' > windows.mac",
        &[("NETWORK", "user")],
        "virtio-scsi data.img + 02:aa:bb:cc:dd:ee | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; chmod 600 *; chown 0:0 *; chown 1000 .",
        &[],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; printf win11x64.iso > windows.base",
        &[],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; printf 'WIN11X64.ISO\\r\\n' > windows.base; \
         printf '02-aa-bb-cc-dd-ee\\r\\n' > windows.mac",
        &[("VERSION", "win11")],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; echo mine.esd > windows.base",
        &[("VERSION", "https://example.com/a/mine.esd")],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; rm windows.base windows.ver",
        &[],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; cp $D/win11.iso win11x64.iso; mkdir tmp backups; \
         truncate -s 64M setup.img",
        &[],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    // Formats and names of the disk.
    row(
        "qemu-img convert -O qcow2 $D/installed data.qcow2; FINISHED",
        &[],
        "virtio-scsi data.qcow2 | windows.vars",
        BOOTED,
    ),
    row(
        "qemu-img convert -O qcow2 $D/installed data.qcow2; FINISHED",
        &[("DISK_FMT", "qcow2")],
        "virtio-scsi data.qcow2 | windows.vars",
        BOOTED,
    ),
    row(
        "qemu-img convert -c -O qcow2 $D/installed data.qcow2; cp $D/blank data.img; FINISHED",
        &[("DISK_FMT", "raw")],
        "virtio-scsi data.qcow2 | windows.vars",
        BOOTED,
    ),
    row(
        "qemu-img convert -O raw $D/installed data.img; FINISHED",
        &[("DISK_FMT", "qcow2")],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed system.img; FINISHED",
        &[("DISK_NAME", "system")],
        "virtio-scsi system.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; for it in base=win11x64.iso boot mac=02:00:00:00:00:01; do \
         echo ${it#*=} > box.${it%=*}; done; STORE windows",
        &[("APP", "Box")],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    // Controllers, set and saved.
    row(
        "cp $D/installed data.img; FINISHED",
        &[("DISK_TYPE", "virtio-scsi")],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED",
        &[("DISK_TYPE", "blk")],
        "virtio-blk data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED",
        &[("DISK_TYPE", "ide")],
        "ahci-disk data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED",
        &[("DISK_TYPE", "sata")],
        "ahci-disk data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED",
        &[("DISK_TYPE", "nvme")],
        "nvme data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED",
        &[("DISK_TYPE", "usb")],
        "usb-storage data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED",
        &[("DISK_TYPE", "auto")],
        "nvme data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; printf 'blk\\r\\n' > windows.type",
        &[],
        "virtio-blk data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; printf ide > windows.type",
        &[],
        "ahci-disk data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; echo IDE > windows.type",
        &[],
        "ahci-disk data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; echo blk > windows.type",
        &[("DISK_TYPE", "scsi")],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    // Boot modes, set and saved, each with its own variables.
    row(
        "cp $D/installed data.img; FINISHED; STORE windows_secure; \
         printf nilmptws > windows_secure.tpm; echo windows_secure > windows.mode",
        &[],
        "virtio-scsi data.img | windows_secure.vars TPM",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; STORE windows_secure; \
         printf 'WINDOWS_SECURE\\r\\n' > windows.mode",
        &[],
        "virtio-scsi data.img | windows_secure.vars TPM",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; STORE windows_secure",
        &[("BOOT_MODE", "windows_secure")],
        "virtio-scsi data.img | windows_secure.vars TPM",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; STORE windows_plain",
        &[("BOOT_MODE", "windows_plain")],
        "virtio-scsi data.img | windows_plain.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; STORE secure",
        &[("BOOT_MODE", "secure")],
        "virtio-scsi data.img | secure.vars TPM",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; STORE uefi",
        &[("BOOT_MODE", "uefi")],
        "virtio-scsi data.img | uefi.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED",
        &[("TPM", "Y")],
        "virtio-scsi data.img | windows.vars TPM",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; : > windows.vars.old; : > windows.old",
        &[],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    // Settings that it saves for old guests.
    row(
        "cp $D/installed data.img; FINISHED; for it in vga=std usb=no net=e1000 hv=N sound=ac97 \
         port=off cpu=qemu64 flag=-x2apic args=-snapshot kill bios; do \
         echo ${it#*=} > windows.${it%=*}; done",
        &[],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    // Media and drivers beside the disk.
    row(
        "cp $D/installed data.img; FINISHED; cp $D/win11.iso custom.iso; \
         echo windows.$(stat -c %s custom.iso).iso > windows.base",
        &[],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; echo windows.77.iso > windows.base",
        &[],
        "virtio-scsi data.img | windows.vars",
        BOOTED,
    ),
    row(
        "cp $D/installed data.img; FINISHED; cp $D/win11.iso Custom.ISO; \
         echo windows.77.iso > windows.base",
        &[],
        "virtio-scsi data.img | windows.vars",
        "boot: windows.77.iso is installed",
    ),
    row(
        "cp $D/installed data.img; FINISHED; cp $D/linux.iso start.iso; \
         cp $D/linux.iso drivers.iso",
        &[],
        "ahci-cdrom start.iso > virtio-scsi data.img > ahci-cdrom drivers.iso | windows.vars",
        BOOTED,
    ),
    // Unfinished: begins again with the medium that is there.
    row("cp $D/begun data.img; BEGUN", &[], AGAIN, "install-again: "),
    row("cp $D/divided data.img; BEGUN", &[], AGAIN, "install-again: "),
    row(
        "cp $D/divided data.img; BEGUN",
        &[("COMPAT", "dockur")],
        "nvme data.img > ahci-cdrom win11x64.iso + usb-storage set-up | new windows.vars",
        "install-again: ",
    ),
    row("cp $D/blank data.img; BEGUN", &[], AGAIN, "install: nothing"),
    row("BEGUN", &[], AGAIN, "install: nothing"),
    row(
        "mkdir tmp; cp $D/win11.iso tmp/win11x64.iso; cp $D/win11.iso custom.iso",
        &[],
        "nvme data.img > ahci-cdrom custom.iso + usb-storage set-up | \
         new windows_secure.vars TPM",
        "install: nothing",
    ),
    row(
        "cp $D/divided data.img; BEGUN; printf 'win11x64.iso\\r\\n' > windows.base",
        &[],
        AGAIN,
        "install-again: ",
    ),
    row(
        "cp $D/divided data.img; BEGUN; STORE windows_secure; echo windows_secure > windows.mode; \
         echo blk > windows.type",
        &[],
        AGAIN,
        "install-again: ",
    ),
    row(
        "cp $D/divided data.img; BEGUN",
        &[("DISK_TYPE", "sata")],
        "ahci-disk data.img > ahci-cdrom win11x64.iso + usb-storage set-up | \
         new windows_secure.vars TPM",
        "install-again: ",
    ),
    row(
        "cp $D/divided data.img; BEGUN",
        &[("MANUAL", "Y")],
        "virtio-scsi data.img > ahci-cdrom win11x64.iso | new windows_secure.vars TPM",
        "by-hand: MANUAL=Y",
    ),
    row(
        "qemu-img convert -O qcow2 $D/divided data.qcow2; BEGUN",
        &[],
        "nvme data.qcow2 > ahci-cdrom win11x64.iso + usb-storage set-up | \
         new windows_secure.vars TPM",
        "install-again: ",
    ),
    row(
        "qemu-img create -q -f qcow2 data.qcow2 64M; BEGUN",
        &[],
        "nvme data.qcow2 > ahci-cdrom win11x64.iso + usb-storage set-up | \
         new windows_secure.vars TPM",
        "install: nothing",
    ),
    // Killed in its first session: the reference image erases this disk.
    row(
        "cp $D/installed data.img; BEGUN",
        &[],
        "virtio-scsi data.img | windows.vars",
        "boot: it has a boot loader",
    ),
    row(
        "cp $D/installed data.img; BEGUN; rm win11x64.iso",
        &[],
        "virtio-scsi data.img | windows.vars",
        "boot: it has a boot loader",
    ),
];

fn script(text: &str) -> String {
    text.replace("FINISHED", FINISHED).replace("BEGUN", BEGUN).replace("STORE ", STORE)
}

#[test]
fn each_volume_of_the_reference_image_starts_or_goes_on() -> Result<()> {
    if !runs_here("volumes of the reference image") {
        return Ok(());
    }
    let files = Files::make()?;
    each(ROWS, |Row { volume, words, machine, step }| {
        let of = || format!("{volume} {words:?}");
        let world = World::new(&files)?;
        world.run(&script(volume))?;
        let log = world.boot(words).with_context(of)?;
        let started = world.machine()?.with_context(of)?;
        ensure!(started == *machine, "{}: {started}: {log}", of());
        ensure!(log.contains(&format!("next step is {step}")), "{}: no {step}: {log}", of());
        Ok(())
    })
}
