//! Tests of `edu`.

use std::time::{Duration, Instant};

use super::*;
use crate::device::Kind;
use crate::hypervisor::Doorbell;
use crate::testutil::Bench;

const AT: Address = Address::new(4, 0);
const BAR0: u64 = 0xc000_0000;
const BAR1: u64 = 0xd000_0000;
/// INTA of slot 4.
const GSI: u32 = 20;

/// A device set up for a driver: BARs have addresses, memory decoding and bus mastering are on.
fn bench() -> Bench {
    let mut bench = Bench::new(1 << 20);
    bench.board.add("edu", |grants| Config { slot: Some(AT) }.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    set_config(&bench, 0x10, 0xc000_0000);
    set_config(&bench, 0x14, 0xd000_0000);
    set_config(&bench, 0x04, 6);
    bench
}

fn set_config(bench: &Bench, at: u64, value: u32) {
    bench.write(Kind::Config, AT.config() + at, &value.to_le_bytes());
}

fn get(bench: &Bench, at: u64) -> u32 {
    u32::from_le_bytes(bench.read(Kind::Memory, BAR0 + at))
}

fn set(bench: &Bench, at: u64, value: u32) {
    bench.write(Kind::Memory, BAR0 + at, &value.to_le_bytes());
}

fn set_wide(bench: &Bench, at: u64, value: u64) {
    bench.write(Kind::Memory, BAR0 + at, &value.to_le_bytes());
}

fn wait(event: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "timeout: {event}");
        std::thread::yield_now();
    }
}

fn program(bench: &Bench, source: u64, destination: u64, count: u64) {
    set_wide(bench, DMA_SOURCE, source);
    set_wide(bench, DMA_DESTINATION, destination);
    set_wide(bench, DMA_COUNT, count);
}

/// Runs a DMA as in the specification's example.
fn dma(bench: &Bench, command: u64, source: u64, destination: u64, count: u64) {
    program(bench, source, destination, count);
    set_wide(bench, DMA_COMMAND, command | START);
    wait("the end of the DMA", || get(bench, DMA_COMMAND) & 1 == 0);
}

fn memory(bench: &Bench, at: u64) -> [u8; 4] {
    let mut data = [0; 4];
    bench.memory.read(at, &mut data).unwrap();
    data
}

#[test]
fn reports_its_identity_and_liveness() {
    let bench = bench();
    assert_eq!(get(&bench, IDENTIFICATION), 0x0100_00ed);
    set(&bench, LIVENESS, 0x1234_5678);
    assert_eq!(get(&bench, LIVENESS), !0x1234_5678);
    assert_eq!(bench.read(Kind::Config, AT.config()), [0x34, 0x12, 0xe8, 0x11]);
    assert_eq!(bench.read(Kind::Config, AT.config() + 8), [0x10, 0, 0xff, 0]);
}

#[test]
fn wrong_widths_and_offsets_have_no_effect() {
    let bench = bench();
    set_wide(&bench, LIVENESS, 0);
    bench.write(Kind::Memory, BAR0 + LIVENESS, &[0; 2]);
    assert_eq!(get(&bench, LIVENESS), 0, "as at power-on");
    assert_eq!(bench.read(Kind::Memory, BAR0), [0xff; 8]);
    assert_eq!(bench.read(Kind::Memory, BAR0 + DMA_SOURCE), [0xff; 2]);
    for at in [0x0c, 0x02, 0x60, 0x84, 0x9c, 0xa0, BUFFER, BAR_SIZE - 4] {
        assert_eq!(get(&bench, at), u32::MAX, "{at:#x}");
    }
    set_wide(&bench, DMA_SOURCE, 0x1_0000_0002);
    assert_eq!(bench.read(Kind::Memory, BAR0 + DMA_SOURCE), 0x1_0000_0002_u64.to_le_bytes());
    assert_eq!(get(&bench, DMA_SOURCE), 2);
}

#[test]
fn computes_factorials_and_interrupts_until_acknowledged() {
    let bench = bench();
    for (n, result) in [(0, 1), (5, 120), (13, 1_932_053_504), (33, 1 << 31), (u32::MAX, 0)] {
        set(&bench, FACTORIAL, n);
        wait("the factorial", || get(&bench, STATUS) & COMPUTING == 0);
        assert_eq!(get(&bench, FACTORIAL), result, "{n}!");
    }
    assert!(!bench.hypervisor.pins.is_high(GSI));
    set(&bench, STATUS, u32::MAX);
    assert_eq!(get(&bench, STATUS), FACTORIAL_INTERRUPT);
    set(&bench, FACTORIAL, 3);
    wait("the interrupt", || bench.hypervisor.pins.is_high(GSI));
    set(&bench, INTERRUPT_RAISE, 0x30);
    assert_eq!(get(&bench, INTERRUPT_STATUS), 0x31);
    set(&bench, INTERRUPT_ACKNOWLEDGE, 0x21);
    assert!(bench.hypervisor.pins.is_high(GSI), "one cause is left");
    set(&bench, INTERRUPT_ACKNOWLEDGE, 0x10);
    assert!(!bench.hypervisor.pins.is_high(GSI));
}

#[test]
fn msix_replaces_the_wire() {
    let bench = bench();
    bench.write(Kind::Memory, BAR1, &0xfee0_0000_u64.to_le_bytes());
    bench.write(Kind::Memory, BAR1 + 8, &0x41_u64.to_le_bytes());
    set_config(&bench, 0x40, 0x8000_0000);
    dma(&bench, DMA_INTERRUPT, 0, BUFFER, 16);
    wait("the message", || bench.hypervisor.sent.lock().unwrap().len() == 1);
    assert_eq!(bench.hypervisor.sent.lock().unwrap()[0].data, 0x41);
    assert_eq!(get(&bench, INTERRUPT_STATUS), DMA_DONE);
    assert_eq!(bench.hypervisor.pins.edges(GSI), 0);
}

