//! The clock and CMOS memory of a PC: Motorola MC146818A at ports 0x70 and 0x71, with 128 bytes.
//!
//! The time is the host's time plus an offset that the guest sets. The flags of register C are
//! computed when the guest reads them. A timer runs only while an interrupt is enabled whose flag
//! is clear.
//!
//! Threats: the guest writes any byte to any register, and every register content is a valid time.
//! There are at most 8192 interrupts a second, and the timer stops while an interrupt is not
//! acknowledged (register C). The guest learns the host's time and the offset of its time zone.

mod calendar;
mod registers;
mod time_source;

use std::sync::{Arc, Mutex};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::alarm::Alarm;
use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Grants};
use registers::{Registers, State};
use time_source::TimeSource;

/// `--device rtc,base=utc`
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Time of the clock: `local` time according to `TZ`, as Windows expects it, or `utc`.
    #[serde(default)]
    pub base: Base,
    /// Start time of the clock instead of the current time, for tests: `2026-03-29T00:59:59Z`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Base {
    /// Local time according to `TZ`, with daylight saving time.
    #[default]
    Local,
    Utc,
}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        grants.claim(Kind::Port, 0x70..0x72)?;
        let line = grants.line(8)?;
        grants.acpi("PNP0B00");
        let ram = grants.shared().memory.ram().ok().context("the guest has no memory yet")?;
        let time_source = TimeSource::new(self.base, self.start.as_deref())?;
        let registers = Registers::new(State::power_on(ram), time_source, line);
        let power_on = registers.state.clone();
        Ok(Box::new(Rtc { registers: Arc::new(Mutex::new(registers)), power_on, timer: None }))
    }
}

struct Rtc {
    registers: Arc<Mutex<Registers>>,
    power_on: State,
    timer: Option<Alarm>,
}

impl Rtc {
    /// Runs `act` on the registers, and then sets the timer for the next interrupt.
    fn with<T>(&mut self, act: impl FnOnce(&mut Registers) -> T) -> T {
        let mut registers = self.registers.lock().expect("no device panicked");
        let done = act(&mut registers);
        if registers.has_new_due()
            && let Some(timer) = &self.timer
        {
            timer.set(registers.due());
        }
        done
    }
}

impl Device for Rtc {
    fn read(&mut self, _: Region, offset: u64, data: &mut [u8]) -> Access {
        let [byte] = data else { return Access::Ignored };
        *byte = self.with(|it| if offset == 0 { it.state.index } else { it.read() });
        Access::Done
    }

    fn write(&mut self, _: Region, offset: u64, data: &[u8]) -> Access {
        let [byte] = *data else { return Access::Ignored };
        self.with(|it| if offset == 0 { it.select(byte) } else { it.write(byte) });
        Access::Done
    }

    fn park(&mut self) -> Saved {
        // The thread may need the lock on the registers to end.
        drop(self.timer.take());
        Saved::of(&self.registers.lock().expect("no device panicked").state)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let state: Option<State> = saved.take()?;
        let state = state.unwrap_or_else(|| self.power_on.clone());
        self.registers.lock().expect("no device panicked").restore(state)?;
        let registers = self.registers.clone();
        let ring = move || registers.lock().expect("no device panicked").ring();
        self.timer = Some(Alarm::spawn("rtc", ring)?);
        self.with(|_| ());
        Ok(())
    }
}

#[cfg(test)]
mod test;
