//! Events of Linux input devices, as `evtest` prints them.
//!
//! The guest mounts the asset `USB_TOOLS`, with `/dev` and `/proc` bound into it.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::linux::Booted;

const SOON: Duration = Duration::from_secs(60);

/// Mount point of the tools in the guest.
pub const TOOLS: &str = "/tools";

/// One event: type, code, value.
pub type Event = (u16, u16, i32);

/// End of a group of events that belong together (`EV_SYN`).
const SYNCHRONIZE: u16 = 0;
/// Keys and buttons (`EV_KEY`).
const KEY: u16 = 1;
/// The value of a key that is repeated.
const REPEATED: i32 = 2;
/// Relative axes (`EV_REL`).
const RELATIVE: u16 = 2;
/// Absolute axes (`EV_ABS`).
const ABSOLUTE: u16 = 3;

/// The keys that went down (1) and up (0). Linux repeats a key by itself if a busy host delays the
/// report of its release.
pub fn presses(events: &[Event]) -> impl Iterator<Item = (u16, i32)> {
    let presses = events.iter().filter(|it| it.0 == KEY && it.2 != REPEATED);
    presses.map(|it| (it.1, it.2))
}

/// Waits until a command in the guest succeeds.
pub fn wait_until(booted: &mut Booted, command: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let answer = booted.try_run(command, SOON)?;
        if answer.status == 0 {
            return Ok(());
        }
        ensure!(start.elapsed() < SOON, "`{command}` still fails: {}", answer.output);
        sleep(Duration::from_millis(100));
    }
}

pub struct EventRecorder {
    /// The device's name in `/dev/input`: `event2`.
    handler: String,
}

impl EventRecorder {
    /// Records the events of the input device with this name from now on.
    pub fn new(booted: &mut Booted, name: &str) -> anyhow::Result<Self> {
        let name = format!("N: Name=\"{name}\"");
        wait_until(booted, &format!("grep -qF '{name}' /proc/bus/input/devices"))?;
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
        // The driver polls the device once a program has it open.
        wait_until(booted, &format!("ls -l /proc/$(cat /{handler}.pid)/fd | grep -q {device}"))?;
        Ok(Self { handler })
    }

    /// Waits until an event matches a pattern. Linux keeps 64 events, three for each key, for a
    /// program that reads slowly; then it drops them.
    pub fn wait_for(&self, booted: &mut Booted, event: &str) -> anyhow::Result<()> {
        let handler = &self.handler;
        wait_until(booted, &format!("grep '^Event: time' /{handler} | grep -q '{event}'"))
    }

    /// Returns all events up to the first that matches a pattern. Fails if Linux dropped some.
    pub fn finish(self, booted: &mut Booted, last: &str) -> anyhow::Result<Vec<Event>> {
        self.wait_for(booted, last)?;
        let Self { handler } = self;
        let mut events = Vec::new();
        let short = r"s/.*type \([0-9]*\) .*code \([0-9]*\) .*value \(-*[0-9]*\)$/\1 \2 \3/p";
        let end = "s/.*SYN_REPORT.*/0 0 0/p";
        let command = format!("kill $(cat /{handler}.pid); sed -n '{short}; {end}' /{handler}");
        let output = booted.run(&command, SOON)?;
        ensure!(
            booted
                .run(&format!("grep -c '^Event: time.*SYN_DROPPED' /{handler} || true"), SOON)?
                .trim()
                == "0",
            "Linux dropped events: {output}"
        );
        for line in output.lines() {
            let fields: Vec<_> = line.split_whitespace().collect();
            let [kind, code, value] = fields[..] else { continue };
            events.push((kind.parse()?, code.parse()?, value.parse()?));
        }
        Ok(events)
    }
}

/// Left, right, middle, back and forward button, by their Linux codes.
const BUTTONS: [u16; 5] = [0x110, 0x111, 0x112, 0x113, 0x114];
const WHEEL: u16 = 8;

/// The states that a tablet reported (its position, and a bit for each button that was down), and
/// the turns of the wheel.
pub fn states(events: Vec<Event>) -> (Vec<(i32, i32, u8)>, Vec<i32>) {
    let mut state: BTreeMap<(u16, u16), i32> = BTreeMap::new();
    let (mut seen, mut notches) = (Vec::new(), Vec::new());
    for (kind, code, value) in events {
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
