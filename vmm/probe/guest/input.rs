//! User input: a PS/2 keyboard and a PS/2 mouse, both with interrupts.
use crate::entry::DEVICE_VECTOR;
use crate::io::{in8, out8, read32, write32};
use crate::keys::{PAUSE, PREFIXED, character};
use crate::timer::LOCAL_APIC;

const DATA: u16 = 0x60;
const STATUS: u16 = 0x64;
const OUTPUT_FULL: u8 = 1 << 0;
const INPUT_FULL: u8 = 1 << 1;
const FROM_MOUSE: u8 = 1 << 5;
const WRITE_CONTROL: u8 = 0x60;
const ENABLE_MOUSE: u8 = 0xa8;
const TO_MOUSE: u8 = 0xd4;
/// Controller configuration: interrupts of both devices, and translation to scan codes of set 1.
const CONTROL: u8 = 0x47;
const ACK: u8 = 0xfa;
/// A sequence of sample rates that switches a mouse with a wheel to packets of four bytes. The last
/// command reads its type.
const KNOCK: [u8; 7] = [0xf3, 200, 0xf3, 100, 0xf3, 80, 0xf2];
const WITH_WHEEL: u8 = 3;
const REPORT: u8 = 0xf4;
const MAX_POLLS: u32 = 200;

/// The I/O APIC: register select and register window.
const IO_APIC: u64 = 0xfec0_0000;
const WINDOW: u64 = IO_APIC + 0x10;
const REDIRECTION: u32 = 0x10;
const LINES: [u32; 2] = [1, 12];
/// The ID register of the local APIC.
const APIC_ID: u64 = 0x20;

const LEFT_SHIFT: u8 = 0x2a;
const RIGHT_SHIFT: u8 = 0x36;
const CAPS_LOCK: u8 = 0x3a;

/// Numbers of recent keys and of characters that are kept.
const RECENT: usize = 24;
const TEXT: usize = 160;

pub(crate) struct UserInput {
    /// Recent keys, the newest at the end.
    recent: [u8; RECENT],
    count: usize,
    /// One bit for each key that is pressed.
    held: [u128; 2],
    capitals: bool,
    prefix: Prefix,
    text: [u8; TEXT],
    length: usize,
    /// Number of characters so far, including line feeds.
    pub(crate) typed: u32,
    pub(crate) pointer: Pointer,
    packet: [u8; 4],
    got: usize,
    size: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Prefix {
    None,
    E0,
    /// The number of bytes that follow.
    E1(u8),
}

pub(crate) struct Pointer {
    /// Pixels from the upper left.
    pub(crate) x: i32,
    pub(crate) y: i32,
    width: i32,
    height: i32,
    pub(crate) buttons: u8,
    /// Notches, positive away from the user.
    pub(crate) wheel: i32,
    /// Whether the mouse has moved at least once.
    pub(crate) seen: bool,
}

impl UserInput {
    /// Enables both devices, with interrupts for this processor, whose local APIC must be enabled.
    pub(crate) fn open((width, height): (u32, u32)) -> Option<Self> {
        // The status reads as ones if there is no controller.
        if in8(STATUS) == 0xff {
            return None;
        }
        drain();
        command(WRITE_CONTROL);
        data(CONTROL);
        command(ENABLE_MOUSE);
        let answers = KNOCK.map(send_to_mouse);
        let wheel = answers.iter().all(|&ok| ok) && answer() == Some(WITH_WHEEL);
        send_to_mouse(REPORT);
        LINES.into_iter().for_each(route);
        let pointer = Pointer {
            x: 0,
            y: 0,
            width: width as i32,
            height: height as i32,
            buttons: 0,
            wheel: 0,
            seen: false,
        };
        Some(Self {
            recent: [0; RECENT],
            count: 0,
            held: [0; 2],
            capitals: false,
            prefix: Prefix::None,
            text: [0; TEXT],
            length: 0,
            typed: 0,
            pointer,
            packet: [0; 4],
            got: 0,
            size: if wheel { 4 } else { 3 },
        })
    }

    /// Reads the available input, up to a limit, so that it can be shown. Returns whether there was
    /// any.
    pub(crate) fn read_all(&mut self) -> bool {
        let before = (0..64).take_while(|_| self.read_one()).count();
        before > 0
    }

    fn read_one(&mut self) -> bool {
        let status = in8(STATUS);
        if status & OUTPUT_FULL == 0 {
            return false;
        }
        let byte = in8(DATA);
        if status & FROM_MOUSE == 0 {
            self.code(byte);
        } else {
            self.motion(byte);
        }
        true
    }

