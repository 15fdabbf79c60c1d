//! Tests of the display from the view of a driver and of a viewer.

use super::*;
use crate::device::Kind;
use crate::testutil::Bench;
use host::display::PAGE_BYTES;
use host::testutil::noise::Noise;

const AT: Address = Address::new(1, 0);
const BAR0: u64 = 0xc000_0000;
const BAR2: u64 = 0xd000_0000;

fn built(config: &Config) -> anyhow::Result<Bench> {
    let mut bench = Bench::new(1 << 20);
    let config = Config { slot: Some(AT), ..config.clone() };
    bench.board.add("display", |grants| config.build(grants))?;
    bench.board.run(Vec::new())?;
    set_config(&bench, 0x10, BAR0);
    set_config(&bench, 0x18, BAR2);
    set_config(&bench, 0x04, 2);
    Ok(bench)
}

fn bench() -> Bench {
    built(&Config { memory: Size(16 << 20), ..Config::default() }).unwrap()
}

fn set_config(bench: &Bench, at: u64, value: u64) {
    bench.write(Kind::Config, AT.config() + at, &value.to_le_bytes()[..4]);
}

fn set(bench: &Bench, index: usize, value: u16) {
    bench.write(Kind::Memory, BAR2 + DISPI + 2 * index as u64, &value.to_le_bytes());
}

fn get(bench: &Bench, index: usize) -> u16 {
    u16::from_le_bytes(bench.read(Kind::Memory, BAR2 + DISPI + 2 * index as u64))
}

/// Sets a mode as drivers do: disables the display, sets the size, and enables it.
fn set_mode(bench: &Bench, width: u16, height: u16) {
    for (index, value) in [(ENABLE, 0), (BPP, 32), (X_RES, width), (Y_RES, height)] {
        set(bench, index, value);
    }
    set(bench, ENABLE, 0x41);
}

fn screen(bench: &Bench) -> Arc<dyn Scanout> {
    bench.board.shared.screens.first().unwrap()
}

/// The addresses where memory is mapped for the guest.
fn mapped(bench: &Bench) -> Vec<u64> {
    bench.hypervisor.mapped.lock().unwrap().iter().map(|range| range.start).collect()
}

fn edid_of(bench: &Bench) -> Vec<u8> {
    (0..1024).map(|at| bench.read::<1>(Kind::Memory, BAR2 + at)[0]).collect()
}

#[test]
fn matches_the_ids_and_bars_that_drivers_expect() {
    let bench = bench();
    let config = |at| u32::from_le_bytes(bench.read(Kind::Config, AT.config() + at));
    assert_eq!((config(0), config(8), config(0x2c)), (0x1111_1234, 0x0380_0002, 0x1100_1af4));
    assert_eq!(config(0x10), 0xc000_0008, "prefetchable, 32 bits");
    set_config(&bench, 0x10, 0xffff_ffff);
    assert_eq!(config(0x10), 0xff00_0008, "16 MiB");
    assert_eq!(config(0x3c), 0, "no interrupt pin");
    assert_eq!(get(&bench, ID), 0xb0c5);
    assert_eq!(get(&bench, MEMORY_64K), 0x100);
    assert_eq!(bench.read::<8>(Kind::Memory, BAR2 + EXTENDED), [8, 0, 0, 0, 30, 30, 30, 30]);
}

#[test]
fn registers_keep_values_and_read_only_ones_stay() {
    let bench = bench();
    for index in 0..11_u16 {
        set(&bench, index.into(), 0x1100 + index);
    }
    for index in 1..10_u16 {
        assert_eq!(get(&bench, index.into()), 0x1100 + index);
    }
    assert_eq!((get(&bench, ID), get(&bench, MEMORY_64K)), (0xb0c5, 0x100));
    // Two registers at once, and one byte of a register.
    bench.write(Kind::Memory, BAR2 + DISPI + 2, &[1, 2, 3, 4]);
    assert_eq!((get(&bench, X_RES), get(&bench, Y_RES)), (0x0201, 0x0403));
    assert_eq!(bench.read::<1>(Kind::Memory, BAR2 + DISPI + 5), [4]);
    // Accesses of single bytes, at odd offsets, and between the register blocks are invalid.
    bench.write(Kind::Memory, BAR2 + DISPI + 2, &[9]);
    bench.write(Kind::Memory, BAR2 + DISPI + 3, &[9, 9]);
    assert_eq!((get(&bench, X_RES), get(&bench, Y_RES)), (0x0201, 0x0403));
    assert_eq!(bench.read::<2>(Kind::Memory, BAR2 + 0x700), [0xff, 0xff]);
    bench.write(Kind::Memory, BAR2 + EXTENDED + 4, &0xbebe_bebe_u32.to_le_bytes());
    assert_eq!(bench.read::<4>(Kind::Memory, BAR2 + EXTENDED + 4), [0x1e; 4]);
}

