//! Tests of the display from the view of a driver and of a viewer.

use super::resource::{MAX_EXTENTS, MAX_RESOURCES};
use super::*;
use crate::device::Kind;
use crate::testutil::Bench;
use crate::testutil::driver::Driver;
use host::display::{Mode, PAGE_BYTES, Scanout};

const AT: Address = Address::new(1, 0);
const BAR0: u64 = 0xc100_0000;
const BAR2: u64 = 0xc200_0000;
const DISPI: u64 = BAR2 + 0x500;
/// Memory of the tests' resources, beyond the driver's own.
const PIXELS: u64 = 8 << 20;
const PAGE: u32 = 4096;
const RAM: usize = 16 << 20;

const OK: u32 = 0x1100;
const UNSPECIFIED: u32 = 0x1200;
const OUT_OF_MEMORY: u32 = 0x1201;
const INVALID_SCANOUT: u32 = 0x1202;
const INVALID_RESOURCE: u32 = 0x1203;
const INVALID_PARAMETER: u32 = 0x1205;

fn bench() -> Bench {
    let mut bench = Bench::new(RAM);
    let config = Config { memory: Size(4 << 20), slot: Some(AT), ..Config::default() };
    bench.board.add("gpu", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn screen(bench: &Bench) -> Arc<dyn Scanout> {
    bench.board.shared.screens.first().unwrap()
}

/// Sets a mode of the linear frame buffer, as firmware does.
fn set_linear(bench: &Bench, width: u16, height: u16) {
    for (register, at) in [(0x10, BAR0), (0x18, BAR2)] {
        let at = u32::try_from(at).unwrap().to_le_bytes();
        bench.write(Kind::Config, AT.config() + register, &at);
    }
    bench.write(Kind::Config, AT.config() + 4, &[6, 0]);
    for (index, value) in [(4, 0), (3, 32), (1, width), (2, height), (4, 0x41)] {
        bench.write(Kind::Memory, DISPI + 2 * index, &u16::to_le_bytes(value));
    }
}

/// A driver whose queues run.
fn start(bench: &Bench) -> Driver<'_> {
    let mut driver = Driver::find(bench, AT);
    assert!(driver.negotiate(EDID));
    driver.enable(CONTROL, 256);
    driver.enable(CURSOR, 16);
    driver.start();
    driver
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|it| it.to_le_bytes()).collect()
}

/// Sends a command with its words after the header. Returns the answer.
fn send(driver: &mut Driver<'_>, command: u32, body: &[u32], room: u32) -> Vec<u8> {
    let mut bytes = words(&[command, 0, 0, 0, 0, 0]);
    bytes.extend(words(body));
    // The memory is used again: many commands would not fit otherwise.
    let (request, answer) = (4 << 20, 7 << 20);
    driver.bench.memory.write(request, &bytes).unwrap();
    let length = u32::try_from(bytes.len()).unwrap();
    let chain = [(request, length, false), (answer, room, true)];
    driver.offer(CONTROL, &chain[..if room > 0 { 2 } else { 1 }]);
    driver.kick(CONTROL);
    let used = driver.wait(CONTROL);
    driver.bytes(answer, used.length as usize)
}

/// The type of the answer.
fn answer(driver: &mut Driver<'_>, command: u32, body: &[u32]) -> u32 {
    let bytes = send(driver, command, body, 24);
    u32::from_le_bytes(bytes[..4].try_into().unwrap())
}

fn done(driver: &mut Driver<'_>, command: u32, body: &[u32]) {
    assert_eq!(answer(driver, command, body), OK, "{command:#x} {body:?}");
}

/// Creates a resource of this format, in adjacent memory at `PIXELS`.
fn create(driver: &mut Driver<'_>, id: u32, format: u32, (width, height): (u32, u32)) {
    done(driver, 0x101, &[id, format, width, height]);
    let pixels = u32::try_from(PIXELS).unwrap();
    done(driver, 0x106, &[id, 1, pixels, 0, width * height * 4, 0]);
}

fn show(driver: &mut Driver<'_>, id: u32, (width, height): (u32, u32)) {
    done(driver, 0x103, &[0, 0, width, height, 0, id]);
}

