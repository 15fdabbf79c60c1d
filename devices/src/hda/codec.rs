//! The codec: a DAC with a line-out pin, and an ADC with a microphone pin (HDA 7).
//!
//! It has one format, because its listeners have one: guests resample better than we would.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

/// Vendor and device ID: those of QEMU's duplex codec with amplifiers, which has these widgets.
/// Windows and Linux have no driver for this ID, and use the one for audio functions in general.
/// Its interface was made for such codecs, so an ID of our own would gain nothing.
const ID: u32 = 0x1af4_0022;
const REVISION: u32 = 0x0010_0101;

// Nodes.
const ROOT: u8 = 0;
const FUNCTION: u8 = 1;
const DAC: u8 = 2;
const LINE_OUT: u8 = 3;
const ADC: u8 = 4;
const MICROPHONE: u8 = 5;

/// 48 kHz, 16 bits, two channels, as converters and streams write it (3.7.1).
pub(super) const FORMAT: u16 = 0x0011;
/// The same as a capability (7.3.4.7).
const PCM: u32 = 1 << 17 | 1 << 6;
/// Steps of the amplifiers, of one decibel. The last one changes nothing.
const STEPS: u8 = 74;
const MUTE: u8 = 0x80;
/// Mute, step size, number of steps, offset of 0 dB (7.3.4.10).
const AMPLIFIER: u32 = 1 << 31 | 3 << 16 | (STEPS as u32) << 8 | STEPS as u32;
/// Power states D0 and D3 (7.3.4.12).
const POWER_STATES: u32 = 1 << 3 | 1;

/// Jacks without presence detection (7.3.3.31): line-out, green, first group; microphone, pink,
/// second group.
const LINE_OUT_JACK: u32 = 0x0000_4010;
const MICROPHONE_JACK: u32 = 0x00a0_9020;
const OUTPUT_ENABLED: u8 = 1 << 6;
const INPUT_ENABLED: u8 = 1 << 5;

/// An amplitude: [`UNITY`] changes nothing.
type Level = u64;
const UNITY: Level = 1 << 16;
const LEVELS: [Level; STEPS as usize + 1] = levels();

