//! tpm.sys, which is closed, at the Command Response Buffer. Its steps are from these sources:
//!
//! - cloud-hypervisor/cloud-hypervisor pull request 8312: it accesses the registers byte by byte,
//!   and the TPM must work after a reset of the machine.
//! - TCG PC Client Device Driver Design Principles for TPM 2.0, and PC Client Platform TPM Profile
//!   1.05, 6.5.3: the order of a command, its limits of time, and its cancellation.
//! - TCG Platform Reset Attack Mitigation 1.10, and QEMU's `docs/specs/tpm.rst`: the requests that
//!   `_DSM` leaves in memory.
//!
//! Conjecture: it relinquishes the locality and lets the TPM idle after each command.

use std::time::{Duration, Instant};

use devices::device::Kind;
use devices::registry::Config;
use devices::testutil::Bench;
use host::swtpm::NO_SESSIONS;
use host::testutil::swtpm::{CANCELED, CommandLog, SLOW, listen, response};
use serde_json::json;
use tempfile::TempDir;

use crate::eventually;

const BASE: u64 = 0xfed4_0000;
const LOC_STATE: u64 = 0x00;
const LOC_CTRL: u64 = 0x08;
const LOC_STS: u64 = 0x0c;
const INTERFACE_ID: u64 = 0x30;
const CTRL_REQ: u64 = 0x40;
const CTRL_STS: u64 = 0x44;
const CTRL_CANCEL: u64 = 0x48;
const CTRL_START: u64 = 0x4c;
const CTRL_CMD_SIZE: u64 = 0x58;
const CTRL_RSP_SIZE: u64 = 0x64;
/// The requests for firmware.
const PRESENCE: u64 = BASE + 0x5000;
const OVERWRITE: u64 = PRESENCE + 0x15a;

/// Limits of the profile (6.5.1.3): TIMEOUT_A for a locality, TIMEOUT_B for a cancellation,
/// TIMEOUT_C for readiness.
const LOCALITY: Duration = Duration::from_millis(750);
const CANCELLATION: Duration = Duration::from_secs(2);
const READINESS: Duration = Duration::from_millis(200);

struct Tpm {
    bench: Bench,
    log: CommandLog,
    buffer: u64,
    size: usize,
    _folder: TempDir,
}

impl Tpm {
    /// Starts the device: its interface, and the place of its buffer.
    fn started() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("swtpm");
        let log = listen(&path, NO_SESSIONS);
        let config = Config::of_kind("tpm", json!({ "path": path })).unwrap().unwrap();
        let mut bench = Bench::new(4096);
        bench.board.add("tpm", |grants| config.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        let mut tpm = Self { bench, log, buffer: 0, size: 0, _folder: folder };
        tpm.start();
        tpm
    }

    fn start(&mut self) {
        assert_eq!(self.byte(LOC_STATE) & 0x80, 0x80, "the state is valid");
        assert_eq!(self.byte(INTERFACE_ID) & 0xf, 1, "a Command Response Buffer");
        let [_, capabilities, selected, _] = self.bytes(INTERFACE_ID);
        assert_eq!((capabilities >> 6 & 1, selected >> 1 & 3), (1, 1), "it is also selected");
        let [size, low, high] = [0, 4, 8].map(|at| self.number(CTRL_CMD_SIZE + at));
        let response = [self.number(CTRL_RSP_SIZE + 4), self.number(CTRL_RSP_SIZE + 8)];
        assert_eq!([low, high], response, "one buffer serves both directions");
        assert_eq!(size, self.number(CTRL_RSP_SIZE));
        self.buffer = u64::from(low) | u64::from(high) << 32;
        self.size = usize::try_from(size).unwrap();
    }

    fn byte(&self, register: u64) -> u8 {
        let [byte] = self.bench.read(Kind::Memory, BASE + register);
        byte
    }

    fn bytes<const N: usize>(&self, register: u64) -> [u8; N] {
        std::array::from_fn(|at| self.byte(register + at as u64))
    }

    fn number(&self, register: u64) -> u32 {
        u32::from_le_bytes(self.bytes(register))
    }

    fn set(&self, register: u64, byte: u8) {
        self.bench.write(Kind::Memory, BASE + register, &[byte]);
    }