#[test]
fn a_mode_is_shown_once_complete_and_enabled() {
    let bench = bench();
    let mode = || screen(&bench).mode();
    assert_eq!(mode(), None, "power-on");
    set_mode(&bench, 1728, 1117);
    assert_eq!(mode(), Some(Mode { width: 1728, height: 1117, stride: 6912, start: 0 }));
    set(&bench, VIRTUAL_WIDTH, 2000);
    set(&bench, X_OFFSET, 10);
    set(&bench, Y_OFFSET, 3);
    let start = 10 * 4 + 3 * 8000;
    assert_eq!(mode(), Some(Mode { width: 1728, height: 1117, stride: 8000, start }));
    // A virtual width below the picture's width: the picture's width is used.
    set(&bench, VIRTUAL_WIDTH, 100);
    assert_eq!(mode().unwrap().stride, 6912);
    for (index, bad, good) in [(BPP, 24, 32), (BPP, 16, 32), (X_RES, 63, 1728), (Y_RES, 0, 1117)] {
        set(&bench, index, bad);
        assert_eq!(mode(), None, "register {index}: {bad}");
        set(&bench, index, good);
        assert!(mode().is_some());
    }
    // 1117 lines of 6912 bytes, and the further lines that fit into 16 MiB.
    set(&bench, X_OFFSET, 0);
    set(&bench, Y_OFFSET, 1310);
    assert_eq!(mode().unwrap().start, 1310 * 6912);
    set(&bench, Y_OFFSET, 1311);
    assert_eq!(mode(), None);
    set(&bench, Y_OFFSET, 0);
    bench.board.reset().unwrap();
    assert_eq!(mode(), None, "a reset");
}

#[test]
fn random_guest_writes_stay_inside_the_video_memory() {
    let bench = bench();
    let mut noise = Noise::new(5);
    let mut shown = 0;
    for _ in 0..200_000 {
        // Values with few set bits, so that some are valid modes.
        let value = u16::try_from(noise.below(1 << 16) & noise.below(1 << 16)).unwrap();
        let index = usize::try_from(noise.below(11)).unwrap();
        set(&bench, index, value);
        if noise.below(4) == 0 {
            set(&bench, BPP, 32);
            set(&bench, ENABLE, 1);
        }
        if let Some(mode) = screen(&bench).mode() {
            shown += 1;
            let last = mode.start
                + u64::from(mode.stride) * u64::from(mode.height - 1)
                + u64::from(mode.width) * 4;
            assert!(last <= 16 << 20, "{mode:?}");
            assert!(mode.stride >= mode.width * 4, "{mode:?}");
        }
    }
    assert!(shown > 1000, "{shown} modes");
    for index in 0..11 {
        set(&bench, index, u16::MAX);
    }
    assert_eq!(screen(&bench).mode(), None);
}

#[test]
fn drivers_can_blank_the_screen() {
    let bench = bench();
    set_mode(&bench, 1280, 800);
    let port = |port: u64| BAR2 + VGA + port - 0x3c0;
    let shows = || screen(&bench).mode().is_some();
    // Linux: selects color, resets the flip-flop, then writes the index.
    let blank = |value: u8| {
        bench.write(Kind::Memory, port(0x3c2), &[1]);
        bench.read::<1>(Kind::Memory, port(0x3da));
        bench.write(Kind::Memory, port(0x3c0), &[value]);
    };
    for _ in 0..3 {
        blank(0);
        assert!(!shows());
        blank(0x20);
        assert!(shows());
    }
    // The second write is data.
    bench.write(Kind::Memory, port(0x3c0), &[0]);
    assert!(shows());
    assert_eq!(bench.read::<1>(Kind::Memory, port(0x3cc)), [1]);
    let [one, two] = [(); 2].map(|()| bench.read::<1>(Kind::Memory, port(0x3da)));
    assert_ne!(one, two, "a retrace comes and goes");
    // Firmware fills a palette, which has no effect.
    bench.write(Kind::Memory, port(0x3c8), &[0]);
    assert_eq!(bench.read::<1>(Kind::Memory, port(0x3c8)), [0xff]);
}

