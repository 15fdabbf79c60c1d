//! The display 1234:1111, or virtio-gpu, which has the same registers: its monitor's preferred
//! resolution, and its picture.
use crate::Session;
use crate::canvas::Canvas;
use crate::config::Function;
use crate::cpu::Cpu;
use crate::gate::halt_once;
use crate::io::{read8, read16, write16, write64};
use crate::report::Finding;
use crate::start::Words;
use crate::timer;

const DEVICES: [u32; 2] = [0x1111_1234, 0x1050_1af4];
/// Offset in BAR 2 of the registers of Bochs' VBE extension. The monitor's EDID is at offset 0.
const DISPI: u64 = 0x500;
const ID: u64 = 0;
const X_RES: u64 = 1;
const Y_RES: u64 = 2;
const BPP: u64 = 3;
const ENABLE: u64 = 4;
const MEMORY_64K: u64 = 10;
/// Thirty pictures per second.
const PERIOD_US: u64 = 33_333;
/// ENABLE: on, with a linear frame buffer.
const ON: u16 = 0x41;
/// EDID: bytes of a block, and offsets in the first detailed timing.
const BLOCK: u64 = 128;
const WIDTH: u64 = 56;
const HEIGHT: u64 = 59;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Picture {
    Page,
    /// `draw=yes`
    Pattern,
    /// `draw=moving`
    Moving,
    /// `draw=no`, or `torture`, which moves the display's registers.
    None,
}

impl Picture {
    fn of(words: Words) -> Self {
        match words.get("draw") {
            Some("yes") => Self::Pattern,
            Some("moving") => Self::Moving,
            Some("no") => Self::None,
            _ if words.get("torture").is_some() => Self::None,
            _ => Self::Page,
        }
    }
}

/// The first display of the machine.
pub(crate) struct Display {
    content: Picture,
    picture: u64,
    registers: u64,
    width: u64,
    height: u64,
    memory: u64,
}

impl Display {
    pub(crate) fn find(words: Words) -> Option<Self> {
        let function = DEVICES.into_iter().find_map(Function::find)?;
        function.switch_on();
        // Both BARs have 32 bits, so memory below 4 GiB is mapped.
        let address = |bar| function.memory(bar).filter(|it| *it >> 32 == 0);
        let (picture, registers) = (address(0)?, address(2)?);
        let content = Picture::of(words);
        let mut display = Self { content, picture, registers, width: 0, height: 0, memory: 0 };
        (display.width, display.height) = display.preferred();
        display.memory = u64::from(display.get(MEMORY_64K)) << 16;
        Some(display)
    }

    fn fits(&self) -> bool {
        let pixels = self.width * self.height;
        self.width >= 640 && self.height >= 480 && pixels * 4 <= self.memory
    }

    /// Switches the display on for the page, if the page is to be shown.
    pub(crate) fn canvas(&self) -> Option<Canvas> {
        if self.content != Picture::Page || !self.fits() || !self.is_mapped() {
            return None;
        }
        self.switch_on();
        let [width, height] = [self.width, self.height].map(|side| side as u32);
        Some(Canvas { picture: self.picture, width, height })
    }

    /// Switches the display on with this size, whatever it prefers. Returns the address of the
    /// picture.
    pub(crate) fn open(&mut self, width: u64, height: u64) -> Option<u64> {
        (self.width, self.height) = (width, height);
        let able = self.fits() && self.is_mapped();
        able.then(|| {
            self.switch_on();
            self.picture
        })
    }

    /// Whether the picture is in the first 4 GiB, which are mapped.
    fn is_mapped(&self) -> bool {
        self.picture != 0 && self.picture + self.memory <= 1 << 32
    }

    pub(crate) fn check(&self, session: &mut Session) {
        let id = self.get(ID);
        let edid = self.edid_adds_up();
        if matches!(self.content, Picture::Pattern | Picture::Moving) && self.fits() {
            self.switch_on();
            self.draw(0);
        }
        session.add(
            Finding::check("display", id & 0xfff0 == 0xb0c0 && edid && self.fits())
                .hex("id", id.into())
                .flag("edid", edid)
                .number("width", self.width)
                .number("height", self.height)
                .number("memory", self.memory)
                .flag("drawn", self.content != Picture::None && self.fits()),
        );
    }

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

    fn switch_on(&self) {
        let [width, height] = [self.width, self.height].map(|side| side as u16);
        for (register, value) in
            [(ENABLE, 0), (BPP, 32), (X_RES, width), (Y_RES, height), (ENABLE, ON)]
        {
            self.set(register, value);
        }
    }

    /// Draws the pattern repeatedly, shifted up by a row each time. Does not return.
    pub(crate) fn move_on(&self, cpu: &Cpu) {
        if self.content != Picture::Moving || !self.fits() {
            return;
        }
        timer::tick(cpu, PERIOD_US);
        for up in 1.. {
            halt_once();
            self.draw(up);
        }
    }

    /// Fills the screen: red is the column, green the row, and blue their exclusive or.
    fn draw(&self, up: u64) {
        let pixel = |x: u64, y: u64| {
            let y = y + up;
            (x & 0xff) << 16 | (y & 0xff) << 8 | (x ^ y) & 0xff
        };
        let mut at = self.picture;
        for y in 0..self.height {
            for x in (0..self.width).step_by(2) {
                write64(at, pixel(x, y) | pixel(x + 1, y) << 32);
                at += 8;
            }
        }
    }
}
