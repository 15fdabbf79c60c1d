//! Everything that the reference image accepts or survives starts here: a row per case, with the
//! warning that says what has no effect.

mod catalog;
mod dependents;
mod host;

use container::command::{Start, start};
use container::plan::Plan;
use container::settings::environment::{Environment, read};
use container::status::Status;

use self::host::{Host, warnings};

/// Words of the warning; empty if there must be none.
type Warning = &'static str;

fn environment(text: &str) -> Environment {
    let words = text.split('|').filter(|word| !word.is_empty());
    words.map(|word| word.split_once('=').expect("NAME=VALUE")).map(own).collect()
}

fn own((name, value): (&str, &str)) -> (std::ffi::OsString, std::ffi::OsString) {
    (name.into(), value.into())
}

/// Variables, separated by `|`, and the warning.
const SURVIVED: &[(&str, Warning)] = &[
    // The defaults of the reference image.
    ("VERSION=11|CPU_CORES=2|RAM_SIZE=4G|DISK_SIZE=64G", ""),
    ("DISK_TYPE=scsi|MEDIA_TYPE=ide|DISK_CACHE=none|DISK_IO=native|DISK_DISCARD=unmap", ""),
    ("VGA=virtio|DISPLAY=web|ADAPTER=virtio-net-pci|NETWORK=Y|BRIDGE=docker|TAP=qemu", ""),
    ("USB=qemu-xhci,id=xhci,p2=7,p3=7|MOUSE=usb-tablet|SERIAL=mon:stdio|MACHINE=q35", ""),
    ("KVM=Y|VMX=N|HV=Y|VM=Y|WEB=Y|SHUTDOWN=Y|TIMEOUT=105|BALLOONING=N|RNG=Y|DEBUG=N", ""),
    // Screens.
    ("WIDTH=320|HEIGHT=200", ""),
    ("WIDTH=16384|HEIGHT=16384", ""),
    ("WIDTH=0", "WIDTH=0 has no effect: give a whole number from 320 to 16384"),
    ("HEIGHT=tall", "HEIGHT=tall has no effect: give a whole number"),
    ("VGA=qxl", "VGA: qxl is not available"),
    ("DISPLAY=gtk", "DISPLAY: gtk is not available"),
    ("VNC_PORT=80", "VNC_PORT=80 has no effect: give a whole number from 5900"),
    ("WEB_PORT=0", "WEB_PORT=0 has no effect"),
    ("GPU=Y", "GPU has no effect"),
    ("AUDIO=Y", ""),
    ("AUDIO=Y|SOUND=intel-hda", ""),
    ("SOUND=usb-audio", "SOUND: usb-audio is not available; hda is used"),
    ("LOSSY=Y", "LOSSY has no effect"),
    // The network.
    ("MTU=0", "MTU=0 has no effect: give a whole number from 576"),
    ("MTU=68", "MTU=68 has no effect"),
    ("ADAPTER=e1000", "ADAPTER: e1000 is not available; e1000e is used"),
    ("DHCP=maybe", "DHCP=maybe has no effect: this is a switch"),
    ("DNSMASQ_OPTS=--log-queries", "DNSMASQ_OPTS has no effect"),
    ("PASST_OPTS=-4", "PASST_OPTS has no effect"),
    ("USER_PORTS=44772,8080,3389,8006", ""),
    // Switches of earlier versions, by their first letter.
    ("SAMBA=yep", "SAMBA=yep has no effect: this is a switch"),
    ("ALLOCATE=nope", "ALLOCATE=nope has no effect: this is a switch: give Y or N"),
    ("TPM=2.0", "TPM=2.0 has no effect"),
    // Remote control of QEMU.
    ("MONITOR=telnet:localhost:7100,server,nowait,nodelay", ""),
    ("MONITOR=stdio", "MONITOR: stdio has no effect: give tcp:127.0.0.1:PORT,server or unix:"),
    ("QMP=tcp:0.0.0.0:7149,server,wait=off", "QMP: tcp:0.0.0.0:7149 can be reached by other"),
    ("QMP=unix:/run/qmp.sock,server,nowait", ""),
    ("ARGUMENTS=-qmp tcp:0.0.0.0:7149,server,wait=off", "ARGUMENTS: -qmp: tcp:0.0.0.0:7149 can"),
    ("ARGUMENTS=-monitor telnet:127.0.0.1:7100,server", ""),
    ("ARGUMENTS=-vnc :1 -spice port=5930", "ARGUMENTS: -vnc has no effect: "),
    ("ARGUMENTS=-gdb tcp::1234", "ARGUMENTS: -gdb has no effect: "),
    ("ARGUMENTS=-s", "ARGUMENTS: -s has no effect: "),
    ("SERIAL=tcp:0.0.0.0:4444,server", "SERIAL: tcp:0.0.0.0:4444 is not available; stdio is used"),
    // Debug flags.
    ("DEBUG=Y", ""),
    ("TRACE=Y", ""),
    ("DEBUG=all", "DEBUG=all has no effect: this is a switch"),
    ("SAMBA_DEBUG=Y", "SAMBA_DEBUG has no effect"),
    ("DNSMASQ_DEBUG=Y", "DNSMASQ_DEBUG has no effect: "),
    ("PASST_DEBUG=Y", "PASST_DEBUG has no effect: "),
    ("DEBUG_DNS=Y", "DEBUG_DNS has no effect: "),
    ("BALLOONING_DEBUG=all", ""),
    ("ARGUMENTS=-d guest_errors -D /tmp/qemu.log", "ARGUMENTS: -d has no effect"),
    // Processors, memory and firmware.
    ("KVM=N", "KVM=N has no effect: emulation is not supported"),
    ("CPU_CORES=0", "CPU_CORES=0: a machine has a processor at least"),
    ("CPU_CORES=4096", "CPU_CORES=4096: the pod may use only"),
    ("RAM_SIZE=900G", "RAM_SIZE=900G: only"),
    ("CPU_MODEL=EPYC-Milan", "CPU_MODEL: "),
    ("CPU_FLAGS=-hypervisor,kvm=off,+invtsc,hv_vendor_id=GenuineIntel", ""),
    ("CPU_FLAGS=-avx512f", "CPU_FLAGS: -avx512f has no effect"),
    ("ARGUMENTS=-cpu host,arch_capabilities=off", "ARGUMENTS: -cpu has no effect: "),
    ("VMX=Y", ""),
    ("MACHINE=pc", "MACHINE: pc is not available; q35 is used"),
    ("BIOS=/storage/ovmf.fd", "BIOS has no effect: the firmware is built in"),
    ("ARGUMENTS=-drive if=pflash,file=/x", "ARGUMENTS: -drive if=pflash has no effect"),
    ("ARGUMENTS=-rtc base=2020-01-01", "ARGUMENTS: -rtc base has no effect"),
    ("ARGUMENTS=-device usb-host,vendorid=0x1234,productid=0x1234", ""),
    ("ARGUMENTS=-device vfio-pci,host=01:00.0", "-device vfio-pci has no effect"),
    // The rest.
    ("TZ=Europe/Berlin", ""),
    ("TZ=CET-1CEST,M3.5.0,M10.5.0/3", "Windows has no time zone for it, and uses its own"),
    ("TZ=Europe/Belrin", "TZ=Europe/Belrin is unknown: did you mean Europe/Berlin?"),
    ("TZ=europe/berlin", "did you mean Europe/Berlin?"),
    ("TZ=Mars/Olympus_Mons", "TZ=Mars/Olympus_Mons is unknown: set a name like Europe/Berlin"),
    ("TIMEOUT=2m", "TIMEOUT=2m has no effect: give a whole number"),
    ("CONNECTIONS=17", "CONNECTIONS=17 has no effect"),
    ("BALLOONING_KP=fast", "BALLOONING_KP=fast has no effect"),
    ("SHARES=/a,/b", "SHARES has no effect"),
    ("HOME=/root|HOSTNAME=box|TERM=xterm", ""),
];

