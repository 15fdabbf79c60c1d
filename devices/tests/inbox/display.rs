//! BasicDisplay.sys, which is closed. Microsoft has published a driver with its structure
//! (microsoft/Windows-driver-samples, commit 26a27df8, `video/KMDOD`, whose files are titled "Basic
//! Display Driver"): it maps the frame buffer of firmware's mode write-combined (`MapFrameBuffer`),
//! copies rectangles line by line (`CopyBits32_32`), fills the screen with zeros (`BlackOutScreen`)
//! and draws the screen of a crash (`SystemDisplayWrite`). It accesses no register. Conjecture: the
//! width of the stores, which is that of `RtlCopyMemory` on the processor.
//!
//! Firmware's part is in the order of edk2's QemuVideoDxe.

use std::sync::Arc;

use devices::device::Kind;
use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use host::display::{Mode, PAGE_BYTES, Scanout};
use host::testutil::noise::Noise;
use serde_json::json;

use crate::pci::Function;

const AT: Address = Address::new(1, 0);
const BAR0: u64 = 0xc000_0000;
const BAR2: u64 = 0xd000_0000;
const DISPI: u64 = BAR2 + 0x500;
const BLACK: u32 = 0;

struct Machine {
    bench: Bench,
    pci: Function,
    screen: Arc<dyn Scanout>,
}

/// The mode that firmware reports (GOP): it never changes afterwards.
#[derive(Clone, Copy)]
struct Gop {
    width: u32,
    height: u32,
    /// In bytes.
    stride: u32,
}

/// A rectangle: left, top, width, height.
type Rectangle = (u32, u32, u32, u32);

