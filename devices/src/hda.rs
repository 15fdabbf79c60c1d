//! Intel High Definition Audio ("HDA", specification 1.0a): the controller of ICH9 with a codec for
//! two channels in each direction, which Windows and Linux have drivers for.
//!
//! Streams move at the pace of the host's clock, not of a listener. A thread looks at them while
//! one moves, and sleeps without a timer otherwise. Frames are 16 bits, stereo, 48 kHz: a stream of
//! another format moves at the same pace and is not heard. There are no unsolicited responses, no
//! digital outputs, and jacks do not detect plugs.
//!
//! Threats: the guest programs rings, buffer lists and positions, and may change them meanwhile.
//! A list is copied when its stream starts, and has at most 256 buffers. A late stream moves at
//! most a tenth of a second at once, so a list of single bytes delays only this device. Rings are
//! read one command at a time, at most 255 for each access. Addresses outside of RAM stop the ring
//! or are silent. The guest records only what `microphone` names.

mod codec;
mod controller;
mod stream;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use self::controller::{Controller, State, TICK};
use crate::alarm::Alarm;
use crate::device::{Access, Device, Region, Saved};
use crate::grants::{Build, Grants};
use crate::pci::{Address, Bar, Id, Identity};
use host::sound::Ends;

/// `--device hda`: a sound card. Viewers in browsers and VNC clients with QEMU's extension for
/// sound hear it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// A file that gets everything that is played: 48 kHz, 16 bits, stereo, without a header.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speaker: Option<PathBuf>,
    /// A file or FIFO that the guest records, in the same format. By default it records silence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub microphone: Option<PathBuf>,
    /// PCI slot. Defaults to the first free one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
}

/// The controller of ICH9, whose ID Linux has no workarounds for. The subsystem is QEMU's.
const ID: Id = Id {
    vendor: 0x8086,
    device: 0x293e,
    class: 0x04_0300,
    revision: 3,
    subsystem: (0x1af4, 0x1100),
};
const BAR_SIZE: u64 = 16 << 10;
/// ICH9's own registers. Linux clears bits in TCSEL, at 0x44, so no capability may be there.
const CHIPSET_REGISTERS: std::ops::Range<u64> = 0x40..0x50;
/// HDCTL selects the signaling of HDA instead of AC'97.
const HDCTL: u64 = 0x40;
/// As in ICH9, the capabilities begin behind them.
const CAPABILITIES: u8 = 0x60;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let identity = Identity {
            at: self.slot,
            bars: vec![(0, Bar::Memory32(BAR_SIZE))],
            msi: true,
            pin: Some(0),
            capabilities_at: CAPABILITIES,
            own_registers: vec![CHIPSET_REGISTERS],
            ..Identity::new(ID)
        };
        let hub = grants.shared().sound.clone();
        hub.add_card();
        let goes_on = grants.goes_on();
        let ends = Ends::open(hub, self.speaker.as_deref(), self.microphone.as_deref(), goes_on)?;
        let slot = grants.pci(identity)?;
        let controller = Controller::new(slot.memory.clone(), slot.interrupt.clone(), ends);
        let device = Hda {
            controller: Arc::new(Mutex::new(controller)),
            bar: slot.bar(0).region,
            config: slot.config,
            alarm: None,
        };
        Ok(slot.wrap(Box::new(device)))
    }

    fn detach_host_side(&mut self) {
        (self.speaker, self.microphone) = (None, None);
    }
}

struct Hda {
    controller: Arc<Mutex<Controller>>,
    bar: Region,
    config: Region,
    /// Rings while a stream moves. Set while the device runs.
    alarm: Option<Alarm>,
}

fn lock(controller: &Mutex<Controller>) -> MutexGuard<'_, Controller> {
    controller.lock().expect("no device panicked")
}

/// Moves the streams. Returns the time of the next look, if a stream still moves.
fn look(controller: &Mutex<Controller>, now: Instant) -> Option<Instant> {
    let mut controller = lock(controller);
    controller.advance(now);
    controller.moves().then(|| now + TICK)
}

impl Hda {
    /// Sets the alarm if a stream moves now and none did before.
    fn set_alarm(&self, moved: bool, now: Instant) {
        if !moved
            && lock(&self.controller).moves()
            && let Some(alarm) = &self.alarm
        {
            alarm.set(Some(now + TICK));
        }
    }
}

/// The bytes of an access within words of 4 bytes: the word's offset, and the bytes in it.
fn words(offset: u64, length: usize) -> Option<(u64, usize)> {
    let within = usize::try_from(offset % 4).ok()?;
    let fits = matches!(length, 1 | 2 | 4) && within + length <= 4;
    fits.then_some((offset - offset % 4, within))
}

impl Device for Hda {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.config {
            for (byte, at) in data.iter_mut().zip(offset..) {
                *byte = u8::from(at == HDCTL);
            }
            return Access::Done;
        }
        if data.len() == 8 && offset.is_multiple_of(8) {
            let (low, high) = data.split_at_mut(4);
            let _low = self.read(region, offset, low);
            return self.read(region, offset + 4, high);
        }
        let Some((at, within)) = words(offset, data.len()).filter(|_| region == self.bar) else {
            return Access::Ignored;
        };
        let word = lock(&self.controller).read(at, Instant::now()).to_le_bytes();
        data.copy_from_slice(&word[within..within + data.len()]);
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if region == self.config {
            return Access::Done;
        }
        if data.len() == 8 && offset.is_multiple_of(8) {
            let (low, high) = data.split_at(4);
            let _low = self.write(region, offset, low);
            return self.write(region, offset + 4, high);
        }
        let Some((at, within)) = words(offset, data.len()).filter(|_| region == self.bar) else {
            return Access::Ignored;
        };
        let (mut value, mut mask) = ([0; 4], [0; 4]);
        value[within..within + data.len()].copy_from_slice(data);
        mask[within..within + data.len()].fill(0xff);
        let [value, mask] = [value, mask].map(u32::from_le_bytes);
        let now = Instant::now();
        let mut controller = lock(&self.controller);
        let moved = controller.moves();
        controller.write(at, value, mask, now);
        drop(controller);
        self.set_alarm(moved, now);
        Access::Done
    }

    fn park(&mut self) -> Saved {
        self.alarm = None;
        Saved::of(&lock(&self.controller).save())
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let state: State = saved.take().context("hda")?;
        lock(&self.controller).restore(state)?;
        let controller = self.controller.clone();
        let ring = move || look(&controller, Instant::now());
        self.alarm = Some(Alarm::spawn("hda", ring)?);
        self.set_alarm(false, Instant::now());
        Ok(())
    }
}

#[cfg(test)]
mod test;
