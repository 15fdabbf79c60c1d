//! Mistakes on the command line and in files: each is refused with one sentence.

use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;

use transom_tests::flash;
use transom_tests::program::{not_run, not_run_in_part};

use crate::{FAILED, NO_KVM, USAGE, refusal};

/// The arguments, the exit status, and texts that the error must contain.
type Mistake = (&'static [&'static str], i32, &'static [&'static str]);

const WORDS: &[Mistake] = &[
    (&["rnu"], USAGE, &["rnu", "did you mean run?"]),
    (&["--bogus"], USAGE, &["--bogus", "vmm help"]),
    (&["run", "now"], USAGE, &["now", "--"]),
    (&["run", "--memroy", "1G"], USAGE, &["--memroy", "did you mean --memory?"]),
    (&["run", "--xyzzy"], USAGE, &["--xyzzy", "vmm help run"]),
    (&["run", "--memory"], USAGE, &["--memory needs a value", "SIZE"]),
    (&["run", "--config"], USAGE, &["--config needs a value"]),
    (&["inspect", "--memroy=1G"], USAGE, &["--memroy", "did you mean --memory?"]),
    (&["doctor", "--jsn"], USAGE, &["--jsn", "--json"]),
    (&["doctor", "--disk"], USAGE, &["--disk needs a value"]),
    (&["doctor", "--kernel", "bzImage"], USAGE, &["--kernel", "need --run"]),
    (&["doctor", "--seconds", "90"], USAGE, &["--seconds", "need --run"]),
    (&["doctor", "--run", "--seconds", "5"], USAGE, &["from 20 to 3600", "\"5\""]),
    (&["doctor", "--run", "--report", "gone/file"], FAILED, &["--report gone/file: No such file"]),
    (&["help", "rnu"], USAGE, &["rnu"]),
    (&["ctl", "status"], USAGE, &["--control PATH"]),
    (&["ctl", "--control", "gone"], USAGE, &["vmm help ctl"]),
    (&["ctl", "--control", "gone", "puase"], USAGE, &["puase", "did you mean pause?"]),
    (&["ctl", "--control", "gone", "grow"], USAGE, &["`grow NAME [SIZE]`"]),
    (&["ctl", "--control", "gone", "grow", "nvme", "much"], USAGE, &["much", "is not a size"]),
    (&["ctl", "--control", "gone", "link", "net", "on"], USAGE, &["state=on", "`up`, `down`"]),
    (&["ctl", "--control", "gone", "pause"], FAILED, &["gone", "no machine listens there"]),
];

