//! A display 1234:1111: its registers, what its monitor prefers and, if asked for, a picture.
use crate::Session;
use crate::io::{read8, read16, write16, write64};
use crate::pci::Function;
use crate::report::Finding;
use crate::start::Words;

const DEVICE: u32 = 0x1111_1234;
/// BAR 2: the monitor's EDID, and the registers of Bochs' VBE extension.
const DISPI: u64 = 0x500;
const ID: u64 = 0;
const X_RES: u64 = 1;
const Y_RES: u64 = 2;
const BPP: u64 = 3;
const ENABLE: u64 = 4;
const MEMORY_64K: u64 = 10;
/// ENABLE: on, and the frame buffer is linear.
const ON: u16 = 0x41;
/// EDID: bytes of a block, and the first detailed timing.
const BLOCK: u64 = 128;
const WIDTH: u64 = 56;
const HEIGHT: u64 = 59;

struct Display {
    picture: u64,
    registers: u64,
}

pub(crate) fn check(session: &mut Session, words: Words) {
    let Some(function) = Function::find(DEVICE) else { return };
    function.switch_on();
    let display = Display { picture: function.memory(0), registers: function.memory(2) };
    let id = display.get(ID);
    let (width, height) = display.preferred();
    let memory = u64::from(display.get(MEMORY_64K)) << 16;
    let edid = display.edid_adds_up();
    let fits = width >= 640 && height >= 480 && width * height * 4 <= memory;
    let draws = words.get("draw") == Some("yes");
    if draws && fits {
        display.draw(width, height);
    }
    session.add(
        Finding::check("display", id & 0xfff0 == 0xb0c0 && edid && fits)
            .hex("id", id.into())
            .flag("edid", edid)
            .number("width", width)
            .number("height", height)
            .number("memory", memory)
            .flag("drawn", draws && fits),
    );
}

impl Display {
    fn get(&self, register: u64) -> u16 {
        read16(self.registers + DISPI + 2 * register)
    }

    fn set(&self, register: u64, value: u16) {
        write16(self.registers + DISPI + 2 * register, value);
    }

    fn edid(&self, at: u64) -> u64 {
        read8(self.registers + at).into()
    }

    fn edid_adds_up(&self) -> bool {
        self.edid(0) == 0
            && self.edid(1) == 0xff
            && (0..BLOCK).map(|at| self.edid(at)).sum::<u64>() % 256 == 0
    }

    fn preferred(&self) -> (u64, u64) {
        let number = |at| self.edid(at) | (self.edid(at + 2) & 0xf0) << 4;
        (number(WIDTH), number(HEIGHT))
    }

    /// Fills the screen: red tells the column, green the line, and blue both.
    fn draw(&self, width: u64, height: u64) {
        for (register, value) in
            [(ENABLE, 0), (BPP, 32), (X_RES, width as u16), (Y_RES, height as u16), (ENABLE, ON)]
        {
            self.set(register, value);
        }
        let pixel = |x: u64, y: u64| (x & 0xff) << 16 | (y & 0xff) << 8 | (x ^ y) & 0xff;
        let mut at = self.picture;
        for y in 0..height {
            for x in (0..width).step_by(2) {
                write64(at, pixel(x, y) | pixel(x + 1, y) << 32);
                at += 8;
            }
        }
    }
}
