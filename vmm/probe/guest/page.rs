//! Shows the report as a page on the display while the checks run. Afterwards, shows keys and
//! mouse.
use core::fmt::{self, Arguments, Write};

use crate::canvas::{Canvas, Cell, Layer, Pen, Style};
use crate::cursor::Cursor;
use crate::font::{DOT, Font, RIGHT, WRONG};
use crate::input::UserInput;
use crate::keys::Name;
use crate::names;
use crate::report::{Finding, Report, Verdict};
use crate::units::{Bytes, Hertz, Microseconds};

/// Maximum and minimum size of a page, in columns and rows. The minimum fits all panels.
const MAX_SIZE: [usize; 2] = [240, 64];
const MIN_SIZE: [usize; 2] = [86, 26];
const CELLS: usize = MAX_SIZE[0] * MAX_SIZE[1];
const TITLE: usize = 64;
const PANELS: usize = 7;
/// Rows of panels with a fixed height, including the heading.
const PROCESSOR: usize = 7;
const MEMORY: usize = 4;
const STORAGE: usize = 3;
const INPUT: usize = 4;
/// Minimum number of rows for checks; columns between panels.
const CHECKS: usize = 2;
const GAP: usize = 2;
/// Number of failures that are shown in full.
const FAILURES: usize = 3;
/// Columns from a panel's edge to its text; of a label; of a label with a PCI address; of a check.
const PADDING: usize = 2;
const LABEL: usize = 12;
const ADDRESS: usize = 9;
const CHECK: usize = 17;
/// Columns of the count of typed characters.
const COUNT: usize = 13;

/// The wanted content, and the content on the screen, of each layer.
struct Cells {
    title: [[Cell; TITLE]; 2],
    verdict: [[Cell; TITLE]; 2],
    body: [[Cell; CELLS]; 2],
}

// Not in .bss, which is zeroed at the start: a run without a page does not touch this memory.
#[unsafe(link_section = ".early")]
static mut STORE: Cells = Cells {
    title: [[Cell::ZERO; TITLE]; 2],
    verdict: [[Cell::ZERO; TITLE]; 2],
    body: [[Cell::ZERO; CELLS]; 2],
};

pub(crate) struct Page {
    canvas: Canvas,
    title: Layer,
    verdict: Layer,
    body: Layer,
    /// The position of the panels as drawn.
    panels: [Area; PANELS],
    cursor: Cursor,
    /// Duration of the checks in microseconds, once they are done.
    took: Option<u64>,
}

struct TextLayout {
    font: Font,
    x: u32,
    margin: u32,
    /// The top of the text below the title.
    top: u32,
    line: u32,
    columns: usize,
    rows: usize,
}

impl TextLayout {
    fn of(font: Font, canvas: &Canvas) -> Self {
        let scale = font.scale();
        let (width, height) = (font.width(), font.height());
        // Small fonts need no space between the rows.
        let small = height <= 16;
        let line = if small { height } else { height + 4 * scale };
        let margin = if small { 8 } else { line };
        let top = margin + font.title().height() + line * 3 / 4;
        let columns = (canvas.width.saturating_sub(2 * margin) / width) as usize;
        let columns = columns.min(MAX_SIZE[0]);
        let x = (canvas.width - columns as u32 * width) / 2;
        let rows = (canvas.height.saturating_sub(top + margin) / line) as usize;
        Self { font, x, margin, top, line, columns, rows: rows.min(MAX_SIZE[1]) }
    }

    /// The layout with the largest font that fits all panels.
    fn best(canvas: &Canvas) -> Self {
        let fits = |it: &Self| it.columns >= MIN_SIZE[0] && it.rows >= MIN_SIZE[1];
        let smallest = Self::of(Font::SMALLEST, canvas);
        Font::SIZES.into_iter().map(|font| Self::of(font, canvas)).find(fits).unwrap_or(smallest)
    }
}

