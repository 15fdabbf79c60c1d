//! COM1, and a store for text with static lifetime.
use core::fmt::{self, Write};

use crate::io::{in8, out8};

pub(crate) const COM1: u16 = 0x3f8;
/// Interrupt enable, and its bit for received data.
const IER: u16 = COM1 + 1;
const RECEIVED: u8 = 1;
/// FIFO control (write), interrupt identification (read).
const FCR: u16 = COM1 + 2;
const LCR: u16 = COM1 + 3;
/// Modem control: on PCs, OUT2 enables interrupts.
const MCR: u16 = COM1 + 4;
const DTR_RTS_OUT2: u8 = 0xb;
const LSR: u16 = COM1 + 5;
const DATA_READY: u8 = 1;
const TRANSMITTER_EMPTY: u8 = 0x20;
/// Bytes of the FIFO. Reading the status costs an exit like a write, so it is read once per full
/// FIFO.
const FIFO: u8 = 16;
/// Number of polls, some milliseconds: longer than a real UART takes, and short if there is none.
const MAX_POLLS: u32 = 2000;

/// The serial port, for writing text.
pub(crate) struct Console {
    room: u8,
    fifo: u8,
}

impl Console {
    /// Opens the port and prints the greeting. The entry code has sent its first letter.
    pub(crate) fn open() -> Self {
        let mut console = Self { room: 0, fifo: 1 };
        console.wait();
        out8(LCR, 3);
        out8(IER, 0);
        out8(FCR, 1);
        console.fifo = if in8(FCR) & 0xc0 == 0xc0 { FIFO } else { 1 };
        console.room = console.fifo;
        console.write_str("ransom probe\n").ok();
        console
    }

    fn wait(&mut self) {
        for _ in 0..MAX_POLLS {
            if in8(LSR) & TRANSMITTER_EMPTY != 0 {
                break;
            }
        }
        self.room = self.fifo;
    }
}

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if self.room == 0 {
                self.wait();
            }
            out8(COM1, byte);
            self.room -= 1;
        }
        Ok(())
    }
}

/// Enables the interrupt for received data.
pub(crate) fn enable_interrupt() {
    out8(MCR, DTR_RTS_OUT2);
    out8(IER, RECEIVED);
}

pub(crate) fn receive() -> Option<u8> {
    (in8(LSR) & DATA_READY != 0).then(|| in8(COM1))
}

/// Stores text permanently, up to a limit.
pub(crate) struct Store {
    bytes: &'static mut [u8],
}

struct Filling<'a> {
    bytes: &'a mut [u8],
    used: usize,
}

impl Write for Filling<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars().map(|c| if c.is_ascii() { c as u8 } else { b'?' }) {
            let Some(free) = self.bytes.get_mut(self.used) else { return Err(fmt::Error) };
            *free = character;
            self.used += 1;
        }
        Ok(())
    }
}

impl Store {
    pub(crate) fn new(bytes: &'static mut [u8]) -> Self {
        Self { bytes }
    }

    /// If the store is full, the text is cut.
    pub(crate) fn keep(&mut self, arguments: fmt::Arguments) -> &'static str {
        let bytes = core::mem::take(&mut self.bytes);
        let mut filling = Filling { bytes, used: 0 };
        filling.write_fmt(arguments).ok();
        let Filling { bytes, used } = filling;
        let (text, rest) = bytes.split_at_mut(used);
        self.bytes = rest;
        core::str::from_utf8(text).unwrap_or("?")
    }
}
