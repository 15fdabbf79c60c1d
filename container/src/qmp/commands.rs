//! The commands of QMP, carried out at the machine's control socket.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use vmm::control::Command;
use vmm::control::host_usb::MAX_DEVICES;

use super::Monitors;
use super::events::runs;
use super::keys::{self, KeyValue};
use super::protocol::{self, Failure};
use super::screendump::{self, Format};
use crate::pod::machine_client;
use crate::pod::usb;
use crate::settings::translate::arguments::usb_filter;

/// Commands, and whether an address that other hosts can reach answers them.
const COMMANDS: &[(&str, bool)] = &[
    ("qmp_capabilities", true),
    ("query-commands", true),
    ("query-kvm", true),
    ("query-name", true),
    ("query-status", true),
    ("query-uuid", true),
    ("query-version", true),
    ("device_add", true),
    ("device_del", true),
    ("human-monitor-command", true),
    ("cont", false),
    ("quit", false),
    ("screendump", false),
    ("send-key", false),
    ("stop", false),
    ("system_powerdown", false),
    ("system_reset", false),
];

/// The rights of a listener's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    All,
    /// Other hosts can reach the listener: nothing that disturbs the guest, or shows its screen.
    Harmless,
}

impl Rights {
    pub fn check(self, command: &str) -> Result<(), Failure> {
        match COMMANDS.iter().find(|(name, _)| *name == command) {
            None => Err(Failure::unknown(format!("The command {command} has not been found"))),
            Some((_, false)) if self == Self::Harmless => Err(Failure::generic(format!(
                "{command} is not allowed here, because other hosts can reach this address: listen \
                 at 127.0.0.1 or unix:PATH"
            ))),
            Some(_) => Ok(()),
        }
    }

    /// Whether devices of the host may be attached and detached.
    fn check_usb(self) -> Result<(), Failure> {
        match self {
            Self::All => Ok(()),
            Self::Harmless => Err(Failure::generic(
                "devices of the host cannot be attached or detached here, because other hosts can \
                 reach this address: listen at 127.0.0.1 or unix:PATH, set ARGUMENTS=-device \
                 usb-host,vendorid=...,productid=..., or use `transom usb`",
            )),
        }
    }

