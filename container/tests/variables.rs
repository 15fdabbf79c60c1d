//! Tests that every variable does what the list says, so that the list and these cases stay the
//! same.

use container::settings::Settings;
use container::settings::environment::{Environment, ParsedEnvironment, read};
use container::settings::list;
use container::settings::variable::{Support, Variable};
use container::status::Status;

/// A test case of a variable.
struct Case {
    /// The name of the variable.
    name: &'static str,
    /// A value that is not the default.
    text: &'static str,
    /// The value as it is shown; for a variable without effect, words of its warning.
    becomes: &'static str,
    /// A value that is invalid; empty if every text is accepted.
    bad: &'static str,
}

macro_rules! cases {
    ($($name:literal $text:literal => $becomes:literal $(not $bad:literal)?;)+) => {
        &[$(Case { name: $name, text: $text, becomes: $becomes, bad: concat!($($bad)?) }),+]
    };
}

#[rustfmt::skip]
const CASES: &[Case] = cases! {
    "VERSION" "2022" => "win2022-eval" not "xp";
    "EDITION" "Datacenter Azure" => "datacenter-azure" not "a;b";
    "INSTALLER" "script" => "script" not "both";
    "LANGUAGE" "Korean" => "Korean" not "klingon";
    "REGION" "ko_kr" => "ko-KR" not "korea";
    "KEYBOARD" "0412:00000412" => "0412:00000412" not "qwerty uiop";
    "KEY" "abcde-12345-abcde-12345-abcde" => "***" not "abcde";
    "WIDTH" "320" => "320" not "319";
    "HEIGHT" "16384" => "16384" not "16385";
    "MANUAL" "yes" => "Y" not "maybe";
    "COMMAND" "cmd /c echo hi" => "cmd /c echo hi" not "a\nb";
    "LOG" "ON" => "Y" not "2";
    "USERNAME" "bill" => "bill" not "a/b";
    "PASSWORD" "secret" => "***" not "a\u{7}b";
    "AUTOLOGIN" "disabled" => "N" not "nope";
    "DOMAIN" "corp.example.com" => "corp.example.com" not "a..b";
    "DOMAIN_OU" "OU=pods,DC=corp" => "OU=pods,DC=corp" not "a\tb";
    "WORKGROUP" "OFFICE" => "OFFICE" not "far too long a name";
    "HOST" "box-1" => "box-1" not "12345";
    "VERIFY" "true" => "always compared";
    "REMOVE" "off" => "N" not "3";
    "MIDO" "0" => "N" not "3";
    "ESD" "false" => "N" not "3";
    "CONNECTIONS" "16" => "16" not "17";
    "UNPACK" "enable" => "not unpacked";
    "DRIVERS" "/srv/virtio-win.iso" => "/srv/virtio-win.iso" not "virtio-win.iso";
    "HTTPS_PROXY" "http://me:pw@proxy:3128" => "http://***@proxy:3128" not "a\tb";
    "HTTP_PROXY" "proxy:3128" => "http://proxy:3128" not "a\tb";
    "NO_PROXY" ".svc,10.0.0.1" => ".svc,10.0.0.1" not "a\tb";
    "SSL_CERT_FILE" "/ca.pem" => "/ca.pem" not "ca.pem";
    "REBUILD" "Y" => "media are never changed";
    "SAMBA" "N" => "N" not "maybe";
    "SAMBA_DEBUG" "Y" => "DEBUG=Y";
    "SAMBA_READONLY" "Y" => "Y" not "maybe";
    "SAMBA_CONFIG" "/x" => "without such a file";
    "SAMBA_INTERFACE" "eth0" => "for the guest only";
    "SHORTCUT" "N" => "N" not "maybe";
    "SHARES" "/a,/b" => "/shared2";
    "CPU_CORES" "max" => "max" not "1.5";
    "SMP" "4,threads=2" => "4,sockets=1,cores=2,threads=2" not "4,cores=3";
    "CPU_MODEL" "x86-64-v2-AES" => "x86-64-v2" not "";
    "CPU_FLAGS" "+avx2" => "+avx2" not "a\u{7}";
    "VM" "N" => "N" not "maybe";
    "KVM" "N" => "N" not "maybe";
    "VMX" "Y" => "Y" not "maybe";
    "HV" "N" => "N" not "hyper";
    "RAM_SIZE" "6" => "6G" not "6 GBit";
    "RAM_CHECK" "N" => "N" not "x";
    "RAM_MINIMUM" "512M" => "512M" not "half";
    "STORAGE" "/data" => "/data" not "data";
    "DISK_SIZE" "half" => "half" not "big";
    "DISK_MINIMUM" "8G" => "8G" not "max";
    "DISK2_SIZE" "10" => "10G" not "x";
    "DISK3_SIZE" "10GB" => "10G" not "x";
    "DISK4_SIZE" "0.5T" => "512G" not "x";
    "DISK5_SIZE" "max" => "max" not "x";
    "DISK6_SIZE" "1500M" => "1500M" not "1e9";
    "DEVICE" "/dev/sdb" => "/dev/sdb" not "sdb";
    "DEVICE2" "/dev/sdc" => "/dev/sdc" not "sdc";
    "DEVICE3" "/dev/sdd" => "/dev/sdd" not "sdd";
    "DEVICE4" "/dev/sde" => "/dev/sde" not "sde";
    "DEVICE5" "/dev/sdf" => "/dev/sdf" not "sdf";
    "DEVICE6" "/dev/sdg" => "/dev/sdg" not "sdg";
    "DISK_FMT" "qcow2" => "qcow2" not "vmdk";
    "DISK_TYPE" "sata" => "ide" not "floppy";
    "MEDIA_TYPE" "usb" => "usb" not "tape";
    "DISK_CACHE" "writeback" => "writeback" not "all";
    "DISK_IO" "threads" => "native" not "fibers";
    "DISK_DISCARD" "off" => "ignore" not "trim";
    "DISK_ROTATION" "7200" => "do not rotate";
    "DISK_FLAGS" "cluster_size=2M" => "leave it out";
    "DISK_OPTIONS" "write-cache=on" => "DISK_CACHE";
    "DISK_NAME" "system" => "system" not "../system";
    "DISK_OFFSET" "3" => "PCI";
    "BASE" "/base" => "/base" not "base";
    "EPHEMERAL" "1" => "Y" not "x";
    "DISK_DISABLE" "Y" => "Y" not "x";
    "ALLOCATE" "1" => "Y" not "x";
    "NETWORK" "passt" => "user" not "bridge";
    "DHCP" "Y" => "Y" not "auto";
    "DEV" "eth1" => "eth1" not "an interface";
    "IP" "172.30.5.2" => "172.30.5.2" not "172.30.5";
    "MASK" "255.255.0.0" => "255.255.0.0" not "255.0.0.0";
    "MAC" "02-aa-bb-cc-dd-ee" => "02:AA:BB:CC:DD:EE" not "01:00:00:00:00:01";
    "TAP" "tap7" => "tap7" not "a tap with a long name";
    "BRIDGE" "br0" => "no bridge";
    "MTU" "1400" => "1400" not "0";
    "ADAPTER" "e1000" => "e1000e" not "";
    "HOST_PORTS" "7149, 53/udp" => "7149,53/udp" not "7149-7151";
    "USER_PORTS" "22,22,5985/TCP" => "22,5985" not "0";
    "CHECK_PORT" "3389" => "/healthz";
    "DNSMASQ_OPTS" "--log" => "built in";
    "DNSMASQ_DEBUG" "Y" => "DEBUG=Y";
    "DNSMASQ_DISABLE" "Y" => "built in";
    "DNSMASQ" "/bin/x" => "built in";
    "DNSMASQ_PID" "/x" => "built in";
    "DNSMASQ_CONF_DIR" "/x" => "built in";
    "DEBUG_DNS" "Y" => "DEBUG=Y";
    "PASST" "/bin/x" => "built in";
    "PASST_OPTS" "-4" => "USER_PORTS";
    "PASST_DEBUG" "Y" => "DEBUG=Y";
    "PASST_PID" "/x" => "built in";
    "PASST_SOCKET" "/x" => "built in";
    "DISPLAY" "vnc" => "vnc" not "";
    "VGA" "none" => "none" not "";
    "VNC_PORT" "5901" => "5901" not "80";
    "WEB" "N" => "N" not "x";
    "WEB_PORT" "80" => "80" not "0";
    "PROTECT" "N" => "N" not "x";
    "PASS" "secret" => "***" not "a\nb";
    "LOSSY" "Y" => "every viewer chooses";
    "GPU" "Y" => "graphics card";
    "RENDERNODE" "/dev/dri/renderD128" => "graphics card";
    "NVIDIA_DRIVER_CAPABILITIES" "graphics" => "graphics card";
    "CLIPBOARD" "N" => "N" not "x";
    "AUDIO" "Y" => "Y" not "x";
    "SOUND" "ac97" => "hda" not "";
    "WSS_SOCKET" "/x" => "no socket";
    "WSS_PORT" "5700" => "WEB_PORT";
    "WSD_PORT" "8004" => "WEB_PORT";
    "WEB_ORIGIN" "https://Vm.org" => "https://vm.org" not "vm.org";
    "WEB_PROXY" "10.0.0.0/8 ::1" => "10.0.0.0/8,::1" not "10.0.0.0/33";
    "MACHINE" "pc-q35-9.0,hpet=on" => "q35" not "";
    "BOOT_MODE" "windows_secure" => "windows_secure" not "windows_legacy";
    "BIOS" "/bios.bin" => "BOOT_MODE";
    "SMM" "Y" => "BOOT_MODE";
    "TPM" "Y" => "Y" not "2.0";
    "LOGO" "Y" => "firmware is unchanged";
    "CLEAR" "Y" => "Y" not "x";
    "BOOT" "alpine" => "VERSION";
    "BOOT_INDEX" "1" => "leave it out";
    "PCI_BUS" "pci.0" => "leave it out";
    "USB" "N" => "xhci" not "";
    "MOUSE" "ps2" => "tablet" not "";
    "RNG" "N" => "N" not "x";
    "UUID" "123E4567-e89b-12d3-a456-426614174000" => "123e4567-e89b-12d3-a456-426614174000" not "1";
    "SM_BIOS" "type=1,serial=7" => "serial=7" not "type=1,uuid=7";
    "HPET" "on" => "Y" not "x";
    "VMPORT" "on" => "no such port";
    "SERIAL" "none" => "none" not "";
    "TZ" "Europe/Berlin" => "Europe/Berlin" not "../../etc/passwd";
    "ARGUMENTS" "-cdrom /x.iso" => "CD /x.iso at ide" not "-snapshot";
    "APP" "Linux" => "Linux" not "a/b";
    "PLATFORM" "arm64" => "x64";
    "SUPPORT" "https://example.com" => "leave it out";
    "SHUTDOWN" "Migrate" => "migrate" not "x";
    "MIGRATE_PORT" "4000" => "4000" not "0";
    "MIGRATE_PAUSE" "1000" => "1000" not "0";
    "TIMEOUT" "300" => "300" not "2m";
    "QEMU_TIMEOUT" "300" => "300" not "0";
    "IDLE" "90 M" => "90m" not "30";
    "SNAPSHOT_KEY_FILE" "/run/secrets/key" => "/run/secrets/key" not "key";
    "ERROR_HOLD" "5" => "5" not "30s";
    "COMPAT" "dockur" => "dockur" not "kubevirt";
    "MONITOR" "telnet:localhost:7100,server" => "tcp:127.0.0.1:7100" not "a\u{7}";
    "QMP" "tcp:0.0.0.0:7149,server,wait=off" => "tcp:0.0.0.0:7149" not "a\u{7}";
    "LOG_FORMAT" "JSON" => "json" not "xml";
    "DEBUG" "Y" => "Y" not "x";
    "TRACE" "Y" => "Y" not "x";
    "container" "podman" => "podman" not "a\u{7}";
    "BALLOONING" "Y" => "Y" not "x";
    "BALLOONING_MIN_MEM" "1G" => "1G" not "101%";
    "BALLOONING_RAM_THRESHOLD" "75.5" => "75.5" not "-1";
    "BALLOONING_RAM_THRESHOLD_HARD" "95" => "95" not "inf";
    "BALLOONING_PSI_PRESSURE" "5" => "5" not "1e3";
    "BALLOONING_PSI_PRESSURE_MAX" "60" => "60" not "NaN";
    "BALLOONING_HYSTERESIS" "64M" => "64M" not "64%";
    "BALLOONING_KP" "0.25" => "0.25" not "0,25";
    "BALLOONING_KI" "0.1" => "0.1" not ".";
    "BALLOONING_INTERVAL" "10" => "10" not "0";
    "BALLOONING_DEBUG" "controller" => "controller" not "x";
    "BALLOONING_PID" "/x" => "no process";
    "BALLOONING_SOCKET" "/x" => "no socket";
};

