//! `--display`: `none`, or the configuration of the display.

use devices::display::{Resolution, bochs};
use devices::pci::Address;
use devices::registry;
use devices::virtio::gpu;
use serde::de::MapAccess;
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Serialize};

use super::OptionValue;
use host::keyvalue;
use host::size::Size;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Display {
    /// `none`
    Absent(Absent),
    Present(Present),
}

/// The value `none`, as a type of its own so that serde reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Absent {
    None,
}

/// A display. The fields are those of its device, which has the defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Present {
    pub adapter: Adapter,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<Resolution>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Size>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Adapter {
    /// The device `display`.
    #[default]
    Bochs,
    /// The device `virtio-gpu`.
    Virtio,
}

impl Present {
    /// The device, in this slot unless another is configured.
    pub fn device(&self, slot: Address) -> registry::Config {
        let slot = self.slot.or(Some(slot));
        match self.adapter {
            Adapter::Bochs => {
                let usual = bochs::Config::default();
                let memory = self.memory.unwrap_or(usual.memory);
                let mode = self.mode.unwrap_or(usual.mode);
                registry::Config::Display(bochs::Config { mode, memory, slot })
            }
            Adapter::Virtio => {
                let usual = gpu::Config::default();
                let memory = self.memory.unwrap_or(usual.memory);
                let mode = self.mode.unwrap_or(usual.mode);
                registry::Config::VirtioGpu(gpu::Config { mode, memory, slot })
            }
        }
    }
}

impl Default for Display {
    fn default() -> Self {
        Self::Present(Present::default())
    }
}

impl OptionValue for Display {
    const JSON_FORMS: &'static str = "`none`, a resolution or an object";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        *self = match text {
            "none" => Self::Absent(Absent::None),
            _ => Self::Present(keyvalue::parse(text, Some("mode"))?),
        };
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        let config = Deserialize::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Self::Present(config))
    }
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_adapter_has_the_defaults_of_its_device() {
        for (text, device) in [
            ("800x600", json!({ "kind": "display", "mode": "800x600", "memory": "64M" })),
            (
                "1024x768,adapter=virtio",
                json!({ "kind": "virtio-gpu", "mode": "1024x768", "memory": "32M" }),
            ),
            (
                "adapter=virtio,memory=8M",
                json!({ "kind": "virtio-gpu", "mode": "1280x800", "memory": "8M" }),
            ),
        ] {
            let mut display = Display::default();
            display.read_text(text).unwrap();
            let Display::Present(present) = display else { panic!("{text}: no display") };
            let mut built = serde_json::to_value(present.device(Address::new(1, 0))).unwrap();
            assert_eq!(built["slot"], "01.0");
            built.as_object_mut().unwrap().remove("slot");
            assert_eq!(built, device, "{text}");
        }
    }
}
