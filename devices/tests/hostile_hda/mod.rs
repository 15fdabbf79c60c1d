//! The sound card between a hostile driver and a listener.

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::device::Kind;
use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::hda::*;
use devices::testutil::hostile::Actions;
use host::sound::Listener;
use serde_json::json;

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
/// Where the driver's sound is.
const SOUND: u64 = 0x2_0000;
/// Registers that matter most: the controller's, and those of the rings.
const AIMS: [u64; 16] = [
    GCTL, WAKEEN, 0x10, INTCTL, INTSTS, SSYNC, 0x40, 0x44, CORBWP, 0x4c, 0x50, 0x54, RIRBWP, 0x5c,
    0x68, DPLBASE,
];

/// Runs the actions that the bytes describe, then checks that an ordinary driver is served. Returns
/// how often a response arrived, and how often a frame was heard.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) -> [u32; 2] {
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    let config = Config::of_kind("hda", json!({ "slot": "03.0" })).expect("it is in the registry");
    let config = config.expect("its fields are right");
    bench.board.add("hda", |grants| config.build(grants)).expect("the board is empty");
    bench.board.run(Vec::new()).expect("power-on");
    let mut listener = bench.board.shared.sound.listen(Arc::new(|| {}));
    let mut card = Card::find(&bench, AT);
    card.start();
    let (mut actions, mut seen) = (Actions::new(bytes, RAM), [0; 2]);
    while step(&mut actions, &mut card, &mut listener, &mut seen).is_some() {}
    bench.board.reset().expect("power-on again");
    let mut card = Card::find(&bench, AT);
    card.start();
    assert_eq!(card.command(0, 0xf_0004), Some(0x0001_0001), "the codec is stuck");
    card.command(2, 0x7_0610);
    card.prepare(OUTPUT, &[(SOUND, 64, true), (SOUND + 64, 64, true)]);
    card.run(OUTPUT, 1);
    while listener.take(&mut [0; 4096]) > 0 {}
    let start = Instant::now();
    while listener.take(&mut [0; 4]) == 0 {
        assert!(start.elapsed() < Duration::from_secs(2), "the card is stuck");
        std::thread::yield_now();
    }
    seen
}

/// Runs one action. Returns `None` at the end of the bytes.
fn step<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    card: &mut Card<'_>,
    listener: &mut Listener,
    seen: &mut [u32; 2],
) -> Option<()> {
    let (what, which) = (actions.byte()?, u64::from(actions.byte()?));
    let stream = which % 8;
    match what {
        0..30 => {
            let at = AIMS[usize::try_from(which).ok()? % AIMS.len()];
            card.write32(at, actions.word()?);
        }
        // Any register of a stream, or of all, in any width.
        30..50 => card.write32(of(stream, which >> 3 & 0x1c), actions.word()?),
        50..65 => {
            let at = u64::from(actions.short()?) % 0x4000;
            match which & 3 {
                0 => card.write8(at, actions.byte()?),
                1 => card.write16(at, actions.short()?),
                _ => card.write32(at, actions.word()?),
            }
            card.read32(at);
        }
        // Commands: to any node, or to those that exist.
        65..90 => {
            let command = actions.word()?;
            let command = if which & 1 == 0 { command & 0xf_ffff } else { command };
            let end = card.queue(&[command | u32::try_from(which & 7).ok()? << 20]);
            card.write16(CORBWP, if which < 250 { end } else { actions.short()? });
        }
        90..110 => seen[0] += u32::from(card.take().is_some()),
        110..190 => move_stream(actions, card, what, stream)?,
        190..200 => {
            card.read32(of(stream, LPIB));
            seen[1] += u32::from(listener.take(&mut [0; 64]) > 0);
        }
        200..215 => {
            let (at, value) = (actions.address()?, actions.word()?);
            card.bench.memory.write(at, &value.to_le_bytes()).ok();
        }
        215..225 => {
            // Bus mastering and MSI.
            let (register, value) =
                if which & 1 == 0 { (4, 3 + (which & 4)) } else { (0x62, which >> 1) };
            let value = u8::try_from(value).ok()?;
            card.bench.write(Kind::Config, AT.config() + register, &[value, 0]);
        }
        225..235 => {
            let saved = card.bench.board.park();
            card.bench.board.run(saved).expect("the state was just saved");
        }
        // Time, which is all that a stream needs.
        235..240 => std::thread::sleep(Duration::from_micros(200)),
        _ => {
            *card = Card::find(card.bench, AT);
            card.start();
        }
    }
    Some(())
}

/// Sets up a stream, or writes its control.
fn move_stream<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    card: &mut Card<'_>,
    what: u8,
    stream: u64,
) -> Option<()> {
    match what {
        // Mostly within RAM.
        0..150 => {
            let count = actions.byte()? % 8;
            let buffers: Option<Vec<_>> = (0..count)
                .map(|_| Some((actions.address()?, actions.length()?, actions.byte()? & 1 == 1)))
                .collect();
            card.prepare(stream, &buffers?);
            card.run(stream, actions.byte()? & 3);
        }
        150..180 => {
            card.command(2, 0x7_0610);
            let length = u32::from(actions.short()?) + 1;
            card.prepare(OUTPUT, &[(SOUND, length, true), (SOUND, length, false)]);
            card.run(OUTPUT, 1);
        }
        _ => card.write8(of(stream, CTL), actions.byte()?),
    }
    Some(())
}
