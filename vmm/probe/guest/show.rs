//! `show=yes`: plays scenes from the loader's module on the display, as it is told by the serial
//! port. Who measures screens has made them, so that every machine shows the same.
//!
//! A module begins with how many scenes there are, and a table of them ([`Scene`]); all numbers
//! have 32 bits.
use core::fmt::Write;

use crate::Session;
use crate::console::{self, Console};
use crate::cpu::Cpu;
use crate::display::Display;
use crate::entry::{halt_once, timer_interrupts};
use crate::hands::{self, Hands};
use crate::io::{out8, read32};
use crate::report::Finding;
use crate::start::{Start, Words};
use crate::timer;

/// The number of the serial port's interrupt.
const COM1_LINE: u32 = 4;
const FIRST: u8 = b'a';
const NEXT: u8 = b'.';

/// Part of a screen, and what is there frame by frame.
struct Scene {
    /// Of the display.
    width: u64,
    height: u64,
    /// Of the part that changes; what is around it is the scene's first frame.
    left: u64,
    top: u64,
    columns: u64,
    lines: u64,
    /// Where the first frame is in the module, and bytes from a line to the next.
    first: u64,
    stride: u64,
    /// Frames, and bytes from one to the next.
    frames: u64,
    step: u64,
    /// Frames a second; with 0 each is asked for.
    rate: u64,
    /// Where in the module what is around it is, a screen full of pixels.
    ground: u64,
}

const FIELDS: u64 = 12;

impl Scene {
    /// One of the table, if all that it shows is in the module.
    fn read(module: (u64, u64), number: u64) -> Option<Self> {
        let (at, size) = module;
        let count = if size < 4 { 0 } else { u64::from(read32(at)) };
        if number >= count || size < 4 + 4 * FIELDS * count {
            return None;
        }
        let mut next = at + 4 + 4 * FIELDS * number;
        let mut field = || {
            next += 4;
            u64::from(read32(next - 4))
        };
        let [width, height, left, top] = [(); 4].map(|()| field());
        let [columns, lines, first, stride] = [(); 4].map(|()| field());
        let [frames, step, rate, ground] = [(); 4].map(|()| field());
        let last = first + frames.checked_sub(1)? * step;
        let end = last + lines.checked_sub(1)? * stride + 4 * columns;
        let inside = end <= size && ground + 4 * width * height <= size;
        let fits = left + columns <= width && top + lines <= height;
        let scene = Self {
            width,
            height,
            left,
            top,
            columns,
            lines,
            first,
            stride,
            frames,
            step,
            rate,
            ground,
        };
        (inside && fits).then_some(scene)
    }

    /// What is around it.
    fn lay(&self, module: u64, picture: u64) {
        copy(module + self.ground, picture, 4 * self.width * self.height);
    }

    fn draw(&self, module: u64, picture: u64, frame: u64) {
        let from = module + self.first + frame % self.frames * self.step;
        for line in 0..self.lines {
            let to = picture + 4 * ((self.top + line) * self.width + self.left);
            copy(from + line * self.stride, to, 4 * self.columns);
        }
    }
}

/// Copies from the module to the display.
fn copy(from: u64, to: u64, bytes: u64) {
    // SAFETY: the module is RAM that nobody writes, the display's memory is no variable's, and
    // both are as large as was checked.
    unsafe {
        core::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes as usize);
    }
}

/// What is played.
struct Player {
    module: (u64, u64),
    display: Display,
    picture: u64,
    size: (u64, u64),
    scene: Option<Scene>,
    frame: u64,
}

impl Player {
    /// Another scene; tells how many frames the one before had.
    fn choose(&mut self, number: u8, cpu: &Cpu, console: &mut Console) {
        timer::stop();
        writeln!(console, "drew {}", self.frame).ok();
        self.frame = 0;
        self.scene = Scene::read(self.module, number.into());
        let Some(scene) = &self.scene else {
            writeln!(console, "no scene {number}").ok();
            return;
        };
        if self.size != (scene.width, scene.height) {
            let Some(picture) = self.display.open(scene.width, scene.height) else {
                writeln!(console, "no mode for scene {number}").ok();
                self.scene = None;
                return;
            };
            (self.picture, self.size) = (picture, (scene.width, scene.height));
        }
        scene.lay(self.module.0, self.picture);
        scene.draw(self.module.0, self.picture, 0);
        if let Some(period) = 1_000_000_u64.checked_div(scene.rate) {
            timer::tick(cpu, period);
        }
        writeln!(console, "scene {number}").ok();
    }

    fn next(&mut self) {
        if let Some(scene) = &self.scene {
            self.frame += 1;
            scene.draw(self.module.0, self.picture, self.frame);
        }
    }
}

/// Plays for good; returns only where there is nothing to play, or no way to.
pub(crate) fn run(session: &mut Session, start: &Start, cpu: &Cpu, words: Words) {
    let display = Display::find(words);
    let module = start.module();
    let able = timer::switch_on().1;
    let size = module.map_or(0, |(_, size)| size);
    let ready = display.is_some() && module.is_some() && able;
    session.add(Finding::check("show", ready).number("module", size).flag("local_apic", able));
    let (Some(display), Some(module), true) = (display, module, able) else { return };
    let mut hands = Hands::open((640, 480));
    hands::route(COM1_LINE);
    console::listen();
    let (picture, size) = (0, (0, 0));
    let mut player = Player { module, display, picture, size, scene: None, frame: 0 };
    writeln!(session.console, "ready").ok();
    let mut ticks = timer_interrupts();
    loop {
        while let Some(byte) = console::heard() {
            match byte {
                NEXT => step(&mut player),
                b'a'..=b'z' => player.choose(byte - FIRST, cpu, &mut session.console),
                _ => {}
            }
            ticks = timer_interrupts();
        }
        if hands.as_mut().is_some_and(Hands::take) {
            step(&mut player);
        }
        if core::mem::replace(&mut ticks, timer_interrupts()) != ticks {
            player.next();
        }
        halt_once();
    }
}

/// The next frame, because somebody wants it: tells the moment at which it begins.
fn step(player: &mut Player) {
    out8(console::COM1, b'!');
    player.next();
}
