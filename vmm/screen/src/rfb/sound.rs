//! QEMU's extension for sound (rfbproto, "QEMU Audio"): a client chooses a format, and gets frames
//! while the guest plays.
//!
//! Threats: a client chooses its format, of which there are few, and its rate, which is at most the
//! card's. A client that reads slowly loses frames: at most [`MAX_BYTES`] are taken at once.

use std::sync::Arc;

use anyhow::ensure;
use host::sound::{FRAME_BYTES, Hub, Listener, RATE, Wake};

use super::message::SoundRequest;

/// The card's bytes of one message: 43 ms.
const MAX_BYTES: usize = 8 << 10;
const MIN_RATE: u32 = 8000;
/// The messages of this extension, and what they say.
const MESSAGE: [u8; 2] = [255, 1];
const END: u16 = 0;
const BEGIN: u16 = 1;
const DATA: u16 = 2;

/// A format of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Format {
    /// Bytes of a sample.
    width: usize,
    signed: bool,
    mono: bool,
    rate: u32,
}

/// The sound of one client.
pub(super) struct Sound {
    format: Format,
    listener: Option<Listener>,
    /// The beginning of the sound was announced to the client, and its end was not.
    begun: bool,
    /// The client turned the sound off, and its end is to be announced.
    ended: bool,
    previous: [i16; 2],
    /// The time of the client's next frame, where `previous` is at 0 and the card's next frame at
    /// `format.rate`. The client's frames are [`RATE`] apart.
    phase: u32,
}

impl Default for Sound {
    fn default() -> Self {
        // QEMU's.
        let format = Format { width: 2, signed: true, mono: false, rate: 44_100 };
        let (previous, phase) = ([0; 2], 0);
        Self { format, listener: None, begun: false, ended: false, previous, phase }
    }
}

impl Sound {
    pub(super) fn handle(
        &mut self,
        request: SoundRequest,
        hub: &Arc<Hub>,
        wake: Wake,
    ) -> anyhow::Result<()> {
        match request {
            SoundRequest::Enable => {
                if self.listener.is_none() {
                    self.listener = Some(hub.listen(wake));
                }
            }
            SoundRequest::Disable => {
                self.listener = None;
                self.ended |= std::mem::take(&mut self.begun);
            }
            SoundRequest::Format { sample, channels, rate } => {
                ensure!(sample < 6, "sound in format {sample}: there are 0 to 5");
                ensure!((1..=2).contains(&channels), "sound of {channels} channels: 1 or 2");
                let rates = MIN_RATE..=RATE;
                ensure!(rates.contains(&rate), "sound at {rate} Hz: {MIN_RATE} to {RATE}");
                let (width, signed) = (1 << (sample / 2), sample % 2 == 1);
                self.format = Format { width, signed, mono: channels == 1, rate };
                self.phase = 0;
            }
        }
        Ok(())
    }

    /// Appends the messages that are due.
    pub(super) fn write(&mut self, out: &mut Vec<u8>) {
        if std::mem::take(&mut self.ended) {
            say(END, out);
        }
        let Some(listener) = &mut self.listener else { return };
        let mut frames = [0; MAX_BYTES];
        let count = listener.take(&mut frames);
        if count == 0 {
            return;
        }
        if !std::mem::replace(&mut self.begun, true) {
            say(BEGIN, out);
        }
        say(DATA, out);
        let length_at = out.len();
        out.extend([0; 4]);
        let (frames, _) = frames[..count].as_chunks::<FRAME_BYTES>();
        for [a, b, c, d] in frames {
            self.resample([[*a, *b], [*c, *d]].map(i16::from_le_bytes), out);
        }
        let length = u32::try_from(out.len() - length_at - 4).unwrap_or(0);
        out[length_at..length_at + 4].copy_from_slice(&length.to_be_bytes());
    }

    /// Appends the frames between the previous one and this one, by linear interpolation.
    fn resample(&mut self, frame: [i16; 2], out: &mut Vec<u8>) {
        let Format { rate, mono, .. } = self.format;
        while self.phase < rate {
            let (phase, whole) = (i64::from(self.phase), i64::from(rate));
            let between = |side: usize| {
                let (one, two) = (i64::from(self.previous[side]), i64::from(frame[side]));
                one + (two - one) * phase / whole
            };
            let [left, right] = [between(0), between(1)];
            if mono {
                self.sample((left + right) / 2, out);
            } else {
                self.sample(left, out);
                self.sample(right, out);
            }
            self.phase += RATE;
        }
        self.phase -= rate;
        self.previous = frame;
    }

