//! Settings of the balloon's controller.

use anyhow::{Context, ensure};
use host::size::Size;

use super::value::{Decimal, Value, Within, choices, plain_decimal};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Balloon {
    pub on: bool,
    pub minimum: MinimumMemory,
    /// Use of the host's memory in per cent from which the balloon grows.
    pub threshold: Decimal,
    /// Use of the host's memory in per cent from which it grows as fast as possible.
    pub threshold_hard: Decimal,
    /// Memory pressure (per cent of time) from which the balloon grows.
    pub pressure: Decimal,
    /// Memory pressure (per cent of time) from which it grows as fast as possible.
    pub pressure_max: Decimal,
    /// Smaller changes are not made.
    pub hysteresis: Size,
    /// The controller's proportional gain.
    pub proportional: Decimal,
    /// The controller's integral gain.
    pub integral: Decimal,
    /// Seconds between two measurements.
    pub interval: Within<1, 3600>,
    pub debug: Debug,
}

/// The memory that a guest keeps: a share in per cent, or a size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MinimumMemory {
    /// A share of the guest's memory, in per cent.
    Percent(f64),
    Bytes(Size),
}

impl Default for MinimumMemory {
    fn default() -> Self {
        Self::Bytes(Size::default())
    }
}

impl Value for MinimumMemory {
    const ACCEPTS: &'static str = "percentage or size";

    fn read(text: &str) -> anyhow::Result<Self> {
        let reason = "give a share like 33%, or a size like 1G";
        let Some(share) = text.strip_suffix('%') else {
            return Size::read(text).map(Self::Bytes).ok().context(reason);
        };
        let share = plain_decimal(share.trim()).context(reason)?;
        ensure!(share <= 100.0, "a guest cannot keep more than 100%: {reason}");
        Ok(Self::Percent(share))
    }
    fn show(&self) -> String {
        match self {
            Self::Percent(share) => format!("{share}%"),
            Self::Bytes(size) => size.show(),
        }
    }
}

choices! {
    /// The subjects of the balloon's log messages.
    Debug:
    /// None.
    #[default]
    Nothing "n" or "no", "none", "false", "0", "off";
    /// All.
    All "all" or "y", "yes", "true", "1", "on";
    /// Decisions of the controller.
    Controller "controller";
    /// Requests to the machine.
    Asked "qmp";
}