#[test]
fn what_the_reference_image_survives_starts_with_a_warning() {
    let host = Host::make();
    for (words, warning) in SURVIVED {
        let plan = Plan::make(&environment(words), host.root());
        let plan = plan.unwrap_or_else(|error| panic!("{words}: {error:#}"));
        let all = warnings(&plan);
        let fits = match *warning {
            "" => all.is_empty(),
            some => all.iter().any(|it| it.contains(some)),
        };
        assert!(fits, "{words}: {all:?}");
        for line in all {
            assert!(!line.is_empty() && line.len() < 300 && !line.contains('\n'), "{line}");
        }
    }
}

/// Stops, because data or safety is at stake, or because there is no such Windows.
const STOPS: &[(&str, Status)] = &[
    ("ARGUMENTS=-snapshot", Status::Usage),
    ("ARGUMENTS=-incoming tcp:0:4444", Status::Usage),
    ("PASSWORD=\u{7}", Status::Usage),
    ("USERNAME=a/b", Status::Usage),
    ("KEY=abcde", Status::Usage),
    ("VERSION=xp", Status::Version),
    ("LANGUAGE=klingon", Status::Language),
    ("BOOT_MODE=windows_legacy", Status::Boot),
    ("NETWORK=cloud", Status::Network),
    ("MAC=01:00:00:00:00:01", Status::Address),
    ("RAM_SIZE=many", Status::Memory),
    ("RAM_SIZE=1G", Status::Memory),
    ("CPU_CORES=many", Status::Processors),
    ("DISK_SIZE=1G", Status::Disk),
    ("DISK_TYPE=floppy", Status::Disk),
    ("STORAGE=relative", Status::Storage),
];

