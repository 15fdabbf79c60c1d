//! The table of translations: each row translates words of QEMU in one scope.

use super::arguments::Arguments;
use super::options::Options;

/// The variable or option in which a word is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `DISK_TYPE` and `MEDIA_TYPE`.
    Bus,
    /// `DISK_CACHE`.
    Cache,
    /// `DISK_IO`.
    Engine,
    /// `ADAPTER`.
    Adapter,
    /// `VGA`.
    Screen,
    /// `DISPLAY`.
    Display,
    /// `MACHINE`.
    Kind,
    /// `USB`.
    Usb,
    /// `SOUND`.
    Sound,
    /// `MOUSE`.
    Pointer,
    /// `CPU_MODEL`.
    Model,
    /// `SERIAL`.
    Serial,
    /// `CPU_FLAGS`.
    Flag,
    /// `ARGUMENTS`: options of the command line.
    Option,
    /// `ARGUMENTS`: `-device`.
    Device,
    /// `ARGUMENTS`: `-object`.
    Object,
}

#[derive(Clone, Copy)]
pub enum Translation {
    /// Our word with the same meaning.
    Exact(&'static str),
    /// Our nearest word, and the reason why it is taken.
    Nearest(&'static str, &'static str),
    /// No effect, because the machine always has this.
    BuiltIn,
    Apply(fn(&mut Arguments, &Options) -> anyhow::Result<()>),
    /// The option's value is looked up in another scope.
    Scoped(Scope),
    /// No effect. The text says what to use instead.
    Ignored(&'static str),
    /// An error, because to continue would be unsafe or wrong. The text says what to use instead.
    Refused(&'static str),
}

pub struct Row {
    pub scope: Scope,
    /// The words in lower case. A `*` at the end matches any suffix.
    pub words: &'static [&'static str],
    pub translation: Translation,
}

macro_rules! rows {
    ($($scope:ident $($word:literal)+ => $translation:expr;)+) => {
        &[$(Row { scope: Scope::$scope, words: &[$($word),+], translation: $translation }),+]
    };
}

use Translation::{Apply, BuiltIn, Exact, Ignored, Nearest, Refused, Scoped};

const VIEWER: &str = "the screen is at WEB_PORT and VNC_PORT: set DISPLAY";
const WITHOUT_NETKVM: &str = "Windows has a driver for this card too";
const NO_PASS_THROUGH: &str = "devices of the host cannot be passed through to the guest";
const NO_SOUND: &str = "set AUDIO=Y for a sound card";
const USB_REDIRECTION: &str = "use -device usb-host for a USB device of the host, or the \
                               redirection of a remote desktop";
const SHARES: &str = "mount the folder as /shared instead, which Windows sees as a network share";
const NETWORKS: &str = "set NETWORK, IP, MAC, MTU and USER_PORTS for the network";
const CONTROLLER: &str = "controllers are added with their disks: set DISK_TYPE";

/// All rows. The first match wins.
#[rustfmt::skip]
pub const TABLE: &[Row] = rows! {
    Bus "scsi" "virtio-scsi" "virtio-scsi-pci" => Exact("scsi");
    Bus "blk" "virtio-blk" "virtio-blk-pci" "virtio" => Exact("blk");
    Bus "ide" "sata" "ahci" => Exact("ide");
    Bus "nvme" => Exact("nvme");
    Bus "usb" => Exact("usb");
    Bus "auto" => Exact("auto");
    Bus "none" => Exact("none");

    Cache "none" "directsync" => Exact("none");
    Cache "writeback" => Exact("writeback");
    Cache "writethrough" => Nearest("none", "both write flushed data to the disk");
    Cache "unsafe" => Nearest("writeback", "the guest's flushes are never ignored");

    Engine "native" "io_uring" => Exact("native");
    Engine "threads" => Nearest("native", "the fastest engine is chosen at the start");

    Adapter "virtio" "virtio-net" "virtio-net-pci" "virtio-net-pci-non-transitional"
        "virtio-net-pci-transitional" => Exact("virtio");
    Adapter "e1000e" => Exact("e1000e");
    Adapter "e1000" "e1000-*" "rtl8139" "pcnet" "ne2k_*" "vmxnet3" "i82*" "igb" "usb-net" "tulip"
        => Nearest("e1000e", WITHOUT_NETKVM);

    Screen "std" "vga" "bochs-display" => Exact("std");
    Screen "virtio" "virtio-vga" => Exact("virtio");
    Screen "virtio-gpu" => Nearest("virtio", "boot loaders draw on it, too");
    Screen "virtio-vga-gl" "virtio-gpu-gl" => Nearest("virtio", "there is no 3D acceleration");
    Screen "none" "n" "no" "off" => Exact("none");
    Screen "qxl" "cirrus" "vmware" "ramfb" "tcx" "cg3" "xenfb"
        => Nearest("std", "every Windows has a driver for it");

    Display "web" ":*" => Exact("web");
    Display "vnc" "vnc=*" => Exact("vnc");
    Display "disabled" "disable" "headless" => Exact("disabled");
    Display "none" "n" "no" "off" => Exact("none");
    Display "gtk" "sdl" "cocoa" "curses" "spice-app" "dbus" "egl-headless"
        => Nearest("web", "a container has no window");

    Kind "q35" "pc-q35-*" => Exact("q35");
    Kind "pc" "pc-i440fx-*" "isapc" "microvm" "virt"
        => Nearest("q35", "every supported Windows runs on it");

    Usb "qemu-xhci" "xhci" "nec-usb-xhci" "y" "yes" "true" "1" "on" => Exact("xhci");
    Usb "n" "no" "none" "off" "false" "0" "disable" "disabled"
        => Nearest("xhci", "the pointing device and the CD drives need it");
    Usb "usb-ehci" "ich9-usb-*" "piix3-usb-uhci" "piix4-usb-uhci" "pci-ohci" "vt82c686b-usb-uhci"
        => Nearest("xhci", "every supported Windows has a driver for USB 3");

    Sound "intel-hda" "ich9-intel-hda" "hda" "hda-*" => Exact("hda");
    Sound "ac97" "usb-audio" "virtio-sound*" "sb16" "es1370" "adlib" "cs4231a" "gus"
        => Nearest("hda", "every supported Windows has a driver for it");

    Pointer "usb-tablet" "tablet" => Exact("tablet");
    Pointer "usb-mouse" "mouse" "ps2" "virtio-mouse-pci" "virtio-tablet-pci" "usb-wacom-tablet"
        => Nearest("tablet", "it needs no driver, and follows the viewer's pointer exactly");

    Model "host" "max" => Exact("host");
    Model "x86-64-v2" "x86-64-v2-aes" => Exact("x86-64-v2");
    Model "x86-64-v3" => Exact("x86-64-v3");
    Model "x86-64-v4" => Exact("x86-64-v4");
    Model "*" => Nearest("host", "KVM provides the processor of the host");

    Serial "mon:stdio" "stdio" "y" => Exact("stdio");
    Serial "none" "null" "n" => Exact("none");
    Serial "tcp:*" "telnet:*" "udp:*" "websocket:*" "unix:*" "chardev:*" "mon:*"
        => Nearest("stdio", "its output is in the log of the container, and nowhere else");
    Serial "file:*" "pipe:*" "pty" "vc" "vc:*" "/dev/*" => Nearest("stdio",
        "its output is in the log of the container");

    Flag "-hv-evmcs" "-hv-emsr-bitmap" "-hv-reset" "-hv-reenlightenment" "-hv-tlbflush-direct"
        "-hv-syndbg" "-hv-no-nonarch-coresharing" => BuiltIn;
    Flag "+hv-evmcs" "+hv-emsr-bitmap" "+hv-reset" "+hv-reenlightenment" "+hv-tlbflush-direct"
        "+hv-syndbg" => Ignored("it is never offered to the guest");
    Flag "+hv-*" "+kvm-*" "-migratable" "+l3-cache" "+invtsc" "+x2apic" "+tsc-deadline" "+topoext"
        => BuiltIn;
    Flag "-kvm-*" => Ignored("KVM's own features can only be hidden together: add kvm=off");
    Flag "-hv-*" => Ignored("to hide all of Hyper-V, set HV=N");

    Option "-drive" => Apply(Arguments::drive);
    Option "-cdrom" => Apply(Arguments::cdrom);
    Option "-hda" "-hdb" "-hdc" "-hdd" => Apply(Arguments::hard_disk);
    Option "-smbios" => Apply(Arguments::smbios);
    Option "-uuid" => Apply(Arguments::uuid);
    Option "-fw_cfg" => Apply(Arguments::file);
    Option "-rtc" => Apply(Arguments::clock);
    Option "-mem-prealloc" => Apply(Arguments::prealloc);
    Option "-device" => Scoped(Scope::Device);
    Option "-object" => Scoped(Scope::Object);
    Option "-qmp" "-qmp-pretty" => Apply(Arguments::qmp);
    Option "-monitor" => Apply(Arguments::monitor);
    Option "-mon" => Apply(Arguments::mon);
    Option "-chardev" => Apply(Arguments::chardev);
    Option "-gdb" "-s" => Ignored("the machine has no port for debuggers");
    Option "-vnc" "-spice" => Ignored("the screen is at WEB_PORT: set VNC_PORT for VNC viewers");
    Option "-incoming" => Refused("it is QEMU's own: leave it out, and use \
        SHUTDOWN=migrate to move a machine here");
    Option "-serial" "-parallel" "-debugcon" =>
        Ignored("set SERIAL for the serial port");
    Option "-m" => Ignored("set RAM_SIZE");
    Option "-smp" => Ignored("set CPU_CORES or SMP");
    Option "-cpu" => Ignored("set CPU_FLAGS");
    Option "-machine" "-M" => Ignored("the machine is always a Q35: set BOOT_MODE and HPET");
    Option "-vga" => Ignored("set VGA");
    Option "-display" "-nographic" "-full-screen" => Ignored(VIEWER);
    Option "-k" => Ignored("set KEYBOARD");
    Option "-bios" "-pflash" "-kernel" "-initrd" "-append" "-option-rom" =>
        Ignored("the firmware is built in: set BOOT_MODE");
    Option "-boot" => Ignored("the medium is booted until Windows is installed, and then the disk");
    Option "-snapshot" => Refused("the disk would lose all writes: leave it out, and use a copy of \
        the volume instead");
    Option "-fda" "-fdb" => Ignored("the machine has no floppy drive: use an ISO");
    Option "-net" "-netdev" "-nic" => Ignored(NETWORKS);
    Option "-usb" "-enable-kvm" "-accel" "-nodefaults" "-no-user-config" "-name" "-no-hpet"
        "-no-fd-bootchk" => BuiltIn;
    Option "-usbdevice" => Ignored(USB_REDIRECTION);
    Option "-audio" "-audiodev" "-soundhw" => Ignored(NO_SOUND);
    Option "-virtfs" "-fsdev" => Ignored(SHARES);
    Option "-tpmdev" => Ignored("set TPM=Y, or BOOT_MODE=windows_secure");
    Option "-watchdog" "-watchdog-action" => Ignored("use a liveness probe at /healthz to restart \
        a guest that hangs");
    Option "-mem-path" =>
        Ignored("memory is that of the container: set its limit and hugepages there");
    Option "-numa" => Ignored("the machine has a single NUMA node");
    Option "-global" => Ignored("it changes internals of QEMU");
    Option "-blockdev" => Ignored("use -drive with file=, format= and if=virtio");
    Option "-acpitable" => Ignored("the ACPI tables are built in");
    Option "-pidfile" "-daemonize" "-msg" "-overcommit" "-D" "-d" "-trace"
        "-sandbox" "-runas" "-run-with" "-compat" "-action" "-no-reboot" "-no-shutdown" =>
        Ignored("the machine starts and stops with the container: set SHUTDOWN, TIMEOUT and DEBUG");
    Option "-loadvm" "-S" => Ignored("the machine always starts immediately, from its disk");

    Device "virtio-rng" "virtio-rng-pci" "virtio-rng-device" => BuiltIn;
    Device "qemu-xhci" "nec-usb-xhci" "usb-tablet" "usb-kbd" "pcie-root-port" "pci-bridge"
        "ioh3420" "usb-hub" "vmgenid" => BuiltIn;
    Device "virtio-blk" "virtio-blk-pci" "nvme" "usb-storage" "usb-uas" "usb-bot" "scsi-hd"
        "scsi-disk" "scsi-block" "scsi-cd" "ide-hd" "ide-cd" => Apply(Arguments::connect);
    Device "virtio-scsi" "virtio-scsi-pci" "ich9-ahci" "ahci" "lsi" "lsi53c895a" "megasas"
        "pvscsi" "sdhci-pci" => Ignored(CONTROLLER);
    Device "usb-host" => Apply(Arguments::usb_host);
    Device "usb-redir" => Ignored(USB_REDIRECTION);
    Device "vfio-pci" "vfio-*" => Ignored(NO_PASS_THROUGH);
    Device "virtio-balloon" "virtio-balloon-pci" => Ignored("set BALLOONING=Y");
    Device "e1000" "e1000e" "rtl8139" "pcnet" "virtio-net" "virtio-net-pci" "vmxnet3" "igb"
        => Ignored("the machine has one network card: set NETWORK, MAC and MTU");
    Device "ivshmem-*" "ivshmem" => Ignored("memory cannot be shared with other programs");
    Device "virtio-9p*" "vhost-user-fs*" "virtio-fs*" => Ignored(SHARES);
    Device "tpm-*" => Ignored("set TPM=Y, or BOOT_MODE=windows_secure");
    Device "qxl*" "vga" "virtio-vga*" "virtio-gpu*" "bochs-display" "ramfb" => Ignored("set VGA");
    Device "usb-mouse" "usb-wacom-tablet" "virtio-mouse*" "virtio-tablet*" "virtio-keyboard*"
        "virtio-input*" => Ignored("set MOUSE");
    Device "intel-hda" "ich9-intel-hda" "hda-*" "ac97" "usb-audio" "virtio-sound*" =>
        Ignored(NO_SOUND);
    Device "virtio-serial*" "virtserialport" "virtconsole" "isa-serial" "pci-serial*" =>
        Ignored("the machine has a port for the guest agent already: set SERIAL for the serial \
        port");
    Device "vhost-vsock*" => Ignored("use the network to reach the guest");
    Device "isa-debugcon" "pvpanic*" "i6300esb" "edu" "intel-iommu" "virtio-iommu*" =>
        Ignored("the machine has no such device");

    Object "rng-random" "rng-builtin" "rng-egd" "iothread" => BuiltIn;
    Object "memory-backend-*" => Ignored("set RAM_SIZE for memory");
    Object "secret" "tls-creds-*" =>
        Ignored("certificates and passwords are built in: set PASSWORD");
};

/// The translation of a word in a scope. Words are in lower case, except options: `-M` is not `-m`.
pub fn find(scope: Scope, word: &str) -> Option<Translation> {
    let fits = |own: &&str| match own.strip_suffix('*') {
        Some(start) => word.starts_with(start),
        None => word == *own,
    };
    let rows = TABLE.iter().filter(|row| row.scope == scope);
    rows.filter(|row| row.words.iter().any(fits)).map(|row| row.translation).next()
}

/// QEMU options without a value.
const SWITCHES: &[&str] = &[
    "-s",
    "-S",
    "-usb",
    "-snapshot",
    "-enable-kvm",
    "-nodefaults",
    "-no-user-config",
    "-daemonize",
    "-no-fd-bootchk",
    "-no-hpet",
    "-no-reboot",
    "-no-shutdown",
    "-mem-prealloc",
    "-nographic",
    "-full-screen",
];

pub fn is_switch(option: &str) -> bool {
    SWITCHES.contains(&option)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::translate::{
        Adapter, Bus, Cache, Display, Engine, Kind, Model, Pointer, Screen, Serial, Sound, Usb,
    };
    use crate::settings::value::Value;

    fn takes(scope: Scope, word: &str) -> bool {
        match scope {
            Scope::Bus => Bus::read(word).is_ok(),
            Scope::Cache => Cache::read(word).is_ok(),
            Scope::Engine => Engine::read(word).is_ok(),
            Scope::Adapter => Adapter::read(word).is_ok(),
            Scope::Screen => Screen::read(word).is_ok(),
            Scope::Display => Display::read(word).is_ok(),
            Scope::Kind => Kind::read(word).is_ok(),
            Scope::Usb => Usb::read(word).is_ok(),
            Scope::Sound => Sound::read(word).is_ok(),
            Scope::Pointer => Pointer::read(word).is_ok(),
            Scope::Model => Model::read(word).is_ok(),
            Scope::Serial => Serial::read(word).is_ok(),
            _ => false,
        }
    }

    #[test]
    fn every_row_names_options_that_its_scope_accepts() {
        for row in TABLE {
            assert!(!row.words.is_empty());
            match row.translation {
                Exact(own) | Nearest(own, _) => assert!(takes(row.scope, own), "{:?}", row.words),
                BuiltIn | Ignored(_) | Refused(_) => {}
                Apply(_) => assert!(matches!(row.scope, Scope::Option | Scope::Device)),
                Scoped(_) => assert_eq!(row.scope, Scope::Option),
            }
            if let Nearest(_, why) | Ignored(why) | Refused(why) = row.translation {
                assert!(why.len() >= 7 && !why.ends_with('.'), "{:?}: {why}", row.words);
            }
        }
    }

    #[test]
    fn no_row_is_shadowed_by_an_earlier_one() {
        for row in TABLE {
            for word in row.words.iter().filter(|word| !word.ends_with('*')) {
                let first = TABLE.iter().find(|other| {
                    let fits = |own: &&str| match own.strip_suffix('*') {
                        Some(start) => word.starts_with(start),
                        None => word == own,
                    };
                    other.scope == row.scope && other.words.iter().any(fits)
                });
                assert!(first.is_some_and(|first| std::ptr::eq(first, row)), "{word}");
            }
        }
    }

    #[test]
    fn option_names_are_case_sensitive() {
        assert!(matches!(find(Scope::Option, "-m"), Some(Ignored("set RAM_SIZE"))));
        assert!(matches!(find(Scope::Option, "-M"), Some(Ignored(why)) if why.contains("Q35")));
    }
}
