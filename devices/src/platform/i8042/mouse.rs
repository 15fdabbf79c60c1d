//! A PS/2 mouse that becomes an IntelliMouse (wheel) or IntelliMouse Explorer (five buttons) when a
//! driver sets the sequence of sample rates for it (Microsoft, "Mouse Products for PS/2").
//!
//! Movement is never lost: it accumulates until the guest reads it. The sample rate and the
//! resolution are stored and reported, but do not slow or scale the movement of the host's pointer.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{ACK, Answers, BAT_PASSED, RESEND};
use host::input::Motion;

const SCALING_1_1: u8 = 0xe6;
const SCALING_2_1: u8 = 0xe7;
const SET_RESOLUTION: u8 = 0xe8;
const STATUS: u8 = 0xe9;
const STREAM: u8 = 0xea;
const READ_DATA: u8 = 0xeb;
const LEAVE_WRAP: u8 = 0xec;
const WRAP: u8 = 0xee;
const REMOTE: u8 = 0xf0;
const READ_ID: u8 = 0xf2;
const SET_RATE: u8 = 0xf3;
const ENABLE: u8 = 0xf4;
const DISABLE: u8 = 0xf5;
const DEFAULTS: u8 = 0xf6;
const RESEND_LAST: u8 = 0xfe;
const RESET: u8 = 0xff;

/// The sequences of sample rates, oldest first, and the ID that the mouse then has.
const KNOCKS: [([u8; 3], u8); 2] = [([200, 100, 80], WHEEL), ([200, 200, 80], EXPLORER)];
const WHEEL: u8 = 3;
const EXPLORER: u8 = 4;

/// The maximum number of unread button changes.
const MAX_CHANGES: usize = 16;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Mouse {
    id: u8,
    rate: u8,
    resolution: u8,
    scaling: bool,
    remote: bool,
    wrap: bool,
    reporting: bool,
    /// The last three sample rates.
    knocked: [u8; 3],
    /// The command that waits for its parameter.
    command: Option<u8>,
    answers: Answers,
    /// The unread rest of the current packet.
    packet: VecDeque<u8>,
    /// The last packet or answer, for `RESEND_LAST`.
    last: Vec<u8>,
    /// Movement that is not reported yet, one entry for each state of the buttons.
    moves: VecDeque<Motion>,
    buttons: u8,
}

impl Default for Mouse {
    fn default() -> Self {
        Self {
            id: 0,
            rate: 100,
            resolution: 2,
            scaling: false,
            remote: false,
            wrap: false,
            reporting: false,
            knocked: [0; 3],
            command: None,
            answers: Answers::default(),
            packet: VecDeque::new(),
            last: Vec::new(),
            moves: VecDeque::new(),
            buttons: 0,
        }
    }
}

impl Mouse {
    /// Queues a movement. Returns false if the guest has disabled reports.
    pub(super) fn motion(&mut self, motion: Motion) -> bool {
        let changed = motion.buttons != self.buttons;
        self.buttons = motion.buttons;
        if !(self.reporting || self.remote) {
            return false;
        }
        let still = Motion { buttons: 0, ..motion } == Motion::default();
        if still && !changed {
            return true;
        }
        let full = self.moves.len() >= MAX_CHANGES;
        match self.moves.back_mut() {
            Some(last) if full || last.buttons == motion.buttons => {
                last.dx = last.dx.saturating_add(motion.dx);
                last.dy = last.dy.saturating_add(motion.dy);
                last.wheel = last.wheel.saturating_add(motion.wheel);
                last.buttons = motion.buttons;
            }
            _ => self.moves.push_back(motion),
        }
        true
    }

    pub(super) fn pop(&mut self) -> Option<u8> {
        if let Some(answer) = self.answers.pop() {
            return Some(answer);
        }
        if self.packet.is_empty() && self.reporting && !self.remote && !self.moves.is_empty() {
            let packet = self.report();
            self.packet.extend(&packet);
            self.last = packet;
        }
        self.packet.pop_front()
    }

