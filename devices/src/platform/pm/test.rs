//! Tests of `pm`.

use super::*;
use crate::device::Kind;
use crate::pci::lpc;
use crate::testutil::{Bench, lpc_bench};

const BASE: u64 = 0x600;

/// A machine whose firmware has set the address of the block.
fn bench() -> Bench {
    let bench = lpc_bench(false);
    bench.write(Kind::Config, lpc::AT.config() + 0x40, &0x601_u32.to_le_bytes());
    bench.write(Kind::Config, lpc::AT.config() + 0x44, &[0x80]);
    bench
}

fn word(bench: &Bench, at: u64) -> u16 {
    u16::from_le_bytes(bench.read(Kind::Port, BASE + at))
}

fn set_word(bench: &Bench, at: u64, value: u16) {
    bench.write(Kind::Port, BASE + at, &value.to_le_bytes());
}

fn ticks(bench: &Bench) -> u32 {
    u32::from_le_bytes(bench.read(Kind::Port, BASE + PM1_TMR))
}

/// Parks the machine, changes the saved state, and runs it again.
fn tamper(bench: &Bench, change: impl Fn(&mut serde_json::Value)) {
    let saved = bench.board.park();
    let mut json = serde_json::to_value(saved).unwrap();
    change(&mut json[0][1]["device"]["pm"]);
    bench.board.run(serde_json::from_value(json).unwrap()).unwrap();
}

#[test]
fn a_general_purpose_event_interrupts_until_its_bit_is_cleared() {
    let bench = bench();
    bench.write(Kind::Port, BASE + GPE0_EN, &[1 << 5]);
    set_word(&bench, PM1_CNT, SCI_EN);
    assert!(bench.board.shared.buttons.raise(5));
    assert_eq!(bench.read(Kind::Port, BASE + GPE0_STS), [1 << 5, 0, 0, 0]);
    assert!(bench.hypervisor.pins.is_high(9));
    bench.write(Kind::Port, BASE + GPE0_STS, &[1 << 5]);
    assert!(!bench.hypervisor.pins.is_high(9));
    assert!(bench.board.shared.buttons.raise(255), "beyond the register: nothing happens");
    assert_eq!(bench.read(Kind::Port, BASE + GPE0_STS), [0; 4]);
}

#[test]
fn powers_on_quiet_and_without_smm() {
    let bench = bench();
    assert_eq!([0, 2, 4, 6].map(|at| word(&bench, at)), [0; 4]);
    assert_eq!(bench.read(Kind::Port, BASE + GPE0_STS), [0; 4]);
    assert_eq!(bench.read(Kind::Port, BASE + SMI_EN), [0x20, 0, 0, 0]);
    assert_eq!(bench.read(Kind::Port, BASE + 0x68), [0, 8], "the watchdog is halted");
    assert!(!bench.hypervisor.pins.is_high(9));
}

#[test]
fn holes_and_odd_widths_have_no_effect() {
    let bench = bench();
    for at in [0x0c, 0x1e, 0x38, 0x5c] {
        bench.write(Kind::Port, BASE + at, &[0; 4]);
        assert_eq!(bench.read(Kind::Port, BASE + at), [0xff; 4], "{at:#x}");
    }
    assert_eq!(bench.read(Kind::Port, BASE), [0xff; 8]);
    assert_eq!(bench.read(Kind::Port, BASE), [0xff; 3]);
    bench.write(Kind::Port, BASE + 0x0a, &[0xff; 4]);
    assert_eq!(
        bench.read(Kind::Port, BASE + 0x0a),
        [0xff; 4],
        "half of the access hits no register"
    );
}

#[test]
fn the_timer_runs_at_its_rate_and_stops_while_parked() {
    let bench = bench();
    let (before, start) = (ticks(&bench), Instant::now());
    std::thread::sleep(Duration::from_millis(50));
    let (after, most) = (ticks(&bench), start.elapsed());
    let counted = u128::from(after - before) * 1_000_000 / u128::from(HERTZ);
    assert!((50_000..=most.as_micros() + 2_000).contains(&counted), "{counted} us");
    let saved = bench.board.park();
    std::thread::sleep(Duration::from_millis(1500));
    bench.board.run(saved).unwrap();
    assert!(ticks(&bench) - after < HERTZ, "it stood for a second and a half");
    bench.write(Kind::Port, BASE + PM1_TMR, &[0xff; 4]);
    assert!(ticks(&bench) < TIMER_MASK / 2, "it cannot be written");
    tamper(&bench, |pm| pm["timer"] = 0xff_ffff.into());
    std::thread::sleep(Duration::from_millis(1));
    assert!(ticks(&bench) < TIMER_MASK / 2, "24 bits wide");
    bench.board.reset().unwrap();
    assert_eq!(ticks(&bench), u32::MAX, "a reset takes the block away");
}