    fn poll(what: &str, limit: Duration, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < limit, "{what} takes longer than {limit:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Requests the locality, makes the TPM ready, and starts a command.
    fn begin(&self, command: &[u8]) {
        assert!(command.len() <= self.size);
        self.set(LOC_CTRL, 1);
        Self::poll("the locality", LOCALITY, || self.byte(LOC_STS) & 1 == 1);
        assert_eq!(self.byte(LOC_STATE) & 0x1e, 1 << 1, "locality 0 is active");
        self.set(CTRL_REQ, 1);
        Self::poll("readiness", READINESS, || self.byte(CTRL_REQ) & 1 == 0);
        assert_eq!(self.byte(CTRL_STS) & 3, 0, "neither idle nor broken");
        for (at, byte) in (self.buffer..).zip(command) {
            self.bench.write(Kind::Memory, at, &[*byte]);
        }
        self.set(CTRL_START, 1);
    }

    /// Reads the response, and lets the TPM idle.
    fn end(&self) -> Vec<u8> {
        assert_eq!(self.byte(CTRL_STS) & 1, 0, "no fatal error");
        let byte = |at: u64| self.bench.read::<1>(Kind::Memory, self.buffer + at)[0];
        let size = u32::from_be_bytes(std::array::from_fn(|at| byte(2 + at as u64)));
        assert!((10..=self.size).contains(&(size as usize)), "{size} bytes");
        let answer = (0..u64::from(size)).map(byte).collect();
        self.set(CTRL_REQ, 2);
        Self::poll("idleness", READINESS, || self.byte(CTRL_REQ) & 2 == 0);
        assert_eq!(self.byte(CTRL_STS) & 2, 2, "idle");
        self.set(LOC_CTRL, 2);
        assert_eq!((self.byte(LOC_STS) & 1, self.byte(LOC_STATE) & 2), (0, 0), "relinquished");
        answer
    }

    fn execute(&self, code: u32, rest: &[u8]) -> Vec<u8> {
        self.begin(&response(NO_SESSIONS, code, rest));
        eventually("the response", || (self.byte(CTRL_START) == 0).then_some(()));
        self.end()
    }
}

fn good(rest: &[u8]) -> Vec<u8> {
    response(NO_SESSIONS, 0, rest)
}

/// Startup, SelfTest and GetCapability, then random numbers. Conjecture: their order.
#[test]
fn starts_and_sends_its_first_commands() {
    let mut tpm = Tpm::started();
    for round in 0..2 {
        assert_eq!(tpm.execute(0x144, &[0, 0]), good(&[0, 0]), "Startup");
        assert_eq!(tpm.execute(0x143, &[1]), good(&[1]), "SelfTest");
        for property in [0x100_u32, 0x105, 0x11e, 0x200] {
            let rest = [6_u32, property, 8].map(u32::to_be_bytes).concat();
            assert_eq!(tpm.execute(0x17a, &rest), good(&rest), "GetCapability {property:#x}");
        }
        for length in [0, 1, 32, tpm.size - 10] {
            let rest: Vec<u8> = (0..=255).cycle().take(length).collect();
            assert_eq!(tpm.execute(0x17b, &rest), good(&rest), "{length} bytes in round {round}");
        }
        // cloud-hypervisor 8312: again after a reset of the machine.
        tpm.bench.board.reset().unwrap();
        tpm.start();
    }
}

#[test]
fn a_command_that_takes_too_long_is_cancelled_and_the_next_one_is_not() {
    let tpm = Tpm::started();
    for _ in 0..2 {
        tpm.begin(&response(NO_SESSIONS, SLOW, b"work"));
        tpm.log.wait(SLOW);
        assert_eq!(tpm.byte(CTRL_START), 1);
        // Other requests have no effect on a running command.
        tpm.set(CTRL_REQ, 2);
        assert_eq!(tpm.byte(CTRL_STS) & 2, 0);
        tpm.set(CTRL_CANCEL, 1);
        Tpm::poll("the cancellation", CANCELLATION, || tpm.byte(CTRL_START) == 0);
        tpm.set(CTRL_CANCEL, 0);
        assert_eq!(tpm.end(), response(NO_SESSIONS, CANCELED, &[]));
        assert_eq!(tpm.execute(0x17b, b"next"), good(b"next"));
    }
}

/// The fields of `_DSM`'s memory, in each width that an interpreter may choose, and what firmware
/// finds after the reset that Windows requests for them.
#[test]
fn requests_for_firmware_survive_the_reset() {
    let tpm = Tpm::started();
    let dword = |at: u64| u32::from_le_bytes(tpm.bench.read(Kind::Memory, PRESENCE + at));
    for (operation, by_bytes) in [(5_u32, false), (22, true), (0, false)] {
        // PPRQ, its parameter PPRM, and LPPR, which are not aligned.
        for (at, value) in [(0x109_u64, operation), (0x10d, 7), (0x111, 0)] {
            if by_bytes {
                for (at, byte) in (PRESENCE + at..).zip(value.to_le_bytes()) {
                    tpm.bench.write(Kind::Memory, at, &[byte]);
                }
            } else {
                tpm.bench.write(Kind::Memory, PRESENCE + at, &value.to_le_bytes());
            }
        }
        tpm.bench.board.reset().unwrap();
        assert_eq!((dword(0x109), dword(0x10d)), (operation, 7));
    }
    let cleared = || tpm.bench.hypervisor.released.lock().unwrap().len();
    assert_eq!(cleared(), 0);
    // The memory overwrite request is cleared by the reset that obeys it.
    tpm.bench.write(Kind::Memory, OVERWRITE, &[1]);
    tpm.bench.board.reset().unwrap();
    assert_eq!((cleared(), tpm.bench.read(Kind::Memory, OVERWRITE)), (1, [0]));
    tpm.bench.board.reset().unwrap();
    assert_eq!(cleared(), 1);
}
