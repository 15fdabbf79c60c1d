//! What firmware is to boot.

use serde::{Deserialize, Serialize};

use super::Word;

/// Names of devices, first the first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Order(pub Vec<String>);

impl Word for Order {
    const ELSE: &'static str = "a list of names of devices";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        self.0 = text.split(',').map(|name| name.trim().to_owned()).collect();
        Ok(())
    }
}
