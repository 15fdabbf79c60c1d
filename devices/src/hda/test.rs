//! The sound card under the steps of Linux' and Windows' drivers.

use std::thread::sleep;
use std::time::Duration;

use super::*;
use crate::device::Kind;
use crate::testutil::Bench;
use crate::testutil::hda::*;
use host::sound::{FRAME_BYTES, Listener};

const AT: Address = Address::new(3, 0);
/// Buffers of the driver.
const SOUND: u64 = 0x2_0000;
const PIN: u32 = 23;
/// The longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(20);

fn bench_with(config: Config) -> Bench {
    let mut bench = Bench::new(1 << 20);
    let config = Config { slot: Some(AT), ..config };
    bench.board.add("hda", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn bench() -> Bench {
    bench_with(Config::default())
}

/// A card whose DAC plays stream 5 and whose ADC records stream 6.
fn started(bench: &Bench) -> Card<'_> {
    let mut card = Card::find(bench, AT);
    card.start();
    card.command(2, 0x70650).unwrap();
    card.command(4, 0x70660).unwrap();
    card.write8(RIRBSTS, 5);
    card
}

fn listen(bench: &Bench) -> Listener {
    bench.board.shared.sound.listen(Arc::new(|| {}))
}

fn until(what: &str, mut ready: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        sleep(Duration::from_millis(1));
    }
}

/// Frames, each with its number in both samples.
fn numbered(count: u16) -> Vec<u8> {
    (0..count).flat_map(|it| [it, it]).flat_map(u16::to_le_bytes).collect()
}

/// Hears at least this number of frames.
fn hear(listener: &mut Listener, frames: usize) -> Vec<u8> {
    let mut heard = Vec::new();
    until("the sound stopped", || {
        let mut some = [0; 4096];
        let count = listener.take(&mut some);
        heard.extend(&some[..count]);
        heard.len() >= frames * FRAME_BYTES
    });
    heard
}

/// Whether two and a half ticks bring nothing new.
fn is_quiet(listener: &mut Listener) -> bool {
    let mut some = [0; 4096];
    while listener.take(&mut some) > 0 {}
    sleep(TICK * 5 / 2);
    listener.take(&mut some) == 0
}

#[test]
fn linux_finds_the_controller_and_all_widgets() {
    let bench = bench();
    let mut card = Card::find(&bench, AT);
    assert_eq!(bench.read(Kind::Config, AT.config()), [0x86, 0x80, 0x3e, 0x29]);
    assert_eq!(bench.read(Kind::Config, AT.config() + 0x34), [0x60], "TCSEL is at 0x44");
    assert_eq!(bench.read(Kind::Config, AT.config() + 0x60), [5, 0]);
    assert_eq!((card.read32(GCTL), card.read16(STATESTS)), (0, 0), "in reset at power-on");
    card.write16(CORBWP, 7);
    assert_eq!(card.read16(CORBWP), 0, "no register takes a write in reset");
    assert_eq!((card.read16(0), card.read8(3)), (0x4401, 1));
    card.start();
    assert_eq!(card.read16(STATESTS), 1, "the codec reports after the reset");
    card.write16(STATESTS, 0x7fff);
    assert_eq!(card.read16(STATESTS), 0);
    let mut parameter = |node: u32, id: u32| card.command(node, 0xf_0000 | id).unwrap();
    assert_eq!(parameter(0, 4), 0x0001_0001);
    assert_eq!((parameter(1, 4), parameter(1, 5)), (0x0002_0004, 1));
    let types: Vec<_> = (2..6).map(|node| parameter(node, 9) >> 20).collect();
    assert_eq!(types, [0, 4, 1, 4], "DAC, pin, ADC, pin");
    assert_eq!((parameter(2, 0xa), parameter(2, 0x12)), (0x0002_0040, 0x8003_4a4a));
    assert_eq!(card.command(3, 0xf_0200), Some(2), "line-out plays what the DAC gives");
    assert_eq!(card.command(4, 0xf_0200), Some(5));
    assert_eq!(card.command(0x100, 0xf_0004), None, "there is no second codec");
    assert_eq!(card.command(1, 0x7_0503), Some(0));
    assert_eq!(card.command(1, 0xf_0500), Some(0x33));
}

