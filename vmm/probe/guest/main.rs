//! The probe: a guest of our own that looks at the machine from within, and says what it found.
//!
//! README.md beside this file lists the words of its command line and the fields of its report.
#![no_std]
#![no_main]

mod acpi;
mod canvas;
mod clock;
mod config;
mod console;
mod cpu;
mod cursor;
mod disk;
mod display;
mod edu;
mod end;
mod entry;
mod exits;
mod font;
mod hands;
mod intrinsics;
mod io;
mod keys;
mod memory;
mod msix;
mod names;
mod net;
mod nvme;
mod page;
mod paging;
mod pattern;
mod pci;
mod processors;
mod random;
mod records;
mod report;
mod show;
mod start;
mod timer;
mod torture;
mod units;
mod virtio;
mod virtio_blk;
mod virtio_net;
mod waiting;

use core::fmt::{Arguments, Write};
use core::panic::PanicInfo;

use clock::Clock;
use console::{Console, Store};
use cpu::Cpu;
use display::Display;
use hands::Hands;
use page::Page;
use report::{Finding, Report};
use start::{Start, Words};

static mut COMMAND_LINE: [u8; 1024] = [0; 1024];
static mut TEXT: [u8; 16 << 10] = [0; 16 << 10];
/// How to end when something goes wrong on the way.
static mut END: (Words, u16) = (Words(""), 0x600);
/// Where it is told then, too.
static mut PAGE: *mut Option<Page> = core::ptr::null_mut();

/// What every check is given: a place to tell, and a place to keep text.
pub(crate) struct Session {
    pub(crate) console: Console,
    report: Report,
    store: Store,
    page: Option<Page>,
    /// The local APIC takes interrupts.
    interruptible: bool,
}

impl Session {
    pub(crate) fn add(&mut self, finding: Finding) {
        self.report.add(finding, &mut self.console);
        self.show();
    }

    fn show(&mut self) {
        if let Some(page) = &mut self.page {
            page.show(&self.report, None);
        }
    }

    pub(crate) fn text(&mut self, arguments: Arguments) -> &'static str {
        self.store.keep(arguments)
    }
}

/// Ring 3 begins here.
#[unsafe(no_mangle)]
extern "C" fn ring3_main(start_info: u64) -> ! {
    let began = io::tsc();
    let console = Console::open();
    entry::fill_interrupt_table();
    let start = Start::read(start_info);
    let (line, text) = (&raw mut COMMAND_LINE, &raw mut TEXT);
    // SAFETY: the one use of this variable; there is one thread.
    let line = unsafe { &mut *line };
    // SAFETY: the same.
    let text = unsafe { &mut *text };
    let words = Words(start.command_line(line));
    config::open(&start, words);
    let pm_base = pci::pm_base();
    // SAFETY: there is one thread; a fault reads it after this or not at all.
    unsafe { END = (words, pm_base) };
    let (report, store) = (Report::new(), Store::new(text));
    let mut session = Session { console, report, store, page: None, interruptible: false };
    let mut moving = None;
    // SAFETY: as for `END`; the session stays where it is.
    unsafe { PAGE = &raw mut session.page };
    if words.get("checks") != Some("none") {
        moving = checks(&mut session, &start, words, (began, pm_base));
    } else if words.get("show").is_some() {
        let cpu = cpu::check(&mut session, Clock::find(pm_base).as_ref());
        show::run(&mut session, &start, &cpu, words);
    } else if words.get("disk").or(words.get("net")).is_some() {
        let cpu = cpu::check(&mut session, Clock::find(pm_base).as_ref());
        pci::move_bars(&mut session, words);
        disk::run(&mut session, &start, &cpu, words);
        net::run(&mut session, &start, &cpu, words);
    }
    session.report.json(&mut session.console).ok();
    if words.get("then").is_none_or(|then| then == "halt") {
        live(&mut session, moving, pm_base);
    }
    end::end(words, pm_base)
}