    /// Builds a packet from the movement that is not reported yet.
    fn report(&mut self) -> Vec<u8> {
        let now = Motion { buttons: self.buttons, ..Motion::default() };
        let motion = self.moves.front_mut().map_or(now, |first| {
            let part = Motion {
                dx: first.dx.clamp(-127, 127),
                dy: first.dy.clamp(-127, 127),
                wheel: first.wheel.clamp(-7, 7),
                buttons: first.buttons,
            };
            first.dx -= part.dx;
            first.dy -= part.dy;
            first.wheel -= part.wheel;
            part
        });
        if self.moves.front().is_some_and(|it| (it.dx, it.dy, it.wheel) == (0, 0, 0)) {
            self.moves.pop_front();
        }
        let double = self.scaling && !self.remote;
        let scaled = |count| if double { scale(count) } else { count };
        // On a mouse, up is positive. On a screen, down is positive.
        let (dx, dy) = (scaled(motion.dx), scaled(-motion.dy));
        let signs = u8::from(dx < 0) << 4 | u8::from(dy < 0) << 5;
        let mut packet = vec![0x08 | motion.buttons & 7 | signs, low_byte(dx), low_byte(dy)];
        match self.id {
            WHEEL => packet.push(low_byte(-motion.wheel)),
            EXPLORER => packet.push(low_byte(-motion.wheel) & 0xf | (motion.buttons & 0x18) << 1),
            _ => {}
        }
        packet
    }

    pub(super) fn write(&mut self, byte: u8) {
        // A packet that is being sent is discarded.
        self.packet.clear();
        if self.wrap && byte != LEAVE_WRAP && byte != RESET {
            return self.answers.give(&[byte]);
        }
        match self.command.take() {
            Some(SET_RATE) if byte < SCALING_1_1 => self.set_rate(byte),
            Some(SET_RESOLUTION) if byte < 4 => {
                self.resolution = byte;
                self.answers.give(&[ACK]);
            }
            _ => self.command(byte),
        }
    }

    fn command(&mut self, byte: u8) {
        let mut answer = vec![ACK];
        match byte {
            SCALING_1_1 | SCALING_2_1 => self.scaling = byte == SCALING_2_1,
            SET_RESOLUTION | SET_RATE => self.command = Some(byte),
            STATUS => answer.extend(self.status()),
            STREAM => self.set_mode(false),
            REMOTE => self.set_mode(true),
            READ_DATA => {
                self.last = self.report();
                answer.extend(&self.last);
            }
            LEAVE_WRAP | WRAP => self.wrap = byte == WRAP,
            READ_ID => answer.push(self.id),
            ENABLE | DISABLE => {
                self.moves.clear();
                self.reporting = byte == ENABLE;
            }
            DEFAULTS => self.set_defaults(),
            RESEND_LAST => answer = self.last.clone(),
            RESET => {
                self.set_defaults();
                (self.id, self.knocked, self.wrap) = (0, [0; 3], false);
                answer.extend([BAT_PASSED, self.id]);
            }
            _ => answer = vec![RESEND],
        }
        if byte != RESEND_LAST && byte != READ_DATA {
            self.last.clone_from(&answer);
        }
        self.answers.give(&answer);
    }

    fn set_rate(&mut self, rate: u8) {
        self.rate = rate;
        self.knocked = [self.knocked[1], self.knocked[2], rate];
        if let Some((_, id)) = KNOCKS.iter().find(|(knock, _)| *knock == self.knocked) {
            self.id = *id;
        }
        self.answers.give(&[ACK]);
    }

    fn set_mode(&mut self, remote: bool) {
        self.moves.clear();
        self.remote = remote;
    }

    fn set_defaults(&mut self) {
        let Self { rate, resolution, scaling, remote, reporting, .. } = Self::default();
        (self.rate, self.resolution, self.scaling) = (rate, resolution, scaling);
        (self.remote, self.reporting) = (remote, reporting);
        self.moves.clear();
    }

    fn status(&self) -> [u8; 3] {
        let left_middle_right =
            (self.buttons & 1) << 2 | (self.buttons & 4) >> 1 | (self.buttons & 2) >> 1;
        let modes = u8::from(self.remote) << 6
            | u8::from(self.reporting) << 5
            | u8::from(self.scaling) << 4;
        [modes | left_middle_right, self.resolution, self.rate]
    }
}

/// 2:1 scaling, which keeps small movements small.
fn scale(count: i32) -> i32 {
    let scaled = match count.abs() {
        few @ (0 | 1 | 3) => few,
        2 => 1,
        4 => 6,
        5 => 9,
        many => 2 * many,
    };
    scaled * count.signum()
}

fn low_byte(count: i32) -> u8 {
    count.to_le_bytes()[0]
}

#[cfg(test)]
mod test {
    use super::*;

