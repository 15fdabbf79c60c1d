//! `--fw-cfg`: files that the guest reads from fw_cfg.

use std::fs;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::OptionValue;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Item {
    /// `opt/...`, at most 55 ASCII characters.
    pub name: String,
    value: String,
}

impl Item {
    /// `value` is the text of the file, or `@` and the path of a file on the host.
    pub fn new(name: &str, value: String) -> Result<Self, String> {
        if !name.starts_with("opt/") || name.len() > 55 || !name.is_ascii() {
            return Err(format!(
                "`{name}`: invalid name: use `opt/...`, at most 55 ASCII characters"
            ));
        }
        Ok(Self { name: name.into(), value })
    }

    pub fn bytes(&self) -> anyhow::Result<Vec<u8>> {
        match self.value.strip_prefix('@') {
            Some(path) => fs::read(path).with_context(|| format!("--fw-cfg {}: {path}", self.name)),
            None => Ok(self.value.clone().into_bytes()),
        }
    }
}

impl TryFrom<String> for Item {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let Some((name, value)) = text.split_once('=') else {
            return Err(format!("`{text}` has no value: write NAME=TEXT or NAME=@FILE"));
        };
        Self::new(name, value.into())
    }
}

impl From<Item> for String {
    fn from(item: Item) -> Self {
        format!("{}={}", item.name, item.value)
    }
}

impl OptionValue for Vec<Item> {
    const REPEATS: bool = true;
    const JSON_FORMS: &'static str = "a list of NAME=VALUE";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        self.push(Item::try_from(text.to_owned()).map_err(anyhow::Error::msg)?);
        Ok(())
    }
}