#[test]
fn mistakes_about_data_and_safety_stop_with_one_sentence() {
    let host = Host::make();
    for (words, status) in STOPS {
        let error = Plan::make(&environment(words), host.root()).err();
        let error = error.unwrap_or_else(|| panic!("{words} starts"));
        assert_eq!(Status::of(&error), *status, "{words}: {error:#}");
        assert!(!format!("{error:#}").contains('\n'), "{words}: {error:#}");
    }
}

#[test]
fn without_kvm_emulation_is_named_as_unsupported() {
    let host = Host::make();
    let missing = host.root().join("dev/no-kvm");
    let of = |words: &str| {
        let plan = Plan::make(&environment(words), host.root()).unwrap();
        let error = plan.check_kvm(&missing).unwrap_err();
        assert_eq!(Status::of(&error), Status::NoKvm);
        format!("{error:#}")
    };
    let said = of("KVM=N");
    assert!(said.starts_with("KVM=N: emulation is not supported: "), "{said}");
    assert!(said.contains("--device /dev/kvm"), "{said}");
    assert!(!of("").contains("emulation"));
}

#[test]
fn arguments_of_the_container_are_ignored_as_by_its_entry_point() {
    let of = |program: &str, words: &[&str]| {
        start(program, words.iter().map(|word| (*word).to_owned()).collect(), true)
    };
    let pod = |ignored: &[&str]| Start::Pod {
        ignored: ignored.iter().map(|word| (*word).to_owned()).collect(),
    };
    // `command:` of Compose, and `args:` of Kubernetes.
    for words in [&["powershell"][..], &["bash", "-c", "sleep 1"], &["--privileged"], &["sh"]] {
        assert_eq!(of("/usr/bin/transom", words), pod(words), "{words:?}");
    }
    // `command:` of Kubernetes.
    assert_eq!(of("/run/entry.sh", &[]), pod(&[]));
    assert_eq!(of("/run/entry.sh", &["pod"]), pod(&[]));
    assert_eq!(of("/run/entry.sh", &["status"]), pod(&["status"]));
    assert_eq!(of("/usr/bin/tini", &["-s", "/run/entry.sh"]), pod(&[]));
    assert_eq!(of("tini", &["-s", "--", "/run/entry.sh", "x"]), pod(&["x"]));
    // Commands of our own, and slips in them.
    for words in [&["plan"][..], &["pod"], &["exec", "dir"], &["--help"], &["plna"], &[]] {
        assert!(matches!(of("transom", words), Start::Command(_)), "{words:?}");
    }
    let exec = start("transom", vec!["powershell".into()], false);
    assert!(matches!(exec, Start::Command(_)), "a command in a running container: {exec:?}");
}

#[test]
fn an_ignored_value_is_not_used() {
    let input = read(&environment("MTU=0|WIDTH=1|TIMEOUT=2m")).unwrap();
    assert_eq!(input.settings.network.mtu, None);
    assert_eq!((input.settings.windows.width.0, input.settings.pod.timeout.0), (1280, 105));
}
