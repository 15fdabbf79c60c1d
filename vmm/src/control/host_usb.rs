//! Passes USB devices of this host through to a machine: opens each when it is plugged in, and
//! sends it to the machine's control socket. The machine itself can open none in its jail, and
//! unplugs one that is gone.
//!
//! A container sees no events of the host's kernel, so sysfs is read every second, and only while
//! a device is configured.

use std::fmt::Write as _;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use devices::registry;
use host::usb::{self, Filter, Found};
use serde::Serialize;

use super::{Client, Command};
use crate::config::Config;
use crate::signals;

/// The interval at which sysfs is read.
pub const INTERVAL: Duration = Duration::from_secs(1);
/// The time limit of a command, which may wait for a slow device.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The maximum number of devices. No controller has more ports.
pub const MAX_DEVICES: usize = 15;
const KIND: &str = "usb-host";

/// A configured device, which is attached whenever it is plugged in.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// The words after `usb-host`.
    pub device: String,
    #[serde(skip)]
    filter: Filter,
    /// The machine's name of the device while it is attached.
    pub name: Option<String>,
    /// Its bus and address at the host then.
    pub at: Option<(u8, u8)>,
    /// The reason why the device is not attached, unless it is not plugged in.
    pub error: Option<String>,
}

/// The filter of a device, if it is one of the host's.
pub fn filter(device: &str) -> anyhow::Result<Option<Filter>> {
    if device.split(',').next() != Some(KIND) {
        return Ok(None);
    }
    let mut config = Config::default();
    config.set("device", device)?;
    let Some(registry::Config::UsbHost(config)) = config.device.pop() else { return Ok(None) };
    let filter = config.filter();
    filter.check()?;
    Ok(Some(filter))
}

pub struct HostUsb {
    control: PathBuf,
    entries: Vec<Entry>,
}

impl HostUsb {
    pub fn new(control: PathBuf) -> Self {
        Self { control, entries: Vec::new() }
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// `device` is written as for `usb-host`. It is attached by the next `step`.
    pub fn add(&mut self, device: &str) -> anyhow::Result<()> {
        let filter = filter(&format!("{KIND},{device}"))?.context("no USB device")?;
        ensure!(
            self.entries.iter().all(|entry| entry.filter != filter),
            "{filter} is configured already: detach it first"
        );
        ensure!(self.entries.len() < MAX_DEVICES, "at most {MAX_DEVICES} devices of the host");
        let device = filter.to_string();
        self.entries.push(Entry { device, filter, name: None, at: None, error: None });
        Ok(())
    }

    /// Removes and unplugs a device, given by its words or by the machine's name of the device.
    pub fn remove(&mut self, device: &str) -> anyhow::Result<()> {
        let same = filter(&format!("{KIND},{device}")).ok().flatten();
        let of = |entry: &Entry| {
            entry.name.as_deref() == Some(device) || same.as_ref() == Some(&entry.filter)
        };
        let at = self.entries.iter().position(of);
        let at = at.with_context(|| format!("{device} is not a configured device"))?;
        // If the machine does not answer, it is still configured, and can be removed later.
        if let Some(name) = self.entries[at].name.clone() {
            self.ask(&Command::Detach { name }, None)?;
        }
        self.entries.remove(at);
        Ok(())
    }

    /// Attaches the devices that are plugged in, and forgets those that are gone.
    pub fn step(&mut self) -> anyhow::Result<()> {
        let found = usb::list()?;
        for entry in &mut self.entries {
            let there = |at: &(u8, u8)| found.iter().any(|it| (it.bus, it.address) == *at);
            if entry.at.take_if(|at| !there(at)).is_some() {
                let name = entry.name.take().unwrap_or_default();
                tracing::info!("{name} ({}) was unplugged", entry.device);
            }
        }
        let mut taken: Vec<_> = self.entries.iter().filter_map(|entry| entry.at).collect();
        for number in 0..self.entries.len() {
            let entry = &self.entries[number];
            let free =
                |it: &&Found| entry.filter.matches(it) && !taken.contains(&(it.bus, it.address));
            let Some(device) = found.iter().find(free).filter(|_| entry.at.is_none()) else {
                continue;
            };
            let attached = self.attach(device);
            let entry = &mut self.entries[number];
            match attached {
                Ok(name) => {
                    tracing::info!("{name} is {} ({})", device.name, entry.device);
                    let at = (device.bus, device.address);
                    (entry.name, entry.at, entry.error) = (Some(name), Some(at), None);
                    taken.push(at);
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    // It is tried again every second.
                    if entry.error.as_ref() != Some(&error) {
                        tracing::warn!("{}: {error}", entry.device);
                    }
                    entry.error = Some(error);
                }
            }
        }
        Ok(())
    }

    fn attach(&self, found: &Found) -> anyhow::Result<String> {
        let file = found.open()?;
        let device = format!("{KIND},hostbus={},hostaddr={}", found.bus, found.address);
        let answer = self.ask(&Command::Attach { device, only: None }, Some(&file))?;
        Ok(answer["name"].as_str().context("an answer without a name")?.to_owned())
    }

    fn ask(
        &self,
        command: &Command,
        file: Option<&std::fs::File>,
    ) -> anyhow::Result<serde_json::Value> {
        let mut client = Client::connect_timeout(&self.control, TIMEOUT)?;
        client.ask_with(command, file.map(AsFd::as_fd).as_slice())
    }

    /// Steps until a signal or the machine's end, then unplugs all devices.
    pub fn run(mut self) -> anyhow::Result<()> {
        let _signals = signals::catch(|_| false)?;
        let mut failed = None;
        while signals::arrived().is_none() && is_listening(&self.control) {
            // It is tried again every second.
            let error = self.step().err().map(|error| format!("{error:#}"));
            if let Some(error) = error.as_ref().filter(|_| error != failed) {
                tracing::warn!("the host's USB devices: {error}");
            }
            failed = error;
            sleep(INTERVAL);
        }
        for name in self.entries.iter().filter_map(|entry| entry.name.clone()) {
            // The machine may be gone.
            self.ask(&Command::Detach { name }, None).ok();
        }
        Ok(())
    }
}

fn is_listening(control: &Path) -> bool {
    Client::connect_timeout(control, TIMEOUT).is_ok()
}

/// A table of this host's devices, without hubs.
pub fn show(found: &[Found]) -> String {
    let mut text = String::new();
    for it in found.iter().filter(|it| !it.is_hub()) {
        let (vendor, product) = (it.vendor, it.product);
        let place = format!("hostbus={},hostport={}", it.bus, it.port);
        writeln!(
            text,
            "vendorid={vendor:#06x},productid={product:#06x}  {place:<24}  {:>5} Mb/s  {}",
            it.speed, it.name
        )
        .expect("a string takes all");
    }
    text
}