const fn levels() -> [Level; STEPS as usize + 1] {
    let mut levels = [UNITY; STEPS as usize + 1];
    // In units of 2^-46, so that rounding does not add up.
    let (mut at, mut level) = (STEPS as usize, 1_u64 << 46);
    while at > 0 {
        at -= 1;
        // One decibel: 10^(-1/20) in units of 2^-16.
        level = (level >> 16) * 58_409;
        levels[at] = level >> 30;
    }
    levels
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Codec {
    dac: Converter,
    adc: Converter,
    /// Pin widget control of line-out and microphone.
    pins: [u8; 2],
    /// The power state of the function.
    power: u8,
}

impl Default for Codec {
    fn default() -> Self {
        let [dac, adc] = [(); 2].map(|()| Converter::default());
        Self { dac, adc, pins: [OUTPUT_ENABLED, INPUT_ENABLED], power: 0 }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Converter {
    format: u16,
    /// The stream in bits 7:4, where 0 is none, and its lowest channel.
    stream: u8,
    /// Gain and mute of the left and the right channel.
    amplifier: [u8; 2],
}

impl Default for Converter {
    fn default() -> Self {
        Self { format: FORMAT, stream: 0, amplifier: [STEPS; 2] }
    }
}

impl Converter {
    fn carries(&self, stream: u8, format: u16) -> bool {
        let mine = self.stream >> 4;
        mine != 0 && mine == stream && [self.format, format] == [FORMAT; 2]
    }

    /// Applies the amplifier to whole frames.
    fn amplify(&self, frames: &mut [u8]) {
        let level = |setting: u8| match setting & MUTE {
            0 => LEVELS.get(usize::from(setting)).copied().unwrap_or(UNITY),
            _ => 0,
        };
        let levels = self.amplifier.map(level);
        if levels == [UNITY; 2] {
            return;
        }
        let (samples, _) = frames.as_chunks_mut::<2>();
        for (sample, level) in samples.iter_mut().zip(levels.into_iter().cycle()) {
            let louder = i64::from(i16::from_le_bytes(*sample)) * level.cast_signed();
            let louder = i16::try_from(louder >> 16).expect("no level is above unity");
            *sample = louder.to_le_bytes();
        }
    }

    fn set_amplifier(&mut self, payload: u16) {
        let [setting, which] = payload.to_le_bytes();
        let gain = (setting & !MUTE).min(STEPS) | setting & MUTE;
        for (side, bit) in [(0, 1 << 5), (1, 1 << 4)] {
            if which & bit != 0 {
                self.amplifier[side] = gain;
            }
        }
    }
}

impl Codec {
    /// Refuses values that no guest can set.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let settings = [&self.dac, &self.adc].map(|it| it.amplifier).concat();
        let fits = settings.iter().all(|setting| setting & !MUTE <= STEPS);
        ensure!(fits, "an amplifier of the codec has no such step");
        ensure!(self.power < 4, "the codec has no power state {}", self.power);
        Ok(())
    }

    /// Whether the DAC plays this stream.
    pub(super) fn plays(&self, stream: u8, format: u16) -> bool {
        self.dac.carries(stream, format)
    }

    pub(super) fn records(&self, stream: u8, format: u16) -> bool {
        self.adc.carries(stream, format)
    }

    pub(super) fn amplify_output(&self, frames: &mut [u8]) {
        self.dac.amplify(frames);
    }

    pub(super) fn amplify_input(&self, frames: &mut [u8]) {
        self.adc.amplify(frames);
    }

    /// Runs a command: a node in bits 27:20, then a verb of 12 bits with a payload of 8, or one of
    /// 4 bits with a payload of 16 (7.1). The response to an unknown verb is 0.
    pub(super) fn command(&mut self, command: u32) -> u32 {
        let [low, high, verb, node] = (command & 0x0fff_ffff).to_le_bytes();
        let node = node << 4 | verb >> 4;
        let (verb, payload) = (verb & 0xf, u16::from_le_bytes([low, high]));
        match verb {
            0x7 => {
                self.set(node, high, low);
                0
            }
            0xf => self.get(node, high, low),
            _ => self.convert(node, verb, payload),
        }
    }

    fn converter(&mut self, node: u8) -> Option<&mut Converter> {
        match node {
            DAC => Some(&mut self.dac),
            ADC => Some(&mut self.adc),
            _ => None,
        }
    }

    fn pin(&mut self, node: u8) -> Option<&mut u8> {
        match node {
            LINE_OUT => Some(&mut self.pins[0]),
            MICROPHONE => Some(&mut self.pins[1]),
            _ => None,
        }
    }

    /// Verbs of 4 bits, which belong to converters.
    fn convert(&mut self, node: u8, verb: u8, payload: u16) -> u32 {
        let Some(converter) = self.converter(node) else { return 0 };
        // The DAC has an output amplifier only, the ADC an input amplifier only.
        let direction = if node == DAC { 1 << 15 } else { 1 << 14 };
        match verb {
            0x2 => converter.format = payload,
            0x3 if payload & direction != 0 => converter.set_amplifier(payload),
            0xa => return converter.format.into(),
            0xb if (payload & 1 << 15 != 0) == (node == DAC) => {
                return converter.amplifier[usize::from(payload & 1 << 13 == 0)].into();
            }
            _ => {}
        }
        0
    }

    fn set(&mut self, node: u8, verb: u8, payload: u8) {
        match verb {
            0x05 if node == FUNCTION => self.power = payload & 3,
            0x06 => {
                if let Some(converter) = self.converter(node) {
                    converter.stream = payload;
                }
            }
            0x07 => {
                let enable = if node == LINE_OUT { OUTPUT_ENABLED } else { INPUT_ENABLED };
                if let Some(pin) = self.pin(node) {
                    *pin = payload & enable;
                }
            }
            0xff if node == FUNCTION => *self = Self::default(),
            _ => {}
        }
    }

    fn get(&mut self, node: u8, verb: u8, payload: u8) -> u32 {
        match verb {
            0x00 => parameter(node, payload),
            // The connection list, from which the connection is selected.
            0x02 if payload < 4 => match node {
                LINE_OUT => DAC.into(),
                ADC => MICROPHONE.into(),
                _ => 0,
            },
            // The power state that was set, and the actual one.
            0x05 if node == FUNCTION => u32::from(self.power) << 4 | u32::from(self.power),
            0x06 => self.converter(node).map_or(0, |it| it.stream.into()),
            0x07 => self.pin(node).map_or(0, |it| (*it).into()),
            0x1c => match node {
                LINE_OUT => LINE_OUT_JACK,
                MICROPHONE => MICROPHONE_JACK,
                _ => 0,
            },
            0x20 if node == FUNCTION => ID,
            _ => 0,
        }
    }
}

/// 7.3.4
fn parameter(node: u8, id: u8) -> u32 {
    match (node, id) {
        (ROOT, 0x00) => ID,
        (ROOT, 0x02) => REVISION,
        // The first subordinate node, and the number of them.
        (ROOT, 0x04) => 1 << 16 | 1,
        (FUNCTION, 0x04) => 2 << 16 | 4,
        // An audio function, without unsolicited responses.
        (FUNCTION, 0x05) => 1,
        // The delays of output and input, in frames.
        (FUNCTION, 0x08) => 8 << 8 | 8,
        (FUNCTION, 0x0f) => POWER_STATES,
        // The type, and what the widget has of: connection list, format, amplifier parameters, an
        // output amplifier, an input amplifier, two channels.
        (DAC, 0x09) => 0x01d,
        (ADC, 0x09) => 1 << 20 | 0x11b,
        (LINE_OUT, 0x09) => 4 << 20 | 0x101,
        (MICROPHONE, 0x09) => 4 << 20 | 0x001,
        (FUNCTION | DAC | ADC, 0x0a) => PCM,
        // Plain PCM.
        (FUNCTION | DAC | ADC, 0x0b) => 1,
        (LINE_OUT, 0x0c) => 1 << 4,
        (MICROPHONE, 0x0c) => 1 << 5,
        (ADC, 0x0d) | (DAC, 0x12) => AMPLIFIER,
        // The length of the connection list.
        (LINE_OUT | ADC, 0x0e) => 1,
        _ => 0,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn samples(numbers: &[i16]) -> Vec<u8> {
        numbers.iter().flat_map(|it| it.to_le_bytes()).collect()
    }

    #[test]
    fn amplifiers_have_steps_of_one_decibel_and_mute() {
        let mut codec = Codec::default();
        let mut played = |left: u32, right: u32| {
            codec.command(0x0023_a000 | left);
            codec.command(0x0023_9000 | right);
            let mut frames = samples(&[i16::MIN, i16::MAX]);
            codec.amplify_output(&mut frames);
            frames
        };
        assert_eq!(played(74, 74), samples(&[i16::MIN, i16::MAX]));
        assert_eq!(played(127, 68), samples(&[i16::MIN, 16_421]), "at most 74; -6 dB");
        assert_eq!(played(54, 0xca), samples(&[-3277, 0]), "-20 dB; muted");
        assert_eq!(played(0, 34), samples(&[-7, 327]), "-74 dB; -40 dB");
        assert_eq!(codec.command(0x002b_a000), 0);
        assert_eq!(codec.command(0x002b_8000), 34);
        assert_eq!(codec.command(0x002b_0000), 0, "the DAC has no input amplifier");
    }

    #[test]
    fn a_converter_carries_the_stream_it_is_set_to_in_the_one_format() {
        let mut codec = Codec::default();
        assert!(!codec.plays(0, FORMAT), "stream 0 is none");
        codec.command(0x0027_0650);
        assert!(codec.plays(5, FORMAT) && !codec.plays(4, FORMAT) && !codec.records(5, FORMAT));
        assert!(!codec.plays(5, 0x4011), "44.1 kHz");
        codec.command(0x0022_4011);
        assert!(!codec.plays(5, FORMAT));
        codec.command(0x0017_ff00);
        assert_eq!(codec, Codec::default());
    }
}