const VALUES: &[Mistake] = &[
    (&["run", "--cpus", "0"], USAGE, &["--cpus 0:", "at least one"]),
    (&["run", "--cpus", "100000"], USAGE, &["--cpus 100000", "at most"]),
    (&["run", "--cpus", "-1"], USAGE, &["--cpus -1", "from 0 to"]),
    (&["run", "--cpus", "many"], USAGE, &["--cpus many", "whole number"]),
    (&["run", "--cpus", "4,sockets=3"], USAGE, &["--cpus 4,sockets=3", "evenly"]),
    (&["run", "--cpus", "4,cores=3"], USAGE, &["--cpus 4,cores=3", "3 processors, not 4"]),
    (&["run", "--cpus", "4,threads=0"], USAGE, &["--cpus 4,threads=0"]),
    (&["run", "--cpus", "8,threads=4294967295"], USAGE, &["threads=4294967295"]),
    (&["run", "--cpus", "2,socket=2"], USAGE, &["`socket`", "did you mean `sockets`?"]),
    (&["run", "--memory", "0"], USAGE, &["--memory 0", "the minimum is 16M"]),
    (&["run", "--memory", "1"], USAGE, &["--memory 1:", "the minimum is 16M"]),
    (&["run", "--memory", "4 gigs"], USAGE, &["`4 gigs` is not a size"]),
    (&["run", "--memory", "4GB"], USAGE, &["4GB", "write `G`"]),
    (&["run", "--memory", "16777217"], USAGE, &["16777217", "not a multiple of 1M"]),
    (&["run", "--memory", "99999T"], FAILED, &["--memory 99999T", "more than this host has"]),
    (&["run", "--memory", "900P"], FAILED, &["--memory 900P", "more than this host has"]),
    (&["run", "--memory", "99E"], USAGE, &["99E", "too large"]),
    (&["run", "--memory", "1G,hugepages=3M"], FAILED, &["hugepages=3M", "take 2M or 1G"]),
    (&["run", "--memory", "1G,prealloc=x"], USAGE, &["prealloc=x", "true or false"]),
    (&["run", "--msr", "ignroe"], USAGE, &["`ignroe`", "did you mean `ignore`?"]),
    (&["run", "--hyperv", "maybe"], USAGE, &["`maybe`", "`auto`"]),
    (&["run", "--grace", "soon"], USAGE, &["--grace soon", "number of seconds"]),
    (&["run", "--die-with", "init"], USAGE, &["`init` is not a process ID"]),
    (&["run", "--die-with", "4194305"], FAILED, &["--die-with 4194305", "No such process"]),
    (&["run", "--accept-emulation=x"], USAGE, &["`x`", "true nor false"]),
    (&["run", "--serial", "tcp:1"], USAGE, &["`tcp:1`", "socket:PATH"]),
    (&["run", "--serial", "file:"], USAGE, &["`file:` names no path"]),
    (&["run", "--serial", "file:gone/x"], FAILED, &["serial", "gone/x"]),
    (&["run", "--serial", "socket:gone/x"], FAILED, &["serial", "gone/x"]),
    (&["run", "--tpm", "path="], USAGE, &["a path is missing"]),
    (&["run", "--tpm", "a,b=c"], USAGE, &["`b`", "path"]),
    (&["run", "--tpm", "gone/x"], FAILED, &["gone/x: start swtpm first", "No such file"]),
    (&["run", "--web", "0.0.0.0:0"], FAILED, &["--web 0.0.0.0:0", "password=FILE", "auth=none"]),
    (&["run", "--web", "127.0.0.1:0,origin=x"], FAILED, &["origin=x", "https://example.org"]),
    (&["run", "--vnc", "5900"], USAGE, &["`5900`", "HOST:PORT", "fd:N"]),
    (&["run", "--vnc", "fd:2"], USAGE, &["`2` names no inherited file descriptor, 3 or above"]),
    (&["run", "--vnc", "unix:a", "--vnc", "unix:a"], FAILED, &["--vnc unix:a: --vnc listens"]),
    (&["run", "--web", "fd:9", "--vnc", "fd:9"], FAILED, &["--web fd:9: --vnc listens there"]),
    (&["run", "--vnc", "127.0.0.1:0,pasword=x"], USAGE, &["did you mean `password`?"]),
    (&["run", "--vnc", "0.0.0.0:0"], FAILED, &["--vnc 0.0.0.0:0", "password=FILE", "auth=none"]),
    (&["run", "--vnc", "127.0.0.1:0,password=gone"], FAILED, &["password=gone", "No such file"]),
    (&["run", "--vnc", "127.0.0.1:0,tls-cert=gone"], FAILED, &["tls-cert needs tls-key"]),
    (&["run", "--vnc", "unix:gone/x"], FAILED, &["--vnc unix:gone/x", "gone/x"]),
    (&["run", "--smbios", "uuid=x"], USAGE, &["--smbios uuid=x", "32 hexadecimal digits"]),
    (&["run", "--smbios", "uid=x"], USAGE, &["`uid`", "did you mean `uuid`?"]),
    (&["run", "--fw-cfg", "bad"], USAGE, &["`bad`", "NAME=TEXT"]),
    (&["run", "--fw-cfg", "opt/a"], USAGE, &["`opt/a`", "NAME=TEXT"]),
    (&["run", "--fw-cfg", "etc/a=b"], USAGE, &["`etc/a`", "opt/"]),
    (&["run", "--fw-cfg", "opt/a=@gone"], FAILED, &["opt/a", "gone"]),
    (&["run", "--vars", "x"], USAGE, &["--vars needs --firmware"]),
    (&["run", "--initrd", "x"], USAGE, &["--initrd needs --kernel"]),
];