#[test]
fn rings_wrap_and_interrupt_as_programmed() {
    let bench = bench();
    let mut card = Card::find(&bench, AT);
    card.start();
    card.write32(INTCTL, 0xc000_0000);
    for round in 0..300_u64 {
        let value = u32::try_from(round % 75).unwrap();
        let end = card.queue(&[0x0023_a000 | value, 0x002b_a000]);
        card.write16(CORBWP, end);
        assert!(bench.hypervisor.pins.is_high(PIN), "round {round}");
        assert_eq!(card.read32(INTSTS), 0xc000_0000);
        assert_eq!([card.take(), card.take(), card.take()], [Some(0), Some(round % 75), None]);
        card.write8(RIRBSTS, 5);
        assert!(!bench.hypervisor.pins.is_high(PIN));
    }
    assert_eq!(card.read8(CORBRP), card.read8(CORBWP));
    // Messages replace the line, and each burst of responses sends one.
    bench.write(Kind::Config, AT.config() + 0x64, &0xfee0_0000_u32.to_le_bytes());
    bench.write(Kind::Config, AT.config() + 0x62, &[1]);
    for round in 1..4 {
        card.command(0, 0xf_0000).unwrap();
        assert_eq!(bench.hypervisor.sent.lock().unwrap().len(), round);
        card.write8(RIRBSTS, 1);
    }
    assert_eq!(bench.hypervisor.pins.edges(PIN), 300);
}

#[test]
fn windows_uses_immediate_commands_and_wakes() {
    let bench = bench();
    let card = Card::find(&bench, AT);
    card.write16(WAKEEN, 0x7fff);
    card.write32(GCTL, 1);
    card.write32(INTCTL, 0xc000_0000);
    assert!(bench.hypervisor.pins.is_high(PIN), "the codec's report wakes");
    card.write16(STATESTS, 1);
    assert!(!bench.hypervisor.pins.is_high(PIN));
    card.write32(0x60, 0x000f_0000);
    card.write16(0x68, 1);
    assert_eq!(card.read16(0x68), 2, "not busy, valid");
    assert_eq!(card.read32(0x64), 0x1af4_0022);
    card.write16(0x68, 2);
    assert_eq!(card.read16(0x68), 0);
    card.write32(0x60, 0x300f_0000);
    card.write16(0x68, 1);
    assert_eq!(card.read16(0x68), 0, "no codec at address 3 answers");
}

#[test]
fn plays_every_frame_once_at_the_pace_of_the_clock() {
    let (bench, frames) = (bench(), numbered(12_000));
    let card = started(&bench);
    let mut listener = listen(&bench);
    bench.memory.write(SOUND, &frames).unwrap();
    card.prepare(OUTPUT, &[(SOUND, 1_004, false), (SOUND + 1_004, 46_996, true)]);
    card.write32(INTCTL, 0xc000_00ff);
    card.write32(DPLBASE, u32::try_from(POSITIONS).unwrap() | 1);
    let start = Instant::now();
    card.run(OUTPUT, 5);
    let heard = hear(&mut listener, 30_000);
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(620), "30000 frames within {took:?}");
    let endless: Vec<_> = frames.iter().copied().cycle().take(heard.len()).collect();
    assert!(heard == endless, "two and a half times around");
    // The buffer's end was reached, which only its second part reports.
    assert!(bench.hypervisor.pins.is_high(PIN));
    assert_eq!(card.read32(INTSTS), 0x8000_0010);
    assert_eq!(card.read8(of(OUTPUT, STS)), 0x24, "completed, and the FIFO is ready");
    card.write8(of(OUTPUT, STS), 4);
    let position = card.read32(of(OUTPUT, LPIB));
    assert!(position < 48_000 && position.is_multiple_of(4));
    // A stop in the middle; the alias of LPIB; and on from there.
    card.write8(of(OUTPUT, CTL), 0);
    let stopped = card.read32(of(OUTPUT, LPIB));
    assert!(is_quiet(&mut listener) && card.read32(of(OUTPUT, LPIB)) == stopped);
    assert_eq!(card.read32(0x2004 + of(OUTPUT, 0)), stopped);
    let mut stored = [0; 8];
    bench.memory.read(POSITIONS + 8 * OUTPUT, &mut stored).unwrap();
    assert_eq!(u64::from_le_bytes(stored), u64::from(stopped));
    card.run(OUTPUT, 5);
    let heard = hear(&mut listener, 100);
    assert_eq!(heard[..4], frames[stopped as usize..stopped as usize + 4]);
}