#[test]
fn an_overflow_is_set_when_read_and_cleared_by_a_write() {
    let bench = bench();
    tamper(&bench, |pm| pm["timer"] = 0x7f_ffff.into());
    std::thread::sleep(Duration::from_millis(1));
    assert_eq!(word(&bench, PM1_STS), TMROF);
    assert!(!bench.hypervisor.pins.is_high(9), "not enabled");
    set_word(&bench, PM1_EN, TMROF);
    assert!(!bench.hypervisor.pins.is_high(9), "SCI_EN is off");
    bench.write(Kind::Port, BASE + PM1_CNT, &[1]);
    assert!(bench.hypervisor.pins.is_high(9));
    set_word(&bench, PM1_STS, !TMROF);
    assert!(bench.hypervisor.pins.is_high(9), "other bits were cleared");
    bench.write(Kind::Port, BASE + PM1_STS, &[1]);
    assert_eq!((word(&bench, PM1_STS), bench.hypervisor.pins.is_high(9)), (0, false));
}

#[test]
fn an_enabled_overflow_raises_the_interrupt_without_an_access() {
    let bench = bench();
    // 10 ms before the highest bit changes.
    tamper(&bench, |pm| pm["timer"] = (0x80_0000 - HERTZ / 100).into());
    set_word(&bench, PM1_CNT, SCI_EN);
    set_word(&bench, PM1_EN, TMROF);
    let start = Instant::now();
    while !bench.hypervisor.pins.is_high(9) {
        assert!(start.elapsed() < Duration::from_secs(10), "it never came");
        std::thread::sleep(Duration::from_millis(1));
    }
    set_word(&bench, PM1_STS, TMROF);
    assert!(!bench.hypervisor.pins.is_high(9));
    tamper(&bench, |pm| pm["timer"] = (0x100_0000 - HERTZ / 100).into());
    let start = Instant::now();
    while !bench.hypervisor.pins.is_high(9) {
        assert!(start.elapsed() < Duration::from_secs(10), "not after parking");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_power_button_is_an_event_and_is_held_while_parked() {
    let bench = bench();
    let buttons = bench.board.shared.buttons.clone();
    assert!(buttons.press());
    assert_eq!((word(&bench, PM1_STS), bench.hypervisor.pins.is_high(9)), (PWRBTN, false));
    set_word(&bench, PM1_CNT, SCI_EN);
    set_word(&bench, PM1_EN, PWRBTN);
    assert!(bench.hypervisor.pins.is_high(9));
    set_word(&bench, PM1_STS, PWRBTN);
    assert_eq!((word(&bench, PM1_STS), bench.hypervisor.pins.is_high(9)), (0, false));
    let saved = bench.board.park();
    assert!(buttons.press() && !bench.hypervisor.pins.is_high(9));
    bench.board.run(saved).unwrap();
    assert!(bench.hypervisor.pins.is_high(9), "the press was kept");
    let pins = bench.hypervisor.pins.clone();
    drop(bench);
    assert!(!pins.is_high(9) && !buttons.press(), "the button is disconnected");
}

#[test]
fn only_sleep_type_0_switches_off() {
    let bench = bench();
    set_word(&bench, PM1_CNT, 5 << 10 | 1 << 13);
    set_word(&bench, PM1_CNT, 0);
    assert!(bench.events.lock().unwrap().is_empty());
    set_word(&bench, PM1_CNT, SCI_EN | 1 << 13);
    assert_eq!(*bench.events.lock().unwrap(), [Event::PowerOff]);
    assert_eq!(word(&bench, PM1_CNT), SCI_EN, "SLP_EN is not kept");
    bench.write(Kind::Port, BASE + PM1_CNT_END, &[0x20]);
    bench.write(Kind::Port, BASE + PM1_CNT, &0x2001_u32.to_le_bytes());
    assert_eq!(bench.events.lock().unwrap().len(), 3, "in any width");
}

#[test]
fn gbl_smi_en_is_locked_until_a_reset() {
    let bench = bench();
    let smi_en = BASE + SMI_EN;
    bench.write(Kind::Port, smi_en, &0x21_u32.to_le_bytes());
    let pmcon = lpc::AT.config() + 0xa0;
    bench.write(Kind::Config, pmcon, &0x10_u16.to_le_bytes());
    bench.write(Kind::Config, pmcon, &0_u16.to_le_bytes());
    assert_eq!(bench.read(Kind::Config, pmcon), [0x10, 0]);
    bench.write(Kind::Port, smi_en, &0x20_u32.to_le_bytes());
    assert_eq!(bench.read(Kind::Port, smi_en), [0x21, 0, 0, 0]);
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    bench.write(Kind::Port, smi_en, &[0]);
    assert_eq!(bench.read(Kind::Port, smi_en), [0x01], "locked still");
}

#[test]
fn registers_survive_park_and_run() {
    let bench = bench();
    set_word(&bench, PM1_EN, 0xffff);
    set_word(&bench, PM1_CNT, 0x1c03);
    bench.write(Kind::Port, BASE + GPE0_EN, &[1, 2, 3, 4]);
    bench.write(Kind::Port, BASE + GPE0_EN + 7, &[9]);
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert_eq!([2, 4].map(|at| word(&bench, at)), [0x4521, 0x1c03]);
    assert_eq!(bench.read(Kind::Port, BASE + GPE0_EN), [1, 2, 3, 4]);
    assert_eq!(bench.read(Kind::Port, BASE + GPE0_EN + 4), [0, 0, 0, 9]);
}
