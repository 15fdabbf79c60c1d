//! How the balloon is steered.

use anyhow::{Context, ensure};
use host::size::Size;

use super::value::{Decimal, Value, Within, choices, plain_decimal};

/// How the balloon is steered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Balloon {
    /// It is there.
    pub on: bool,
    /// What the guest keeps.
    pub least: Least,
    /// Per cent of memory in use.
    pub threshold: Decimal,
    /// The same, for haste.
    pub threshold_hard: Decimal,
    /// Per cent of time.
    pub pressure: Decimal,
    /// The same, for haste.
    pub pressure_max: Decimal,
    /// Too small to be done.
    pub hysteresis: Size,
    /// What is missing now.
    pub proportional: Decimal,
    /// What was missing.
    pub integral: Decimal,
    /// Seconds.
    pub interval: Within<1, 3600>,
    /// What it says.
    pub debug: Debug,
}

/// What a guest keeps: a share of its memory in per cent, or a size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Least {
    /// Of its memory.
    Percent(f64),
    /// So much.
    Bytes(Size),
}

impl Default for Least {
    fn default() -> Self {
        Self::Bytes(Size::default())
    }
}

impl Value for Least {
    const ACCEPTS: &'static str = "per cent, or size";

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
    /// What the balloon says of itself.
    Debug:
    /// Nothing.
    #[default]
    Nothing "n" or "no", "none", "false", "0", "off";
    /// Something.
    All "all" or "y", "yes", "true", "1", "on";
    /// What it decides.
    Controller "controller";
    /// What it asks of the machine.
    Asked "qmp";
}
