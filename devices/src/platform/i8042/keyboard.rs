//! A PS/2 keyboard with 101 keys and more (IBM PS/2 Hardware Interface Technical Reference,
//! "Keyboards").
//!
//! Keys repeat when the viewer's keyboard repeats them: the user sees the screen with a delay, and
//! with repeats made here, keys would continue to repeat after the user releases them. The repeat
//! rate is stored, like the LEDs, but has no effect.
//!
//! A real keyboard buffers 16 bytes, which is enough for a person typing. Viewers also paste texts,
//! so there is a queue on the host behind this buffer (`crate::presses`).

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::scancodes::{BREAK, Modifiers, set1, set2, set3};
use super::{ACK, Answers, BAT_PASSED, RESEND};
use crate::presses::Presses;
use host::input::{Key, Lights};

/// The answer to `READ_ID`: an MF2 keyboard.
const ID: [u8; 2] = [0xab, 0x83];
/// The size of the keyboard's buffer in bytes. Further keys stay in the queue.
const BUFFER: usize = 16;
/// The maximum number of bytes of a key: Pause.
const MAX_CODE_LENGTH: usize = 8;
/// The lowest command. Parameters are lower.
const FIRST_COMMAND: u8 = 0xed;

const SET_LEDS: u8 = 0xed;
const ECHO: u8 = 0xee;
const SCAN_CODE_SET: u8 = 0xf0;
const READ_ID: u8 = 0xf2;
const SET_RATE: u8 = 0xf3;
const ENABLE: u8 = 0xf4;
const DEFAULTS_AND_DISABLE: u8 = 0xf5;
const DEFAULTS: u8 = 0xf6;
const ALL_TYPEMATIC: u8 = 0xf7;
const ALL_MAKE_BREAK: u8 = 0xf8;
const ALL_MAKE: u8 = 0xf9;
const ALL_TYPEMATIC_MAKE_BREAK: u8 = 0xfa;
const KEY_TYPEMATIC: u8 = 0xfb;
const KEY_MAKE_BREAK: u8 = 0xfc;
const KEY_MAKE: u8 = 0xfd;
const RESEND_LAST: u8 = 0xfe;
const RESET: u8 = 0xff;

/// The keys that send a code on release in set 3 by default: Ctrl, both Shift keys, Caps Lock and
/// Alt.
const SET3_BREAKS: [u8; 5] = [0x11, 0x12, 0x14, 0x19, 0x59];

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Keyboard {
    set: u8,
    leds: u8,
    rate: u8,
    scanning: bool,
    /// The command that waits for its parameter.
    command: Option<u8>,
    answers: Answers,
    codes: VecDeque<u8>,
    /// The last byte sent, for `RESEND_LAST`.
    last: u8,
    /// Keys whose codes are not in the buffer yet. Its `down` keys are those whose make code was
    /// moved to the buffer.
    keys: Presses<Key>,
    /// Set 3: whether keys send break codes. `except` has the keys that do the opposite.
    breaks: bool,
    except: BTreeSet<u8>,
}

impl Default for Keyboard {
    fn default() -> Self {
        Self {
            set: 2,
            leds: 0,
            rate: 0x2b,
            scanning: true,
            command: None,
            answers: Answers::default(),
            codes: VecDeque::new(),
            last: 0,
            keys: Presses::default(),
            breaks: false,
            except: SET3_BREAKS.into(),
        }
    }
}

impl Keyboard {
    /// Queues a press or a release. Returns false if scanning is disabled.
    pub(super) fn key(&mut self, key: Key, down: bool) -> bool {
        if !self.scanning {
            return false;
        }
        if down && self.keys.is_held(key) {
            self.keys.repeat(key);
        } else {
            self.keys.press(key, down);
        }
        self.fill();
        true
    }

    /// Moves keys into the buffer, only with all bytes of a key.
    fn fill(&mut self) {
        while self.codes.len() <= BUFFER - MAX_CODE_LENGTH {
            // A code depends on the modifiers pressed before it.
            let modifiers = self.modifiers();
            let Some((key, down)) = self.keys.next() else { return };
            self.codes.extend(self.codes_of(key, down, modifiers));
        }
    }

    /// The LEDs set by the guest. `None` while scanning is disabled.
    pub(super) fn lights(&self) -> Option<Lights> {
        let lit = |bit: u32| self.leds >> bit & 1 != 0;
        self.scanning.then(|| Lights { scroll: lit(0), num: lit(1), caps: lit(2) })
    }

    /// Whether the controller has fetched all codes.
    pub(super) fn is_idle(&self) -> bool {
        self.codes.is_empty()
    }

    /// See [`host::input::Sink::has_room`].
    pub(super) fn has_room(&self) -> bool {
        self.keys.has_room()
    }

