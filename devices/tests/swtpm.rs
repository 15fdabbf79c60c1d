//! The TPM device with a real TPM emulator: swtpm, as packaged by Debian.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use devices::device::Kind;
use devices::registry::Config;
use devices::testutil::Bench;
use host::testutil::swtpm::response;
use serde_json::json;
use tempfile::TempDir;

/// Locality 0, and offsets of its registers.
const BASE: u64 = 0xfed4_0000;
const LOC_CTRL: u64 = 0x08;
const CTRL_REQ: u64 = 0x40;
const CTRL_STS: u64 = 0x44;
const CTRL_START: u64 = 0x4c;
const DATA_BUFFER: u64 = 0x80;

/// `TPM_ST_NO_SESSIONS` and `TPM_ST_SESSIONS`
const PLAIN: u16 = 0x8001;
const SESSIONS: u16 = 0x8002;
/// An authorization area with an empty password.
const PASSWORD: [u8; 13] = [0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0];

const STARTUP: u32 = 0x144;
const GET_RANDOM: u32 = 0x17b;
const PCR_READ: u32 = 0x17e;
const PCR_EXTEND: u32 = 0x182;
const CREATE_PRIMARY: u32 = 0x131;
const NV_DEFINE_SPACE: u32 = 0x12a;
const NV_WRITE: u32 = 0x137;
const NV_READ: u32 = 0x14e;
/// `TPM_RH_OWNER`
const OWNER: [u8; 4] = [0x40, 0, 0, 1];
const NV_INDEX: [u8; 4] = [1, 0, 0, 19];
/// `TPMA_NV`: written and read with its own password, and by no attack locked.
const NV_ATTRIBUTES: [u8; 4] = [2, 4, 0, 4];
/// `TPM_RC_INITIALIZE`: started already, or not started yet.
const INITIALIZE: u32 = 0x100;
const FAILURE: u32 = 0x101;

/// Generous, because the test machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A machine with a TPM, and its swtpm process.
struct Machine {
    bench: Bench,
    swtpm: Child,
    folder: TempDir,
    key: &'static str,
    file: bool,
}

impl Machine {
    /// Returns None if swtpm is not installed.
    fn new(test: &str) -> Option<Self> {
        let machine = Self::off(test, "", false)?;
        machine.bench.board.run(Vec::new()).unwrap();
        Some(machine)
    }

    /// A machine before its power-on. swtpm encrypts its state with a `key`, if it is not empty,
    /// and keeps it in a `file` that it gets opened, as in the container, or in a folder.
    fn off(test: &str, key: &'static str, file: bool) -> Option<Self> {
        if let Err(error) = Command::new("swtpm").arg("--version").output() {
            skip::not_run(test, &format!("swtpm of the package swtpm does not start: {error}"));
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let swtpm = start(folder.path(), key, file);
        let bench = bench(folder.path());
        Some(Self { bench, swtpm, folder, key, file })
    }

    /// Ends the machine, and starts it, off, with another swtpm that has the same stored state.
    fn restart(&mut self) {
        self.bench = Bench::new(4096);
        assert!(self.ended(), "swtpm outlives its machine");
        self.swtpm = start(self.folder.path(), self.key, self.file);
        self.bench = bench(self.folder.path());
    }

    fn read(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.bench.read(Kind::Memory, BASE + offset))
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.bench.write(Kind::Memory, BASE + offset, data);
    }

    fn start(&self, tag: u16, code: u32, rest: &[u8]) {
        self.write(LOC_CTRL, &[1, 0, 0, 0]);
        self.write(CTRL_REQ, &[1, 0, 0, 0]);
        for (at, part) in (0..).step_by(4).zip(response(tag, code, rest).chunks(4)) {
            self.write(DATA_BUFFER + at, part);
        }
        self.write(CTRL_START, &[1, 0, 0, 0]);
    }