#[test]
fn resets_in_the_middle_end_the_sound() {
    let bench = bench();
    let mut card = started(&bench);
    let mut listener = listen(&bench);
    let run = |card: &Card<'_>| {
        card.prepare(OUTPUT, &[(SOUND, 400, true), (SOUND + 400, 400, true)]);
        card.run(OUTPUT, 5);
    };
    run(&card);
    hear(&mut listener, 300);
    card.write8(of(OUTPUT, CTL), 1);
    assert!(is_quiet(&mut listener), "after a reset of the stream");
    assert_eq!(card.read32(of(OUTPUT, CTL)), 1, "the driver waits for this");
    assert_eq!((card.read32(of(OUTPUT, CBL)), card.read32(of(OUTPUT, LPIB))), (0, 0));
    run(&card);
    hear(&mut listener, 300);
    card.write32(GCTL, 0);
    assert!(is_quiet(&mut listener), "after a reset of the controller");
    card.start();
    run(&card);
    assert!(is_quiet(&mut listener), "the codec has forgotten the number of the stream");
    card.command(2, 0x70650).unwrap();
    hear(&mut listener, 300);
    bench.board.reset().unwrap();
    assert!(is_quiet(&mut listener), "after a reset of the machine");
}

#[test]
fn a_parked_stream_continues_where_it_was() {
    let (bench, frames) = (bench(), numbered(12_000));
    let card = started(&bench);
    let mut listener = listen(&bench);
    bench.memory.write(SOUND, &frames).unwrap();
    card.prepare(OUTPUT, &[(SOUND, 24_000, true), (SOUND + 24_000, 24_000, true)]);
    card.run(OUTPUT, 5);
    let mut heard = hear(&mut listener, 500);
    let saved = bench.board.park();
    loop {
        let mut some = [0; 4096];
        match listener.take(&mut some) {
            0 => break,
            count => heard.extend(&some[..count]),
        }
    }
    assert!(is_quiet(&mut listener));
    bench.board.run(saved).unwrap();
    heard.extend(hear(&mut listener, 500));
    let endless: Vec<_> = frames.iter().copied().cycle().take(heard.len()).collect();
    assert!(heard == endless, "{} bytes", heard.len());
}

#[test]
fn records_the_microphone_and_silence_without_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("microphone");
    // The microphone is silent after all frames but the first.
    let mut wanted = numbered(2_000).split_off(4);
    std::fs::write(&path, &wanted).unwrap();
    wanted.extend([0; 4]);
    for microphone in [Some(path), None] {
        let silent = microphone.is_none();
        let bench = bench_with(Config { microphone, ..Config::default() });
        let mut card = started(&bench);
        bench.memory.write(SOUND, &[7; 8_000]).unwrap();
        card.prepare(0, &[(SOUND, 4_000, false), (SOUND + 4_000, 4_000, true)]);
        card.run(0, 6);
        until("nothing was recorded", || card.read8(of(0, STS)) & 4 != 0);
        card.write8(of(0, CTL), 0);
        let mut recorded = vec![0; 8_000];
        bench.memory.read(SOUND, &mut recorded).unwrap();
        let position = card.read32(of(0, LPIB)) as usize;
        if silent {
            assert!(recorded == [0; 8_000]);
        } else {
            assert!(recorded[position..] == wanted[position..]);
        }
        // A stream that the ADC does not carry records silence.
        card.command(4, 0x70600).unwrap();
        card.prepare(0, &[(SOUND, 400, false), (SOUND + 400, 400, true)]);
        card.run(0, 6);
        until("nothing was recorded", || card.read8(of(0, STS)) & 4 != 0);
        bench.memory.read(SOUND, &mut recorded).unwrap();
        assert!(recorded[..800] == [0; 800]);
    }
}

