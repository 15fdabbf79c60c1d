//! Tests of `tpm`.

use tempfile::TempDir;

use super::*;
use crate::testutil::Bench;
use host::disk::Disks;
use host::testutil::in_time;
use host::testutil::swtpm::{
    BOASTFUL, CANCELED, CURT, CommandLog, DEAF, DRIP, GONE, HALF, LATE, LATE_DELAY, LONG, RECALL,
    SHORT, SLOW, UNWILLING, listen, listen_with, response,
};

/// A running machine with only a TPM, and the requests that its swtpm received.
fn bench() -> (Bench, CommandLog, TempDir) {
    let (bench, asked, folder) = off(0xffff);
    bench.board.run(Vec::new()).unwrap();
    (bench, asked, folder)
}

/// The same machine before it runs, with an swtpm of these capabilities.
fn off(capabilities: u16) -> (Bench, CommandLog, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("swtpm");
    let asked = listen_with(&path, NO_SESSIONS, capabilities);
    let mut bench = Bench::new(4096);
    let config = Config { path, absent: false };
    bench.board.add("tpm", |grants| config.build(grants)).unwrap();
    (bench, asked, folder)
}

fn read(bench: &Bench, offset: u64) -> u32 {
    u32::from_le_bytes(bench.read(Kind::Memory, BASE + offset))
}

fn write(bench: &Bench, offset: u64, data: &[u8]) {
    bench.write(Kind::Memory, BASE + offset, data);
}

/// Sends a command as drivers do: requests the locality, makes the TPM ready, and writes the
/// command byte by byte.
fn start(bench: &Bench, command: &[u8]) {
    write(bench, LOC_CTRL, &[LOC_CTRL_REQUEST]);
    write(bench, CTRL_REQ, &[CTRL_REQ_COMMAND_READY, 0, 0, 0]);
    for (at, byte) in (DATA_BUFFER..).zip(command) {
        write(bench, at, &[*byte]);
    }
    write(bench, CTRL_START, &[1, 0, 0, 0]);
}

fn finish(bench: &Bench) -> Vec<u8> {
    let end = Instant::now() + Duration::from_secs(60);
    while read(bench, CTRL_START) != 0 {
        assert!(Instant::now() < end, "no response");
        sleep(Duration::from_millis(1));
    }
    let header = (0..2).flat_map(|it| bench.read::<8>(Kind::Memory, BASE + DATA_BUFFER + 8 * it));
    let size = u64::try_from(swtpm::size(&header.collect::<Vec<_>>()).unwrap()).unwrap();
    let byte = |at| bench.read::<1>(Kind::Memory, BASE + DATA_BUFFER + at)[0];
    (0..size).map(byte).collect()
}

fn execute(bench: &Bench, code: u32, rest: &[u8]) -> Vec<u8> {
    start(bench, &response(NO_SESSIONS, code, rest));
    finish(bench)
}

#[test]
fn registers_read_the_same_in_any_width() {
    let (bench, ..) = bench();
    for (register, value) in [
        (LOC_STATE, 0x81),
        (LOC_STS, 0),
        (0x14, 0),
        (INTERFACE_ID, 0x0002_5811),
        (VENDOR_ID, 0x1014),
        (CTRL_REQ, 0),
        (CTRL_STS, 2),
        (CTRL_CANCEL, 0),
        (CTRL_START, 0),
        (CTRL_CMD_SIZE, 0xf80),
        (CTRL_CMD_LADDR, 0xfed4_0080),
        (0x60, 0),
        (CTRL_RSP_SIZE, 0xf80),
        (CTRL_RSP_ADDR, 0xfed4_0080),
        (0x6c, 0),
    ] {
        assert_eq!(read(&bench, register), value, "{register:#x}");
        let bytes = [0, 1, 2, 3].map(|it| bench.read::<1>(Kind::Memory, BASE + register + it)[0]);
        assert_eq!(u32::from_le_bytes(bytes), value, "{register:#x} by bytes");
        let words = [0, 2].map(|it| bench.read::<2>(Kind::Memory, BASE + register + it));
        assert_eq!(words.concat(), value.to_le_bytes(), "{register:#x} by words");
    }
    let id: [u8; 8] = bench.read(Kind::Memory, BASE + INTERFACE_ID);
    assert_eq!(u64::from_le_bytes(id), 0x1014_0002_5811);
    assert_eq!(read(&bench, LENGTH), u32::MAX, "locality 1 is not there");
}

