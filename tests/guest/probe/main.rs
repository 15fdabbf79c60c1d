//! The probe: a guest of our own that looks at the machine from within, and says what it found.
//!
//! README.md beside this file lists the words of its command line and the fields of its report.
#![no_std]
#![no_main]

mod acpi;
mod clock;
mod config;
mod console;
mod cpu;
mod disk;
mod edu;
mod end;
mod entry;
mod exits;
mod intrinsics;
mod io;
mod memory;
mod msix;
mod net;
mod nvme;
mod paging;
mod pattern;
mod pci;
mod processors;
mod random;
mod records;
mod report;
mod start;
mod timer;
mod torture;
mod virtio;
mod virtio_blk;
mod virtio_net;
mod waiting;

use core::fmt::{Arguments, Write};
use core::panic::PanicInfo;

use clock::Clock;
use console::{Console, Store};
use report::{Finding, Report};
use start::{Start, Words};

static mut COMMAND_LINE: [u8; 1024] = [0; 1024];
static mut TEXT: [u8; 16 << 10] = [0; 16 << 10];
/// How to end when something goes wrong on the way.
static mut END: (Words, u16) = (Words(""), 0x600);

/// What every check is given: a place to tell, and a place to keep text.
pub(crate) struct Session {
    pub(crate) console: Console,
    report: Report,
    store: Store,
}

impl Session {
    pub(crate) fn add(&mut self, finding: Finding) {
        self.report.add(finding, &mut self.console);
    }

    pub(crate) fn text(&mut self, arguments: Arguments) -> &'static str {
        self.store.keep(arguments)
    }
}

/// Ring 3 begins here.
#[unsafe(no_mangle)]
extern "C" fn ring3_main(start_info: u64) -> ! {
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
    let mut session = Session { console, report: Report::new(), store: Store::new(text) };
    if words.get("checks") != Some("none") {
        checks(&mut session, &start, words, pm_base);
    } else if words.get("disk").or(words.get("net")).is_some() {
        let cpu = cpu::check(&mut session, Clock::find(pm_base).as_ref());
        pci::move_bars(&mut session, words);
        disk::run(&mut session, &start, &cpu, words);
        net::run(&mut session, &start, &cpu, words);
    }
    session.report.json(&mut session.console).ok();
    end::end(words, pm_base)
}

fn checks(session: &mut Session, start: &Start, words: Words, pm_base: u16) {
    let clock = Clock::find(pm_base);
    let cpu = cpu::check(session, clock.as_ref());
    memory::check(session, start, &cpu);
    if timer::enable(session) {
        timer::check(session, &cpu);
        processors::check(session, start, &cpu);
    }
    pci::move_bars(session, words);
    pci::check(session, start, pm_base);
    edu::check(session, &cpu);
    disk::run(session, start, &cpu, words);
    net::run(session, start, &cpu, words);
    if words.get("bench") == Some("exits") {
        exits::measure(session, &cpu);
    }
    if let Some(words) = words.get("torture") {
        torture::run(session, &cpu, pm_base, words);
    }
    session.add(Finding::check("nmi", entry::nmis() == 0).number("count", entry::nmis().into()));
}

/// An exception: vector, error code, RIP, RAX and CR2, as the stub saved them.
#[unsafe(no_mangle)]
extern "C" fn ring3_fault(record: &[u64; 5]) -> ! {
    let [vector, error, rip, rax, cr2] = *record;
    let mut console = Console::open();
    writeln!(console, "fail  exception     vector={vector} error={error:#x} rip={rip:#x}").ok();
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
    writeln!(console, "{{\"probe\":1,\"ok\":false,\"panic\":{{\"line\":{line}}}}}").ok();
    stop()
}

fn stop() -> ! {
    // SAFETY: there is one thread, and it is here.
    let (words, pm_base) = unsafe { END };
    end::end(words, pm_base)
}