    fn drain(mouse: &mut Mouse) -> Vec<u8> {
        std::iter::from_fn(|| mouse.pop()).collect()
    }

    fn send(mouse: &mut Mouse, bytes: &[u8]) -> Vec<u8> {
        bytes.iter().for_each(|byte| mouse.write(*byte));
        drain(mouse)
    }

    #[test]
    fn drivers_enable_the_wheel_and_five_buttons_by_rate_sequence() {
        let mut mouse = Mouse::default();
        assert_eq!(send(&mut mouse, &[RESET]), [ACK, BAT_PASSED, 0]);
        send(&mut mouse, &[0xf3, 200, 0xf3, 100, 0xf3, 80]);
        assert_eq!(send(&mut mouse, &[READ_ID]), [ACK, 3]);
        send(&mut mouse, &[ENABLE]);
        mouse.motion(Motion { dx: 5, dy: -3, wheel: 1, buttons: 1 });
        assert_eq!(drain(&mut mouse), [0x09, 5, 3, 0xff]);
        send(&mut mouse, &[0xf3, 200, 0xf3, 200, 0xf3, 80]);
        assert_eq!(send(&mut mouse, &[READ_ID]), [ACK, 4]);
        mouse.motion(Motion { dx: -1, dy: 1, wheel: -2, buttons: 0x18 });
        assert_eq!(drain(&mut mouse), [0x38, 0xff, 0xff, 0x32]);
        assert_eq!(send(&mut mouse, &[RESET, READ_ID])[3..], [ACK, 0], "a reset forgets it");
    }

    #[test]
    fn movement_accumulates_and_short_clicks_are_reported() {
        let mut mouse = Mouse::default();
        assert!(!mouse.motion(Motion { dx: 1, ..Motion::default() }), "it does not report yet");
        send(&mut mouse, &[ENABLE]);
        for _ in 0..300 {
            mouse.motion(Motion { dx: 1, ..Motion::default() });
        }
        mouse.motion(Motion { buttons: 1, ..Motion::default() });
        mouse.motion(Motion::default());
        assert_eq!(mouse.moves.len(), 3);
        let packets: Vec<Vec<u8>> = drain(&mut mouse).chunks(3).map(<[u8]>::to_vec).collect();
        let moved: u32 = packets.iter().map(|packet| u32::from(packet[1])).sum();
        assert_eq!(moved, 300);
        let buttons: Vec<u8> = packets.iter().map(|packet| packet[0] & 7).collect();
        assert_eq!(buttons, [0, 0, 0, 1, 0]);
        for button in 0..10_000_u32 {
            let buttons = u8::try_from(button % 2).unwrap();
            mouse.motion(Motion { dx: i32::MAX, dy: i32::MIN, wheel: i32::MIN, buttons });
        }
        assert!(mouse.moves.len() <= MAX_CHANGES);
        assert_eq!(mouse.pop(), Some(0x08));
    }

    #[test]
    fn remote_mode_reports_on_request() {
        let mut mouse = Mouse::default();
        send(&mut mouse, &[REMOTE, SCALING_2_1, SET_RESOLUTION, 3]);
        assert!(mouse.motion(Motion { dx: 7, buttons: 2, ..Motion::default() }));
        assert!(drain(&mut mouse).is_empty());
        assert_eq!(send(&mut mouse, &[STATUS]), [ACK, 0x51, 3, 100]);
        assert_eq!(send(&mut mouse, &[READ_DATA]), [ACK, 0x0a, 7, 0], "scaling is for streams");
        assert_eq!(send(&mut mouse, &[READ_DATA]), [ACK, 0x0a, 0, 0]);
        send(&mut mouse, &[STREAM, ENABLE]);
        mouse.motion(Motion { dx: 7, dy: 4, wheel: 0, buttons: 0 });
        assert_eq!(drain(&mut mouse), [0x28, 14, 0xfa]);
        assert_eq!(send(&mut mouse, &[RESEND_LAST]), [0x28, 14, 0xfa]);
    }

    #[test]
    fn wrap_mode_echoes_and_unknown_commands_are_refused() {
        let mut mouse = Mouse::default();
        assert_eq!(send(&mut mouse, &[WRAP, 0x12, READ_ID, LEAVE_WRAP]), [ACK, 0x12, 0xf2, ACK]);
        assert_eq!(
            send(&mut mouse, &[0xe1, 0x00, SET_RESOLUTION, 9]),
            [RESEND, RESEND, ACK, RESEND]
        );
    }
}