/// Moves the picture, or shows what a person does for as long as there is a page; idle meanwhile.
fn live(session: &mut Session, moving: Option<(Display, Cpu)>, pm_base: u16) {
    if let Some((display, cpu)) = moving.filter(|_| session.interruptible) {
        display.move_on(&cpu);
    }
    if !session.interruptible {
        return;
    }
    let button = end::Button::open(pm_base);
    let hands = session.page.as_ref().and_then(|page| Hands::open(page.size()));
    let (Some(page), Some(mut hands)) = (session.page.as_mut(), hands) else { wait(button) };
    page.show(&session.report, Some(&hands));
    loop {
        button.obey();
        while hands.take() {
            page.show_hands(&hands);
        }
        entry::halt_once();
    }
}

/// Nobody sees it, or nobody can touch it: the power button is all there is.
fn wait(button: end::Button) -> ! {
    loop {
        button.obey();
        entry::halt_once();
    }
}

fn checks(
    session: &mut Session,
    start: &Start,
    words: Words,
    (began, pm_base): (u64, u16),
) -> Option<(Display, Cpu)> {
    let display = Display::find(words);
    session.page = display.as_ref().and_then(Display::canvas).map(Page::open);
    session.show();
    let clock = Clock::find(pm_base);
    let cpu = cpu::check(session, clock.as_ref());
    memory::check(session, start, &cpu);
    session.interruptible = timer::enable(session);
    if session.interruptible {
        timer::check(session, &cpu);
        processors::check(session, start, &cpu);
    }
    pci::move_bars(session, words);
    pci::check(session, start, pm_base);
    edu::check(session, &cpu);
    if let Some(display) = &display {
        display.check(session);
    }
    disk::run(session, start, &cpu, words);
    net::run(session, start, &cpu, words);
    if words.get("bench") == Some("exits") {
        exits::measure(session, &cpu);
    }
    if let Some(words) = words.get("torture") {
        torture::run(session, &cpu, pm_base, words);
    }
    if let Some(page) = &mut session.page {
        page.finish(cpu.nanoseconds(io::tsc() - began) / 1000);
    }
    session.add(Finding::check("nmi", entry::nmis() == 0).number("count", entry::nmis().into()));
    display.map(|display| (display, cpu))
}

/// An exception: vector, error code, RIP, RAX and CR2, as the stub saved them.
#[unsafe(no_mangle)]
extern "C" fn ring3_fault(record: &[u64; 5]) -> ! {
    let [vector, error, rip, rax, cr2] = *record;
    let mut console = Console::open();
    writeln!(console, "fail  exception     vector={vector} error={error:#x} rip={rip:#x}").ok();
    tell(format_args!("Exception {vector} at {rip:#x}"));
    write!(console, "{{\"probe\":1,\"ok\":false,\"exception\":{{\"vector\":{vector},").ok();
    write!(console, "\"error\":\"{error:#x}\",\"rip\":\"{rip:#x}\",\"rax\":\"{rax:#x}\",").ok();
    writeln!(console, "\"cr2\":\"{cr2:#x}\"}}}}").ok();
    stop()
}

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    let mut console = Console::open();
    writeln!(console, "fail  panic         {info}").ok();
    let line = info.location().map_or(0, |location| location.line());
    tell(format_args!("The probe itself failed"));
    writeln!(console, "{{\"probe\":1,\"ok\":false,\"panic\":{{\"line\":{line}}}}}").ok();
    stop()
}

/// Tells on the page why there will be nothing more.
fn tell(what: Arguments) {
    // SAFETY: there is one thread, and it is here for good: whoever had the page is gone.
    if let Some(page) = unsafe { PAGE.as_mut() }.and_then(Option::as_mut) {
        page.break_off(what);
    }
}

fn stop() -> ! {
    // SAFETY: there is one thread, and it is here.
    let (words, pm_base) = unsafe { END };
    end::end(words, pm_base)
}