    fn codes_of(&self, key: Key, down: bool, modifiers: Modifiers) -> Vec<u8> {
        match self.set {
            1 => set1(key, down, modifiers),
            2 => set2(key, down, modifiers),
            _ => {
                let breaks = |code| self.breaks != self.except.contains(&code);
                match set3(key) {
                    Some(code) if down => vec![code],
                    Some(code) if breaks(code) => vec![BREAK, code],
                    _ => Vec::new(),
                }
            }
        }
    }

    fn modifiers(&self) -> Modifiers {
        let down = &self.keys.down;
        let held = |codes: [u16; 2]| down.iter().any(|key| codes.contains(&key.code()));
        Modifiers {
            ctrl: held([0x1d, 0xe01d]),
            alt: held([0x38, 0xe038]),
            shift: held([0x2a, 0x36]),
        }
    }

    pub(super) fn pop(&mut self) -> Option<u8> {
        let byte = self.answers.pop().or_else(|| self.codes.pop_front())?;
        self.last = byte;
        self.fill();
        Some(byte)
    }

    pub(super) fn write(&mut self, byte: u8) {
        match self.command {
            // A new command cancels one that waits for its parameter.
            Some(command) if byte < FIRST_COMMAND => self.parameter(command, byte),
            _ => self.command(byte),
        }
    }

    fn command(&mut self, byte: u8) {
        self.command = None;
        match byte {
            SET_LEDS | SCAN_CODE_SET | SET_RATE | KEY_TYPEMATIC..=KEY_MAKE => {
                self.command = Some(byte);
                self.answers.give(&[ACK]);
            }
            ECHO => self.answers.give(&[ECHO]),
            READ_ID => self.answers.give(&[ACK, ID[0], ID[1]]),
            ENABLE => {
                self.clear_keys();
                self.scanning = true;
                self.answers.give(&[ACK]);
            }
            DEFAULTS_AND_DISABLE | DEFAULTS => {
                let answers = std::mem::take(&mut self.answers);
                let scanning = byte == DEFAULTS;
                *self = Self { scanning, answers, last: self.last, ..Self::default() };
                self.answers.give(&[ACK]);
            }
            ALL_TYPEMATIC | ALL_MAKE_BREAK | ALL_MAKE | ALL_TYPEMATIC_MAKE_BREAK => {
                self.breaks = matches!(byte, ALL_MAKE_BREAK | ALL_TYPEMATIC_MAKE_BREAK);
                self.except.clear();
                self.answers.give(&[ACK]);
            }
            RESEND_LAST => self.answers.give(&[self.last]),
            RESET => {
                *self = Self::default();
                self.answers.give(&[ACK, BAT_PASSED]);
            }
            _ => self.answers.give(&[RESEND]),
        }
    }

    fn parameter(&mut self, command: u8, byte: u8) {
        // A list of keys continues until the next command.
        let list = (KEY_TYPEMATIC..=KEY_MAKE).contains(&command);
        self.command = list.then_some(command);
        match (command, byte) {
            (SET_LEDS, 0..=7) => self.leds = byte,
            (SET_RATE, 0..=0x7f) => self.rate = byte,
            (SCAN_CODE_SET, 0) => return self.answers.give(&[ACK, self.set]),
            (SCAN_CODE_SET, 1..=3) => {
                self.clear_keys();
                self.set = byte;
            }
            (KEY_MAKE_BREAK, _) => self.set_break(byte, true),
            (KEY_TYPEMATIC | KEY_MAKE, _) => self.set_break(byte, false),
            _ => return self.answers.give(&[RESEND]),
        }
        self.answers.give(&[ACK]);
    }

    fn set_break(&mut self, code: u8, breaks: bool) {
        if breaks == self.breaks {
            self.except.remove(&code);
        } else {
            self.except.insert(code);
        }
    }

