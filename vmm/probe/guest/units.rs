//! Formats numbers with units.
use core::fmt::{Display, Formatter, Result};

/// `512 MiB`, `16.5 KiB`
pub(crate) struct Bytes(pub(crate) u64);

impl Display for Bytes {
    fn fmt(&self, f: &mut Formatter) -> Result {
        let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let unit = units.into_iter().find(|(_, shift)| self.0 >> shift > 0);
        let Some((name, shift)) = unit else { return write!(f, "{} bytes", self.0) };
        let whole = self.0 >> shift;
        let tenth = ((self.0 >> (shift - 10) & 1023) * 10) >> 10;
        if tenth == 0 { write!(f, "{whole} {name}") } else { write!(f, "{whole}.{tenth} {name}") }
    }
}

/// `2.10 GHz`
pub(crate) struct Hertz(pub(crate) u64);

impl Display for Hertz {
    fn fmt(&self, f: &mut Formatter) -> Result {
        if self.0 >= 1_000_000_000 {
            write!(f, "{}.{:02} GHz", self.0 / 1_000_000_000, self.0 / 10_000_000 % 100)
        } else {
            write!(f, "{} MHz", self.0 / 1_000_000)
        }
    }
}

/// `41.2 ms`
pub(crate) struct Microseconds(pub(crate) u64);

impl Display for Microseconds {
    fn fmt(&self, f: &mut Formatter) -> Result {
        let (unit, name) = match self.0 {
            0..1000 => return write!(f, "{} us", self.0),
            1000..1_000_000 => (1000, "ms"),
            _ => (1_000_000, "s"),
        };
        let (whole, tenth) = (self.0 / unit, self.0 * 10 / unit % 10);
        if tenth == 0 { write!(f, "{whole} {name}") } else { write!(f, "{whole}.{tenth} {name}") }
    }
}
