//! The keyboard controller of a PC (Intel 8042, as in the IBM PS/2 Hardware Interface Technical
//! Reference) with a PS/2 keyboard and a PS/2 mouse connected.
//!
//! Threats: the guest sends any byte to either port. Unknown commands do nothing, unread answers
//! have a small limit, and the only command with an effect outside of the chip is the reset, which
//! a guest can cause in other ways too. Keys and movement from the host are bounded too: a guest
//! that never reads them costs at most 100 KB.

mod keyboard;
mod mouse;
mod scancodes;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Event, Events, Grants};
use crate::line::Line;
use host::input::{self, Sink};
use keyboard::Keyboard;
use mouse::Mouse;

/// `--device i8042`: a PS/2 keyboard and a PS/2 mouse, which need no extra driver.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let data = grants.claim(Kind::Port, 0x60..0x61)?;
        let command = grants.claim(Kind::Port, 0x64..0x65)?;
        let keyboard_line = grants.line(1)?;
        grants.acpi("PNP0303");
        let mouse_line = grants.line(12)?;
        grants.acpi("PNP0F13");
        let events = grants.shared().events.clone();
        let state = State::default();
        let chip = Chip { state, running: false, keyboard_line, mouse_line, events };
        let chip = Arc::new(Plug(Mutex::new(chip)));
        grants.shared().input.register(chip.clone());
        Ok(Box::new(I8042 { data, command, chip }))
    }
}

// Answers of both devices.
const ACK: u8 = 0xfa;
const RESEND: u8 = 0xfe;
const BAT_PASSED: u8 = 0xaa;

// Status register (0x64, read).
const OUTPUT_FULL: u8 = 1 << 0;
const SYSTEM: u8 = 1 << 2;
const COMMAND: u8 = 1 << 3;
const UNLOCKED: u8 = 1 << 4;
const MOUSE_OUTPUT_FULL: u8 = 1 << 5;

// Commands (0x64, write).
const READ_CONTROL: u8 = 0x20;
const WRITE_CONTROL: u8 = 0x60;
const DISABLE_MOUSE: u8 = 0xa7;
const ENABLE_MOUSE: u8 = 0xa8;
const TEST_MOUSE: u8 = 0xa9;
const SELF_TEST: u8 = 0xaa;
const TEST_KEYBOARD: u8 = 0xab;
const DISABLE_KEYBOARD: u8 = 0xad;
const ENABLE_KEYBOARD: u8 = 0xae;
const READ_INPUT_PORT: u8 = 0xc0;
const READ_OUTPUT_PORT: u8 = 0xd0;
const WRITE_OUTPUT_PORT: u8 = 0xd1;
const WRITE_KEYBOARD_OUTPUT: u8 = 0xd2;
const WRITE_MOUSE_OUTPUT: u8 = 0xd3;
const WRITE_MOUSE: u8 = 0xd4;
/// Commands from here on pulse the output lines whose bit is clear.
const PULSE: u8 = 0xf0;

const SELF_TEST_PASSED: u8 = 0x55;
/// The keyboard is not locked.
const INPUT_PORT: u8 = 0x80;

// Control byte.
const KEYBOARD_INTERRUPT: u8 = 1 << 0;
const MOUSE_INTERRUPT: u8 = 1 << 1;
const SYSTEM_FLAG: u8 = 1 << 2;
const KEYBOARD_OFF: u8 = 1 << 4;
const MOUSE_OFF: u8 = 1 << 5;
const TRANSLATE: u8 = 1 << 6;

// Output port.
/// The processor's reset line, active low.
const NO_RESET: u8 = 1 << 0;
const OUTPUT_PORT_FULL: u8 = 1 << 4;
const OUTPUT_PORT_MOUSE_FULL: u8 = 1 << 5;
/// Reset inactive, A20 on, and the unconnected lines.
const OUTPUT_PORT: u8 = 0xcf;

/// Answers of a device that the guest has not read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
struct Answers(VecDeque<u8>);

impl Answers {
    /// Capacity in bytes, more than any driver leaves unread.
    const CAPACITY: usize = 16;

    /// Queues an answer. An answer that does not fit completely is dropped.
    fn give(&mut self, answer: &[u8]) {
        if self.0.len() + answer.len() <= Self::CAPACITY {
            self.0.extend(answer);
        }
    }

