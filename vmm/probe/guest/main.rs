//! The probe: a guest program that checks the machine from within and reports the results.
//!
//! README.md in this folder documents the command line and the fields of the report.
#![no_std]
#![no_main]

mod acpi;
mod ahci;
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
mod gate;
mod hyperv;
mod hyperv_calls;
mod hyperv_clock;
mod hyperv_timers;
mod input;
mod intrinsics;
mod io;
mod keys;
mod load;
mod memory;
mod moves;
mod msix;
mod names;
mod net;
mod nvme;
mod page;
mod paging;
mod pattern;
mod pci;
mod peers;
mod processors;
mod random;
mod rebalance;
mod records;
mod report;
mod show;
mod start;
mod timer;
mod torture;
mod trampoline;
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
use input::UserInput;
use page::Page;
use report::{Finding, Report};
use start::{Start, Words};

static mut COMMAND_LINE: [u8; 1024] = [0; 1024];
static mut TEXT: [u8; 16 << 10] = [0; 16 << 10];
/// Command line and PM base, for ending the run after an exception or a panic.
static mut END: (Words, u16) = (Words(""), 0x600);
/// The page, for showing an exception or a panic.
static mut PAGE: *mut Option<Page> = core::ptr::null_mut();

/// The state that all checks share: the report, and storage for text.
pub(crate) struct Session {
    pub(crate) console: Console,
    report: Report,
    store: Store,
    page: Option<Page>,
    /// Whether the local APIC accepts interrupts.
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

#[unsafe(no_mangle)]
extern "C" fn ring3_main(start_info: u64) -> ! {
    let began = io::tsc();
    let console = Console::open();
    entry::fill_interrupt_table();
    let start = Start::read(start_info);
    let (line, text) = (&raw mut COMMAND_LINE, &raw mut TEXT);
    // SAFETY: this is the only use of the variable, and there is one thread.
    let line = unsafe { &mut *line };
    // SAFETY: the same.
    let text = unsafe { &mut *text };
    let words = Words(start.command_line(line));
    config::open(&start, words);
    let pm_base = pci::pm_base();
    end::find_reset(&start);
    // SAFETY: there is one thread; a fault handler reads it only after this write.
    unsafe { END = (words, pm_base) };
    let (report, store) = (Report::new(), Store::new(text));
    let mut session = Session { console, report, store, page: None, interruptible: false };
    let mut moving = None;
    // SAFETY: as for `END`; the session is not moved.
    unsafe { PAGE = &raw mut session.page };
    load::fill(&mut session, &start, words);
    if words.get("checks") != Some("none") {
        moving = checks(&mut session, &start, words, began, pm_base);
    } else if words.get("show").is_some() {
        let cpu = cpu::check(&mut session, Clock::find(pm_base).as_ref());
        show::run(&mut session, &start, &cpu, words);
    } else if ["disk", "net", "moves", "memory"].iter().any(|key| words.get(key).is_some()) {
        let cpu = cpu::check(&mut session, Clock::find(pm_base).as_ref());
        pci::move_bars(&mut session, words);
        disk::run(&mut session, &start, &cpu, words);
        net::run(&mut session, &start, &cpu, words);
        rebalance::run(&mut session, &start, &cpu, words);
        load::run(&mut session, &start, &cpu, words);
    }
    session.report.json(&mut session.console).ok();
    if words.get("then").is_none_or(|then| then == "halt") {
        show_live(&mut session, moving, pm_base);
    }
    end::end(words, pm_base)
}

/// With `then=halt`: moves the picture, or shows keys and mouse on the page. Halts in between.
fn show_live(session: &mut Session, moving: Option<(Display, Cpu)>, pm_base: u16) {
    if let Some((display, cpu)) = moving.filter(|_| session.interruptible) {
        display.move_on(&cpu);
    }
    if !session.interruptible {
        return;
    }
    let button = end::Button::open(pm_base);
    let user_input = session.page.as_ref().and_then(|page| UserInput::open(page.size()));
    let (Some(page), Some(mut user_input)) = (session.page.as_mut(), user_input) else {
        wait(button)
    };
    page.show(&session.report, Some(&user_input));
    loop {
        button.poll();
        while user_input.read_all() {
            page.show_input(&user_input);
        }
        gate::halt_once();
    }
}

/// Without a page or without input devices: waits for the power button.
fn wait(button: end::Button) -> ! {
    loop {
        button.poll();
        gate::halt_once();
    }
}

fn checks(
    session: &mut Session,
    start: &Start,
    words: Words,
    began: u64,
    pm_base: u16,
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
        hyperv::check(session, start, &cpu, words);
    }
    pci::move_bars(session, words);
    pci::check(session, start, pm_base);
    edu::check(session, &cpu);
    if let Some(display) = &display {
        display.check(session);
    }
    disk::run(session, start, &cpu, words);
    net::run(session, start, &cpu, words);
    rebalance::run(session, start, &cpu, words);
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

/// Reports an exception: vector, error code, RIP, RAX and CR2, as the stub saved them.
#[unsafe(no_mangle)]
extern "C" fn ring3_fault(record: &[u64; 5]) -> ! {
    let [vector, error, rip, rax, cr2] = *record;
    let mut console = Console::open();
    writeln!(console, "fail  exception     vector={vector} error={error:#x} rip={rip:#x}").ok();
    show_failure(format_args!("Exception {vector} at {rip:#x}"));
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
    show_failure(format_args!("The probe itself failed"));
    writeln!(console, "{{\"probe\":1,\"ok\":false,\"panic\":{{\"line\":{line}}}}}").ok();
    stop()
}

fn show_failure(what: Arguments) {
    // SAFETY: there is one thread, and it never returns to the code that used the page.
    if let Some(page) = unsafe { PAGE.as_mut() }.and_then(Option::as_mut) {
        page.show_failure(what);
    }
}

fn stop() -> ! {
    // SAFETY: there is one thread, which runs this.
    let (words, pm_base) = unsafe { END };
    end::end(words, pm_base)
}