fn environment(name: &str, text: &str) -> Environment {
    [(name.into(), text.into())].into()
}

fn case(variable: &Variable) -> &'static Case {
    let case = CASES.iter().find(|case| case.name == variable.name);
    case.unwrap_or_else(|| panic!("{} has no case here", variable.name))
}

#[test]
fn every_variable_has_exactly_one_case() {
    for variable in list::all() {
        case(variable);
    }
    for case in CASES {
        assert!(list::all().any(|variable| variable.name == case.name), "{}", case.name);
    }
    assert_eq!(list::all().count(), CASES.len());
    let mut names: Vec<_> = list::all().flat_map(Variable::names).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "a name stands twice in the list");
}

#[test]
fn a_value_sets_only_its_own_setting() {
    for variable in list::all() {
        let (case, Some(slot)) = (case(variable), &variable.slot) else { continue };
        for name in variable.names() {
            let input = read(&environment(name, case.text)).unwrap();
            assert_eq!((slot.show)(&input.settings), case.becomes, "{name}={}", case.text);
            assert!(input.names.contains(variable.name), "{name}");
            let defaults = Settings::defaults();
            let translated = variable.support == Support::Translated;
            let noted = translated && input.warnings.iter().any(|it| it.starts_with(name));
            assert!(input.settings != defaults || noted, "{name}={} has no effect", case.text);
            for other in list::all().filter(|other| other.name != variable.name) {
                let Some(other_slot) = &other.slot else { continue };
                let old = variable.name == "QEMU_TIMEOUT" && other.name == "TIMEOUT";
                let same = (other_slot.same)(&input.settings, &defaults);
                assert_eq!(same, !old, "{name} changes {}", other.name);
            }
        }
    }
}

