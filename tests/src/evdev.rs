//! What Linux hears from input devices, as `evtest` tells it.
//!
//! The guest has the asset `USB_TOOLS` mounted, with its own `/dev` and `/proc` in it.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::linux::Booted;

const SOON: Duration = Duration::from_secs(60);

/// Where the tools are mounted.
pub const TOOLS: &str = "/tools";

/// One event: type, code, value.
pub type Event = (u16, u16, i32);

/// Types of events: what came before belongs together.
const SYNCHRONIZE: u16 = 0;
/// Keys and buttons.
pub const KEY: u16 = 1;
/// Ways.
const RELATIVE: u16 = 2;
/// Places.
const ABSOLUTE: u16 = 3;

/// Waits until a command of the guest's succeeds.
///
/// # Errors
///
/// When it does not.
pub fn comes_true(booted: &mut Booted, command: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let answer = booted.try_run(command, SOON)?;
        if answer.status == 0 {
            return Ok(());
        }
        ensure!(start.elapsed() < SOON, "`{command}` does not come true: {}", answer.output);
        sleep(Duration::from_millis(100));
    }
}

/// An input device that is listened to.
pub struct Ear {
    /// `event2`.
    handler: String,
}

impl Ear {
    /// Listens to the input device with this name from now on.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn new(booted: &mut Booted, name: &str) -> anyhow::Result<Self> {
        let name = format!("N: Name=\"{name}\"");
        comes_true(booted, &format!("grep -qF '{name}' /proc/bus/input/devices"))?;
        let find = format!("grep -A 5 -F '{name}' /proc/bus/input/devices | grep Handlers");
        let words = booted.run(&find, SOON)?;
        let mut words = words.split(['=', ' ']).map(str::trim);
        let handler = words.find(|it| it.starts_with("event"));
        let handler = handler.with_context(|| format!("{name}: no handler"))?.to_owned();
        let device = format!("/dev/input/{handler}");
        booted.run(
            &format!(
                "chroot {TOOLS} stdbuf -oL evtest {device} > /{handler} 2>&1 & \
                 echo $! > /{handler}.pid"
            ),
            SOON,
        )?;
        // When a program has it open, the driver asks the device.
        comes_true(booted, &format!("ls -l /proc/$(cat /{handler}.pid)/fd | grep -q {device}"))?;
        Ok(Self { handler })
    }

    /// Waits until something came that this pattern fits. Linux keeps 64 events for a program that
    /// is slow to read, three for each key, and then drops them.
    ///
    /// # Errors
    ///
    /// When it does not come.
    pub fn hears(&self, booted: &mut Booted, event: &str) -> anyhow::Result<()> {
        let handler = &self.handler;
        comes_true(booted, &format!("grep '^Event: time' /{handler} | grep -q '{event}'"))
    }

    /// All that came until something did that this pattern fits.
    ///
    /// # Errors
    ///
    /// When it did not come, or Linux dropped some.
    pub fn heard(self, booted: &mut Booted, last: &str) -> anyhow::Result<Vec<Event>> {
        self.hears(booted, last)?;
        let Self { handler } = self;
        let mut events = Vec::new();
        let short = r"s/.*type \([0-9]*\) .*code \([0-9]*\) .*value \(-*[0-9]*\)$/\1 \2 \3/p";
        let end = "s/.*SYN_REPORT.*/0 0 0/p";
        let command = format!("kill $(cat /{handler}.pid); sed -n '{short}; {end}' /{handler}");
        let heard = booted.run(&command, SOON)?;
        ensure!(
            booted
                .run(&format!("grep -c '^Event: time.*SYN_DROPPED' /{handler} || true"), SOON)?
                .trim()
                == "0",
            "Linux dropped events: {heard}"
        );
        for line in heard.lines() {
            let fields: Vec<_> = line.split_whitespace().collect();
            let [kind, code, value] = fields[..] else { continue };
            events.push((kind.parse()?, code.parse()?, value.parse()?));
        }
        Ok(events)
    }
}

/// Left, right, middle, back and forward, as Linux calls them.
const BUTTONS: [u16; 5] = [0x110, 0x111, 0x112, 0x113, 0x114];
const WHEEL: u16 = 8;

/// All that a tablet told: where it was, and a bit for each button that was down; and turns of the
/// wheel.
pub fn states(heard: Vec<Event>) -> (Vec<(i32, i32, u8)>, Vec<i32>) {
    let mut state: BTreeMap<(u16, u16), i32> = BTreeMap::new();
    let (mut seen, mut notches) = (Vec::new(), Vec::new());
    for (kind, code, value) in heard {
        match kind {
            SYNCHRONIZE => {
                let of = |kind, code| state.get(&(kind, code)).copied().unwrap_or(0);
                let buttons = BUTTONS.iter().rev();
                let down = buttons.fold(0, |sum, it| sum << 1 | u8::from(of(KEY, *it) != 0));
                seen.push((of(ABSOLUTE, 0), of(ABSOLUTE, 1), down));
            }
            RELATIVE if code == WHEEL => notches.push(value),
            _ => drop(state.insert((kind, code), value)),
        }
    }
    (seen, notches)
}
