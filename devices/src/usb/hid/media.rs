//! Media keys: volume, playback, browser and sleep. As on other keyboards, they are an interface of
//! their own beside the boot keyboard that firmware uses, with a report for each of two usage pages
//! (HID Usage Tables, 4 and 15).

use serde::{Deserialize, Serialize};

use crate::presses::Presses;
use host::input::Key;

/// Report IDs.
const CONSUMER: u8 = 1;
const SYSTEM: u8 = 2;
/// Keys of the Consumer page per report.
const SLOTS: usize = 3;
/// The first usage of the System report.
const FIRST: u16 = 0x81;

/// Three usages of the Consumer page, and three bits for power, sleep and wake-up.
pub(super) const REPORT: &[u8] = &[
    0x05, 0x0c, 0x09, 0x01, 0xa1, 0x01, 0x85, CONSUMER, // Consumer: Consumer Control
    0x19, 0x00, 0x2a, 0xff, 0x03, 0x15, 0x00, 0x26, 0xff, 0x03, 0x75, 0x10, 0x95, 0x03, 0x81, 0x00,
    0xc0, // an array of keys
    0x05, 0x01, 0x09, 0x80, 0xa1, 0x01, 0x85, SYSTEM, // Generic Desktop: System Control
    0x19, 0x81, 0x29, 0x83, 0x15, 0x00, 0x25, 0x01, 0x75, 0x01, 0x95, 0x03, 0x81, 0x02, 0x75, 0x05,
    0x95, 0x01, 0x81, 0x01, 0xc0, // padding of their byte
];

/// Scan codes with the prefix E0, and their usages in Microsoft's table.
const USAGES: &[(u8, u16)] = &[
    (0x10, 0xb6),  // Scan Previous Track
    (0x19, 0xb5),  // Scan Next Track
    (0x20, 0xe2),  // Mute
    (0x21, 0x192), // Calculator
    (0x22, 0xcd),  // Play/Pause
    (0x24, 0xb7),  // Stop
    (0x2e, 0xea),  // Volume Decrement
    (0x30, 0xe9),  // Volume Increment
    (0x32, 0x223), // browser home
    (0x65, 0x221), // search
    (0x66, 0x22a), // bookmarks
    (0x67, 0x227), // refresh
    (0x68, 0x226), // stop loading
    (0x69, 0x225), // forward
    (0x6a, 0x224), // back
    (0x6b, 0x194), // file manager
    (0x6c, 0x18a), // mail
    (0x6d, 0x183), // media player
    (0x5f, 0x82),  // System Sleep
    (0x63, 0x83),  // System Wake Up
];

/// The usage of a media key: on the System page if below 0x84, otherwise on the Consumer page.
fn of(key: Key) -> Option<u16> {
    let [code, prefix] = key.code().to_le_bytes();
    USAGES.iter().find(|it| prefix == 0xe0 && it.0 == code).map(|it| it.1)
}

fn is_system(usage: u16) -> bool {
    (FIRST..FIRST + 3).contains(&usage)
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Media(Presses<u16>);

impl Media {
    /// Returns false if it is not a media key.
    pub(super) fn take(&mut self, key: Key, down: bool) -> bool {
        let usage = of(key);
        usage.map(|usage| self.0.press(usage, down)).is_some()
    }

    pub(super) fn next_report(&mut self) -> Option<Vec<u8>> {
        let (usage, _) = self.0.next()?;
        self.current_report(if is_system(usage) { SYSTEM } else { CONSUMER })
    }

    pub(super) fn current_report(&self, number: u8) -> Option<Vec<u8>> {
        let down = &self.0.down;
        let mut report = vec![number];
        match number {
            CONSUMER => {
                // The keys that were pressed last. More at once are not useful.
                let usages = down.iter().rev().filter(|it| !is_system(**it)).take(SLOTS);
                usages.for_each(|it| report.extend(it.to_le_bytes()));
                report.resize(1 + 2 * SLOTS, 0);
            }
            SYSTEM => {
                let usages = down.iter().filter(|it| is_system(**it));
                report.push(usages.fold(0, |bits, it| bits | 1 << (it - FIRST)));
            }
            _ => return None,
        }
        Some(report)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn each_key_is_in_the_report_of_its_page() {
        let mut media = Media::default();
        let mut press = |code, down| assert!(media.take(Key::new(code).unwrap(), down));
        for (code, down) in
            [(0xe030, true), (0xe05f, true), (0xe022, true), (0xe030, false), (0xe05f, false)]
        {
            press(code, down);
        }
        let reports: Vec<_> = std::iter::from_fn(|| media.next_report()).collect();
        let expected: [&[u8]; 5] = [
            &[1, 0xe9, 0, 0, 0, 0, 0],
            &[2, 0b10],
            &[1, 0xcd, 0, 0xe9, 0, 0, 0],
            &[1, 0xcd, 0, 0, 0, 0, 0],
            &[2, 0],
        ];
        assert_eq!(reports, expected);
        assert_eq!(media.current_report(0), None, "these reports have IDs");
        assert!(!media.take(Key::new(0x1e).unwrap(), true), "letters are on the other interface");
    }

    #[test]
    fn excess_keys_replace_the_oldest() {
        let mut media = Media::default();
        for (code, _) in USAGES {
            media.take(Key::new(0xe000 | u16::from(*code)).unwrap(), true);
        }
        let last =
            std::iter::from_fn(|| media.next_report()).filter(|it| it[0] == 1).last().unwrap();
        assert_eq!(last, [1, 0x83, 1, 0x8a, 1, 0x94, 1]);
        for (code, _) in USAGES {
            media.take(Key::new(0xe000 | u16::from(*code)).unwrap(), false);
        }
        while media.next_report().is_some() {}
        assert_eq!(media.current_report(1).unwrap(), [1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(media.current_report(2).unwrap(), [2, 0]);
    }
}
