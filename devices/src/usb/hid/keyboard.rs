//! A keyboard with 101 keys and more. It uses the report of the boot protocol (HID 1.11, B.1),
//! which firmware supports. Its media keys are a second interface.
//!
//! The guest receives presses and releases, and repeats keys by itself. Key repeats from the host's
//! keyboard are not passed on.

use serde::{Deserialize, Serialize};

use super::media::{self, Media};
use super::{Model, build, usages};
use crate::device::Device;
use crate::grants::{Build, Grants};
use crate::presses::Presses;
use host::input::{Event, Key, Lights};

/// `--device usb-keyboard`: a keyboard at the first free USB port.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        build::<Keyboard>(grants, "USB keyboard", (1, 1))
    }

    fn is_usb(&self) -> bool {
        true
    }
}

/// Keys per report, besides Ctrl, Shift, Alt and the logo keys.
const KEYS: usize = 6;
/// ErrorRollOver: the report for more keys.
const TOO_MANY: u8 = 1;
/// The first of the eight modifiers, which have a bit each.
const MODIFIERS: u8 = 0xe0;

/// The report of the boot protocol: modifiers, a reserved byte, six keys, and five lights as
/// output. Keys go up to 0xFF, because keys for other languages are above 101.
const REPORT: &[u8] = &[
    0x05, 0x01, 0x09, 0x06, 0xa1, 0x01, // Generic Desktop: Keyboard
    0x05, 0x07, 0x19, 0xe0, 0x29, 0xe7, 0x15, 0x00, 0x25, 0x01, 0x75, 0x01, 0x95, 0x08, 0x81, 0x02,
    0x75, 0x08, 0x95, 0x01, 0x81, 0x01, // reserved
    0x05, 0x08, 0x19, 0x01, 0x29, 0x05, 0x75, 0x01, 0x95, 0x05, 0x91, 0x02, // lights
    0x75, 0x03, 0x95, 0x01, 0x91, 0x01, // padding of their byte
    0x05, 0x07, 0x19, 0x00, 0x2a, 0xff, 0x00, 0x15, 0x00, 0x26, 0xff, 0x00, 0x75, 0x08, 0x95, 0x06,
    0x81, 0x00, 0xc0, // an array of keys
];

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Keyboard {
    keys: Presses<u8>,
    media: Media,
    lights: u8,
}

impl Keyboard {
    fn report(&self) -> Vec<u8> {
        let mut report = vec![0; 2];
        let (modifiers, keys): (Vec<u8>, Vec<u8>) =
            self.keys.down.iter().partition(|usage| **usage >= MODIFIERS);
        report[0] = modifiers.iter().fold(0, |bits, usage| bits | 1 << (usage & 7));
        let keys = if keys.len() > KEYS { vec![TOO_MANY; KEYS] } else { keys };
        report.extend(keys);
        report.resize(2 + KEYS, 0);
        report
    }
}

