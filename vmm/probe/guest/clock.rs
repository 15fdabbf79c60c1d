//! The reference clock: the ACPI PM timer, or else channel 2 of the PIT.
use crate::io::{in8, in32, out8, tsc};

const PM_TIMER_HZ: u64 = 3_579_545;
const PIT_HZ: u64 = 1_193_182;
/// The PM timer counts in 24 bits (some in 32).
const PM_TIMER_MASK: u32 = 0xff_ffff;

const READINGS: u32 = 5;

/// A clock of known frequency, for spans of up to 50 ms.
pub(crate) enum Clock {
    PmTimer { port: u16 },
    Pit,
}

/// A reading of the clock, and of the time stamp counter at the same time.
pub(crate) struct Moment {
    clock: u32,
    tsc: u64,
}

impl Clock {
    /// The first clock that advances.
    pub(crate) fn find(pm_base: u16) -> Option<Self> {
        [Self::PmTimer { port: pm_base + 8 }, Self::Pit].into_iter().find(Self::moves)
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::PmTimer { .. } => "pm-timer",
            Self::Pit => "pit",
        }
    }

    fn moves(&self) -> bool {
        let start = self.start();
        (0..1000).any(|_| self.since(&start).0 > 0)
    }

    /// Starts a measurement, which restarts the PIT.
    pub(crate) fn start(&self) -> Moment {
        if let Self::Pit = self {
            // Gate off, mode 0, the maximum count; gate on, speaker off.
            let gate = in8(0x61) & 0xfc;
            out8(0x61, gate);
            out8(0x43, 0xb0);
            out8(0x42, 0xff);
            out8(0x42, 0xff);
            out8(0x61, gate | 1);
        }
        self.now()
    }

    /// The best of several readings. If the host interrupts a reading, its two values are not from
    /// the same time.
    fn now(&self) -> Moment {
        let readings = (0..READINGS).map(|_| self.read());
        let best = readings.min_by_key(|(gap, _)| *gap);
        best.map_or(Moment { clock: 0, tsc: 0 }, |(_, moment)| moment)
    }

    /// Takes a reading. Also returns its duration in time stamp counts.
    fn read(&self) -> (u64, Moment) {
        let before = tsc();
        let clock = match self {
            Self::PmTimer { port } => in32(*port),
            Self::Pit => {
                out8(0x43, 0x80);
                let low = in8(0x42);
                // Counts down.
                u32::from(!u16::from_le_bytes([low, in8(0x42)]))
            }
        };
        let after = tsc();
        (after - before, Moment { clock, tsc: before.midpoint(after) })
    }

    /// Nanoseconds and time stamp counts since `start`.
    pub(crate) fn since(&self, start: &Moment) -> (u64, u64) {
        let now = self.now();
        let (hz, mask) = match self {
            Self::PmTimer { .. } => (PM_TIMER_HZ, PM_TIMER_MASK),
            Self::Pit => (PIT_HZ, 0xffff),
        };
        let ticks = u64::from(now.clock.wrapping_sub(start.clock) & mask);
        (ticks * 1_000_000_000 / hz, now.tsc - start.tsc)
    }
}
