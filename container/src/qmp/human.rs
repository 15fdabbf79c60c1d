//! The human monitor: lines of words, answered with text. QEMU's clients read some of the answers
//! by program, so they have QEMU's form.

use serde_json::{Map, Value, json};
use vmm::control::Command;

use super::Monitors;
use super::commands::{HostDevice, Rights, host_devices};
use super::keys;
use super::protocol::{self, Failure};
use crate::pod::machine_client;
use crate::settings::translate::options::{self, Options};

/// The help text.
const HELP: &str = "\
cont -- resume the machine\r\n\
device_add driver[,prop=value]... -- attach a device\r\n\
device_del device -- detach a device\r\n\
info kvm|name|qtree|status|usb|uuid|version -- show the state\r\n\
quit -- switch the machine off\r\n\
screendump filename [-f format] -- write the screen to a file\r\n\
sendkey keys -- press keys, as in ctrl-alt-delete\r\n\
stop -- pause the machine\r\n\
system_powerdown -- press the power button\r\n\
system_reset -- reset the machine\r\n";

impl Monitors {
    /// Runs a line of the human monitor, and returns its output.
    pub async fn run_line(&self, rights: Rights, line: &str) -> String {
        let output = match options::split(line) {
            Ok(words) => self.run_words(rights, &words).await,
            Err(error) => format!("Error: {error:#}\r\n"),
        };
        // Some texts are those of the `vmm` process. A guest that took it over cannot control the
        // client's terminal.
        output.replace(|it: char| it.is_control() && !"\r\n".contains(it), "")
    }

    async fn run_words(&self, rights: Rights, words: &[String]) -> String {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let Some((word, rest)) = words.split_first() else { return String::new() };
        let done = match (*word, rest) {
            ("help" | "?", _) => return HELP.to_owned(),
            ("info", [what, ..]) => return self.info(rights, what).await,
            ("sendkey", [keys, ..]) => self.send_keys(rights, keys).await,
            ("screendump", [_, ..]) => self.picture(rights, rest).await,
            ("device_add", [device, ..]) => {
                let Options { first, rest: options } = Options::read(device);
                let mut call = Map::from_iter([("driver".to_owned(), first.into())]);
                call.extend(options.into_iter().map(|(key, value)| (key, value.into())));
                self.act(rights, "device_add", call.into()).await
            }
            ("device_del", [id, ..]) => self.act(rights, "device_del", json!({ "id": id })).await,
            ("c", _) => self.act(rights, "cont", json!({})).await,
            ("q", _) => self.act(rights, "quit", json!({})).await,
            ("s", _) => self.act(rights, "stop", json!({})).await,
            ("cont" | "quit" | "stop" | "system_powerdown" | "system_reset", _) => {
                self.act(rights, word, json!({})).await
            }
            ("info" | "sendkey" | "screendump" | "device_add" | "device_del", []) => {
                Err(Failure::generic(format!("{word} needs an argument: see help")))
            }
            _ => return format!("unknown command: '{word}'\r\n"),
        };
        done.err().map_or_else(String::new, |failure| format!("Error: {}\r\n", failure.text))
    }

    async fn act(&self, rights: Rights, command: &str, arguments: Value) -> Result<(), Failure> {
        let arguments = arguments.as_object().cloned().unwrap_or_default();
        // The future would contain itself: a command may be a line of this monitor.
        Box::pin(self.execute(rights, command, arguments)).await.map(drop)
    }

    async fn send_keys(&self, rights: Rights, keys: &str) -> Result<(), Failure> {
        rights.check("send-key")?;
        let keys = keys::typed(keys)?;
        machine_client::ask(&self.control, Command::Key { keys }).await?;
        Ok(())
    }

