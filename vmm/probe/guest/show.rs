//! `show=yes`: plays scenes from the loader's module on the display, controlled through the serial
//! port. Benchmarks of screens create the module, so that every machine shows the same.
//!
//! A module begins with the number of scenes and a table of them ([`Scene`]). All numbers have 32
//! bits.
use core::fmt::Write;

use crate::Session;
use crate::console::{self, Console};
use crate::cpu::Cpu;
use crate::display::Display;
use crate::entry::timer_interrupts;
use crate::gate::halt_once;
use crate::input::{self, UserInput};
use crate::io::{out8, read32};
use crate::report::Finding;
use crate::start::{Start, Words};
use crate::timer;

const COM1_LINE: u32 = 4;
const FIRST: u8 = b'a';
const NEXT: u8 = b'.';

/// A part of the screen, and its content frame by frame.
struct Scene {
    /// The resolution of the display.
    width: u64,
    height: u64,
    /// The part that changes. The rest of the screen shows the scene's background.
    left: u64,
    top: u64,
    columns: u64,
    lines: u64,
    /// The offset of the first frame in the module, and the bytes from one row to the next.
    first: u64,
    stride: u64,
    /// The number of frames, and the bytes from one to the next.
    frames: u64,
    step: u64,
    /// Frames per second; 0 if each frame is requested.
    rate: u64,
    /// The offset of the background in the module: a full screen of pixels.
    background: u64,
}

const FIELDS: u64 = 12;

impl Scene {
    /// Reads a scene of the table. `None` if a part of it is outside of the module.
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
        let [frames, step, rate, background] = [(); 4].map(|()| field());
        let last = first + frames.checked_sub(1)? * step;
        let end = last + lines.checked_sub(1)? * stride + 4 * columns;
        let inside = end <= size && background + 4 * width * height <= size;
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
            background,
        };
        (inside && fits).then_some(scene)
    }

    fn draw_background(&self, module: u64, picture: u64) {
        copy(module + self.background, picture, 4 * self.width * self.height);
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
    // SAFETY: the module is RAM that no device writes, the display's memory holds no variable, and
    // the sizes of both were checked.
    unsafe {
        core::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes as usize);
    }
}

struct Player {
    module: (u64, u64),
    display: Display,
    picture: u64,
    size: (u64, u64),
    scene: Option<Scene>,
    frame: u64,
}

impl Player {
    /// Prints the number of frames drawn for the previous scene.
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
        scene.draw_background(self.module.0, self.picture);
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

/// Plays forever. Returns only if the display, the module or the local APIC is missing.
pub(crate) fn run(session: &mut Session, start: &Start, cpu: &Cpu, words: Words) {
    let display = Display::find(words);
    let module = start.module();
    let able = timer::switch_on().1;
    let size = module.map_or(0, |(_, size)| size);
    let ready = display.is_some() && module.is_some() && able;
    session.add(Finding::check("show", ready).number("module", size).flag("local_apic", able));
    let (Some(display), Some(module), true) = (display, module, able) else { return };
    let mut user_input = UserInput::open((640, 480));
    input::route(COM1_LINE);
    console::enable_interrupt();
    let (picture, size) = (0, (0, 0));
    let mut player = Player { module, display, picture, size, scene: None, frame: 0 };
    writeln!(session.console, "ready").ok();
    let mut ticks = timer_interrupts();
    loop {
        while let Some(byte) = console::receive() {
            match byte {
                NEXT => step(&mut player),
                b'a'..=b'z' => player.choose(byte - FIRST, cpu, &mut session.console),
                _ => {}
            }
            ticks = timer_interrupts();
        }
        if user_input.as_mut().is_some_and(UserInput::read_all) {
            step(&mut player);
        }
        if core::mem::replace(&mut ticks, timer_interrupts()) != ticks {
            player.next();
        }
        halt_once();
    }
}

/// Draws the next frame on request. Prints the moment at which it begins.
fn step(player: &mut Player) {
    out8(console::COM1, b'!');
    player.next();
}