    /// Appends a sample of 16 bits in the client's format.
    fn sample(&self, sample: i64, out: &mut Vec<u8>) {
        let sample = i16::try_from(sample).unwrap_or(0);
        let [low, high] = sample.to_le_bytes();
        let high = if self.format.signed { high } else { high ^ 0x80 };
        match self.format.width {
            1 => out.push(high),
            2 => out.extend([low, high]),
            _ => out.extend([0, 0, low, high]),
        }
    }
}

fn say(operation: u16, out: &mut Vec<u8>) {
    out.extend(MESSAGE);
    out.extend(operation.to_be_bytes());
}

#[cfg(test)]
mod test {
    use super::*;

    fn played(format: Option<(u8, u8, u32)>, samples: &[i16]) -> Vec<u8> {
        let hub = Arc::<Hub>::default();
        let mut sound = Sound::default();
        let wake: Wake = Arc::new(|| {});
        if let Some((sample, channels, rate)) = format {
            let request = SoundRequest::Format { sample, channels, rate };
            sound.handle(request, &hub, wake.clone()).unwrap();
        }
        sound.handle(SoundRequest::Enable, &hub, wake).unwrap();
        let frames: Vec<_> = samples.iter().flat_map(|it| it.to_le_bytes()).collect();
        hub.play(&frames);
        let mut out = Vec::new();
        sound.write(&mut out);
        out
    }

    #[test]
    fn frames_have_the_format_that_the_client_chose() {
        let samples = [256, -256, i16::MAX, i16::MIN, 7, 9];
        // A frame is between the one before and itself, so the first is silent.
        let out = played(Some((3, 2, 48_000)), &samples);
        let head = [255, 1, 0, 1, 255, 1, 0, 2, 0, 0, 0, 12];
        assert_eq!(out, [&head[..], &[0, 0, 0, 0, 0, 1, 0, 255, 255, 127, 0, 128]].concat());
        assert_eq!(played(Some((0, 2, 48_000)), &samples)[12..], [128, 128, 129, 127, 255, 0]);
        assert_eq!(played(Some((2, 1, 48_000)), &samples)[12..], [0, 128, 0, 128, 0, 128]);
        let wide = played(Some((5, 1, 48_000)), &[256, 256, 32767, 32767, 0, 0]);
        assert_eq!(wide[12..], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 255, 127]);
        let ramp: Vec<_> = (0..480).flat_map(|it| [it * 10; 2]).collect();
        let slow = played(None, &ramp);
        assert_eq!(slow.len(), 12 + 441 * 4, "44.1 kHz");
        let last = i16::from_le_bytes([slow[slow.len() - 2], slow[slow.len() - 1]]);
        assert!((4770..4790).contains(&last), "{last}");
    }

    #[test]
    fn sound_ends_when_the_client_turns_it_off() {
        let hub = Arc::<Hub>::default();
        let (mut sound, mut out) = (Sound::default(), Vec::new());
        let wake: Wake = Arc::new(|| {});
        hub.play(&[1; 4]);
        sound.write(&mut out);
        assert!(out.is_empty(), "not turned on");
        sound.handle(SoundRequest::Enable, &hub, wake.clone()).unwrap();
        hub.play(&[1; 400_000]);
        sound.write(&mut out);
        assert!(out.len() < MAX_BYTES, "{} bytes", out.len());
        out.clear();
        sound.handle(SoundRequest::Disable, &hub, wake.clone()).unwrap();
        sound.write(&mut out);
        assert_eq!(out, [255, 1, 0, 0]);
        for (sample, channels, rate) in
            [(6, 2, 44_100), (3, 0, 44_100), (3, 3, 44_100), (3, 2, 0), (3, 2, 48_001)]
        {
            let request = SoundRequest::Format { sample, channels, rate };
            assert!(sound.handle(request, &hub, wake.clone()).is_err(), "{request:?}");
        }
    }
}