const DEVICES: &[Mistake] = &[
    (&["run", "--device", "ede"], USAGE, &["`ede`", "did you mean `edu`?"]),
    (&["run", "--device", "edu,slto=4"], USAGE, &["`slto`", "did you mean `slot`?"]),
    (&["run", "--device", "edu,slot=99.0"], USAGE, &["`99.0`", "04.0"]),
    (&["run", "--device", "edu,slot=00.0"], FAILED, &["edu:", "slot 00.0", "`host-bridge`"]),
    (
        &["run", "--device", "edu,slot=04.0", "--device", "edu,slot=04.0"],
        FAILED,
        &["edu.2:", "slot 04.0", "`edu`"],
    ),
    (&["run", "--device", "serial,port=1"], FAILED, &["serial.2:", "0x3f8", "`serial`"]),
    (
        &["run", "--device", "serial,port=2", "--device", "serial,port=2"],
        FAILED,
        &["serial.3:", "0x2f8", "`serial.2`"],
    ),
    (&["run", "--device", "serial,port=7"], FAILED, &["serial", "7", "1, 2, 3 or 4"]),
    (&["run", "--device", "hpet", "--device", "hpet"], FAILED, &["hpet.2:", "0xfed00000"]),
    (&["run", "--device", "rtc"], FAILED, &["rtc.2:", "0x70"]),
    (&["inspect", "--device", "rtc"], FAILED, &["rtc.2:", "0x70"]),
    (
        &["inspect", "--tpm", "gone", "--device", "tpm,path=gone"],
        FAILED,
        &["tpm.2:", "0xfed40000", "`tpm`"],
    ),
];

fn refuse(mistakes: &[Mistake]) {
    let folder = tempfile::tempdir().expect("a folder");
    refuse_in(folder.path(), mistakes);
}

fn refuse_in(folder: &Path, mistakes: &[Mistake]) {
    for (words, status, parts) in mistakes {
        let said = refusal(folder, words, *status);
        for part in *parts {
            assert!(said.contains(part), "{words:?}: no {part:?} in: {said}");
        }
    }
}

#[test]
fn refuses_unknown_words() {
    refuse(WORDS);
}

#[test]
fn refuses_invalid_values() {
    refuse(VALUES);
}

#[test]
fn refuses_conflicting_devices() {
    refuse(DEVICES);
}

