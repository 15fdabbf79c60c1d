//! COM1, and the store for text that outlives its making.
use core::fmt::{self, Write};

use crate::io::{in8, out8};

pub(crate) const COM1: u16 = 0x3f8;
/// Interrupt enable: when something came in.
const IER: u16 = COM1 + 1;
const RECEIVED: u8 = 1;
/// FIFO control, interrupt identification.
const FCR: u16 = COM1 + 2;
const LCR: u16 = COM1 + 3;
/// Modem control: on PCs, one of its outputs lets interrupts through.
const MCR: u16 = COM1 + 4;
const DTR_RTS_OUT2: u8 = 0xb;
const LSR: u16 = COM1 + 5;
const DATA_READY: u8 = 1;
const TRANSMITTER_EMPTY: u8 = 0x20;
/// A status read is an exit like a write, so it is asked for once per full FIFO.
const FIFO: u8 = 16;
/// Some milliseconds: longer than a real UART takes, and no hang where there is none.
const PATIENCE: u32 = 2000;

/// The serial port as a place to write text to.
pub(crate) struct Console {
    room: u8,
    fifo: u8,
}

impl Console {
    /// Says hello; the first letter was sent by the entry code.
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
        for _ in 0..PATIENCE {
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

/// The port interrupts from now on when something comes in.
pub(crate) fn listen() {
    out8(MCR, DTR_RTS_OUT2);
    out8(IER, RECEIVED);
}

/// A byte that came in.
pub(crate) fn heard() -> Option<u8> {
    (in8(LSR) & DATA_READY != 0).then(|| in8(COM1))
}

/// Text put together once and kept for good, up to a bound.
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

    /// Keeps what `arguments` say; when the store is full, as much of it as there is room for.
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