impl Page {
    /// Must be called only once.
    pub(crate) fn open(canvas: Canvas) -> Self {
        let store = &raw mut STORE;
        // SAFETY: the only use of the variable, by the only thread; any bytes are cells.
        let cells = unsafe { &mut *store };
        let TextLayout { font, x, margin, top, line, columns, rows } = TextLayout::best(&canvas);
        let big = font.title();
        let across = columns as u32 * font.width();
        let half = TITLE.min((across / big.width() / 2) as usize);
        let row = |x, [wanted, shown]: &'static mut [[Cell; TITLE]; 2]| Layer {
            font: big,
            x,
            y: margin,
            line: big.height(),
            columns: half,
            rows: 1,
            wanted,
            shown,
        };
        let title = row(x, &mut cells.title);
        let verdict = row(x + across - half as u32 * big.width(), &mut cells.verdict);
        let [wanted, shown] = &mut cells.body;
        let body = Layer { font, x, y: top, line, columns, rows, wanted, shown };
        let cursor = Cursor::new(font.scale());
        let panels = [Area::NONE; PANELS];
        let mut page = Self { canvas, title, verdict, body, panels, cursor, took: None };
        page.title.blank();
        let end = page.title.columns;
        let version = env!("CARGO_PKG_VERSION");
        let mut pen = page.title.pen(0, 0, end);
        pen.write(Style::TITLE, format_args!("Transom probe"));
        pen.write(Style::SUBTITLE, format_args!(" {version}"));
        page
    }

    fn clear(&mut self) {
        self.canvas.clear();
        for layer in [&mut self.title, &mut self.verdict, &mut self.body] {
            layer.forget();
        }
    }

    /// The positions of the panels, which depend on the number of checks and of failures shown in
    /// full.
    fn areas(&self, report: &Report) -> [Area; PANELS] {
        let (columns, rows) = (self.body.columns, self.body.rows);
        let per_row = ((columns - 2 * PADDING) / CHECK).max(1);
        let failures = report.findings().filter(is_wrong).count().min(FAILURES);
        let checks = report.findings().filter(is_check).count().div_ceil(per_row).max(CHECKS);
        let input = rows.saturating_sub(INPUT);
        let checks = input.saturating_sub(1 + 1 + checks + failures);
        let middle = checks.saturating_sub(1);
        let half = (columns - GAP) / 2;
        let memory = PROCESSOR + 1;
        let clocks = memory + MEMORY + 1;
        let storage = middle.saturating_sub(STORAGE);
        let area = |left, right, top, bottom| Area { left, right, top, bottom };
        [
            area(0, half, 0, PROCESSOR),
            area(0, half, memory, memory + MEMORY),
            area(0, half, clocks, middle),
            area(half + GAP, columns, 0, storage.saturating_sub(1)),
            area(half + GAP, columns, storage, middle),
            area(0, columns, checks, input.saturating_sub(1)),
            area(0, columns, input, rows),
        ]
    }

    /// Draws the background of all panels, which extends a little above and below their rows.
    fn draw_panels(&mut self, panels: [Area; PANELS]) {
        self.clear();
        self.panels = panels;
        let body = &self.body;
        let (width, line) = (body.font.width(), body.line);
        for area in panels.iter().filter(|area| area.top < area.bottom) {
            let [left, right] = [area.left, area.right].map(|at| body.x + at as u32 * width);
            let [top, bottom] = [area.top, area.bottom].map(|at| body.y + at as u32 * line);
            let more = line / 4;
            self.canvas.fill([left, top - more, right, bottom + more], Style::TEXT);
        }
    }

    pub(crate) fn size(&self) -> (u32, u32) {
        (self.canvas.width, self.canvas.height)
    }

    /// Ends the checks, which took this many microseconds.
    pub(crate) fn finish(&mut self, microseconds: u64) {
        self.took = Some(microseconds);
    }

    pub(crate) fn show(&mut self, report: &Report, user_input: Option<&UserInput>) {
        let panels = self.areas(report);
        if panels != self.panels {
            self.draw_panels(panels);
        }
        self.body.blank();
        self.sum_up(report);
        let [processor, memory, timings, devices, storage, checks, input] = panels;
        self.processor(processor, report);
        self.memory(memory, report);
        self.timings(timings, report);
        self.devices(devices, report);
        self.storage(storage, report);
        self.checks(checks, report);
        self.input(input, user_input);
        self.draw(user_input);
    }

    pub(crate) fn show_input(&mut self, user_input: &UserInput) {
        self.input(self.panels[PANELS - 1], Some(user_input));
        self.draw(Some(user_input));
    }

    fn draw(&mut self, user_input: Option<&UserInput>) {
        let pointer =
            user_input.map(|user_input| &user_input.pointer).filter(|pointer| pointer.seen);
        self.cursor.lift(&self.canvas);
        self.title.draw(&self.canvas);
        self.verdict.draw(&self.canvas);
        self.body.draw(&self.canvas);
        if let Some(pointer) = pointer {
            self.cursor.put(&self.canvas, pointer.x as u32, pointer.y as u32);
        }
    }

    pub(crate) fn show_failure(&mut self, what: Arguments) {
        self.show_verdict(Style::SOME_BAD, what);
        self.verdict.draw(&self.canvas);
    }

    fn sum_up(&mut self, report: &Report) {
        let wrong = report.findings().filter(is_wrong).count();
        match (self.took, report.is_ok()) {
            (_, false) if wrong == 1 => {
                self.show_verdict(Style::SOME_BAD, format_args!("1 check failed"))
            }
            (_, false) => self.show_verdict(Style::SOME_BAD, format_args!("{wrong} checks failed")),
            (None, true) => self.show_verdict(Style::WORKING, format_args!("Checking")),
            (Some(_), true) => self.show_verdict(Style::ALL_GOOD, format_args!("All is well")),
        }
    }

    /// Writes at the upper right.
    fn show_verdict(&mut self, style: Style, what: Arguments) {
        self.verdict.blank();
        let end = self.verdict.columns;
        let width = width(what) + 2;
        self.verdict.pen(0, end.saturating_sub(width), end).write(style, format_args!(" {what} "));
    }

    fn processor(&mut self, area: Area, report: &Report) {
        let mut panel = Panel::open(&mut self.body, area, "Processor");
        if let Some(cpu) = report.find("cpu") {
            let brand = [cpu.text_of("brand"), cpu.text_of("vendor")];
            let brand = brand.into_iter().find(|text| !text.is_empty()).unwrap_or("unknown");
            let [family, model, stepping] =
                ["family", "model", "stepping"].map(|key| cpu.count(key));
            let bits = cpu.count("physical_bits");
            let hypervisor = cpu.text_of("hypervisor");
            let steady = if cpu.count("invariant_tsc") == 1 { ", invariant" } else { "" };
            panel.line("Model", format_args!("{brand}"));
            panel.line("Family", format_args!("{family}, model {model}, stepping {stepping}"));
            panel.note(format_args!("{bits} address bits"));
            panel.line("Hypervisor", format_args!("{hypervisor}"));
            if let Some(tsc) = report.find("tsc") {
                let (hz, clock) = (Hertz(tsc.count("hz")), tsc.text_of("clock"));
                panel.line("TSC", format_args!("{hz}{steady}"));
                panel.note(format_args!("by {clock}"));
            }
        }
        if let Some(speed) = report.find("speed") {
            let loops = Hertz(speed.count("loops_per_us") * 1_000_000);
            panel.line("Speed", format_args!("{loops} in a short loop"));
        }
        if let Some(processors) = report.find("processors") {
            let [online, listed] = ["online", "madt"].map(|key| processors.count(key));
            panel.line("Processors", format_args!("{online} of {} run", listed.max(online)));
        }
    }

    fn memory(&mut self, area: Area, report: &Report) {
        let mut panel = Panel::open(&mut self.body, area, "Memory");
        let ranges = report.findings().filter(|finding| finding.name() == "memory-range");
        let ram = ranges.filter(|range| range.count("type") == 1);
        let count = ram.clone().count();
        let end = ram.map(|range| range.count("base") + range.count("length")).max().unwrap_or(0);
        if let Some(map) = report.find("memory-map") {
            panel.line("Size", format_args!("{}", Bytes(map.count("ram_bytes"))));
            panel.line("Map", format_args!("{count} ranges, up to {end:#x}"));
        }
        if let Some(test) = report.find("memory-test") {
            let [samples, errors] = ["samples", "errors"].map(|key| test.count(key));
            let bytes = Bytes(test.count("tested_bytes"));
            panel.line("Test", format_args!("{samples} samples, {errors} errors"));
            panel.note(format_args!("{bytes}"));
        }
    }

    fn timings(&mut self, area: Area, report: &Report) {
        let took = self.took;
        let mut panel = Panel::open(&mut self.body, area, "Time");
        if let Some(timer) = report.find("timer") {
            let [ticks, period, elapsed] =
                ["ticks", "period_us", "elapsed_us"].map(|key| Microseconds(timer.count(key)));
            let ticks = ticks.0;
            panel.line("Timer", format_args!("{ticks} ticks of {period} in {elapsed}"));
        }
        match took {
            Some(took) => {
                panel.line("Report", format_args!("{} after the start", Microseconds(took)))
            }
            None => panel.line("Report", format_args!("in progress")),
        }
        if let Some(timer) = report.find("timer") {
            panel.line("APIC clock", format_args!("{}", Hertz(timer.count("hz"))));
        }
        for (label, name) in
            [("Port exit", "exit-port"), ("MMIO exit", "exit-mmio"), ("CPUID exit", "exit-cpuid")]
        {
            if let Some(exit) = report.find(name) {
                let [median, least] = ["median_ns", "min_ns"].map(|key| exit.count(key));
                panel.line(label, format_args!("{median} ns, at best {least} ns"));
            }
        }
    }

    fn devices(&mut self, area: Area, report: &Report) {
        let mut panel = Panel::open(&mut self.body, area, "Devices");
        panel.label = ADDRESS;
        let functions = || report.findings().filter(|it| it.name() == "pci-function");
        let (count, room) = (functions().count(), panel.room());
        let shown = if count > room { room.saturating_sub(1) } else { count };
        for function in functions().take(shown) {
            let id = function.text_of("id");
            let name = names::name(id, function.count("class"));
            let address = function.text_of("bdf");
            match report.find("display").filter(|_| id == names::DISPLAY) {
                Some(it) => {
                    let [width, height] = ["width", "height"].map(|key| it.count(key));
                    let memory = Bytes(it.count("memory"));
                    panel.line(address, format_args!("{name}, {width}x{height}, {memory}"));
                }
                None => panel.line(address, format_args!("{name}")),
            }
            panel.note(format_args!("{id}"));
        }
        if count > shown {
            panel.line("", format_args!("and {} more", count - shown));
        }
    }

    fn storage(&mut self, area: Area, report: &Report) {
        let mut panel = Panel::open(&mut self.body, area, "Disks and networks");
        let looked = report.find("pci").is_some();
        for (label, class, name) in [("Disks", 1, "disk"), ("Networks", 2, "net")] {
            let functions = report.findings().filter(|it| it.name() == "pci-function");
            let count = functions.filter(|it| it.count("class") >> 16 == class).count();
            let driven = report.findings().filter(|it| it.name() == name).last();
            match driven {
                Some(work) => {
                    let [requests, sent] = ["requests", "sent"].map(|key| work.count(key));
                    let time = Microseconds(work.count("microseconds"));
                    let count = requests.max(sent);
                    panel.line(label, format_args!("{count} requests in {time}"));
                }
                None if !looked => {}
                None if count == 0 => panel.line(label, format_args!("none")),
                None => panel.line(label, format_args!("{count}, not tried")),
            }
        }
    }

    fn checks(&mut self, area: Area, report: &Report) {
        let (left, right) = (area.left + PADDING, area.right - PADDING);
        let mut panel = Panel::open(&mut self.body, area, "Checks");
        let per_row = ((right - left) / CHECK).max(1);
        for (index, finding) in report.findings().filter(is_check).enumerate() {
            let (row, column) = (index / per_row, index % per_row);
            let from = left + column * CHECK;
            mark(panel.pen(row, from, from + CHECK - 1), finding);
        }
        let rows = report.findings().filter(is_check).count().div_ceil(per_row);
        for (row, finding) in (rows..).zip(report.findings().filter(is_wrong).take(FAILURES)) {
            let mut pen = panel.pen(row, left, right);
            finding.line(pen.style(Style::BAD)).ok();
        }
    }

    fn input(&mut self, area: Area, user_input: Option<&UserInput>) {
        let (right, left) = (area.right - PADDING, area.left + PADDING + LABEL);
        let mut panel = Panel::open(&mut self.body, area, "Keyboard and mouse");
        let Some(user_input) = user_input else {
            return panel.line("", format_args!("to be tried when the checks are done"));
        };
        panel.line("Keys", format_args!(""));
        let mut pen = panel.pen(0, left, right);
        let mut room = right - left;
        let fits = |key: &u8| {
            let width = width(format_args!("{}", Name::of(*key))) + 3;
            room.checked_sub(width).map(|rest| room = rest).is_some()
        };
        let shown = user_input.recent().take_while(fits).count();
        for key in user_input.last(shown) {
            let style = if user_input.is_held(key) { Style::HELD } else { Style::KEY };
            pen.write(style, format_args!(" {} ", Name::of(key)));
            pen.write(Style::TEXT, format_args!(" "));
        }
        if user_input.recent().next().is_none() {
            pen.write(Style::LABEL, format_args!("type something"));
        }
        panel.line("Text", format_args!("{}_", user_input.text(right - left - 1 - COUNT)));
        if user_input.typed > 0 {
            let mut pen = panel.pen(1, right - COUNT, right);
            pen.write(Style::LABEL, format_args!("{:>7} typed", user_input.typed));
        }
        let pointer = &user_input.pointer;
        if !pointer.seen {
            panel.line("Mouse", format_args!(""));
            let mut pen = panel.pen(2, left, right);
            pen.write(Style::LABEL, format_args!("move it over this page"));
            return;
        }
        let [x, y, wheel] = [pointer.x, pointer.y, pointer.wheel];
        panel.line("Mouse", format_args!("at {x}, {y}"));
        let mut pen = panel.pen(2, left + 16, right);
        for (bit, name) in [(0, "Left"), (2, "Middle"), (1, "Right")] {
            // A background would make a button that is up look pressed.
            let style = if pointer.buttons >> bit & 1 == 1 { Style::HELD } else { Style::LABEL };
            pen.write(style, format_args!(" {name} "));
            pen.write(Style::TEXT, format_args!(" "));
        }
        pen.write(Style::TEXT, format_args!("  wheel {wheel}"));
    }
}