#[test]
fn copies_memory_into_its_buffer_and_back() {
    let bench = bench();
    bench.memory.write(0x1000, b"abcd").unwrap();
    dma(&bench, 0, 0x1000, BUFFER + 4092, 4);
    dma(&bench, TO_MEMORY, BUFFER + 4092, 0x2001, 4);
    assert_eq!(&memory(&bench, 0x2001), b"abcd");
}

#[test]
fn an_out_of_bounds_transfer_copies_nothing_and_completes() {
    let bench = bench();
    bench.memory.write(0, &[7; 8192]).unwrap();
    dma(&bench, 0, 0, BUFFER, 4096);
    for (source, count) in [
        (BUFFER - 1, 4),
        (BUFFER + 4093, 4),
        (BUFFER, 4097),
        (BUFFER + 4097, 0),
        (u64::MAX, 1),
        (BUFFER, u64::MAX),
        (BUFFER + 1, u64::MAX),
    ] {
        bench.memory.write(0x3000, b"kept").unwrap();
        dma(&bench, TO_MEMORY | DMA_INTERRUPT, source, 0x3000, count);
        assert_eq!(&memory(&bench, 0x3000), b"kept", "{source:#x} {count:#x}");
        wait("the interrupt", || get(&bench, INTERRUPT_STATUS) == DMA_DONE);
        set(&bench, INTERRUPT_ACKNOWLEDGE, DMA_DONE);
    }
    dma(&bench, TO_MEMORY, BUFFER, u64::MAX - 2, 4);
    dma(&bench, 0, 1 << 40, BUFFER, 4);
    set_config(&bench, 0x04, 2);
    dma(&bench, TO_MEMORY, BUFFER, 0x3000, 4);
    assert_eq!(&memory(&bench, 0x3000), b"kept", "the driver allowed no bus mastering");
}

#[test]
fn the_doorbell_follows_the_bar_and_starts_the_programmed_dma() {
    let bench = bench();
    let bell = |address| Doorbell { kind: Kind::Memory, address, length: 4, value: Some(1) };
    assert_eq!(bench.hypervisor.bells(), [bell(BAR0 + DMA_DOORBELL)]);
    bench.memory.write(0x1000, b"ring").unwrap();
    dma(&bench, 0, 0x1000, BUFFER, 4);
    program(&bench, BUFFER, 0x2000, 4);
    set(&bench, DMA_COMMAND, 6);
    assert_eq!(get(&bench, DMA_COMMAND), 6, "kept, and not started");
    set(&bench, DMA_DOORBELL, 2);
    set(&bench, DMA_DOORBELL, 1);
    wait("the transfer", || &memory(&bench, 0x2000) == b"ring");
    wait("the interrupt", || bench.hypervisor.pins.is_high(GSI));
    set_config(&bench, 0x10, 0xc010_0000);
    assert_eq!(bench.hypervisor.bells(), [bell(BAR0 + (1 << 20) + DMA_DOORBELL)]);
}

#[test]
fn pending_work_continues_after_a_park_and_ends_with_a_reset() {
    let bench = bench();
    bench.memory.write(0x1000, b"data").unwrap();
    dma(&bench, 0, 0x1000, BUFFER, 4);
    program(&bench, BUFFER, 0x2000, 4);
    set(&bench, LIVENESS, 5);
    let freeze = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = serde_json::to_value(bench.board.park()).unwrap();
        change(&mut json[0][1]["device"]);
        bench.board.run(serde_json::from_value(json).unwrap()).unwrap();
    };
    freeze(&|it| {
        assert_eq!(it["rung"], false);
        it["state"]["dma"]["command"] = (START | TO_MEMORY).into();
        it["state"]["status"] = (COMPUTING | FACTORIAL_INTERRUPT).into();
        it["state"]["factorial"] = 4.into();
    });
    wait("the factorial", || bench.hypervisor.pins.is_high(GSI));
    assert_eq!((get(&bench, FACTORIAL), get(&bench, LIVENESS)), (24, !5));
    wait("the transfer", || get(&bench, DMA_COMMAND) & 1 == 0);
    assert_eq!(&memory(&bench, 0x2000), b"data");
    bench.memory.write(0x2000, b"none").unwrap();
    freeze(&|it| it["rung"] = true.into());
    wait("the transfer of the doorbell", || &memory(&bench, 0x2000) == b"data");
    assert!(bench.hypervisor.pins.is_high(GSI), "not acknowledged yet");
    bench.board.reset().unwrap();
    assert!(!bench.hypervisor.pins.is_high(GSI));
    set_config(&bench, 0x10, 0xc000_0000);
    set_config(&bench, 0x04, 6);
    assert_eq!([LIVENESS, FACTORIAL, STATUS, DMA_COUNT].map(|at| get(&bench, at)), [0; 4]);
    dma(&bench, TO_MEMORY, BUFFER, 0x2000, 4);
    assert_eq!(memory(&bench, 0x2000), [0; 4], "the buffer is empty again");
}

#[test]
fn refuses_a_buffer_of_another_size() {
    let bench = bench();
    let mut json = serde_json::to_value(bench.board.park()).unwrap();
    json[0][1]["device"]["buffer"] = "00".repeat(4095).into();
    let error = bench.board.run(serde_json::from_value(json).unwrap()).unwrap_err();
    assert!(format!("{error:#}").contains("8190 hexadecimal digits"), "{error:#}");
}