#[test]
fn refuses_configuration_files_with_mistakes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let cases: &[(&str, &[&str])] = &[
        ("memory=1G", &["this is not JSON"]),
        ("", &["this is not JSON"]),
        (r#"{"memory": "1G""#, &["this is not JSON"]),
        ("[1]", &["must be an object"]),
        ("\"x\"", &["must be an object"]),
        (r#"{"memroy": "1G"}"#, &["`memroy`", "did you mean `memory`?"]),
        (r#"{"cpus": {"core": 1}}"#, &["`core`", "did you mean `cores`?"]),
        (r#"{"cpus": true}"#, &["`true`"]),
        (r#"{"memory": "1 gig"}"#, &["`1 gig` is not a size"]),
        (r#"{"memory": "1G", "memory": "2G"}"#, &["`memory`", "duplicate"]),
        (r#"{"device": [{"kind": "ede"}]}"#, &["`ede`", "did you mean `edu`?"]),
        (r#"{"device": [{"kind": "edu", "slto": 4}]}"#, &["`slto`", "did you mean `slot`?"]),
        (r#"{"device": [{"slot": "04.0"}]}"#, &["missing key `kind`"]),
        (r#"{"device": ["edu"]}"#, &["`edu`", "an object with a `kind`"]),
        (r#"{"device": {"kind": "edu"}}"#, &["a list"]),
        (r#"{"disk": [{"path": "a.img", "qeues": 4}]}"#, &["`qeues`", "did you mean `queues`?"]),
        (r#"{"disk": [{"readonly": true}]}"#, &["missing key `path`"]),
        (r#"{"disk": ["a.img"]}"#, &["`a.img`", "an object with a `path`"]),
        (r#"{"disk": {"path": "a.img"}}"#, &["a list"]),
    ];
    for (json, parts) in cases {
        fs::write(path("machine.json"), json).expect("a file");
        for words in
            [&["run", "--config", "machine.json"], &["inspect", "--config", "machine.json"]]
        {
            let said = refusal(folder.path(), words, USAGE);
            for part in parts.iter().chain(&["machine.json"]) {
                assert!(said.contains(part), "{json}: no {part:?} in: {said}");
            }
        }
    }
    fs::write(path("binary.json"), [0xff, 0xfe]).expect("a file");
    fs::create_dir(path("folder.json")).expect("a folder");
    for name in ["binary.json", "folder.json", "gone.json"] {
        let said = refusal(folder.path(), &["run", &format!("--config={name}")], USAGE);
        assert!(said.contains(name), "{said}");
    }
}

#[test]
fn refuses_invalid_firmware_and_variable_stores() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    flash::write(folder.path());
    fs::write(path("empty.fd"), []).expect("a file");
    fs::write(path("odd.fd"), vec![1; 5000]).expect("a file");
    fs::write(path("huge.fd"), vec![1; 17 << 20]).expect("a file");
    fs::write(path("blank.fd"), vec![0xff; 64 << 10]).expect("a file");
    fs::create_dir(path("folder.fd")).expect("a folder");
    for (code, what) in [
        ("gone.fd", "No such file"),
        ("empty.fd", "is empty"),
        ("odd.fd", "5000 bytes"),
        ("huge.fd", "at most 16 MiB"),
        ("blank.fd", "not firmware"),
        ("folder.fd", "is a directory"),
    ] {
        let said = refusal(folder.path(), &["run", "--firmware", code], FAILED);
        assert!(said.contains(code) && said.contains(what), "{said}");
        // The blank image is neither firmware nor a variable store.
        let words = ["run", "--firmware", "code.fd", "--vars", code];
        let said = refusal(folder.path(), &words, FAILED);
        let what = if code == "blank.fd" { "not a variable store" } else { what };
        assert!(said.contains(code) && said.contains(what), "{said}");
    }
    let words = ["run", "--firmware", "code.fd", "--vars", "code.fd"];
    let said = refusal(folder.path(), &words, FAILED);
    assert!(said.contains("code.fd is not a variable store"), "{said}");
}

#[test]
fn refuses_invalid_kernels_and_initrds() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    // A bzImage whose header announces 1 MiB, which is missing.
    let mut cut = vec![0; 1536];
    cut[0x1f1] = 1;
    for (at, bytes) in [
        (0x1f4, &0x1_0000_u32.to_le_bytes()[..]),
        (0x202, b"HdrS"),
        (0x206, &0x20f_u16.to_le_bytes()),
        (0x230, &0x20_0000_u32.to_le_bytes()),
        (0x236, &1_u16.to_le_bytes()),
    ] {
        cut[at..at + bytes.len()].copy_from_slice(bytes);
    }
    fs::write(path("cut"), &cut).expect("a file");
    fs::write(path("text"), "hello").expect("a file");
    fs::write(path("empty"), []).expect("a file");
    fs::write(path("elf"), &probe::IMAGE[..200]).expect("a file");
    fs::write(path("probe"), probe::IMAGE).expect("a file");
    fs::create_dir(path("folder")).expect("a folder");
    for (kernel, what) in [
        ("gone", "No such file"),
        ("empty", "it is empty"),
        ("text", "not a Linux kernel"),
        ("cut", "ends after 1536 bytes"),
        ("elf", "ELF file of 200 bytes"),
        ("folder", "directory"),
    ] {
        let said = refusal(folder.path(), &["run", "--kernel", kernel], FAILED);
        assert!(said.contains(&format!("--kernel {kernel}")) && said.contains(what), "{said}");
    }
    for (initrd, what) in
        [("gone", "No such file"), ("empty", "initrd is empty"), ("folder", "folder")]
    {
        let words = ["run", "--kernel", "probe", "--initrd", initrd];
        let said = refusal(folder.path(), &words, FAILED);
        assert!(said.contains(what), "{said}");
    }
}

/// A file that a user may take for a disk: name, content, and texts that the error must contain.
type Wrong = (&'static str, &'static [u8], &'static [&'static str]);

const NO_DISKS: &[Wrong] = &[
    ("empty", b"", &["0 bytes", "truncate -s 64G empty"]),
    ("odd", &[7; 5000], &["5000 bytes", "truncate -s %512 odd"]),
    ("v.img", b"KDMV", &["a VMware image", "qemu-img convert -f vmdk -O raw v.img"]),
    ("x.img", b"vhdxfile", &["a Hyper-V image", "qemu-img convert -f vhdx"]),
    ("q.img", b"QFI\xfb\0\0\0\x03", &["a qcow2 image", "format=qcow2", "format=raw"]),
    ("cut.qcow2", b"QFI\xfb\0\0\0\x03", &["cut.qcow2"]),
    ("raw.qcow2", &[0; 512], &["not a qcow2 image", "format=raw"]),
];

#[test]
fn refuses_invalid_disks() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("folder")).expect("a folder");
    let _listener = UnixListener::bind(path("socket")).expect("a socket");
    for (name, content, _) in NO_DISKS {
        fs::write(path(name), content).expect("a file");
    }
    let others: [Wrong; 3] = [
        ("gone", b"", &["does not exist", "truncate -s 64G gone"]),
        ("folder", b"", &["is a folder"]),
        ("socket", b"", &["neither a file nor a block device"]),
    ];
    for (name, _, parts) in NO_DISKS.iter().chain(&others) {
        let (nvme, blk) = (format!("nvme,path={name}"), format!("virtio-blk,path={name}"));
        for words in [["--disk", name], ["--device", &nvme], ["--device", &blk]] {
            let words = ["run", words[0], words[1], "--control", "c"];
            let said = refusal(folder.path(), &words, FAILED);
            for part in parts.iter().chain([name]) {
                assert!(said.contains(part), "{words:?}: no {part:?} in: {said}");
            }
        }
    }
}

#[test]
fn refuses_invalid_disk_options() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("a.img"), [0; 4096]).expect("a file");
    fs::write(folder.path().join("half.img"), [0; 512]).expect("a file");
    refuse_in(
        folder.path(),
        &[
            (&["run", "--disk", ""], USAGE, &["--disk", "empty word"]),
            (&["run", "--disk", "path="], USAGE, &["a path is missing"]),
            (&["run", "--disk", "readonly=on"], USAGE, &["missing key `path`"]),
            (&["run", "--disk", "a.img,qeues=2"], USAGE, &["`qeues`", "did you mean `queues`?"]),
            (&["run", "--disk", "a.img,format=rwa"], USAGE, &["`rwa`", "did you mean `raw`?"]),
            (&["run", "--disk", "a.img,sector=513"], USAGE, &["sector=513", "512 or 4096"]),
            (&["run", "--disk", "half.img,sector=4096"], FAILED, &["half.img", "sectors of 4096"]),
            (&["run", "--disk", "a.img,iops=0"], FAILED, &["iops=0", "leave it out"]),
            (&["run", "--disk", "a.img,queues=0"], FAILED, &["queues=0", "1 to 64"]),
            (&["run", "--disk", "a.img,queues=65"], FAILED, &["queues=65", "1 to 64"]),
            (&["run", "--disk", "a.img,serial=a\tb"], FAILED, &["serial number", "20 ASCII"]),
            (&["run", "--disk", "a.img,slot=00.0"], FAILED, &["nvme:", "`host-bridge`"]),
            (&["run", "--disk", "a.img", "--disk", "a.img"], FAILED, &["nvme.2:", "in use by"]),
            (&["run", "--disk", "a.img", "--kernel", "gone"], FAILED, &["--kernel gone"]),
        ],
    );
}

#[test]
fn refuses_an_unusable_control_path() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let _listener = UnixListener::bind(path("taken")).expect("a socket");
    fs::write(path("file"), "kept").expect("a file");
    fs::create_dir(path("folder")).expect("a folder");
    let long = "x".repeat(200);
    for (control, what) in [
        ("taken", "is in use"),
        ("file", "is not a socket"),
        ("folder", "is not a socket"),
        ("gone/x", "No such file"),
        (&long, "at most 107 bytes"),
    ] {
        let said = refusal(folder.path(), &["run", "--control", control], FAILED);
        assert!(said.contains(control) && said.contains(what), "{said}");
        let serial = format!("socket:{control}");
        let said = refusal(folder.path(), &["run", "--serial", &serial], FAILED);
        assert!(said.contains(control) && said.contains(what), "{said}");
    }
    // A machine that is refused for another reason removes its socket.
    let words = ["run", "--control", "mine", "--kernel", "gone"];
    refusal(folder.path(), &words, FAILED);
    let words = ["run", "--control", "mine", "--firmware", "gone"];
    refusal(folder.path(), &words, FAILED);
}

#[test]
fn reports_a_host_that_only_emulates_kernels() {
    let folder = tempfile::tempdir().expect("a folder");
    if vmm::kvm::KvmSupport::of_this_host() != vmm::kvm::KvmSupport::Paravirtual {
        let reason = "this host's KVM is not paravirtual only";
        not_run("reports_a_host_that_only_emulates_kernels", reason);
        return;
    }
    flash::write(folder.path());
    fs::write(folder.path().join("probe"), probe::IMAGE).expect("a file");
    let stock = "/usr/share/OVMF/OVMF_CODE_4M.fd";
    let mut tries = vec![
        vec!["run", "--firmware", "code.fd", "--vars", "vars.fd", "--control", "c"],
        vec!["run", "--kernel", "probe", "--serial", "socket:s"],
    ];
    if fs::exists(stock).unwrap_or(false) {
        tries.push(vec!["run", "--firmware", stock]);
    } else {
        not_run_in_part("stock firmware", &format!("there is no {stock}"));
    }
    for words in tries {
        let start = std::time::Instant::now();
        let said = refusal(folder.path(), &words, NO_KVM);
        assert!(said.contains("paravirtual only") && said.contains("nested"), "{said}");
        assert!(said.contains("--accept-emulation"), "{said}");
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    }
}

/// A certificate, its key, and keys that do not fit.
const CERTIFICATE: &str = include_str!("../vnc_clients/certificate.pem");
const KEY: &str = include_str!("../vnc_clients/key.pem");
const OTHER_KEY: &str = include_str!("../vnc_clients/other-key.pem");
const LOCKED_KEY: &str = include_str!("../vnc_clients/locked-key.pem");

#[test]
fn refuses_screens_that_cannot_be_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = listener.local_addr().expect("its address").to_string();
    let _socket = UnixListener::bind(path("socket")).expect("a socket");
    fs::create_dir(path("folder")).expect("a folder");
    for (name, text) in [
        ("c", CERTIFICATE),
        ("k", KEY),
        ("other", OTHER_KEY),
        ("locked", LOCKED_KEY),
        ("cut", &CERTIFICATE[..200]),
        ("empty", ""),
        ("line", "\nsecret\n"),
        ("text", "hello\n"),
    ] {
        fs::write(path(name), text).expect("a file");
    }
    let cases: [(&str, &[&str]); 15] = [
        (&taken, &["the port is in use by another process"]),
        ("unix:socket", &["socket", "in use by another process"]),
        ("unix:text", &["text is not a socket"]),
        ("203.0.113.1:0,auth=none", &["203.0.113.1:0 is not an address of this host"]),
        ("nowhere.invalid:0", &["nowhere.invalid:0 is not an address of this host"]),
        ("127.0.0.1:0,password=empty", &["password=empty: the password is empty"]),
        ("127.0.0.1:0,password=line", &["password=line: the password is empty"]),
        ("127.0.0.1:0,view-password=empty", &["view-password=empty: the password is empty"]),
        ("127.0.0.1:0,password=folder", &["password=folder", "Is a directory"]),
        ("127.0.0.1:0,tls-cert=c,tls-key=other", &["tls-cert=c is not for tls-key=other"]),
        ("127.0.0.1:0,tls-cert=c,tls-key=locked", &["tls-key=locked", "passphrase", "openssl"]),
        ("127.0.0.1:0,tls-cert=cut,tls-key=k", &["tls-cert=cut: the file is cut short"]),
        ("127.0.0.1:0,tls-cert=k,tls-key=c", &["tls-cert=k: no certificate in PEM format"]),
        ("127.0.0.1:0,tls-cert=c,tls-key=text", &["tls-key=text: no private key in PEM format"]),
        ("127.0.0.1:0,tls-cert=gone,tls-key=k", &["tls-cert=gone: No such file"]),
    ];
    for (place, parts) in cases {
        for option in ["--vnc", "--web"] {
            let said = refusal(folder.path(), &["run", option, place], FAILED);
            let named = place.split(',').next().unwrap_or_default();
            for part in parts.iter().chain([&format!("{option} {named}:").as_str()]) {
                assert!(said.contains(part), "{option} {place}: no {part:?} in: {said}");
            }
        }
    }
    for place in [&taken, "unix:new"] {
        let said = refusal(folder.path(), &["run", "--vnc", place, "--web", place], FAILED);
        let sentence = format!("--web {place}: --vnc listens there");
        assert!(said.starts_with(&sentence), "{said}");
    }
}