/// The width in columns.
fn width(text: Arguments) -> usize {
    struct Count(usize);
    impl Write for Count {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0 += text.len();
            Ok(())
        }
    }
    let mut count = Count(0);
    count.write_fmt(text).ok();
    count.0
}

fn is_check(finding: &&Finding) -> bool {
    finding.verdict() != Verdict::Info
}

fn is_wrong(finding: &&Finding) -> bool {
    finding.verdict() == Verdict::Fail
}

fn mark(mut pen: Pen, finding: &Finding) {
    let (style, code) = match finding.verdict() {
        Verdict::Pass => (Style::GOOD, RIGHT),
        Verdict::Fail => (Style::BAD, WRONG),
        Verdict::Info => (Style::OPEN, DOT),
    };
    pen.style(style).glyph(code);
    let style = if finding.verdict() == Verdict::Fail { Style::BAD } else { Style::TEXT };
    pen.write(style, format_args!(" {}", finding.name()));
}

/// A part of the page, in cells. `right` and `bottom` are exclusive.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Area {
    left: usize,
    right: usize,
    top: usize,
    bottom: usize,
}

impl Area {
    const NONE: Self = Self { left: 0, right: 0, top: 0, bottom: 0 };
}

/// An area with a heading. It is filled from the top.
struct Panel<'a> {
    layer: &'a mut Layer,
    area: Area,
    /// Columns of a label.
    label: usize,
    /// The row of the next line, and the column after the last text.
    next: usize,
    end: usize,
}