#[test]
fn localities_are_requested_and_released_and_the_tpm_idles() {
    let (bench, ..) = bench();
    // Writes to bytes other than the lowest have no effect.
    write(&bench, LOC_CTRL + 1, &[1]);
    assert_eq!(read(&bench, LOC_STATE), 0x81);
    for (register, value, state, granted, status) in [
        (LOC_CTRL, 1_u32, 0x83, 1, 2),
        (CTRL_REQ, 1, 0x83, 1, 0),
        (CTRL_REQ, 2, 0x83, 1, 2),
        (LOC_CTRL, 2, 0x81, 0, 2),
    ] {
        write(&bench, register, &value.to_le_bytes());
        let now = [LOC_STATE, LOC_STS, CTRL_STS].map(|it| read(&bench, it));
        assert_eq!(now, [state, granted, status], "{value} to {register:#x}");
    }
    for register in [LOC_STATE, LOC_STS, INTERFACE_ID, CTRL_STS, CTRL_CMD_SIZE, CTRL_RSP_ADDR] {
        let before = read(&bench, register);
        write(&bench, register, &[0xff; 4]);
        write(&bench, register, &[0; 4]);
        assert_eq!(read(&bench, register), before, "{register:#x}");
    }
}

#[test]
fn a_command_of_any_valid_length_gets_its_response() {
    let (bench, asked, _folder) = bench();
    for length in [0, 1, 500, MAX_MESSAGE - swtpm::HEADER_LENGTH] {
        let rest: Vec<_> = (0..=255).cycle().take(length).collect();
        assert_eq!(execute(&bench, 0x17b, &rest), response(NO_SESSIONS, 0, &rest), "{length}");
    }
    assert_eq!(execute(&bench, DRIP, b"slowly"), response(NO_SESSIONS, 0, b"slowly"));
    assert_eq!(asked.commands(), [16, 1, 14, 17, 2, 5], "the requests at power-on");
    assert_eq!(read(&bench, CTRL_STS), 0);
}

#[test]
fn a_command_of_wrong_length_does_not_reach_the_tpm() {
    let (bench, ..) = bench();
    for size in [0, 9, 0xf81, u32::MAX] {
        let mut command = response(NO_SESSIONS, 0x17b, b"abc");
        command[2..6].copy_from_slice(&size.to_be_bytes());
        start(&bench, &command);
        assert_eq!(finish(&bench), error(TPM_RC_COMMAND_SIZE), "{size}");
    }
    assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"), "the next is fine");
}

#[test]
fn no_command_starts_without_a_locality() {
    let (bench, ..) = bench();
    write(&bench, CTRL_START, &[1]);
    assert_eq!(read(&bench, CTRL_START), 0);
}

#[test]
fn a_slow_command_locks_the_buffer_until_cancelled() {
    let (bench, asked, _folder) = bench();
    start(&bench, &response(NO_SESSIONS, SLOW, b"before"));
    assert_eq!(read(&bench, CTRL_START), 1);
    write(&bench, DATA_BUFFER, &[0xff; 8]);
    write(&bench, CTRL_START, &[1]);
    write(&bench, CTRL_REQ, &[CTRL_REQ_GO_IDLE]);
    assert_eq!([CTRL_START, CTRL_STS].map(|it| read(&bench, it)), [1, 0]);
    assert_eq!(bench.read(Kind::Memory, BASE + DATA_BUFFER), NO_SESSIONS.to_be_bytes());
    write(&bench, CTRL_CANCEL, &[1, 0, 0, 0]);
    assert_eq!(finish(&bench), response(NO_SESSIONS, CANCELED, &[]));
    write(&bench, CTRL_CANCEL, &[1, 0, 0, 0]);
    assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"), "nothing to cancel");
    assert_eq!(asked.commands().iter().filter(|it| **it == 9).count(), 1);
}