impl Machine {
    fn new() -> Self {
        let config = json!({ "slot": "01.0", "memory": "16M" });
        let config = Config::of_kind("display", config).unwrap().unwrap();
        let mut bench = Bench::new(1 << 20);
        bench.board.add("display", |grants| config.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        let pci = Function::find(&bench, AT);
        pci.place(&bench, 0, u32::try_from(BAR0).unwrap());
        pci.place(&bench, 2, u32::try_from(BAR2).unwrap());
        pci.start(&bench);
        let screen = bench.board.shared.screens.first().unwrap();
        Self { bench, pci, screen }
    }

    /// QemuVideoDxe: the mode, with the screen switched on.
    fn set_mode(&self, width: u16, height: u16) -> Gop {
        let registers = [
            (4, 0),
            (5, 0),
            (8, 0),
            (9, 0),
            (3, 32),
            (1, width),
            (6, width),
            (2, height),
            (7, height),
            (4, 0x41),
        ];
        for (index, value) in registers {
            self.bench.write(Kind::Memory, DISPI + 2 * index, &u16::to_le_bytes(value));
        }
        self.bench.write(Kind::Memory, BAR2 + 0x400, &[0x20]);
        Gop { width: width.into(), height: height.into(), stride: u32::from(width) * 4 }
    }

    /// Stores bytes in pieces of 32, then 16, 8, 4 bytes.
    fn store(&self, at: u64, mut data: &[u8]) {
        let mut at = BAR0 + at;
        for width in [32, 16, 8, 4] {
            while data.len() >= width {
                let (piece, rest) = data.split_at(width);
                self.bench.write(Kind::Memory, at, piece);
                (at, data) = (at + width as u64, rest);
            }
        }
        assert!(data.is_empty(), "pixels have four bytes");
    }

    /// `CopyBits32_32`: the lines of a rectangle. `pixels` has no gaps.
    fn copy(&self, gop: Gop, (left, top, width, _): Rectangle, pixels: &[u8]) {
        for (line, row) in (u64::from(top)..).zip(pixels.chunks(4 * width as usize)) {
            self.store(line * u64::from(gop.stride) + 4 * u64::from(left), row);
        }
    }

    /// `BlackOutScreen`: the whole frame.
    fn black_out(&self, gop: Gop) {
        self.store(0, &vec![0; gop.stride as usize * gop.height as usize]);
    }

    fn pixel(&self, gop: Gop, x: u32, y: u32) -> u32 {
        let mut pixel = [0; 4];
        self.screen.read(u64::from(y) * u64::from(gop.stride) + 4 * u64::from(x), &mut pixel);
        u32::from_le_bytes(pixel)
    }

    fn changed(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        self.screen.changed(&mut pages);
        (0..4096)
            .filter(|page| pages[page / 64] >> (page % 64) & 1 == 1)
            .map(|it| it as u64)
            .collect()
    }
}

/// Pages of a rectangle.
fn pages(gop: Gop, (left, top, width, height): Rectangle) -> Vec<u64> {
    let mut pages: Vec<u64> = (top..top + height)
        .flat_map(|line| {
            let start = u64::from(line) * u64::from(gop.stride) + 4 * u64::from(left);
            start / PAGE_BYTES..=(start + 4 * u64::from(width) - 1) / PAGE_BYTES
        })
        .collect();
    pages.dedup();
    pages
}

#[test]
fn draws_into_the_frame_buffer_and_touches_no_register() {
    let machine = Machine::new();
    for (width, height) in [(1280, 800), (1366, 768), (1728, 1117)] {
        let gop = machine.set_mode(width, height);
        let mode = Mode { width: gop.width, height: gop.height, stride: gop.stride, start: 0 };
        let registers = || machine.bench.read::<22>(Kind::Memory, DISPI);
        let before = registers();
        machine.black_out(gop);
        assert_eq!(machine.pixel(gop, 17, 5), BLACK);
        machine.changed();
        let mut noise = Noise::new(u64::from(width));
        let mut below = move |limit: u32| u32::try_from(noise.below(limit.into())).unwrap();
        for _ in 0..40 {
            let (left, top) = (below(gop.width - 1), below(gop.height - 1));
            let size = (1 + below(gop.width - left - 1), 1 + below((gop.height - top - 1).min(90)));
            let rectangle = (left, top, size.0, size.1);
            let color = below(1 << 24) | 1;
            let pixels = color.to_le_bytes().repeat((size.0 * size.1) as usize);
            machine.copy(gop, rectangle, &pixels);
            assert_eq!(machine.changed(), pages(gop, rectangle), "{rectangle:?}");
            assert_eq!(machine.pixel(gop, left + size.0 - 1, top + size.1 - 1), color);
        }
        assert_eq!(machine.screen.mode(), Some(mode), "no panning, no other size");
        assert_eq!(registers(), before);
        // The screen of a crash covers everything.
        let pixels = 0x78d7_u32.to_le_bytes().repeat((gop.width * gop.height) as usize);
        machine.copy(gop, (0, 0, gop.width, gop.height), &pixels);
        assert_eq!(machine.pixel(gop, gop.width - 1, gop.height - 1), 0x78d7);
    }
}

/// The picture outlives the enumeration by pci.sys, and a power state without PMCSR.
#[test]
fn the_picture_survives_enumeration_and_power_states() {
    let mut machine = Machine::new();
    let gop = machine.set_mode(1280, 800);
    machine.copy(gop, (0, 0, 1280, 1), &[0x5a; 4 * 1280]);
    let mapped = |machine: &Machine| !machine.bench.hypervisor.mapped.lock().unwrap().is_empty();
    assert!(mapped(&machine), "drawing needs no exits");
    Function::find(&machine.bench, AT);
    machine.pci.power_down(&machine.bench);
    assert!(!mapped(&machine));
    machine.pci.power_up(&machine.bench);
    assert_eq!(machine.pixel(gop, 1279, 0), 0x5a5a_5a5a);
    assert!(machine.screen.mode().is_some());
    machine.copy(gop, (0, 799, 1280, 1), &[0xa5; 4 * 1280]);
    assert!(mapped(&machine), "and again");
    assert_eq!((machine.pixel(gop, 0, 0), machine.pixel(gop, 0, 799)), (0x5a5a_5a5a, 0xa5a5_a5a5));
}

/// Without VGA, its ports and its memory are not there: bootvid and BasicDisplay must not find a
/// half of it, and writes to it must not change the picture.
#[test]
fn vga_is_absent_and_not_a_half_of_it() {
    let machine = Machine::new();
    let gop = machine.set_mode(1280, 800);
    machine.copy(gop, (0, 0, 1280, 1), &[0x5a; 4 * 1280]);
    let shown = machine.screen.mode();
    for port in (0x3b0..0x3e0).chain([0x1ce, 0x1cf, 0x1d0]) {
        machine.bench.write(Kind::Port, port, &[0]);
        machine.bench.write(Kind::Port, port, &[0x20]);
        assert_eq!(machine.bench.read(Kind::Port, port), [0xff], "port {port:#x}");
    }
    for address in (0xa_0000..0xc_0000).step_by(0x1000) {
        machine.bench.write(Kind::Memory, address, &[0x12; 4]);
        assert_eq!(machine.bench.read(Kind::Memory, address), [0xff; 4], "{address:#x}");
    }
    assert_eq!(machine.screen.mode(), shown);
    assert_eq!(machine.pixel(gop, 0, 0), 0x5a5a_5a5a);
}
