//! Tests of `i8042`.

use super::*;
use crate::grants::Claim;
use crate::presses::LIMIT;
use crate::testutil::Bench;
use host::input::{Key, Motion};

fn bench() -> Bench {
    let mut bench = Bench::new(4096);
    bench.board.add("i8042", |grants| Config::default().build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn status(bench: &Bench) -> u8 {
    bench.read::<1>(Kind::Port, 0x64)[0]
}

fn command(bench: &Bench, bytes: &[u8]) {
    bench.write(Kind::Port, 0x64, &bytes[..1]);
    for byte in &bytes[1..] {
        bench.write(Kind::Port, 0x60, &[*byte]);
    }
}

/// Reads all available bytes, each with the mouse bit of its status.
fn drain(bench: &Bench) -> Vec<(u8, u8)> {
    let mut bytes = Vec::new();
    while status(bench) & OUTPUT_FULL != 0 {
        bytes.push((status(bench) & MOUSE_OUTPUT_FULL, bench.read::<1>(Kind::Port, 0x60)[0]));
    }
    bytes
}

fn keyboard(bytes: &[u8]) -> Vec<(u8, u8)> {
    bytes.iter().map(|byte| (0, *byte)).collect()
}

fn mouse(bytes: &[u8]) -> Vec<(u8, u8)> {
    bytes.iter().map(|byte| (MOUSE_OUTPUT_FULL, *byte)).collect()
}

fn send(bench: &Bench, bytes: &[u8]) -> Vec<(u8, u8)> {
    bytes.iter().for_each(|byte| bench.write(Kind::Port, 0x60, &[*byte]));
    drain(bench)
}

fn send_mouse(bench: &Bench, bytes: &[u8]) -> Vec<(u8, u8)> {
    bytes.iter().for_each(|byte| command(bench, &[WRITE_MOUSE, *byte]));
    drain(bench)
}

fn press(bench: &Bench, code: u16) {
    let key = Key::new(code).unwrap();
    bench.board.shared.input.key(key, true);
    bench.board.shared.input.key(key, false);
}

#[test]
fn the_firmware_finds_its_keyboard() {
    let bench = bench();
    assert_eq!(status(&bench), 0x18);
    command(&bench, &[DISABLE_KEYBOARD]);
    command(&bench, &[DISABLE_MOUSE]);
    command(&bench, &[SELF_TEST]);
    assert_eq!(status(&bench), 0x1d);
    assert_eq!(drain(&bench), keyboard(&[0x55]));
    command(&bench, &[WRITE_CONTROL, 0x67]);
    assert_eq!(send(&bench, &[0xf4]), keyboard(&[0xfa]));
    command(&bench, &[TEST_KEYBOARD]);
    assert_eq!(drain(&bench), keyboard(&[0]));
    assert_eq!(send(&bench, &[0xff]), keyboard(&[0xfa, 0xaa]));
    for byte in [0xf0, 0x02, 0xf4, 0xed, 0x00] {
        assert_eq!(send(&bench, &[byte]), keyboard(&[0xfa]), "{byte:#x}");
    }
    press(&bench, 0x1e);
    assert_eq!(drain(&bench), keyboard(&[0x1e, 0x9e]));
}

#[test]
fn linux_finds_both_devices() {
    let bench = bench();
    command(&bench, &[READ_CONTROL]);
    assert_eq!(drain(&bench), keyboard(&[0x03]));
    command(&bench, &[WRITE_CONTROL, 0x74 & !TRANSLATE]);
    command(&bench, &[WRITE_MOUSE_OUTPUT, 0x5a]);
    assert_eq!(drain(&bench), mouse(&[0x5a]), "the loop that proves a mouse port");
    command(&bench, &[TEST_MOUSE]);
    assert_eq!(drain(&bench), keyboard(&[0]));
    command(&bench, &[WRITE_KEYBOARD_OUTPUT, 0xa5]);
    assert_eq!(drain(&bench), keyboard(&[0xa5]));
    assert_eq!(send(&bench, &[0xf2]), keyboard(&[0xfa, 0xab, 0x83]));
    assert_eq!(send_mouse(&bench, &[0xf2]), mouse(&[0xfa, 0x00]));
    assert_eq!(send_mouse(&bench, &[0xff]), mouse(&[0xfa, 0xaa, 0x00]));
    send_mouse(&bench, &[0xf3, 200, 0xf3, 100, 0xf3, 80]);
    assert_eq!(send_mouse(&bench, &[0xf2]), mouse(&[0xfa, 0x03]));
    assert_eq!(send(&bench, &[0xf0, 0]), keyboard(&[0xfa, 0xfa, 2]));
    press(&bench, 0xe048);
    assert_eq!(drain(&bench), keyboard(&[0xe0, 0x75, 0xe0, 0xf0, 0x75]));
    command(&bench, &[WRITE_CONTROL, 0x43]);
    assert_eq!(send(&bench, &[0xf2]), keyboard(&[0xfa, 0xab, 0x41]), "as every controller");
}

#[test]
fn each_byte_raises_an_edge_if_its_interrupt_is_enabled() {
    let bench = bench();
    let pins = &bench.hypervisor.pins;
    press(&bench, 0xe01d);
    assert!(pins.is_high(1));
    assert_eq!((drain(&bench).len(), pins.edges(1)), (5, 5));
    assert!(!pins.is_high(1));
    send_mouse(&bench, &[0xf4]);
    let before = pins.edges(12);
    bench.board.shared.input.motion(Motion { dx: 3, dy: -4, wheel: 0, buttons: 1 });
    assert_eq!(drain(&bench), mouse(&[0x09, 3, 4]));
    assert_eq!(pins.edges(12) - before, 3);
    command(&bench, &[WRITE_CONTROL, 0]);
    press(&bench, 0x1e);
    assert!(status(&bench) & OUTPUT_FULL != 0 && !pins.is_high(1));
    command(&bench, &[WRITE_CONTROL, KEYBOARD_INTERRUPT]);
    assert!(pins.is_high(1), "enabling the interrupt raises it for a pending byte");
}

#[test]
fn a_disabled_device_keeps_its_queue() {
    let bench = bench();
    command(&bench, &[DISABLE_KEYBOARD]);
    press(&bench, 0x1e);
    assert!(drain(&bench).is_empty());
    command(&bench, &[READ_CONTROL]);
    assert_eq!(drain(&bench), keyboard(&[0x13]));
    command(&bench, &[ENABLE_KEYBOARD]);
    assert_eq!(drain(&bench), keyboard(&[0x1c, 0xf0, 0x1c]));
}

#[test]
fn three_commands_reset_the_machine_and_no_others() {
    let bench = bench();
    for harmless in [&[0xff][..], &[0xf1], &[WRITE_OUTPUT_PORT, 0xdf], &[0x00], &[0xd5]] {
        command(&bench, harmless);
    }
    assert!(bench.events.lock().unwrap().is_empty());
    for reset in [&[0xfe][..], &[0xf0], &[WRITE_OUTPUT_PORT, 0xde]] {
        command(&bench, reset);
    }
    assert_eq!(*bench.events.lock().unwrap(), [Event::Reset; 3]);
    command(&bench, &[READ_OUTPUT_PORT]);
    assert_eq!(drain(&bench), keyboard(&[0xcf]));
}

#[test]
fn park_keeps_the_state_and_reset_restores_power_on_state() {
    let bench = bench();
    let fresh = bench.board.park();
    bench.board.run(fresh.clone()).unwrap();
    command(&bench, &[WRITE_CONTROL, 0x47]);
    send_mouse(&bench, &[0xf4, 0xe8]);
    bench.board.shared.input.key(Key::new(0x2a).unwrap(), true);
    bench.board.shared.input.motion(Motion { dx: 300, ..Motion::default() });
    bench.write(Kind::Port, 0x64, &[WRITE_MOUSE]);
    let saved = bench.board.park();
    assert!(!bench.board.shared.input.key(Key::PRINT, true), "a parked keyboard takes nothing");
    bench.board.run(saved.clone()).unwrap();
    assert_eq!(bench.board.park(), saved);
    bench.board.run(saved).unwrap();
    bench.write(Kind::Port, 0x60, &[2]);
    assert_eq!(drain(&bench)[..2], [(0, 0x2a), (MOUSE_OUTPUT_FULL, 0xfa)], "continues midway");
    bench.board.reset().unwrap();
    assert!(!bench.hypervisor.pins.is_high(1) && !bench.hypervisor.pins.is_high(12));
    assert_eq!(bench.board.park(), fresh);
}

#[test]
fn only_byte_accesses_work_and_acpi_lists_both_devices() {
    let bench = bench();
    bench.write(Kind::Port, 0x64, &[0xfe, 0xfe]);
    assert!(bench.events.lock().unwrap().is_empty());
    assert_eq!(bench.read(Kind::Port, 0x64), [0xff, 0xff]);
    let (_, claims) = bench.board.claims().next().unwrap();
    let print = |claims: &[Claim]| claims.iter().map(Claim::to_string).collect::<Vec<_>>();
    let nodes: Vec<_> = Claim::nodes(claims).map(|(hid, crs)| (hid, print(crs))).collect();
    let ports = ["ports 0x60-0x60", "ports 0x64-0x64", "gsi 1"].map(String::from).to_vec();
    let expected = [("PNP0303", ports), ("PNP0F13", vec!["gsi 12".to_owned()])];
    assert_eq!(nodes, expected);
}

#[test]
fn random_writes_keep_queues_bounded() {
    let bench = bench();
    let mut seed = 1_u64;
    for _ in 0..200_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let [byte, port, host, low, high, ..] = seed.rotate_left(24).to_le_bytes();
        bench.write(Kind::Port, if port & 3 == 0 { 0x64 } else { 0x60 }, &[byte]);
        if let (0, Some(key)) = (host & 3, Key::new(u16::from_le_bytes([low, high]))) {
            bench.board.shared.input.key(key, port & 4 == 0);
        }
        let motion = Motion { dx: byte.into(), dy: -300, wheel: 1, buttons: low };
        bench.board.shared.input.motion(motion);
    }
    let state = serde_json::to_string(&bench.board.park()).unwrap();
    assert!(state.len() < 20 * LIMIT, "{} bytes", state.len());
}