#[test]
fn after_a_swtpm_failure_the_tpm_fails_permanently() {
    for bad in [GONE, LONG, SHORT, HALF] {
        let (bench, ..) = bench();
        assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"));
        assert_eq!(execute(&bench, bad, b"abc"), error(TPM_RC_FAILURE), "{bad:#x}");
        assert_eq!(read(&bench, CTRL_STS), CTRL_STS_FATAL);
        bench.board.reset().unwrap();
        assert_eq!(execute(&bench, 1, b"x"), error(TPM_RC_FAILURE), "{bad:#x}, and later");
        assert_eq!(read(&bench, CTRL_STS), CTRL_STS_FATAL);
    }
}

#[test]
fn a_reset_cancels_the_running_command_and_restarts_the_tpm() {
    let (bench, asked, _folder) = bench();
    start(&bench, &response(NO_SESSIONS, SLOW, &[]));
    asked.wait(SLOW);
    bench.board.reset().unwrap();
    assert_eq!([LOC_STATE, CTRL_STS, CTRL_START].map(|it| read(&bench, it)), [0x81, 2, 0]);
    assert_eq!(read(&bench, DATA_BUFFER), 0);
    assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"));
    let asked = asked.commands();
    assert_eq!(asked, [16, 1, 14, 17, 2, 5, SLOW, 9, 14, 17, 2, 5]);
}

#[test]
fn a_reset_does_not_block_and_the_tpm_works_after_it() {
    for times in 1..3 {
        let (bench, asked, _folder) = in_time(LATE_DELAY, format_args!("{times} resets"), || {
            let (bench, asked, folder) = bench();
            start(&bench, &response(NO_SESSIONS, LATE, &[]));
            asked.wait(LATE);
            let began = Instant::now();
            for _ in 0..times {
                bench.board.reset().unwrap();
            }
            (began.elapsed(), (bench, asked, folder))
        });
        assert_eq!([CTRL_STS, CTRL_START].map(|it| read(&bench, it)), [2, 0]);
        assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"));
        assert_eq!(asked.commands(), [16, 1, 14, 17, 2, 5, LATE, 9, 14, 17, 2, 5]);
        // The cancel request does not affect the next command.
        start(&bench, &response(NO_SESSIONS, SLOW, &[]));
        asked.wait(SLOW);
        sleep(Duration::from_millis(20));
        assert_eq!(read(&bench, CTRL_START), 1);
        write(&bench, CTRL_CANCEL, &[1]);
        assert_eq!(finish(&bench), response(NO_SESSIONS, CANCELED, &[]));
    }
}

#[test]
fn a_command_running_at_park_is_not_repeated() {
    let (bench, asked, _folder) = bench();
    start(&bench, &response(NO_SESSIONS, LATE, &[]));
    asked.wait(LATE);
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert_eq!(finish(&bench), response(NO_SESSIONS, CANCELED, &[]));
    assert_eq!(asked.commands().iter().filter(|it| **it == LATE).count(), 1);
}

