//! `--boot`: the boot order.

use serde::{Deserialize, Serialize};

use super::OptionValue;

/// Names of boot devices, in the order in which the firmware tries them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BootOrder(pub Vec<String>);

impl OptionValue for BootOrder {
    const JSON_FORMS: &'static str = "a list of device names";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        self.0 = text.split(',').map(|name| name.trim().to_owned()).collect();
        Ok(())
    }
}