    fn clear_keys(&mut self) {
        self.codes.clear();
        self.keys = Presses::default();
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn drain(keyboard: &mut Keyboard) -> Vec<u8> {
        std::iter::from_fn(|| keyboard.pop()).collect()
    }

    fn key(code: u16) -> Key {
        Key::new(code).unwrap()
    }

    #[test]
    fn a_slow_guest_gets_every_key_in_order() {
        let mut keyboard = Keyboard::default();
        let mut wanted = Vec::new();
        for round in 0..4000_usize {
            let typed = key([0x1e, 0x30, 0x2e, 0xe048][round % 4]);
            for down in [true, false] {
                assert!(keyboard.key(typed, down));
                wanted.extend(set2(typed, down, Modifiers::default()));
            }
            assert!(keyboard.codes.len() <= BUFFER, "{} bytes", keyboard.codes.len());
        }
        assert!(keyboard.has_room() && !keyboard.is_idle());
        assert!(drain(&mut keyboard) == wanted, "each of 4000 keys, once");
        assert!(keyboard.is_idle());
    }

    #[test]
    fn only_modifiers_pressed_before_a_key_affect_it() {
        let mut keyboard = Keyboard::default();
        let ctrl = key(0x1d);
        for _ in 0..20 {
            keyboard.key(key(0x1e), true);
            keyboard.key(key(0x1e), false);
        }
        for down in [true, false] {
            keyboard.key(Key::PAUSE, down);
        }
        for (it, down) in [(ctrl, true), (Key::PAUSE, true), (ctrl, false)] {
            keyboard.key(it, down);
        }
        let sent = drain(&mut keyboard);
        let pause = |ctrl| set2(Key::PAUSE, true, Modifiers { ctrl, ..Modifiers::default() });
        let wanted = [&pause(false)[..], &[0x14], &pause(true), &[BREAK, 0x14]].concat();
        assert_eq!(sent[20 * 3..], wanted);
    }

    #[test]
    fn a_full_queue_drops_whole_keys_and_leaves_none_pressed() {
        let mut keyboard = Keyboard::default();
        for round in 0..100_000_u32 {
            let it = key(0xe010 + u16::try_from(round % 0x20).unwrap());
            assert!(keyboard.key(it, true));
            if round % 7 == 0 {
                keyboard.key(it, false);
            }
        }
        (0xe010..0xe030).for_each(|code| assert!(keyboard.key(key(code), false)));
        assert!(!keyboard.has_room());
        let sent = drain(&mut keyboard);
        let count = |byte| sent.iter().filter(|it| **it == byte).count();
        assert_eq!(count(0xe0), 2 * count(BREAK));
        assert!(keyboard.keys.down.is_empty() && keyboard.has_room());
    }

    #[test]
    fn reset_and_enable_empty_the_queue() {
        for command in [RESET, ENABLE, DEFAULTS] {
            let mut keyboard = Keyboard::default();
            for _ in 0..100 {
                keyboard.key(key(0x1e), true);
                keyboard.key(key(0x1e), false);
            }
            keyboard.write(command);
            let answers = drain(&mut keyboard);
            assert!(answers.len() <= 2 && keyboard.is_idle(), "{command:#x}: {answers:x?}");
        }
    }

    #[test]
    fn a_flood_of_commands_gets_a_bounded_number_of_answers() {
        let mut keyboard = Keyboard::default();
        for _ in 0..10_000 {
            keyboard.write(RESET);
            keyboard.write(READ_ID);
        }
        assert!(drain(&mut keyboard).len() <= 16);
        keyboard.write(0xef);
        assert_eq!(drain(&mut keyboard), [RESEND]);
    }

    #[test]
    fn set_3_sends_break_codes_only_if_requested() {
        let mut keyboard = Keyboard::default();
        let mut press = |commands: &[u8], code| {
            commands.iter().for_each(|byte| keyboard.write(*byte));
            drain(&mut keyboard);
            keyboard.key(key(code), true);
            keyboard.key(key(code), false);
            drain(&mut keyboard)
        };
        assert_eq!(press(&[SCAN_CODE_SET, 3], 0x1e), [0x1c]);
        assert_eq!(press(&[], 0x1d), [0x11, BREAK, 0x11], "Ctrl");
        assert_eq!(press(&[KEY_MAKE_BREAK, 0x1c, 0x1b], 0x1f), [0x1b, BREAK, 0x1b]);
        assert_eq!(press(&[ALL_MAKE], 0x1f), [0x1b]);
        assert_eq!(press(&[ALL_MAKE_BREAK, KEY_MAKE, 0x1b], 0x1f), [0x1b]);
        assert_eq!(press(&[], 0x20), [0x23, BREAK, 0x23]);
        assert_eq!(press(&[SCAN_CODE_SET, 1], 0x1e), [0x1e, 0x9e]);
    }

    #[test]
    fn reports_its_lights_while_enabled() {
        let mut keyboard = Keyboard::default();
        assert_eq!(keyboard.lights(), Some(Lights::default()));
        keyboard.write(SET_LEDS);
        keyboard.write(0b110);
        let lit = Lights { caps: true, num: true, scroll: false };
        assert_eq!(keyboard.lights(), Some(lit));
        keyboard.write(DEFAULTS_AND_DISABLE);
        assert_eq!(keyboard.lights(), None);
    }

    #[test]
    fn a_command_replaces_one_waiting_for_its_parameter() {
        let mut keyboard = Keyboard::default();
        for byte in [SET_LEDS, SCAN_CODE_SET, 0, SET_RATE, 0x80, RESEND_LAST] {
            keyboard.write(byte);
        }
        assert_eq!(drain(&mut keyboard), [ACK, ACK, ACK, 2, ACK, RESEND, 0]);
        keyboard.write(DEFAULTS_AND_DISABLE);
        assert!(!keyboard.key(key(0x1e), true), "it does not scan");
        assert_eq!(drain(&mut keyboard), [ACK]);
    }
}