#[test]
fn a_bad_value_is_refused_with_the_status_of_its_variable() {
    for variable in list::all().filter(|variable| variable.slot.is_some()) {
        let case = case(variable);
        if case.bad.is_empty() {
            // QEMU knows many words here. Unknown ones are no error: they become what the machine
            // has.
            let strange = read(&environment(case.name, "no-such-thing")).unwrap();
            assert!(strange.warnings[0].contains("no-such-thing"), "{:?}", strange.warnings);
            continue;
        }
        if variable.kind().lenient {
            continue;
        }
        let error = read(&environment(case.name, case.bad));
        let error = error.err().unwrap_or_else(|| panic!("{}={} is taken", case.name, case.bad));
        assert_eq!(Status::of(&error), variable.status, "{}", case.name);
        let sentence = format!("{error:#}");
        assert!(sentence.starts_with(case.name), "{sentence}");
        assert!(!sentence.contains(|letter: char| letter.is_control()), "{sentence:?}");
        assert!(sentence.len() < 400, "{sentence}");
    }
}

#[test]
fn an_invalid_switch_or_number_keeps_its_default_with_a_warning() {
    let lenient = list::all().filter(|variable| variable.kind().lenient);
    let mut count = 0;
    for variable in lenient {
        let case = case(variable);
        let ParsedEnvironment { settings, warnings, names, .. } =
            read(&environment(case.name, case.bad)).unwrap();
        assert_eq!(settings, Settings::defaults(), "{}", case.name);
        let [warning] = &warnings[..] else { panic!("{}: {warnings:?}", case.name) };
        let start = format!("{}={} has no effect: ", case.name, case.bad);
        assert!(warning.starts_with(&start) && warning.contains("give "), "{warning}");
        assert!(names.is_empty(), "{} counts as set", case.name);
        count += 1;
    }
    assert!(count >= 35, "{count} variables are lenient");
}