#[test]
fn drawn_pages_are_reported_once_and_survive_a_bar_move() {
    let bench = bench();
    let screen = screen(&bench);
    let changed = || {
        let mut pages = Vec::new();
        screen.changed(&mut pages);
        assert_eq!(pages.len(), 64);
        (0..4096).filter(|page| pages[page / 64] >> (page % 64) & 1 == 1).collect::<Vec<_>>()
    };
    assert_eq!(
        (changed(), mapped(&bench)),
        (vec![], vec![]),
        "memory is mapped only after an access"
    );
    bench.write(Kind::Memory, BAR0 + 5 * PAGE_BYTES + 4094, &[1, 2, 3, 4]);
    assert_eq!(changed(), [5, 6]);
    assert_eq!(changed(), [0; 0]);
    assert_eq!(mapped(&bench), [BAR0]);
    set_config(&bench, 0x10, 0xc800_0000);
    assert_eq!(mapped(&bench), [0; 0], "no access there yet");
    assert_eq!(bench.read(Kind::Memory, 0xc800_0000 + 5 * PAGE_BYTES + 4094), [1, 2, 3, 4]);
    assert_eq!(mapped(&bench), [0xc800_0000]);
    set_config(&bench, 0x04, 0);
    assert_eq!(mapped(&bench), [0; 0], "memory decoding is off");
    bench.board.reset().unwrap();
    let mut seen = [0; 4];
    screen.read(5 * PAGE_BYTES + 4094, &mut seen);
    assert_eq!(seen, [1, 2, 3, 4], "a reset, as with RAM");
    screen.read(u64::MAX, &mut seen);
    screen.read((16 << 20) - 1, &mut seen);
}

#[test]
fn a_bar_over_other_memory_is_served_by_the_device() {
    let bench = bench();
    let taken = bench.hypervisor.clone();
    let other =
        crate::hypervisor::Hypervisor::backing(&taken, 4096, GuestAccess::ReadWrite).unwrap();
    other.map(Some(BAR0 + PAGE_BYTES)).unwrap();
    bench.write(Kind::Memory, BAR0, &[7]);
    assert_eq!(bench.read(Kind::Memory, BAR0), [7]);
    assert_eq!(mapped(&bench), [BAR0 + PAGE_BYTES], "only the other mapping");
    other.map(None).unwrap();
    // The mapping is tried again at the next address.
    set_config(&bench, 0x10, 0xc800_0000);
    assert_eq!(bench.read(Kind::Memory, 0xc800_0000), [7]);
    assert_eq!(mapped(&bench), [0xc800_0000]);
}

#[test]
fn a_viewer_changes_the_preferred_mode() {
    let mode = Resolution::try_from("1728x1117".to_owned()).unwrap();
    let bench = built(&Config { mode, ..Config::default() }).unwrap();
    let first = || {
        let edid = edid_of(&bench);
        assert_eq!(edid[..8], [0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0]);
        assert_eq!(edid[256..], [0; 768]);
        let number =
            |low: usize, high: usize| u32::from(edid[low]) | u32::from(edid[high] & 0xf0) << 4;
        (number(56, 58), number(59, 61))
    };
    assert_eq!(first(), (1728, 1117));
    screen(&bench).set_preferred_size(1920, 1080);
    assert_eq!(first(), (1920, 1080));
    bench.board.reset().unwrap();
    set_config(&bench, 0x18, BAR2);
    set_config(&bench, 0x04, 2);
    assert_eq!(first(), (1920, 1080), "it is the monitor that changed");
    screen(&bench).set_preferred_size(1, 1);
    assert_eq!(first(), (640, 480));
    screen(&bench).set_preferred_size(u32::MAX, u32::MAX);
    assert_eq!(first(), (640, 480), "more than there is memory for");
    bench.write(Kind::Memory, BAR2, &[1, 2, 3, 4]);
    assert_eq!(first(), (640, 480), "read-only");
}

#[test]
fn invalid_configurations_are_refused_with_advice() {
    let refused = |config: &Config| format!("{:#}", built(config).err().unwrap());
    for memory in [0, 2 << 20, 48 << 20, 512 << 20] {
        let error = refused(&Config { memory: Size(memory), ..Config::default() });
        assert!(error.contains("must be a power of two, from 4M to 256M"), "{error}");
    }
    let mode = Resolution::try_from("4096x2160".to_owned()).unwrap();
    let error = refused(&Config { mode, memory: Size(16 << 20), slot: None });
    assert!(error.contains("mode=4096x2160: this needs memory=64M"), "{error}");
    built(&Config { mode, ..Config::default() }).unwrap();
}