impl Model for Keyboard {
    const REPORTS: &'static [&'static [u8]] = &[REPORT, media::REPORT];

    fn take(&mut self, event: Event) -> bool {
        let Event::Key(key, down) = event else { return false };
        let Some(usage) = usages::of(key) else { return self.media.take(key, down) };
        // These keys send no release, so they are released as soon as they are pressed.
        let once = [Key::HANGUL, Key::HANJA].contains(&key);
        if down || !once {
            self.keys.press(usage, down);
        }
        if once {
            self.keys.press(usage, false);
        }
        true
    }

    fn next_report(&mut self, interface: usize) -> Option<Vec<u8>> {
        if interface > 0 {
            return self.media.next_report();
        }
        self.keys.next().map(|_| self.report())
    }

    fn last_report(&self, interface: usize, number: u8) -> Option<Vec<u8>> {
        if interface > 0 {
            return self.media.current_report(number);
        }
        (number == 0).then(|| self.report())
    }

    fn output(&mut self, report: &[u8]) {
        if let [lights, ..] = report {
            self.lights = *lights;
        }
    }

    fn lights(&self) -> Option<Lights> {
        let lit = |bit: u32| self.lights >> bit & 1 != 0;
        Some(Lights { num: lit(0), caps: lit(1), scroll: lit(2) })
    }

    fn is_idle(&self) -> bool {
        // Firmware never reads the reports of the other interface.
        self.keys.is_idle()
    }

    fn has_room(&self) -> bool {
        self.keys.has_room()
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::presses::LIMIT;

    fn press(keyboard: &mut Keyboard, code: u16, down: bool) {
        assert!(keyboard.take(Event::Key(Key::new(code).unwrap(), down)));
    }

    fn drain(keyboard: &mut Keyboard) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| keyboard.next_report(0)).collect()
    }

    #[test]
    fn each_key_event_is_a_report_and_repeats_are_ignored() {
        let mut keyboard = Keyboard::default();
        for (code, down) in
            [(0x2a, true), (0x1e, true), (0x1e, true), (0x1e, false), (0x2a, false), (0x30, false)]
        {
            press(&mut keyboard, code, down);
        }
        assert!(!keyboard.is_idle());
        let reports = drain(&mut keyboard);
        assert!(keyboard.is_idle());
        let expected: [[u8; 3]; 4] = [[2, 0, 0], [2, 0, 4], [2, 0, 0], [0, 0, 0]];
        assert_eq!(reports.iter().map(|it| &it[..3]).collect::<Vec<_>>(), expected);
        assert!(reports.iter().all(|it| it.len() == 8));
    }

    #[test]
    fn a_full_buffer_drops_whole_keys_and_leaves_none_pressed() {
        let mut keyboard = Keyboard::default();
        let codes = || (0x02..0x54).filter(|code| usages::of(Key::new(*code).unwrap()).is_some());
        for _ in 0..LIMIT {
            codes().for_each(|code| press(&mut keyboard, code, true));
            codes().for_each(|code| press(&mut keyboard, code, false));
        }
        let reports = drain(&mut keyboard);
        assert!((LIMIT..LIMIT + 100).contains(&reports.len()), "{}", reports.len());
        assert!(reports.iter().any(|it| it[2..] == [TOO_MANY; KEYS]));
        assert!(keyboard.has_room());
        assert_eq!(reports.last().unwrap()[..], [0; 8]);
    }

    #[test]
    fn hangul_is_released_automatically() {
        let mut keyboard = Keyboard::default();
        assert!(keyboard.take(Event::Key(Key::HANGUL, true)));
        assert!(keyboard.take(Event::Key(Key::HANGUL, false)));
        let keys: Vec<u8> = drain(&mut keyboard).iter().map(|it| it[2]).collect();
        assert_eq!(keys, [0x90, 0]);
    }

    #[test]
    fn media_keys_use_their_own_interface_and_do_not_block_others() {
        let mut keyboard = Keyboard::default();
        press(&mut keyboard, 0xe020, true);
        press(&mut keyboard, 0x1e, true);
        assert_eq!(drain(&mut keyboard).len(), 1);
        assert!(keyboard.is_idle());
        assert_eq!(keyboard.next_report(1).unwrap()[..3], [1, 0xe2, 0]);
        assert_eq!((keyboard.next_report(1), keyboard.last_report(0, 1)), (None, None));
        assert_eq!(keyboard.last_report(0, 0).unwrap()[2], 4, "the last report again");
    }

    #[test]
    fn lights_follow_the_boot_protocol() {
        let mut keyboard = Keyboard::default();
        keyboard.output(&[]);
        assert_eq!(keyboard.lights(), Some(Lights::default()));
        keyboard.output(&[0b011]);
        assert_eq!(keyboard.lights(), Some(Lights { num: true, caps: true, scroll: false }));
    }
}