#[test]
fn a_default_is_one_of_the_accepted_words() {
    let mut lists = 0;
    for variable in list::all() {
        let (Some(slot), false) = (&variable.slot, variable.default.is_empty()) else { continue };
        let shown = |word: &str| {
            let mut settings = Settings::defaults();
            (slot.store)(&mut settings, word).is_ok().then(|| (slot.show)(&settings))
        };
        let words: Vec<_> = variable.kind().accepts.split(", ").collect();
        // Other descriptions, such as "number", are no lists of words.
        if words.len() > 1 && words.iter().all(|word| shown(word).as_deref() == Some(word)) {
            let default = variable.default.to_lowercase();
            assert!(words.contains(&&*default), "{}: {words:?}", variable.name);
            lists += 1;
        }
    }
    assert!(lists > 10, "{lists} variables have a list of words");
}

#[test]
fn ignored_variables_name_an_alternative() {
    for variable in list::all() {
        let case = case(variable);
        let read = read(&environment(case.name, case.text));
        match variable.support {
            Support::Full | Support::Translated => {}
            Support::Ignored(instead) => {
                let ParsedEnvironment { settings, warnings, .. } = read.unwrap();
                assert_eq!(settings, Settings::defaults(), "{}", case.name);
                let [warning] = &warnings[..] else { panic!("{}: {warnings:?}", case.name) };
                assert!(warning.starts_with(case.name) && warning.ends_with(instead), "{warning}");
                assert!(warning.contains(case.becomes), "{warning}");
            }
        }
    }
}

