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

/// The translation of a word.
#[derive(Clone, Copy)]
pub enum Becomes {
    /// Our word with the same meaning.
    Is(&'static str),
    /// Our nearest word, and the reason why it is taken.
    Near(&'static str, &'static str),
    /// No effect, because the machine always has this.
    Already,
    /// A function applies the option.
    Take(fn(&mut Arguments, &Options) -> anyhow::Result<()>),
    /// The option's value is looked up in another scope.
    Below(Scope),
    /// No effect. The text says what to use instead.
    Not(&'static str),
    /// An error, because to continue would be unsafe or wrong. The text says what to use instead.
    Never(&'static str),
}

/// A row of the table.
pub struct Row {
    /// The scope in which the words are valid.
    pub scope: Scope,
    /// The words in lower case. A `*` at the end matches any suffix.
    pub words: &'static [&'static str],
    /// Their translation.
    pub becomes: Becomes,
}

macro_rules! rows {
    ($($scope:ident $($word:literal)+ => $becomes:expr;)+) => {
        &[$(Row { scope: Scope::$scope, words: &[$($word),+], becomes: $becomes }),+]
    };
}

use Becomes::{Already, Below, Is, Near, Never, Not, Take};

const CONTROL: &str = "its clients control the whole machine: use `transom` in the container, or \
                       the API at the web port";
const VIEWER: &str = "the screen is at WEB_PORT and VNC_PORT: set DISPLAY";
const VIRTIO_ONLY: &str = "the only card is virtio, whose driver the installation adds to Windows";
const NO_PASS_THROUGH: &str = "devices of the host cannot be passed through to the guest";
const NO_SOUND: &str = "the machine has no sound card: listen through a remote desktop";
const USB_HOST: &str = "USB devices of the host cannot be passed through: use the redirection of \
                        a remote desktop, or usbip";
const SHARES: &str = "there is no share server: copy files through a remote desktop";
const NETWORKS: &str = "set NETWORK, IP, MAC, MTU and USER_PORTS for the network";
const CONTROLLER: &str = "controllers are added with their disks: set DISK_TYPE";

/// All rows. The first match wins.
#[rustfmt::skip]
pub const TABLE: &[Row] = rows! {
    Bus "scsi" "virtio-scsi" "virtio-scsi-pci" => Is("scsi");
    Bus "blk" "virtio-blk" "virtio-blk-pci" "virtio" => Is("blk");
    Bus "ide" "sata" "ahci" => Is("ide");
    Bus "nvme" => Is("nvme");
    Bus "usb" => Is("usb");
    Bus "auto" => Is("auto");
    Bus "none" => Is("none");

    Cache "none" "directsync" => Is("none");
    Cache "writeback" => Is("writeback");
    Cache "writethrough" => Near("none", "both write flushed data to the disk");
    Cache "unsafe" => Near("writeback", "the guest's flushes are never ignored");

    Engine "native" "io_uring" => Is("native");
    Engine "threads" => Near("native", "the fastest engine is chosen at the start");

    Adapter "virtio" "virtio-net" "virtio-net-pci" "virtio-net-pci-non-transitional"
        "virtio-net-pci-transitional" => Is("virtio");
    Adapter "e1000" "e1000e" "e1000-*" "rtl8139" "pcnet" "ne2k_*" "vmxnet3" "i82*" "igb"
        "usb-net" "tulip" => Near("virtio", VIRTIO_ONLY);

    Screen "virtio" "std" "vga" "bochs-display" "virtio-vga" "virtio-gpu" => Is("std");
    Screen "none" "n" "no" "off" => Is("none");
    Screen "qxl" "cirrus" "vmware" "virtio-vga-gl" "virtio-gpu-gl" "ramfb" "tcx" "cg3" "xenfb"
        => Near("std", "every Windows has a driver for it");

    Display "web" ":*" => Is("web");
    Display "vnc" "vnc=*" => Is("vnc");
    Display "disabled" "disable" "headless" => Is("disabled");
    Display "none" "n" "no" "off" => Is("none");
    Display "gtk" "sdl" "cocoa" "curses" "spice-app" "dbus" "egl-headless"
        => Near("web", "a container has no window");

    Kind "q35" "pc-q35-*" => Is("q35");
    Kind "pc" "pc-i440fx-*" "isapc" "microvm" "virt"
        => Never("the machine is always a Q35: leave MACHINE out, or set it to q35");

    Usb "qemu-xhci" "xhci" "nec-usb-xhci" "y" "yes" "true" "1" "on" => Is("xhci");
    Usb "n" "no" "none" "off" "false" "0" "disable" "disabled"
        => Near("xhci", "the pointing device and the CD drives need it");
    Usb "usb-ehci" "ich9-usb-*" "piix3-usb-uhci" "piix4-usb-uhci" "pci-ohci" "vt82c686b-usb-uhci"
        => Near("xhci", "every supported Windows has a driver for USB 3");

    Pointer "usb-tablet" "tablet" => Is("tablet");
    Pointer "usb-mouse" "mouse" "ps2" "virtio-mouse-pci" "virtio-tablet-pci" "usb-wacom-tablet"
        => Near("tablet", "it needs no driver, and follows the viewer's pointer exactly");

    Model "host" "max" => Is("host");
    Model "*" => Near("host", "KVM provides the processor of the host");

    Serial "mon:stdio" "stdio" "y" => Is("stdio");
    Serial "none" "null" "n" => Is("none");
    Serial "tcp:*" "telnet:*" "udp:*" "websocket:*" "unix:*" "chardev:*" "mon:*"
        => Never("its clients get the machine's console: set SERIAL=stdio and read the log, or \
            set SERIAL=none");
    Serial "file:*" "pipe:*" "pty" "vc" "vc:*" "/dev/*" => Near("stdio",
        "its output is in the log of the container");

    Flag "+hypervisor" "-vmx" "-svm" "+hv-*" "+kvm" "+kvm-*" "-migratable" "+l3-cache"
        "+invtsc" "+x2apic" "+tsc-deadline" "+topoext" => Already;
    Flag "-hypervisor" "-kvm" "-kvm-*" => Not("the guest always sees that it is in a virtual \
        machine");
    Flag "-hv-*" => Not("Hyper-V's enlightenments can only be disabled together: set HV=N");
    Flag "+vmx" "+svm" => Not("nested virtualization is off: WSL 2 and Hyper-V do not run in the \
        guest");

    Option "-drive" => Take(Arguments::drive);
    Option "-cdrom" => Take(Arguments::cdrom);
    Option "-hda" "-hdb" "-hdc" "-hdd" => Take(Arguments::hard_disk);
    Option "-smbios" => Take(Arguments::smbios);
    Option "-uuid" => Take(Arguments::uuid);
    Option "-fw_cfg" => Take(Arguments::file);
    Option "-rtc" => Take(Arguments::clock);
    Option "-mem-prealloc" => Take(Arguments::prealloc);
    Option "-device" => Below(Scope::Device);
    Option "-object" => Below(Scope::Object);
    Option "-qmp" "-qmp-pretty" "-monitor" "-mon" => Never(CONTROL);
    Option "-gdb" "-s" => Never("its clients control the whole machine: leave it out, and use \
        `transom` in the container");
    Option "-vnc" "-spice" => Never("it would show the screen without a password: set VNC_PORT, \
        WEB_PORT and PASSWORD");
    Option "-incoming" => Never("migration is not supported: leave it out, and use the disk on \
        the volume");
    Option "-serial" "-parallel" "-chardev" "-debugcon" => Not("set SERIAL for the serial port");
    Option "-m" => Not("set RAM_SIZE");
    Option "-smp" => Not("set CPU_CORES or SMP");
    Option "-cpu" => Not("set CPU_FLAGS");
    Option "-machine" "-M" => Not("the machine is always a Q35: set BOOT_MODE and HPET");
    Option "-vga" => Not("set VGA");
    Option "-display" "-nographic" "-full-screen" => Not(VIEWER);
    Option "-k" => Not("set KEYBOARD");
    Option "-bios" "-pflash" "-kernel" "-initrd" "-append" "-option-rom" =>
        Not("the firmware is built in: set BOOT_MODE");
    Option "-boot" => Not("the medium is booted until Windows is installed, and then the disk");
    Option "-snapshot" => Never("the disk would lose all writes: leave it out, and use a copy of \
        the volume instead");
    Option "-fda" "-fdb" => Not("the machine has no floppy drive: use an ISO");
    Option "-net" "-netdev" "-nic" => Not(NETWORKS);
    Option "-usb" "-enable-kvm" "-accel" "-nodefaults" "-no-user-config" "-name" "-no-hpet"
        "-no-fd-bootchk" => Already;
    Option "-usbdevice" => Not(USB_HOST);
    Option "-audio" "-audiodev" "-soundhw" => Not(NO_SOUND);
    Option "-virtfs" "-fsdev" => Not(SHARES);
    Option "-tpmdev" => Not("set TPM=Y, or BOOT_MODE=windows_secure");
    Option "-watchdog" "-watchdog-action" => Not("use a liveness probe at /healthz to restart a \
        guest that hangs");
    Option "-mem-path" => Not("memory is that of the container: set its limit and hugepages there");
    Option "-numa" => Not("the machine has a single NUMA node");
    Option "-global" => Not("it changes internals of QEMU");
    Option "-blockdev" => Not("use -drive with file=, format= and if=virtio");
    Option "-acpitable" => Not("the ACPI tables are built in");
    Option "-pidfile" "-daemonize" "-msg" "-overcommit" "-D" "-d" "-trace"
        "-sandbox" "-runas" "-run-with" "-compat" "-action" "-no-reboot" "-no-shutdown" =>
        Not("the machine starts and stops with the container: set SHUTDOWN, TIMEOUT and DEBUG");
    Option "-loadvm" "-S" => Not("the machine always starts immediately, from its disk");

    Device "virtio-rng" "virtio-rng-pci" "virtio-rng-device" => Already;
    Device "qemu-xhci" "nec-usb-xhci" "usb-tablet" "usb-kbd" "pcie-root-port" "pci-bridge"
        "ioh3420" "usb-hub" "vmgenid" => Already;
    Device "virtio-blk" "virtio-blk-pci" "nvme" "usb-storage" "usb-uas" "usb-bot" "scsi-hd"
        "scsi-disk" "scsi-block" "scsi-cd" "ide-hd" "ide-cd" => Take(Arguments::connect);
    Device "virtio-scsi" "virtio-scsi-pci" "ich9-ahci" "ahci" "lsi" "lsi53c895a" "megasas"
        "pvscsi" "sdhci-pci" => Not(CONTROLLER);
    Device "usb-host" "usb-redir" => Not(USB_HOST);
    Device "vfio-pci" "vfio-*" => Not(NO_PASS_THROUGH);
    Device "virtio-balloon" "virtio-balloon-pci" => Not("set BALLOONING=Y");
    Device "e1000" "e1000e" "rtl8139" "pcnet" "virtio-net" "virtio-net-pci" "vmxnet3" "igb"
        => Not("the machine has one network card: set NETWORK, MAC and MTU");
    Device "ivshmem-*" "ivshmem" => Not("memory cannot be shared with other programs");
    Device "virtio-9p*" "vhost-user-fs*" "virtio-fs*" => Not(SHARES);
    Device "tpm-*" => Not("set TPM=Y, or BOOT_MODE=windows_secure");
    Device "qxl*" "vga" "virtio-vga*" "virtio-gpu*" "bochs-display" "ramfb" => Not("set VGA");
    Device "usb-mouse" "usb-wacom-tablet" "virtio-mouse*" "virtio-tablet*" "virtio-keyboard*"
        "virtio-input*" => Not("set MOUSE");
    Device "intel-hda" "ich9-intel-hda" "hda-*" "ac97" "usb-audio" "virtio-sound*" =>
        Not(NO_SOUND);
    Device "virtio-serial*" "virtserialport" "virtconsole" "isa-serial" "pci-serial*" =>
        Not("the machine has a port for the guest agent already: set SERIAL for the serial port");
    Device "vhost-vsock*" => Not("use the network to reach the guest");
    Device "isa-debugcon" "pvpanic*" "i6300esb" "edu" "intel-iommu" "virtio-iommu*" =>
        Not("the machine has no such device");

    Object "rng-random" "rng-builtin" "rng-egd" "iothread" => Already;
    Object "memory-backend-*" => Not("set RAM_SIZE for memory");
    Object "secret" "tls-creds-*" => Not("certificates and passwords are built in: set PASSWORD");
};

/// The translation of a word in a scope. Words are in lower case, except options: `-M` is not `-m`.
pub fn find(scope: Scope, word: &str) -> Option<Becomes> {
    let fits = |own: &&str| match own.strip_suffix('*') {
        Some(start) => word.starts_with(start),
        None => word == *own,
    };
    let rows = TABLE.iter().filter(|row| row.scope == scope);
    rows.filter(|row| row.words.iter().any(fits)).map(|row| row.becomes).next()
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

/// Whether an option takes no value.
pub fn is_switch(option: &str) -> bool {
    SWITCHES.contains(&option)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::translate::{
        Adapter, Bus, Cache, Display, Engine, Kind, Model, Pointer, Screen, Serial, Usb,
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
            Scope::Pointer => Pointer::read(word).is_ok(),
            Scope::Model => Model::read(word).is_ok(),
            Scope::Serial => Serial::read(word).is_ok(),
            _ => false,
        }
    }

    #[test]
    fn every_row_is_one_that_its_place_takes() {
        for row in TABLE {
            assert!(!row.words.is_empty());
            match row.becomes {
                Is(own) | Near(own, _) => assert!(takes(row.scope, own), "{:?}", row.words),
                Already | Not(_) | Never(_) => {}
                Take(_) => assert!(matches!(row.scope, Scope::Option | Scope::Device)),
                Below(_) => assert_eq!(row.scope, Scope::Option),
            }
            if let Near(_, why) | Not(why) | Never(why) = row.becomes {
                assert!(why.len() >= 7 && !why.ends_with('.'), "{:?}: {why}", row.words);
            }
        }
    }

    #[test]
    fn no_word_stands_below_another_that_takes_it() {
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
    fn small_and_large_options_differ() {
        assert!(matches!(find(Scope::Option, "-m"), Some(Not("set RAM_SIZE"))));
        assert!(matches!(find(Scope::Option, "-M"), Some(Not(why)) if why.contains("Q35")));
    }
}