fn pixel(screen: &dyn Scanout, x: u32, y: u32) -> [u8; 4] {
    let mode = screen.mode().unwrap();
    let mut data = [0; 4];
    let at = mode.start + u64::from(y) * u64::from(mode.stride) + u64::from(x) * 4;
    screen.read(at, &mut data);
    data
}

fn changed(screen: &dyn Scanout) -> Vec<u64> {
    let mut pages = Vec::new();
    screen.changed(&mut pages);
    (0..64 * pages.len() as u64)
        .filter(|it| pages[usize::try_from(it / 64).unwrap()] >> (it % 64) & 1 == 1)
        .collect()
}

#[test]
fn matches_the_ids_and_bars_that_drivers_expect() {
    let bench = bench();
    let config = |at| u32::from_le_bytes(bench.read(Kind::Config, AT.config() + at));
    assert_eq!((config(0), config(8), config(0x2c)), (0x1050_1af4, 0x0300_0001, 0x1100_1af4));
    bench.write(Kind::Config, AT.config() + 0x10, &[0xff; 4]);
    assert_eq!(config(0x10), 0xffc0_0008, "4 MiB, prefetchable, 32 bits");
    set_linear(&bench, 800, 600);
    assert_eq!(bench.read(Kind::Memory, DISPI), [0xc5, 0xb0]);
    let driver = start(&bench);
    assert_eq!(driver.device::<16>(0), [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    for (mode, memory, words) in [
        ("1280x800", 256 << 20, "from 4M to 128M"),
        ("1920x1080", 4 << 20, "needs memory=8M"),
        ("4096x480", 32 << 20, "write a smaller one"),
    ] {
        let config = Config { mode: mode.parse().unwrap(), memory: Size(memory), slot: None };
        let built = Bench::new(4096).board.add("gpu", |grants| config.build(grants));
        let error = format!("{:#}", built.unwrap_err());
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn the_frame_buffer_is_shown_until_a_driver_draws_and_after_its_reset() {
    let bench = bench();
    let screen = screen(&bench);
    assert_eq!(screen.mode(), None, "power-on");
    set_linear(&bench, 800, 600);
    let linear = Some(Mode { width: 800, height: 600, stride: 3200, start: 0 });
    assert_eq!(screen.mode(), linear);
    bench.write(Kind::Memory, BAR0 + 4, &[1, 2, 3, 4]);
    assert_eq!(pixel(&*screen, 1, 0), [1, 2, 3, 4]);
    changed(&*screen);
    let mut driver = start(&bench);
    create(&mut driver, 1, 2, (320, 200));
    assert_eq!(screen.mode(), linear, "nothing is shown yet");
    done(&mut driver, 0x103, &[0, 0, 0, 0, 0, 0]);
    assert_eq!(screen.mode(), linear, "Linux switches all scanouts off at first");
    changed(&*screen);
    show(&mut driver, 1, (320, 200));
    assert_eq!(screen.mode(), Some(Mode { width: 320, height: 200, stride: 1280, start: 0 }));
    assert_eq!(changed(&*screen).len(), 1024, "all of 4 MiB");
    bench.write(Kind::Memory, BAR0 + 4, &[9; 4]);
    assert_eq!(changed(&*screen), [0; 0], "the frame buffer is not shown");
    done(&mut driver, 0x103, &[0, 0, 0, 0, 0, 0]);
    assert_eq!(screen.mode(), None, "switched off");
    show(&mut driver, 1, (320, 200));
    done(&mut driver, 0x102, &[1, 0]);
    assert_eq!(screen.mode(), None, "the shown resource is gone");
    changed(&*screen);
    driver.set_status(0);
    assert_eq!((screen.mode(), pixel(&*screen, 1, 0)), (linear, [9; 4]));
    assert_eq!(changed(&*screen).len(), 1024);
    let mut driver = start(&bench);
    create(&mut driver, 1, 2, (320, 200));
    show(&mut driver, 1, (320, 200));
    bench.board.reset().unwrap();
    assert_eq!(screen.mode(), None, "power-on again");
}

#[test]
fn viewers_read_the_guests_pages_in_the_order_of_its_list() {
    let bench = bench();
    let screen = screen(&bench);
    let mut driver = start(&bench);
    done(&mut driver, 0x101, &[7, 2, 1000, 4]);
    // 16000 bytes: two adjacent pieces, one of an odd length before, and one at the end.
    let base = u32::try_from(PIXELS).unwrap();
    let list = [(0x4_0000, 5000), (0x2_0000, 4096), (0x2_1000, 4096), (0, 2808)];
    let entries = list.iter().flat_map(|(at, length)| [base + at, 0, *length, 0]);
    done(&mut driver, 0x106, &[&[7, 4][..], &entries.collect::<Vec<_>>()].concat());
    let mut at = 0_u64;
    for (start, length) in list {
        let bytes: Vec<u8> = (at..at + u64::from(length)).map(|it| (it % 251) as u8).collect();
        bench.memory.write(PIXELS + u64::from(start), &bytes).unwrap();
        at += u64::from(length);
    }
    done(&mut driver, 0x103, &[10, 1, 900, 3, 0, 7]);
    let start = 4000 + 40;
    assert_eq!(screen.mode(), Some(Mode { width: 900, height: 3, stride: 4000, start }));
    let mut all = vec![0xee; 16_010];
    screen.read(0, &mut all);
    assert!(all[..16_000].iter().zip(0_u32..).all(|(is, at)| u32::from(*is) == at % 251));
    assert_eq!(all[16_000..], [0xee; 10], "nothing beyond the end");
    changed(&*screen);
    // Line 2 and 3 from 200 to 210, of which the scanout shows all; then a part it does not show.
    done(&mut driver, 0x105, &[200, 2, 10, 2, 2 * 4000 + 800, 0, 7, 0]);
    done(&mut driver, 0x104, &[200, 2, 10, 2, 7, 0]);
    assert_eq!(changed(&*screen), [8800 / PAGE_BYTES, 12_800 / PAGE_BYTES]);
    done(&mut driver, 0x104, &[0, 0, 1000, 1, 7, 0]);
    done(&mut driver, 0x104, &[950, 0, 50, 4, 7, 0]);
    assert_eq!(changed(&*screen), [0; 0]);
    done(&mut driver, 0x107, &[7, 0]);
    let mut rest = [0xee; 8];
    screen.read(0, &mut rest);
    assert_eq!(rest, [0xee; 8], "a resource without memory");
}

#[test]
fn pixels_of_all_formats_become_blue_green_red() {
    let bench = bench();
    let screen = screen(&bench);
    let mut driver = start(&bench);
    for (format, memory) in [
        (1, *b"BGRA"),
        (2, *b"BGRX"),
        (3, *b"ARGB"),
        (4, *b"XRGB"),
        (67, *b"RGBA"),
        (68, *b"XBGR"),
        (121, *b"ABGR"),
        (134, *b"RGBX"),
    ] {
        bench.memory.write(PIXELS + 4, &memory).unwrap();
        create(&mut driver, format, format, (16, 16));
        show(&mut driver, format, (16, 16));
        assert_eq!(pixel(&*screen, 1, 0)[..3], *b"BGR", "format {format}");
    }
    assert_eq!(answer(&mut driver, 0x101, &[99, 5, 16, 16]), INVALID_PARAMETER);
}

#[test]
fn viogpudos_frame_buffer_may_be_the_linear_one() {
    let bench = bench();
    let screen = screen(&bench);
    let mut driver = start(&bench);
    set_linear(&bench, 800, 600);
    done(&mut driver, 0x101, &[1, 2, 320, 200]);
    let bar0 = u32::try_from(BAR0).unwrap();
    done(&mut driver, 0x106, &[1, 2, bar0, 0, 4096, 0, bar0 + 4096, 0, 4 << 20, 0]);
    show(&mut driver, 1, (320, 200));
    bench.write(Kind::Memory, BAR0 + 1280 * 5 + 12, &[5, 6, 7, 8]);
    assert_eq!(pixel(&*screen, 3, 5), [5, 6, 7, 8]);
}

/// Commands with every kind of mistake, and the answers of the specification.
#[test]
fn mistakes_are_answered_and_change_nothing() {
    let bench = bench();
    let screen = screen(&bench);
    let mut driver = start(&bench);
    create(&mut driver, 1, 2, (320, 200));
    done(&mut driver, 0x101, &[2, 2, 64, 64]);
    show(&mut driver, 1, (320, 200));
    changed(&*screen);
    let huge = u32::MAX;
    let bytes = u32::try_from(PIXELS).unwrap();
    let cases: &[(u32, &[u32], u32)] = &[
        (0, &[], UNSPECIFIED),
        (0x108, &[0, 0], UNSPECIFIED),
        (0x200, &[0; 20], UNSPECIFIED),
        (0x101, &[3, 2, 64], UNSPECIFIED),
        (0x101, &[0, 2, 64, 64], INVALID_RESOURCE),
        (0x101, &[1, 2, 64, 64], INVALID_RESOURCE),
        (0x101, &[3, 0, 64, 64], INVALID_PARAMETER),
        (0x101, &[3, 2, 0, 64], INVALID_PARAMETER),
        (0x101, &[3, 2, 64, 8193], INVALID_PARAMETER),
        (0x101, &[3, 2, huge, huge], INVALID_PARAMETER),
        (0x101, &[3, 2, 1025, 1024], OUT_OF_MEMORY),
        (0x102, &[9, 0], INVALID_RESOURCE),
        (0x103, &[0, 0, 320, 200, 1, 1], INVALID_SCANOUT),
        (0x103, &[0, 0, 320, 200, 0, 9], INVALID_RESOURCE),
        (0x103, &[0, 0, 0, 200, 0, 1], INVALID_PARAMETER),
        (0x103, &[1, 0, 320, 200, 0, 1], INVALID_PARAMETER),
        (0x103, &[huge, huge, 2, 2, 0, 1], INVALID_PARAMETER),
        (0x104, &[0, 1, 320, 200, 1, 0], INVALID_PARAMETER),
        (0x104, &[1, 1, huge, huge, 1, 0], INVALID_PARAMETER),
        (0x104, &[0, 0, 1, 1, 9, 0], INVALID_RESOURCE),
        (0x105, &[0, 0, 320, 201, 0, 0, 1, 0], INVALID_PARAMETER),
        (0x105, &[0, 1, 320, 1, 0, 0, 1, 0], INVALID_PARAMETER),
        (0x105, &[0, 0, 1, 1, 0, 1, 1, 0], INVALID_PARAMETER),
        (0x105, &[0, 0, 1, 1, 0, 0, 2, 0], INVALID_RESOURCE),
        (0x106, &[9, 1, bytes, 0, 4096, 0], INVALID_RESOURCE),
        (0x106, &[1, 1, bytes, 0, 4096, 0], UNSPECIFIED),
        (0x106, &[2, 2, bytes, 0, 4096, 0], UNSPECIFIED),
        (0x106, &[2, huge, bytes, 0, 4096, 0], OUT_OF_MEMORY),
        (0x106, &[2, 1, huge, huge, 4096, 0], INVALID_PARAMETER),
        (0x107, &[9, 0], INVALID_RESOURCE),
        (0x10a, &[1, 0], INVALID_SCANOUT),
    ];
    for (command, body, wanted) in cases {
        let is = answer(&mut driver, *command, body);
        assert_eq!(is, *wanted, "{command:#x} {body:x?}: {is:#x}");
    }
    assert_eq!(screen.mode().map(|it| (it.width, it.height)), Some((320, 200)));
    assert_eq!(changed(&*screen), [0; 0]);
    // Too little room for the answer, or none, and a request without a whole header.
    assert_eq!(send(&mut driver, 0x102, &[9, 0], 3), [3, 0x12, 0]);
    assert_eq!(send(&mut driver, 0x102, &[9, 0], 0), [0; 0]);
    driver.offer(CONTROL, &[(4 << 20, 23, false), (7 << 20, 24, true)]);
    driver.kick(CONTROL);
    assert_eq!(driver.wait(CONTROL).length, 24);
    assert_eq!(driver.bytes(7 << 20, 4), words(&[UNSPECIFIED]));
    // A fence is repeated in the answer.
    bench.memory.write(4 << 20, &words(&[0x102, 1, 0xaa, 0xbb, 3, 4, 9, 0])).unwrap();
    driver.offer(CONTROL, &[(4 << 20, 32, false), (7 << 20, 24, true)]);
    driver.kick(CONTROL);
    driver.wait(CONTROL);
    assert_eq!(driver.bytes(7 << 20, 24), words(&[INVALID_RESOURCE, 1, 0xaa, 0xbb, 3, 0]));
}

#[test]
fn resources_and_their_lists_are_limited() {
    let bench = bench();
    let mut driver = start(&bench);
    let most = u32::try_from(MAX_RESOURCES).unwrap();
    for id in 1..=most {
        done(&mut driver, 0x101, &[id, 2, 1, 1]);
    }
    assert_eq!(answer(&mut driver, 0x101, &[most + 1, 2, 1, 1]), OUT_OF_MEMORY);
    done(&mut driver, 0x102, &[5, 0]);
    done(&mut driver, 0x101, &[most + 1, 2, 1, 1]);
    // Half of all extents, none adjacent to the next.
    let half = u32::try_from(MAX_EXTENTS / 2).unwrap();
    let list: Vec<_> = (0..half).flat_map(|at| [2 * at * PAGE, 0, PAGE, 0]).collect();
    for id in [1, 2] {
        done(&mut driver, 0x106, &[&[id, half][..], &list].concat());
    }
    assert_eq!(answer(&mut driver, 0x106, &[3, 1, 0, 0, 16, 0]), OUT_OF_MEMORY);
    done(&mut driver, 0x107, &[1, 0]);
    done(&mut driver, 0x106, &[3, 1, 0, 0, 16, 0]);
    // Parts that are smaller than pages would make a picture slow, unless they are at an end.
    for (middle, code) in [(PAGE, OK), (16, INVALID_PARAMETER)] {
        let list = [6, 3, 0, 0, 16, 0, 2 * PAGE, 0, middle, 0, 8 * PAGE, 0, 16, 0];
        assert_eq!(answer(&mut driver, 0x106, &list), code);
        done(&mut driver, 0x107, &[6, 0]);
    }
    // Adjacent pages count once, as the list is stored.
    let list: Vec<_> = (0..half - 1).flat_map(|at| [at * 16, 0, 16, 0]).collect();
    done(&mut driver, 0x106, &[&[4, half - 1][..], &list].concat());
    let saved = serde_json::to_value(bench.board.park()).unwrap();
    let stored = &saved[0][1]["device"][1]["device"]["resources"]["4"]["extents"];
    assert_eq!(stored, &serde_json::json!([[0, (half - 1) * 16]]));
}

#[test]
fn a_viewers_size_reaches_the_driver() {
    let bench = bench();
    let screen = screen(&bench);
    let mut driver = start(&bench);
    let sizes = |driver: &mut Driver<'_>| {
        let info = send(driver, 0x100, &[], 408);
        let edid = send(driver, 0x10a, &[0, 0], 1056);
        assert_eq!(edid[24..32], words(&[128, 0]));
        let [width, height] =
            [56, 59].map(|at| u32::from(edid[32 + at]) | u32::from(edid[32 + at + 2] & 0xf0) << 4);
        let info: Vec<_> =
            info.as_chunks::<4>().0.iter().map(|it| u32::from_le_bytes(*it)).collect();
        assert_eq!((info[0], info.len()), (0x1101, 102));
        assert_eq!(info[6..12], [0, 0, width, height, 1, 0]);
        assert!(info[12..].iter().all(|it| *it == 0), "one monitor");
        (width, height)
    };
    assert_eq!(sizes(&mut driver), (1280, 800));
    driver.isr();
    assert!(screen.set_preferred_size(1001, 703));
    assert_eq!((driver.isr(), driver.device::<4>(0)), (2, [1, 0, 0, 0]));
    assert_eq!(sizes(&mut driver), (1001, 703));
    driver.set_device(4, &[0xfe, 0xff, 0xff, 0xff]);
    assert_eq!(driver.device::<8>(0), [1, 0, 0, 0, 0, 0, 0, 0], "another event");
    driver.set_device(4, &[1, 0, 0, 0]);
    assert_eq!(driver.device::<8>(0), [0; 8]);
    driver.isr();
    assert!(screen.set_preferred_size(1001, 703));
    assert_eq!(driver.isr(), 0, "the same size");
    assert!(!screen.set_preferred_size(1920, 1080), "more than 4 MiB");
    assert_eq!((driver.isr(), sizes(&mut driver)), (0, (1001, 703)));
    // A request while no driver runs, or the device is parked, is not lost.
    let saved = bench.board.park();
    screen.set_preferred_size(1024, 768);
    bench.board.run(saved).unwrap();
    driver.isr();
    assert_eq!((driver.device::<4>(0), sizes(&mut driver)), ([0; 4], (1024, 768)));
}

#[test]
fn the_pointer_is_drawn_over_the_picture() {
    let bench = bench();
    let screen = screen(&bench);
    let mut driver = start(&bench);
    create(&mut driver, 1, 2, (1024, 100));
    show(&mut driver, 1, (1024, 100));
    bench.memory.write(PIXELS, &[100; 1024 * 100 * 4]).unwrap();
    // The pointer's first pixel is opaque, the second half transparent, the others transparent.
    let image = 6_u64 << 20;
    bench.memory.write(image, &[0; 64 * 64 * 4]).unwrap();
    bench.memory.write(image, &[1, 2, 3, 255, 10, 20, 30, 128]).unwrap();
    done(&mut driver, 0x101, &[2, 1, 64, 64]);
    done(&mut driver, 0x106, &[2, 1, u32::try_from(image).unwrap(), 0, 64 * 64 * 4, 0]);
    done(&mut driver, 0x101, &[3, 1, 32, 64]);
    let point = |driver: &mut Driver<'_>, command: u32, at: [i32; 2], id: u32| {
        let [x, y] = at.map(i32::cast_unsigned);
        let bytes = words(&[command, 0, 0, 0, 0, 0, 0, x, y, 0, id, 0, 0, 0]);
        driver.bench.memory.write(4 << 20, &bytes).unwrap();
        driver.offer(CURSOR, &[(4 << 20, 56, false)]);
        driver.kick(CURSOR);
        assert_eq!(driver.wait(CURSOR).length, 0);
    };
    changed(&*screen);
    point(&mut driver, 0x300, [1000, 98], 2);
    assert_eq!(changed(&*screen), [98, 99], "two lines of 4096 bytes");
    assert_eq!(pixel(&*screen, 1000, 98)[..3], [1, 2, 3]);
    assert_eq!(pixel(&*screen, 1001, 98)[..3], [10 + 49, 20 + 49, 30 + 49]);
    assert_eq!(pixel(&*screen, 1002, 98), [100; 4]);
    // A change of the image counts once it is set again, as with hardware.
    bench.memory.write(image, &[9, 9, 9, 255]).unwrap();
    point(&mut driver, 0x301, [-1, -1], 2);
    assert_eq!(pixel(&*screen, 1000, 98), [100; 4]);
    assert_eq!(changed(&*screen), (0..63).chain([98, 99]).collect::<Vec<_>>());
    point(&mut driver, 0x300, [0, 0], 2);
    assert_eq!(pixel(&*screen, 0, 0)[..3], [9, 9, 9]);
    for (at, id) in [([i32::MIN, i32::MAX], 2), ([i32::MAX, i32::MIN], 2), ([5, 5], 3), ([5, 5], 0)]
    {
        point(&mut driver, 0x300, at, id);
        assert_eq!(pixel(&*screen, 0, 0), [100; 4]);
        assert_eq!(pixel(&*screen, 5, 5), [100; 4]);
    }
}

#[test]
fn a_parked_display_shows_its_picture_again() {
    let bench = bench();
    let mut driver = start(&bench);
    create(&mut driver, 1, 134, (320, 200));
    show(&mut driver, 1, (320, 200));
    bench.memory.write(PIXELS + 8, b"RGBX").unwrap();
    let saved = bench.board.park();
    let new = self::bench();
    new.memory.write(PIXELS + 8, b"RGBX").unwrap();
    new.board.park();
    new.board.run(saved).unwrap();
    let screen = screen(&new);
    assert_eq!(screen.mode().map(|it| (it.width, it.height)), Some((320, 200)));
    assert_eq!(changed(&*screen).len(), 1024);
    assert_eq!(pixel(&*screen, 2, 0)[..3], *b"BGR");
}