impl<'a> Panel<'a> {
    fn open(layer: &'a mut Layer, area: Area, heading: &str) -> Self {
        for row in area.top..area.bottom {
            layer.pen(row, area.left, area.right).fill();
        }
        let panel = Self { layer, area, label: LABEL, next: area.top + 1, end: usize::MAX };
        if area.bottom > area.top {
            let left = area.left + PADDING;
            let mut pen = panel.layer.pen(area.top, left, area.right);
            pen.write(Style::HEADING, format_args!("{heading}"));
        }
        panel
    }

    /// The number of free rows.
    fn room(&self) -> usize {
        self.area.bottom.saturating_sub(self.next)
    }

    fn line(&mut self, label: &str, text: Arguments) {
        if self.room() == 0 {
            self.end = usize::MAX;
            return;
        }
        let (left, right) = (self.area.left + PADDING, self.area.right.saturating_sub(1));
        self.layer.pen(self.next, left, right).write(Style::LABEL, format_args!("{label}"));
        let mut pen = self.layer.pen(self.next, left + self.label, right);
        pen.write(Style::TEXT, text);
        self.end = pen.column();
        self.next += 1;
    }

    /// Adds a note at the right end of the last line, if there is room.
    fn note(&mut self, text: Arguments) {
        let right = self.area.right.saturating_sub(PADDING);
        let left = right.saturating_sub(width(text));
        if left > self.end {
            self.layer.pen(self.next - 1, left, right).write(Style::LABEL, text);
        }
    }

    /// A pen for a row below the heading.
    fn pen(&mut self, row: usize, left: usize, right: usize) -> Pen<'_> {
        let row = self.area.top + 1 + row;
        let end = if row < self.area.bottom { right } else { left };
        self.layer.pen(row, left, end)
    }
}