/// Environment files keep quotes and blanks, and on Windows they have other line ends.
#[test]
fn quotes_blanks_and_line_ends_around_a_value_change_nothing() {
    for variable in list::all() {
        let (name, text) = (variable.name, case(variable).text);
        let plain = read(&environment(name, text)).unwrap();
        let ends = [format!("{text}\r"), format!("{text}\r\n"), format!("{text}\n")];
        let spelled = [
            format!("\"{text}\""),
            format!("'{text}'"),
            format!("  {text}\t"),
            format!(" \"{text} \" "),
            format!("\"{text}\"\r"),
        ];
        // A password may begin and end with anything else.
        let spelled = if variable.kind().secret { &[][..] } else { &spelled };
        for text in ends.iter().chain(spelled) {
            assert_eq!(read(&environment(name, text)).unwrap(), plain, "{name}={text:?}");
        }
    }
}

#[test]
fn an_empty_value_is_none() {
    for variable in list::all() {
        for text in ["", "\r", "\r\n", " ", "\"\"", "''", " \"\" \r"] {
            let is_password = variable.kind().secret && text.contains([' ', '"', '\'']);
            if !is_password {
                let input = read(&environment(variable.name, text)).unwrap();
                let nothing = read(&Environment::new()).unwrap();
                assert_eq!(input, nothing, "{}={text:?}", variable.name);
            }
        }
    }
}

/// Names, paths, addresses, commands and words of QEMU are used as they are written.
#[rustfmt::skip]
const KEEP_CASE: &[&str] = &[
    "COMMAND", "USERNAME", "DOMAIN", "DOMAIN_OU", "WORKGROUP", "HOST", "APP", "TZ", "container",
    "DRIVERS", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "SSL_CERT_FILE", "STORAGE", "DISK_NAME",
    "BASE", "DEVICE", "DEVICE2", "DEVICE3", "DEVICE4", "DEVICE5", "DEVICE6", "DEV", "TAP",
    "SMP", "MACHINE", "SM_BIOS", "ARGUMENTS", "MONITOR", "QMP", "SNAPSHOT_KEY_FILE",
];

#[test]
fn words_are_accepted_in_any_case() {
    for variable in list::all().filter(|it| !it.kind().secret && !KEEP_CASE.contains(&it.name)) {
        let (name, text) = (variable.name, case(variable).text);
        let plain = read(&environment(name, text)).unwrap();
        for text in [text.to_uppercase(), text.to_lowercase()] {
            let input = read(&environment(name, &text)).unwrap();
            assert_eq!(input.settings, plain.settings, "{name}={text}");
        }
    }
}