    fn pop(&mut self) -> Option<u8> {
        self.0.pop_front()
    }
}

/// Which device (keyboard or mouse) filled the output buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Source {
    Keyboard,
    Mouse,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    control: u8,
    output_port: u8,
    system: bool,
    /// Whether the last write was a command.
    commanded: bool,
    /// The command that waits for its data.
    command: Option<u8>,
    /// The output buffer. `full` is the source of its byte if the guest has not read it.
    byte: u8,
    full: Option<Source>,
    /// The controller's own answer. It has room for one byte.
    answer: Option<(u8, Source)>,
    /// The keyboard sent 0xF0, which is translated together with the next byte.
    breaking: bool,
    keyboard: Keyboard,
    mouse: Mouse,
}

impl Default for State {
    fn default() -> Self {
        Self {
            control: KEYBOARD_INTERRUPT | MOUSE_INTERRUPT,
            output_port: OUTPUT_PORT,
            system: false,
            commanded: true,
            command: None,
            byte: 0,
            full: None,
            answer: None,
            breaking: false,
            keyboard: Keyboard::default(),
            mouse: Mouse::default(),
        }
    }
}

impl State {
    fn status(&self) -> u8 {
        let full = match self.full {
            None => 0,
            Some(Source::Keyboard) => OUTPUT_FULL,
            Some(Source::Mouse) => OUTPUT_FULL | MOUSE_OUTPUT_FULL,
        };
        let flag = |is, flag| if is { flag } else { 0 };
        full | flag(self.system, SYSTEM) | flag(self.commanded, COMMAND) | UNLOCKED
    }

    fn output_port(&self) -> u8 {
        let full = match self.full {
            None => 0,
            Some(Source::Keyboard) => OUTPUT_PORT_FULL,
            Some(Source::Mouse) => OUTPUT_PORT_MOUSE_FULL,
        };
        self.output_port & !(OUTPUT_PORT_FULL | OUTPUT_PORT_MOUSE_FULL) | full
    }

    /// Whether this bit of the control byte is set.
    fn has(&self, bit: u8) -> bool {
        self.control & bit != 0
    }

    fn answer(&mut self, byte: u8) {
        self.answer = Some((byte, Source::Keyboard));
    }

    /// Performs a command. Returns true if it resets the machine.
    fn command(&mut self, command: u8) -> bool {
        self.commanded = true;
        self.command = None;
        match command {
            READ_CONTROL => self.answer(self.control),
            WRITE_CONTROL | WRITE_OUTPUT_PORT..=WRITE_MOUSE => self.command = Some(command),
            DISABLE_MOUSE => self.control |= MOUSE_OFF,
            ENABLE_MOUSE => self.control &= !MOUSE_OFF,
            TEST_MOUSE | TEST_KEYBOARD => self.answer(0),
            SELF_TEST => {
                self.system = true;
                self.answer(SELF_TEST_PASSED);
            }
            DISABLE_KEYBOARD => self.control |= KEYBOARD_OFF,
            ENABLE_KEYBOARD => self.control &= !KEYBOARD_OFF,
            READ_INPUT_PORT => self.answer(INPUT_PORT),
            READ_OUTPUT_PORT => self.answer(self.output_port()),
            PULSE.. => return command & NO_RESET == 0,
            _ => {}
        }
        false
    }

    /// Receives data for the last command, or for the keyboard. Returns true if it resets the
    /// machine.
    fn data(&mut self, byte: u8) -> bool {
        self.commanded = false;
        match self.command.take() {
            Some(WRITE_CONTROL) => {
                self.control = byte;
                self.system |= byte & SYSTEM_FLAG != 0;
            }
            Some(WRITE_OUTPUT_PORT) => {
                self.output_port = byte | NO_RESET;
                return byte & NO_RESET == 0;
            }
            Some(WRITE_KEYBOARD_OUTPUT) => self.answer = Some((byte, Source::Keyboard)),
            Some(WRITE_MOUSE_OUTPUT) => self.answer = Some((byte, Source::Mouse)),
            // Sending a byte to a device enables the device.
            Some(WRITE_MOUSE) => {
                self.control &= !MOUSE_OFF;
                self.mouse.write(byte);
            }
            _ => {
                self.control &= !KEYBOARD_OFF;
                self.keyboard.write(byte);
            }
        }
        false
    }