#[test]
fn shutdown_does_not_wait_for_a_hung_tpm() {
    let (bench, asked, _folder) = bench();
    start(&bench, &response(NO_SESSIONS, DEAF, &[]));
    asked.wait(DEAF);
    let began = Instant::now();
    bench.board.park();
    drop(bench);
    // The TPM would take minutes.
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[test]
fn a_command_not_started_before_park_runs_later() {
    for _ in 0..20 {
        let (bench, asked, _folder) = bench();
        start(&bench, &response(NO_SESSIONS, 1, b"x"));
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        assert_eq!(finish(&bench), response(NO_SESSIONS, 0, b"x"));
        assert!(asked.commands().starts_with(&[16, 1, 14, 17, 2, 5]));
    }
}

#[test]
fn a_parked_tpm_continues_without_power_on() {
    let (bench, asked, _folder) = bench();
    assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"));
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert_eq!(finish(&bench), response(NO_SESSIONS, 0, b"x"), "still there");
    assert_eq!(read(&bench, LOC_STS), 1);
    assert_eq!(execute(&bench, 1, b"y"), response(NO_SESSIONS, 0, b"y"));
    assert_eq!(asked.commands().iter().filter(|it| **it == 2).count(), 1);
}

#[test]
fn a_saved_tpm_goes_on_with_another_swtpm() {
    let (bench, asked, _folder) = bench();
    assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"));
    start(&bench, &response(NO_SESSIONS, 2, b"last"));
    // The command that was sent has ended before the state is taken.
    bench.board.gather().unwrap();
    let saved = bench.board.park();
    assert_eq!(asked.commands()[6..], [12, 12], "no request but those for the two parts");
    let (other, asked, _folder) = off(0xffff);
    other.board.park();
    other.board.run(saved.clone()).unwrap();
    assert_eq!(finish(&other), response(NO_SESSIONS, 0, b"last"), "the buffer");
    assert_eq!(read(&other, LOC_STS), 1);
    assert_eq!(execute(&other, RECALL, &[]), response(NO_SESSIONS, 0, b"last"));
    assert_eq!(asked.commands(), [16, 1, 14, 17, 13, 13, 2, 5]);
    // A reset forgets the volatile state, as ever.
    other.board.reset().unwrap();
    assert_eq!(execute(&other, RECALL, &[]), response(NO_SESSIONS, 0, b""));
    // The saved machine goes on, too, without another power-on.
    bench.board.run(saved).unwrap();
    assert_eq!(execute(&bench, RECALL, &[]), response(NO_SESSIONS, 0, b"last"));
}

#[test]
fn a_long_command_is_cancelled_before_the_state_is_saved() {
    let (bench, asked, _folder) = bench();
    execute(&bench, 1, b"x");
    start(&bench, &response(NO_SESSIONS, LATE, &[]));
    asked.wait(LATE);
    bench.board.gather().unwrap();
    assert_eq!(asked.commands()[6..], [LATE, 9, 12, 12]);
    let (other, ..) = off(0xffff);
    other.board.run(bench.board.park()).unwrap();
    assert_eq!(finish(&other), response(NO_SESSIONS, CANCELED, &[]));
    assert_eq!(execute(&other, RECALL, &[]), response(NO_SESSIONS, 0, b"x"));
}

#[test]
fn a_command_that_never_ends_prevents_a_snapshot() {
    let (bench, asked, _folder) = bench();
    start(&bench, &response(NO_SESSIONS, DEAF, &[]));
    asked.wait(DEAF);
    let error = format!("{:#}", bench.board.gather().unwrap_err());
    assert!(error.contains("tpm: the TPM is executing a long command"), "{error}");
}

#[test]
fn a_swtpm_that_keeps_its_state_is_not_saved_and_goes_on() {
    for (code, words) in [(UNWILLING, "0x800"), (CURT, "0xa")] {
        let (bench, ..) = bench();
        execute(&bench, 1, b"x");
        execute(&bench, code, &[]);
        let error = format!("{:#}", bench.board.gather().unwrap_err());
        assert!(error.contains(words) && error.contains("shut the guest down"), "{error}");
        assert_eq!(execute(&bench, RECALL, &[]), response(NO_SESSIONS, 0, b"x"), "{code:#x}");
        execute(&bench, 1, b"y");
        bench.board.gather().unwrap();
    }
    let (bench, ..) = off(0xfcff);
    bench.board.run(Vec::new()).unwrap();
    let error = format!("{:#}", bench.board.gather().unwrap_err());
    assert!(error.contains("tpm: this swtpm neither") && error.contains("0xfcff"), "{error}");
    assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"));
}

#[test]
fn a_state_that_is_too_large_is_not_read() {
    let (bench, ..) = bench();
    execute(&bench, BOASTFUL, &[]);
    let refusal = format!("{:#}", bench.board.gather().unwrap_err());
    assert!(refusal.contains("262145 of 262145 bytes"), "{refusal}");
    // Nobody knows where the next answer begins.
    assert_eq!(execute(&bench, 1, b"x"), error(TPM_RC_FAILURE));
    let refusal = bench.board.gather().unwrap_err();
    assert!(format!("{refusal:#}").contains("the TPM has failed"), "{refusal:#}");
}

#[test]
fn a_state_that_is_missing_or_that_swtpm_refuses_ends_the_start() {
    let (bench, ..) = bench();
    execute(&bench, 1, b"x");
    let without = bench.board.park();
    bench.board.run(without.clone()).unwrap();
    bench.board.gather().unwrap();
    let (name, saved) = bench.board.park().remove(0);
    let mut damaged = serde_json::to_value(&saved).unwrap();
    damaged["tpm"]["permanent"]["flags"] = 0.into();
    let damaged = vec![(name, serde_json::from_value(damaged).unwrap())];
    for (saved, words) in [(without, "no state of its TPM"), (damaged, "error 0x3")] {
        let (other, asked, _folder) = off(0xffff);
        let error = format!("{:#}", other.board.run(saved).unwrap_err());
        assert!(error.contains(words), "{error}");
        assert!(!asked.commands().contains(&2), "it was switched on: {:?}", asked.commands());
    }
}

#[test]
fn shutdown_stops_the_tpm() {
    let (bench, asked, _folder) = bench();
    assert_eq!(execute(&bench, 1, b"x"), response(NO_SESSIONS, 0, b"x"));
    drop(bench);
    asked.wait(3);
}

#[test]
fn refuses_a_socket_that_is_not_a_tpm_2_swtpm() {
    let folder = tempfile::tempdir().unwrap();
    let build = |path: PathBuf| {
        let config = Config { path, absent: false };
        let built = Bench::new(4096).board.add("tpm", |grants| config.build(grants));
        format!("{:#}", built.unwrap_err())
    };
    let path = folder.path().join("nobody");
    assert!(build(path).contains("start swtpm first"));
    let path = folder.path().join("old");
    let asked = listen(&path, 0xc4);
    let said = build(path);
    assert!(said.contains("it is a TPM 1.2: start swtpm with `--tpm2`"), "{said}");
    assert_eq!(asked.commands(), [16, 1], "it was not switched on, and so not off");
    let said = build(folder.path().join("x".repeat(200)));
    assert!(said.contains("too long for a socket"), "{said}");
}

#[test]
fn an_inspected_machine_needs_no_swtpm() {
    let mut bench = Bench::new(4096);
    let config = Config { path: "/nowhere".into(), absent: true };
    bench.board.add("tpm", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    assert_eq!(execute(&bench, 1, b"x"), error(TPM_RC_FAILURE));
    assert_eq!(read(&bench, CTRL_STS), CTRL_STS_FATAL);
}

#[test]
fn requests_for_firmware_outlive_a_reset_and_memory_is_cleared_on_request() {
    let (bench, ..) = bench();
    let at = |offset: u64| PRESENCE + offset;
    bench.write(Kind::Memory, at(0x109), &5_u32.to_le_bytes());
    bench.write(Kind::Memory, at(presence::LENGTH - 1), &[7]);
    bench.write(Kind::Memory, at(0x15a), &[0x10]);
    bench.board.reset().unwrap();
    assert_eq!(bench.read(Kind::Memory, at(0x109)), 5_u32.to_le_bytes());
    assert_eq!(bench.read(Kind::Memory, at(presence::LENGTH - 1)), [7]);
    assert_eq!(*bench.hypervisor.released.lock().unwrap(), []);
    bench.write(Kind::Memory, at(0x15a), &[0x11]);
    bench.board.reset().unwrap();
    bench.board.reset().unwrap();
    // Once, and the other bits stay.
    let released = bench.hypervisor.released.lock().unwrap().clone();
    assert_eq!((released.len(), released[0].clone()), (1, 0..u64::MAX));
    assert_eq!(bench.read(Kind::Memory, at(0x15a)), [0x10]);
}

#[test]
fn a_command_waits_until_memory_is_checked_and_the_guest_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("swtpm");
    let asked = listen_with(&path, NO_SESSIONS, 0xffff);
    let mut bench = Bench::new(4096);
    let gate = Arc::new(Gate::new(true, false));
    gate.started(|| ());
    bench.board.shared.disks = Arc::new(Disks::behind(gate.clone()));
    let config = Config { path, absent: false };
    bench.board.add("tpm", |grants| config.build(grants)).unwrap();
    let before = asked.commands();
    bench.board.run(Vec::new()).unwrap();
    start(&bench, &response(NO_SESSIONS, 0x17b, b"x"));
    sleep(20 * CHECK_INTERVAL);
    assert!(gate.is_urgent());
    assert_eq!((read(&bench, CTRL_START), asked.commands()), (1, before));
    // It is sent again where the machine goes on.
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    sleep(20 * CHECK_INTERVAL);
    assert_eq!(read(&bench, CTRL_START), 1);
    gate.checked();
    assert_eq!(finish(&bench), response(NO_SESSIONS, 0, b"x"));
}
