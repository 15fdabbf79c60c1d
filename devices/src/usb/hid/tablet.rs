//! A tablet: a pointer with absolute positions, which viewers on the network need, and for which
//! all systems have a driver. Its report has five buttons, the position, the wheel, and the
//! horizontal wheel.
//!
//! Movements that the guest has not fetched yet are merged. Changes of buttons are kept apart while
//! there is room.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{Model, build};
use crate::device::Device;
use crate::grants::{Build, Grants};
use host::input::{Event, Position};

/// `--device usb-tablet`: an absolute pointer at the first free USB port, which does not drift like
/// a mouse.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        build::<Tablet>(grants, "USB tablet", (0, 0))
    }

    fn is_usb(&self) -> bool {
        true
    }
}

/// The maximum number of positions that the guest has not fetched.
const MAX_POSITIONS: usize = 32;
const BUTTONS: u8 = 0x1f;
/// Wheel notches: the maximum per report, and the maximum that is pending.
const NOTCHES: i32 = 127;
const MAX_NOTCHES: i32 = 1024;

const REPORT: &[u8] = &[
    0x05, 0x01, 0x09, 0x02, 0xa1, 0x01, 0x09, 0x01, 0xa1,
    0x00, // Generic Desktop: Mouse, Pointer
    0x05, 0x09, 0x19, 0x01, 0x29, 0x05, 0x15, 0x00, 0x25, 0x01, 0x75, 0x01, 0x95, 0x05, 0x81, 0x02,
    0x75, 0x03, 0x95, 0x01, 0x81, 0x01, // padding of the byte of the buttons
    0x05, 0x01, 0x09, 0x30, 0x09, 0x31, 0x15, 0x00, 0x26, 0xff, 0x7f, 0x35, 0x00, 0x46, 0xff, 0x7f,
    0x75, 0x10, 0x95, 0x02, 0x81, 0x02, // X and Y, absolute
    0x09, 0x38, 0x15, 0x81, 0x25, 0x7f, 0x35, 0x00, 0x45, 0x00, 0x75, 0x08, 0x95, 0x01, 0x81, 0x06,
    0x05, 0x0c, 0x0a, 0x38, 0x02, 0x95, 0x01, 0x81, 0x06, // Consumer: AC Pan
    0xc0, 0xc0,
];

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Tablet {
    positions: VecDeque<Position>,
    /// The position of the last report, without notches.
    last: Position,
}

impl Model for Tablet {
    const REPORTS: &'static [&'static [u8]] = &[REPORT];

    fn take(&mut self, event: Event) -> bool {
        let Event::Position(new) = event else { return false };
        let mut new = Position {
            x: new.x.min(Position::MAX),
            y: new.y.min(Position::MAX),
            buttons: new.buttons & BUTTONS,
            ..new
        };
        let full = self.positions.len() >= MAX_POSITIONS;
        if let Some(old) = self.positions.pop_back_if(|it| full || it.buttons == new.buttons) {
            new.wheel = new.wheel.saturating_add(old.wheel);
            new.pan = new.pan.saturating_add(old.pan);
        }
        new.wheel = new.wheel.clamp(-MAX_NOTCHES, MAX_NOTCHES);
        new.pan = new.pan.clamp(-MAX_NOTCHES, MAX_NOTCHES);
        self.positions.push_back(new);
        true
    }

    fn next_report(&mut self, _: usize) -> Option<Vec<u8>> {
        let mut position = self.positions.pop_front()?;
        let notches = |all: &mut i32| {
            let now = (*all).clamp(-NOTCHES, NOTCHES);
            *all -= now;
            i8::try_from(now).expect("clamped")
        };
        let (wheel, pan) = (notches(&mut position.wheel), notches(&mut position.pan));
        if (position.wheel, position.pan) != (0, 0) {
            self.positions.push_front(position);
        }
        self.last = Position { wheel: 0, pan: 0, ..position };
        Some(self.report(wheel, pan))
    }

    fn last_report(&self, _: usize, number: u8) -> Option<Vec<u8>> {
        (number == 0).then(|| self.report(0, 0))
    }
}

impl Tablet {
    fn report(&self, wheel: i8, pan: i8) -> Vec<u8> {
        let Position { x, y, buttons, .. } = self.last;
        let ([x0, x1], [y0, y1]) = (x.to_le_bytes(), y.to_le_bytes());
        let ([wheel], [pan]) = (wheel.to_le_bytes(), pan.to_le_bytes());
        vec![buttons, x0, x1, y0, y1, wheel, pan]
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn at(x: u16, buttons: u8, wheel: i32) -> Event {
        Event::Position(Position { x, y: 0xffff, wheel, pan: -wheel, buttons })
    }

    fn drain(tablet: &mut Tablet) -> Vec<(u16, u8, i8)> {
        let reports = std::iter::from_fn(|| tablet.next_report(0));
        let read = |it: Vec<u8>| {
            assert_eq!((it.len(), &it[3..5]), (7, &[0xff, 0x7f][..]), "at the bottom edge");
            (u16::from_le_bytes([it[1], it[2]]), it[0], i8::from_le_bytes([it[5]]))
        };
        reports.map(read).collect()
    }

    #[test]
    fn movements_are_merged_and_clicks_are_not() {
        let mut tablet = Tablet::default();
        for event in [at(1, 0, 0), at(2, 0, 1), at(3, 1, 0), at(3, 0, 0), at(4, 0, 2)] {
            assert!(tablet.take(event));
        }
        assert_eq!(drain(&mut tablet), [(2, 0, 1), (3, 1, 0), (4, 0, 2)]);
        assert_eq!(tablet.last_report(0, 0).unwrap()[..3], [0, 4, 0]);
    }

    #[test]
    fn large_wheel_movements_are_split() {
        let mut tablet = Tablet::default();
        tablet.take(at(1, 0, 300));
        let turned: i32 = drain(&mut tablet).iter().map(|it| i32::from(it.2)).sum();
        assert_eq!(turned, 300);
        assert!((0..10).all(|_| tablet.take(at(1, 0, -i32::MAX))));
        assert_eq!(drain(&mut tablet).iter().map(|it| i32::from(it.2)).sum::<i32>(), -MAX_NOTCHES);
    }

    #[test]
    fn a_slow_guest_gets_the_last_state() {
        let mut tablet = Tablet::default();
        for round in 0..10_000_u16 {
            tablet.take(at(round, u8::from(round % 2 == 0) | 0xe0, 0));
        }
        let reports = drain(&mut tablet);
        assert!(reports.len() <= MAX_POSITIONS);
        assert_eq!(reports.last(), Some(&(9999, 0, 0)));
    }
}