    fn next(&mut self) -> Option<(u8, Source)> {
        if let Some(answer) = self.answer.take() {
            return Some(answer);
        }
        if !self.has(KEYBOARD_OFF)
            && let Some(byte) = self.keyboard_byte()
        {
            return Some((byte, Source::Keyboard));
        }
        if self.has(MOUSE_OFF) { None } else { Some((self.mouse.pop()?, Source::Mouse)) }
    }

    fn keyboard_byte(&mut self) -> Option<u8> {
        while let Some(byte) = self.keyboard.pop() {
            if !self.has(TRANSLATE) {
                self.breaking = false;
                return Some(byte);
            }
            if byte != scancodes::BREAK {
                return Some(scancodes::translate(byte, std::mem::take(&mut self.breaking)));
            }
            self.breaking = true;
        }
        None
    }
}

struct Chip {
    state: State,
    /// False while parked: the chip then takes no input from the host.
    running: bool,
    keyboard_line: Arc<Line>,
    mouse_line: Arc<Line>,
    events: Events,
}

impl Chip {
    /// Fills the output buffer if it is empty, and drives the lines. A line falls when the guest
    /// reads the byte, and rises for the next one, so that each byte causes an interrupt.
    fn settle(&mut self) {
        let state = &mut self.state;
        if state.full.is_none()
            && let Some((byte, source)) = state.next()
        {
            (state.byte, state.full) = (byte, Some(source));
        }
        let keyboard = state.full == Some(Source::Keyboard)
            && state.has(KEYBOARD_INTERRUPT)
            && !state.has(KEYBOARD_OFF);
        self.keyboard_line.set(keyboard);
        self.mouse_line.set(state.full == Some(Source::Mouse) && state.has(MOUSE_INTERRUPT));
    }

    fn read_data(&mut self) -> u8 {
        let byte = self.state.byte;
        self.state.full = None;
        self.keyboard_line.set(false);
        self.mouse_line.set(false);
        self.settle();
        byte
    }
}

/// The receiver of the host's input.
struct Plug(Mutex<Chip>);

impl Plug {
    fn chip(&self) -> MutexGuard<'_, Chip> {
        self.0.lock().expect("no device panicked")
    }
}

impl Sink for Plug {
    fn take(&self, event: input::Event) -> bool {
        let mut chip = self.chip();
        let taken = chip.running
            && match event {
                input::Event::Key(key, down) => chip.state.keyboard.key(key, down),
                input::Event::Motion(motion) => chip.state.mouse.motion(motion),
                input::Event::Position(_) => false,
            };
        if taken {
            chip.settle();
        }
        taken
    }

    fn lights(&self) -> Option<input::Lights> {
        let chip = self.chip();
        chip.running.then(|| chip.state.keyboard.lights()).flatten()
    }

    fn is_idle(&self) -> bool {
        self.chip().state.keyboard.is_idle()
    }

    fn has_room(&self) -> bool {
        self.chip().state.keyboard.has_room()
    }
}

struct I8042 {
    data: Region,
    command: Region,
    chip: Arc<Plug>,
}

impl Device for I8042 {
    fn read(&mut self, region: Region, _: u64, data: &mut [u8]) -> Access {
        let [byte] = data else { return Access::Ignored };
        let mut chip = self.chip.chip();
        *byte = if region == self.data { chip.read_data() } else { chip.state.status() };
        Access::Done
    }

    fn write(&mut self, region: Region, _: u64, data: &[u8]) -> Access {
        let [byte] = *data else { return Access::Ignored };
        let mut chip = self.chip.chip();
        let is_command = region == self.command;
        let resets = if is_command { chip.state.command(byte) } else { chip.state.data(byte) };
        chip.settle();
        if resets {
            (chip.events)(Event::Reset);
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        let mut chip = self.chip.chip();
        chip.running = false;
        Saved::of(&chip.state)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let mut chip = self.chip.chip();
        chip.state = saved.take()?;
        chip.running = true;
        chip.settle();
        Ok(())
    }
}

#[cfg(test)]
mod test;