    /// Executes a command. Returns the response code and the rest of the response.
    fn execute(&self, tag: u16, code: u32, rest: &[u8]) -> (u32, Vec<u8>) {
        self.start(tag, code, rest);
        let end = Instant::now() + TIMEOUT;
        while self.read(CTRL_START) != 0 {
            assert!(Instant::now() < end, "no response to {code:#x}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let [size, code] = [2, 6]
            .map(|at| u32::from_be_bytes(self.bench.read(Kind::Memory, BASE + DATA_BUFFER + at)));
        let byte =
            |at: u32| self.bench.read::<1>(Kind::Memory, BASE + DATA_BUFFER + u64::from(at))[0];
        (code, (10..size).map(byte).collect())
    }

    /// `TPM2_Startup(TPM_SU_CLEAR)`
    fn startup(&self) -> u32 {
        self.execute(PLAIN, STARTUP, &[0, 0]).0
    }

    /// The SHA-256 value of PCR 7.
    fn pcr(&self) -> Vec<u8> {
        let (code, rest) = self.execute(PLAIN, PCR_READ, &[0, 0, 0, 1, 0, 0xb, 3, 0x80, 0, 0]);
        assert_eq!(code, 0);
        rest[rest.len() - 32..].to_vec()
    }

    /// Measures into PCR 7, and returns its new value.
    fn extend(&self) -> Vec<u8> {
        let extend = [&[0, 0, 0, 7], &PASSWORD[..], &[0, 0, 0, 1, 0, 0xb], &[0x5a; 32]].concat();
        assert_eq!(self.execute(SESSIONS, PCR_EXTEND, &extend).0, 0);
        self.pcr()
    }

    /// Defines an NV index of 8 bytes with an empty password.
    fn define(&self) {
        let public = [&NV_INDEX[..], &[0, 0xb], &NV_ATTRIBUTES, &[0, 0, 0, 8]].concat();
        let rest = [&OWNER[..], &PASSWORD, &[0, 0], &[0, 14], &public].concat();
        assert_eq!(self.execute(SESSIONS, NV_DEFINE_SPACE, &rest).0, 0);
    }

    fn store(&self, content: [u8; 8]) {
        let rest = [&NV_INDEX[..], &NV_INDEX, &PASSWORD, &[0, 8], &content, &[0, 0]].concat();
        assert_eq!(self.execute(SESSIONS, NV_WRITE, &rest).0, 0);
    }

    /// The content of the NV index, if it is defined.
    fn stored(&self) -> Option<Vec<u8>> {
        let rest = [&NV_INDEX[..], &NV_INDEX, &PASSWORD, &[0, 8, 0, 0]].concat();
        let (code, rest) = self.execute(SESSIONS, NV_READ, &rest);
        (code == 0).then(|| rest[6..14].to_vec())
    }

    fn ended(&mut self) -> bool {
        let end = Instant::now() + TIMEOUT;
        while Instant::now() < end {
            if self.swtpm.try_wait().unwrap().is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The process may have ended already.
        self.swtpm.kill().ok();
        self.swtpm.wait().ok();
    }
}

/// A machine with a TPM, off.
fn bench(folder: &Path) -> Bench {
    let device = json!({ "kind": "tpm", "path": folder.join("control") });
    let config: Config = serde_json::from_value(device).unwrap();
    let mut bench = Bench::new(4096);
    bench.board.add("tpm", |grants| config.build(grants)).unwrap();
    bench
}

/// Starts swtpm with its state and its socket in a folder.
fn start(state: &Path, key: &str, file: bool) -> Child {
    // swtpm gets a listening socket. Its own socket would exist before it accepts connections.
    let path = state.join("control");
    std::fs::remove_file(&path).ok();
    let listener = UnixListener::bind(path).unwrap();
    let mut swtpm = Command::new("swtpm");
    swtpm.args(["socket", "--tpm2", "--ctrl", "type=unixio,fd=1", "--tpmstate"]);
    let mut input = Stdio::null();
    if file {
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        input = options.open(state.join("state")).unwrap().into();
        swtpm.arg("backend-uri=file:///proc/self/fd/0");
    } else {
        swtpm.arg(format!("dir={}", state.display()));
    }
    if !key.is_empty() {
        let file = state.join("key");
        std::fs::write(&file, key).unwrap();
        swtpm.arg("--key").arg(format!("pwdfile={}", file.display()));
    }
    swtpm.stdin(input).stdout(OwnedFd::from(listener)).spawn().unwrap()
}

#[test]
fn provides_random_numbers_and_measurements_until_a_reset() {
    let Some(mut machine) = Machine::new("provides_random_numbers_and_measurements_until_a_reset")
    else {
        return;
    };
    assert_eq!(machine.startup(), 0);
    assert_eq!(machine.startup(), INITIALIZE, "it was started");
    let random = || machine.execute(PLAIN, GET_RANDOM, &[0, 32]);
    let (one, two) = (random(), random());
    assert_eq!((one.0, one.1.len(), two.0), (0, 34, 0));
    assert_ne!(one.1, two.1);
    assert_eq!(machine.pcr(), [0; 32]);
    let measured = machine.extend();
    assert_ne!(measured, [0; 32]);
    let saved = machine.bench.board.park();
    machine.bench.board.run(saved).unwrap();
    assert_eq!(machine.pcr(), measured, "a pause changes nothing");
    machine.bench.board.reset().unwrap();
    assert_eq!(machine.startup(), 0, "it was switched off and on");
    assert_eq!(machine.pcr(), [0; 32]);
    machine.bench = Bench::new(4096);
    assert!(machine.ended(), "swtpm outlives its machine");
}

/// Creating an RSA key takes a while.
#[test]
fn the_tpm_works_after_a_reset_during_a_long_command() {
    let test = "the_tpm_works_after_a_reset_during_a_long_command";
    let Some(machine) = Machine::new(test) else { return };
    let template = [
        &[0, 1, 0, 0xb, 0, 3, 0, 0x72, 0, 0][..],
        // AES-128 in CFB mode, no scheme, 2048 bits, default exponent, empty unique field.
        &[0, 6, 0, 0x80, 0, 0x43, 0, 0x10, 8, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    let size = u16::try_from(template.len()).unwrap().to_be_bytes();
    let parts: [&[u8]; 6] = [&OWNER, &PASSWORD, &[0, 4, 0, 0, 0, 0], &size, &template, &[0; 6]];
    for wait in [0, 5, 20] {
        assert_eq!(machine.startup(), 0);
        machine.start(SESSIONS, CREATE_PRIMARY, &parts.concat());
        std::thread::sleep(Duration::from_millis(wait));
        machine.bench.board.reset().unwrap();
        assert_eq!(machine.read(CTRL_STS), 2, "idle, and no failure");
    }
    assert_eq!(machine.startup(), 0);
    let (code, key) = machine.execute(SESSIONS, CREATE_PRIMARY, &parts.concat());
    assert_eq!(code, 0);
    assert!(key.len() > 256, "{key:?}");
}

#[test]
fn a_saved_tpm_goes_on_in_another_swtpm_with_all_its_state() {
    let test = "a_saved_tpm_goes_on_in_another_swtpm_with_all_its_state";
    for (key, file) in [("", false), ("", true), ("secret", false)] {
        let Some(machine) = Machine::off(test, key, file) else { return };
        machine.bench.board.run(Vec::new()).unwrap();
        assert_eq!(machine.startup(), 0);
        let measured = machine.extend();
        assert_eq!(machine.stored(), None);
        machine.define();
        machine.store(*b"snapshot");
        machine.bench.board.gather().unwrap();
        let saved = machine.bench.board.park();
        let text = serde_json::to_value(&saved[0].1).unwrap()["tpm"].to_string();
        let content = host::hex::encode(b"snapshot");
        assert_eq!(text.contains(&content), key.is_empty(), "an encrypted state stays encrypted");
        // This one goes on, and changes its state.
        machine.bench.board.run(saved.clone()).unwrap();
        assert_eq!(machine.pcr(), measured);
        assert_ne!(machine.extend(), measured);
        machine.store(*b"later on");
        let other = Machine::off(test, key, file).unwrap();
        other.bench.board.run(saved.clone()).unwrap();
        assert_eq!(other.startup(), INITIALIZE, "it was started");
        assert_eq!(other.pcr(), measured);
        assert_eq!(other.stored().unwrap(), b"snapshot");
        // The state that swtpm stores is that of the snapshot, too.
        other.bench.board.reset().unwrap();
        assert_eq!(other.startup(), 0);
        assert_eq!((other.pcr(), other.stored().unwrap()), (vec![0; 32], b"snapshot".to_vec()));
        // The same with an swtpm that has a newer state.
        let mut machine = machine;
        machine.restart();
        machine.bench.board.run(saved.clone()).unwrap();
        assert_eq!((machine.pcr(), machine.stored().unwrap()), (measured, b"snapshot".to_vec()));
        if !key.is_empty() {
            let other = Machine::off(test, "another", file).unwrap();
            let error = format!("{:#}", other.bench.board.run(saved).unwrap_err());
            assert!(error.contains("the keys of the swtpm that saved it"), "{error}");
        }
    }
}

#[test]
fn a_killed_tpm_fails_and_the_machine_keeps_running() {
    let Some(mut machine) = Machine::new("a_killed_tpm_fails_and_the_machine_keeps_running") else {
        return;
    };
    assert_eq!(machine.startup(), 0);
    machine.swtpm.kill().unwrap();
    machine.swtpm.wait().unwrap();
    for _ in 0..2 {
        assert_eq!(machine.execute(PLAIN, GET_RANDOM, &[0, 32]), (FAILURE, vec![]));
        assert_eq!(machine.read(CTRL_STS) & 1, 1, "a fatal error");
        machine.bench.board.reset().unwrap();
    }
}