    async fn picture(&self, rights: Rights, words: &[&str]) -> Result<(), Failure> {
        let mut arguments = Map::new();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                "-f" => {
                    arguments.insert("format".into(), words.next().copied().into());
                }
                path => {
                    arguments.entry("filename").or_insert_with(|| path.into());
                }
            }
        }
        self.act(rights, "screendump", arguments.into()).await
    }

    async fn info(&self, rights: Rights, what: &str) -> String {
        let ask = async |command| {
            Box::pin(self.execute(rights, command, Map::new())).await.unwrap_or_default()
        };
        match what {
            "status" => {
                let state = ask("query-status").await;
                let name = state["status"].as_str().unwrap_or_default();
                match name {
                    "running" | "paused" => format!("VM status: {name}\r\n"),
                    _ => format!("VM status: paused ({name})\r\n"),
                }
            }
            "usb" => usb(&self.usb().await),
            "qtree" => qtree(&self.usb().await),
            "kvm" => "kvm support: enabled\r\n".to_owned(),
            "name" => format!("{}\r\n", self.name),
            "uuid" => format!("{}\r\n", ask("query-uuid").await["UUID"].as_str().unwrap_or("none")),
            "version" => {
                let [major, minor, micro] = protocol::VERSION;
                let package =
                    protocol::version()["package"].as_str().unwrap_or_default().to_owned();
                format!("{major}.{minor}.{micro} ({package})\r\n")
            }
            _ => format!("unknown command: 'info {what}'\r\n"),
        }
    }

    /// The machine's USB devices, and those of the host that are not plugged in now.
    async fn usb(&self) -> Vec<Shown> {
        let status = self.events.status().await.unwrap_or_default();
        let names = status["usb"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let configured = host_devices().await.unwrap_or_default();
        let attached = self.attached().clone();
        let mut shown: Vec<_> = names.map(|name| Shown::new(name, name)).collect();
        for HostDevice { device, name } in configured {
            let Some((id, _)) = attached.iter().find(|it| *it.1 == device) else { continue };
            match shown.iter_mut().find(|it| Some(&it.name) == name.as_ref()) {
                Some(it) => it.id.clone_from(id),
                None => shown.push(Shown::new("usb-host", id)),
            }
        }
        shown
    }
}

/// A USB device as it is listed.
struct Shown {
    /// The machine's name of it, which begins with its kind.
    name: String,
    /// The ID that `device_add` gave it, or the name.
    id: String,
}

impl Shown {
    fn new(name: &str, id: &str) -> Self {
        Self { name: name.to_owned(), id: id.to_owned() }
    }
}

/// The kind of a USB device: its type in QEMU, its speed in Mb/s, and its product.
fn kind(name: &str) -> (&'static str, &'static str, &'static str) {
    match name {
        _ if name.starts_with("usb-tablet") => ("usb-tablet", "480", "QEMU USB Tablet"),
        _ if name.starts_with("usb-keyboard") => ("usb-kbd", "480", "QEMU USB Keyboard"),
        _ if name.starts_with("usb-host") => ("usb-host", "480", "USB Host Device"),
        _ => ("usb-storage", "5000", "QEMU USB MSD"),
    }
}

/// The output of `info usb`.
fn usb(devices: &[Shown]) -> String {
    let line = |(at, Shown { name, id }): (usize, &Shown)| {
        let (_, speed, product) = kind(name);
        let number = at + 1;
        format!(
            "  Device 0.{number}, Port {number}, Speed {speed} Mb/s, Product {product}, ID: \
             {id}\r\n"
        )
    };
    devices.iter().enumerate().map(line).collect()
}

/// The output of `info qtree`: the USB bus, which clients look through for their devices.
fn qtree(devices: &[Shown]) -> String {
    let device = |Shown { name, id }: &Shown| {
        let (driver, _, _) = kind(name);
        format!("          dev: {driver}, id \"{id}\"\r\n")
    };
    let devices: String = devices.iter().map(device).collect();
    format!("{TREE}{devices}")
}

/// The tree above the USB devices.
const TREE: &str = "bus: main-system-bus\r\n  type System\r\n  dev: q35-pcihost, id \"\"\r\n    \
    bus: pcie.0\r\n      type PCIE\r\n      dev: qemu-xhci, id \"\"\r\n        bus: usb-bus.0\r\n\
    \x20         type usb-bus\r\n";

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn usb_devices_are_listed_as_qemu_lists_them() {
        let mut names =
            Vec::from(["usb-keyboard", "usb-tablet", "win11"].map(|it| Shown::new(it, it)));
        let lines = [
            "  Device 0.1, Port 1, Speed 480 Mb/s, Product QEMU USB Keyboard, ID: usb-keyboard\r\n",
            "  Device 0.2, Port 2, Speed 480 Mb/s, Product QEMU USB Tablet, ID: usb-tablet\r\n",
            "  Device 0.3, Port 3, Speed 5000 Mb/s, Product QEMU USB MSD, ID: win11\r\n",
        ];
        assert_eq!(usb(&names), lines.concat());
        let tree = qtree(&names);
        assert!(tree.contains("dev: usb-storage, id \"win11\"\r\n"), "{tree}");
        // WinBoat looks for this text to know whether its device is attached.
        assert!(!tree.contains("usb-host, id"), "{tree}");
        names.push(Shown::new("usb-host.2", "1133:49970"));
        assert!(qtree(&names).contains("usb-host, id \"1133:49970\"\r\n"));
    }
}