#[test]
fn streams_start_together_after_ssync() {
    let bench = bench();
    let card = started(&bench);
    let mut listener = listen(&bench);
    card.write32(SSYNC, 1 << OUTPUT);
    card.prepare(OUTPUT, &[(SOUND, 400, true), (SOUND + 400, 400, true)]);
    card.run(OUTPUT, 5);
    assert_eq!(card.read8(of(OUTPUT, STS)), 0x20, "ready, which Linux waits for");
    assert!(is_quiet(&mut listener));
    card.write32(SSYNC, 0);
    hear(&mut listener, 100);
}

#[test]
fn mistakes_of_a_driver_end_only_its_own_sound() {
    let bench = bench();
    let mut card = started(&bench);
    let mut listener = listen(&bench);
    card.write32(INTCTL, 0xc000_00ff);
    card.prepare(OUTPUT, &[(SOUND, 0, true), (SOUND, 0, true)]);
    card.run(OUTPUT, 5);
    assert_eq!(card.read32(of(OUTPUT, CTL)) & 0xff00_0002, 0x1000_0000, "a list error, stopped");
    assert!(bench.hypervisor.pins.is_high(PIN));
    card.prepare(OUTPUT, &[(1 << 40, 400, true), (u64::MAX - 3, 400, true)]);
    card.run(OUTPUT, 5);
    let heard = hear(&mut listener, 300);
    assert!(heard.iter().all(|it| *it == 0), "silence comes from where no RAM is");
    assert_eq!(card.read8(of(OUTPUT, STS)) & 8, 8);
    // Single bytes, each with an interrupt, and a format that no converter has.
    let bytes: Vec<_> = (0..256).map(|at| (SOUND + at, 1, true)).collect();
    card.prepare(OUTPUT, &bytes);
    card.run(OUTPUT, 5);
    hear(&mut listener, 3000);
    card.prepare(OUTPUT, &bytes);
    card.write16(of(OUTPUT, FMT), 0x7f7f);
    card.run(OUTPUT, 5);
    assert!(is_quiet(&mut listener) && card.read32(of(OUTPUT, LPIB)) < 256);
    // Rings outside of RAM.
    card.write32(0x44, 0x100);
    card.write16(CORBWP, 9);
    assert_eq!(card.read32(0x4c), 0x0042_0100, "a memory error, stopped");
    card.start();
    assert_eq!(card.command(0, 0xf_0004), Some(0x0001_0001));
}

#[test]
fn the_alarm_is_set_only_while_a_stream_moves() {
    let bench = Bench::new(1 << 20);
    let ends = Ends::open(Arc::default(), None, None, false).unwrap();
    let controller = Controller::new(bench.memory.clone(), Default::default(), ends);
    let (controller, now) = (Mutex::new(controller), Instant::now());
    assert_eq!(look(&controller, now), None);
    let entry = [SOUND, 1 << 32 | 400].map(u64::to_le_bytes).concat();
    bench.memory.write(0x8000, &entry).unwrap();
    let write = |at, value| lock(&controller).write(at, value, u32::MAX, now);
    write(GCTL, 1);
    write(of(OUTPUT, BDPL), 0x8000);
    for (ssync, control, moves) in
        [(0, 2, true), (0x10, 2, false), (0, 2, true), (0, 0, false), (0, 2, true), (0, 1, false)]
    {
        write(SSYNC, ssync);
        write(of(OUTPUT, CTL), control);
        assert_eq!(look(&controller, now).is_some(), moves, "{ssync:#x}, {control}");
    }
}