    fn commands(self) -> impl Iterator<Item = &'static str> {
        let all = COMMANDS.iter().filter(move |(_, open)| *open || self == Self::All);
        all.map(|(name, _)| *name)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SendKey {
    keys: Vec<KeyValue>,
    /// The machine has its own time between pressing and releasing.
    #[serde(rename = "hold-time")]
    _hold_time: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Screendump {
    filename: PathBuf,
    #[serde(default)]
    format: Format,
}

#[derive(Deserialize)]
struct DeviceAdd {
    driver: String,
    #[serde(default)]
    id: String,
    #[serde(flatten)]
    options: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceDel {
    id: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct HumanMonitorCommand {
    command_line: String,
    #[serde(rename = "cpu-index")]
    _cpu_index: Option<u64>,
}

fn read<T: DeserializeOwned>(arguments: Map<String, Value>) -> Result<T, Failure> {
    let read = serde_json::from_value(Value::Object(arguments));
    read.map_err(|error| Failure::generic(format!("invalid arguments: {error}")))
}

impl Monitors {
    /// Carries out a command, except the negotiation.
    pub async fn execute(
        &self,
        rights: Rights,
        command: &str,
        arguments: Map<String, Value>,
    ) -> Result<Value, Failure> {
        rights.check(command)?;
        match command {
            "send-key" => {
                let SendKey { keys, .. } = read(arguments)?;
                self.press(Command::Key { keys: keys::combination(&keys)? }).await
            }
            "screendump" => {
                let Screendump { filename, format } = read(arguments)?;
                self.screendump(filename, format).await
            }
            "device_add" => {
                let DeviceAdd { driver, id, options } = read(arguments)?;
                if driver != "usb-host" {
                    let reason = format!("'{driver}' is not a valid device model name here");
                    return Err(Failure::generic(reason));
                }
                rights.check_usb()?;
                self.attach(id, &options).await
            }
            "device_del" => {
                let DeviceDel { id } = read(arguments)?;
                // Only devices that `device_add` attached can be detached.
                self.detach(rights, &id).await
            }
            "human-monitor-command" => {
                let HumanMonitorCommand { command_line, .. } = read(arguments)?;
                Ok(self.run_line(rights, &command_line).await.into())
            }
            _ => {
                let Nothing {} = read(arguments)?;
                self.execute_plain(rights, command).await
            }
        }
    }

    /// Carries out a command without arguments.
    async fn execute_plain(&self, rights: Rights, command: &str) -> Result<Value, Failure> {
        match command {
            "query-commands" => Ok(rights.commands().map(|name| json!({ "name": name })).collect()),
            "query-version" => Ok(protocol::version()),
            "query-name" => Ok(json!({ "name": self.name })),
            "query-kvm" => Ok(json!({ "enabled": true, "present": true })),
            "query-uuid" => {
                let status = self.events.status().await;
                let uuid = status.and_then(|it| it["uuid"].as_str().map(str::to_owned));
                let uuid = uuid.unwrap_or_else(|| NO_UUID.to_owned());
                Ok(json!({ "UUID": uuid }))
            }
            "query-status" => Ok(run_state(self.events.status().await.as_ref())),
            "system_powerdown" => {
                let pressed = self.press(Command::PowerButton).await?;
                self.events.send("POWERDOWN", Value::Null);
                Ok(pressed)
            }
            "system_reset" => self.change(Command::Reset).await,
            "stop" => self.change(Command::Pause).await,
            "cont" => self.change(Command::Resume).await,
            "quit" => {
                self.quits.store(true, Ordering::Relaxed);
                let done = self.press(Command::Quit).await;
                self.quits.store(done.is_ok(), Ordering::Relaxed);
                done
            }
            _ => Err(Failure::unknown(format!("The command {command} has not been found"))),
        }
    }

    /// Attaches a USB device of the host.
    async fn attach(&self, id: String, options: &Map<String, Value>) -> Result<Value, Failure> {
        let text = |key: &str| match options.get(key)? {
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        let device = usb_filter(text)?.to_string();
        // As with QEMU, devices without an ID may be many.
        let id = if id.is_empty() { device.clone() } else { id };
        self.reserve(&id, &device)?;
        let attached = usb::ask(usb::Request::Attach(device)).await;
        if attached.is_err() {
            self.attached().remove(&id);
        }
        attached?;
        Ok(json!({}))
    }

    /// Takes the ID for a device before that is attached, so that no other client gets it.
    fn reserve(&self, id: &str, device: &str) -> Result<(), Failure> {
        let mut attached = self.attached();
        if attached.len() >= MAX_DEVICES {
            return Err(Failure::generic(format!("at most {MAX_DEVICES} devices are possible")));
        }
        if attached.contains_key(id) {
            return Err(Failure::generic(format!("Duplicate device ID '{id}'")));
        }
        attached.insert(id.to_owned(), device.to_owned());
        Ok(())
    }

    async fn detach(&self, rights: Rights, id: &str) -> Result<Value, Failure> {
        let device = self.attached().get(id).cloned().ok_or_else(|| Failure::no_device(id))?;
        rights.check_usb()?;
        // `transom usb` may have detached it.
        if host_devices().await?.iter().any(|it| it.device == device) {
            usb::ask(usb::Request::Detach(device)).await?;
        }
        self.attached().remove(id);
        Ok(json!({}))
    }

    pub(super) fn attached(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.usb.lock().expect("no task panicked")
    }

    async fn press(&self, command: Command) -> Result<Value, Failure> {
        machine_client::ask(&self.control, command).await?;
        Ok(json!({}))
    }

    /// Carries out a command that changes the machine's state, and reports the change first, as
    /// QEMU does.
    async fn change(&self, command: Command) -> Result<Value, Failure> {
        let done = self.press(command).await;
        self.events.observe().await;
        done
    }

    async fn screendump(&self, path: PathBuf, format: Format) -> Result<Value, Failure> {
        // Pictures are large, so only one is taken at a time.
        let picture = self.picture.clone().lock_owned().await;
        let (control, folders) = (self.control.clone(), self.folders.clone());
        let written = tokio::task::spawn_blocking(move || {
            let _picture = picture;
            screendump::write(&control, &path, format, &folders)
        });
        written.await.map_err(anyhow::Error::from)??;
        Ok(json!({}))
    }
}

/// A configured device of the host.
pub(super) struct HostDevice {
    /// In the words of `usb-host`.
    pub(super) device: String,
    /// The machine's name of it, while it is plugged in.
    pub(super) name: Option<String>,
}

pub(super) async fn host_devices() -> Result<Vec<HostDevice>, Failure> {
    let list = usb::ask(usb::Request::List).await?;
    let text = |entry: &Value, key: &str| entry[key].as_str().map(str::to_owned);
    let read = |entry: &Value| {
        Some(HostDevice { device: text(entry, "device")?, name: text(entry, "name") })
    };
    Ok(list["configured"].as_array().into_iter().flatten().filter_map(read).collect())
}

/// The UUID that QEMU reports for a machine without one.
const NO_UUID: &str = "00000000-0000-0000-0000-000000000000";

/// The answer to `query-status`.
fn run_state(status: Option<&Value>) -> Value {
    let name = match status.and_then(|it| it["state"].as_str()) {
        Some("running") => "running",
        Some("paused") => "paused",
        Some("asleep") => "suspended",
        // A full volume, for example.
        Some(_) => "io-error",
        None => "prelaunch",
    };
    json!({ "running": status.is_some_and(runs), "status": name })
}