    fn code(&mut self, byte: u8) {
        let prefix = core::mem::replace(&mut self.prefix, Prefix::None);
        let (key, down) = (byte & 0x7f, byte < 0x80);
        match (prefix, byte) {
            (Prefix::None, 0xe0) => self.prefix = Prefix::E0,
            (Prefix::None, 0xe1) => self.prefix = Prefix::E1(2),
            (Prefix::E1(2), _) => self.prefix = Prefix::E1(1),
            (Prefix::E1(_), _) => self.key(PAUSE, down),
            // Fake shifts that a keyboard adds for compatibility.
            (Prefix::E0, 0x2a | 0x36 | 0xaa | 0xb6) => {}
            (Prefix::E0, _) => self.key(key | PREFIXED, down),
            (Prefix::None, _) => self.key(key, down),
        }
    }

    fn key(&mut self, key: u8, down: bool) {
        let bit = 1 << (key & 0x7f);
        let half = &mut self.held[usize::from(key >> 7)];
        let repeats = *half & bit != 0;
        *half = if down { *half | bit } else { *half & !bit };
        if !down {
            return;
        }
        if !repeats {
            self.recent.rotate_left(1);
            self.recent[RECENT - 1] = key;
            self.count = RECENT.min(self.count + 1);
            self.capitals ^= key == CAPS_LOCK;
        }
        let shift = self.is_held(LEFT_SHIFT) || self.is_held(RIGHT_SHIFT);
        let character = character(key, shift, self.capitals);
        self.typed = self.typed.saturating_add(u32::from(character.is_some_and(|it| it != 8)));
        match character {
            Some(8) => self.length = self.length.saturating_sub(1),
            Some(b'\n') => self.length = 0,
            Some(typed) => self.write(if typed == b'\t' { b' ' } else { typed }),
            None => {}
        }
    }

    fn write(&mut self, typed: u8) {
        if self.length == TEXT {
            self.text.rotate_left(1);
            self.length -= 1;
        }
        self.text[self.length] = typed;
        self.length += 1;
    }

    /// A packet begins with a byte whose bit 3 is set.
    fn motion(&mut self, byte: u8) {
        if self.got == 0 && byte & 8 == 0 {
            return;
        }
        self.packet[self.got] = byte;
        self.got += 1;
        if self.got < self.size {
            return;
        }
        self.got = 0;
        let [flags, dx, dy, wheel] = self.packet;
        let delta = |low: u8, sign: u8| i32::from(low) - i32::from(flags >> sign & 1) * 256;
        let pointer = &mut self.pointer;
        pointer.x = (pointer.x + delta(dx, 4)).clamp(0, pointer.width - 1);
        // The y axis of mice points up, that of screens down.
        pointer.y = (pointer.y - delta(dy, 5)).clamp(0, pointer.height - 1);
        pointer.buttons = flags & 7;
        if self.size == 4 {
            pointer.wheel -= i32::from(wheel as i8);
        }
        pointer.seen = true;
    }

    pub(crate) fn is_held(&self, key: u8) -> bool {
        self.held[usize::from(key >> 7)] >> (key & 0x7f) & 1 == 1
    }

    /// The keys that were pressed, the newest first.
    pub(crate) fn recent(&self) -> impl Iterator<Item = u8> {
        self.recent.iter().rev().take(self.count).copied()
    }

    /// The last `count` of these keys, the newest at the end.
    pub(crate) fn last(&self, count: usize) -> impl Iterator<Item = u8> {
        self.recent[RECENT - count.min(self.count)..].iter().copied()
    }

    /// The end of the typed text, at most `room` characters.
    pub(crate) fn text(&self, room: usize) -> &str {
        let from = self.length.saturating_sub(room);
        core::str::from_utf8(&self.text[from..self.length]).unwrap_or("?")
    }
}

/// Routes an ISA interrupt to this processor through the I/O APIC.
pub(crate) fn route(line: u32) {
    let to = read32(LOCAL_APIC + APIC_ID);
    let register = REDIRECTION + 2 * line;
    for (register, value) in [(register + 1, to), (register, DEVICE_VECTOR.into())] {
        write32(IO_APIC, register);
        write32(WINDOW, value);
    }
}

fn wait(bit: u8, wanted: u8) -> bool {
    (0..MAX_POLLS).any(|_| in8(STATUS) & bit == wanted)
}

fn command(byte: u8) {
    wait(INPUT_FULL, 0);
    out8(STATUS, byte);
}

fn data(byte: u8) {
    wait(INPUT_FULL, 0);
    out8(DATA, byte);
}

fn answer() -> Option<u8> {
    wait(OUTPUT_FULL, OUTPUT_FULL).then(|| in8(DATA))
}

fn drain() {
    for _ in 0..64 {
        if in8(STATUS) & OUTPUT_FULL == 0 {
            break;
        }
        in8(DATA);
    }
}

/// Sends a byte to the mouse. Returns whether the mouse acknowledged it.
fn send_to_mouse(byte: u8) -> bool {
    command(TO_MOUSE);
    data(byte);
    // A scan code may arrive before the acknowledgment.
    (0..4).any(|_| answer() == Some(ACK))
}
