//! USB devices of the host, as sysfs lists them and usbfs (`/dev/bus/usb`) opens them.
//!
//! No crate does this for a machine: `nusb` has no isochronous transfers, and reaps on a thread of
//! its own, which no jail knows; `usbfs.rs` is one file of ioctls on a descriptor that epoll waits
//! for.
//!
//! Threats: a device is hostile. The text and the numbers of sysfs come from its descriptors, after
//! the kernel's check; they are bounded and printable here.

pub mod usbfs;

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde::Serialize;

const SYSFS: &str = "/sys/bus/usb/devices";
/// The folder of the devices' nodes.
pub const NODES: &str = "/dev/bus/usb";
/// bDeviceClass of a hub, whose devices are passed through one by one.
const HUB: u8 = 9;
/// The maximum number of devices that are listed, and of characters in a name.
const MAX_DEVICES: usize = 1024;
const MAX_NAME: usize = 126;

/// The devices of the host that an option of the machine describes. Each number that is given must
/// match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    pub vendor: Option<u16>,
    pub product: Option<u16>,
    pub bus: Option<u8>,
    pub address: Option<u8>,
    /// The ports on the way from the root hub, as in `1.4`.
    pub port: Option<String>,
}

impl Filter {
    /// A bus alone, or a port or an address without a bus, describes no device.
    pub fn check(&self) -> anyhow::Result<()> {
        let place = self.address.is_some() || self.port.is_some();
        ensure!(
            (self.vendor.is_some() || place) && (self.bus.is_some() || !place),
            "`usb-host` needs vendorid= and productid=, or hostbus= and hostport=, or hostbus= and \
             hostaddr=: `lsusb -t` and `lsusb` show them"
        );
        ensure!(
            self.port.as_ref().is_none_or(|port| is_port(port)),
            "hostport={}: write the ports on the way from the root hub, as in 1.4",
            self.port.as_deref().unwrap_or_default()
        );
        Ok(())
    }

    /// Hubs are never matched.
    pub fn matches(&self, found: &Found) -> bool {
        fn fits<T: PartialEq>(wanted: Option<&T>, found: &T) -> bool {
            wanted.is_none_or(|it| it == found)
        }
        found.class != HUB
            && fits(self.vendor.as_ref(), &found.vendor)
            && fits(self.product.as_ref(), &found.product)
            && fits(self.bus.as_ref(), &found.bus)
            && fits(self.address.as_ref(), &found.address)
            && fits(self.port.as_ref(), &found.port)
    }

    /// Opens the first device that matches.
    pub fn open(&self) -> anyhow::Result<(Found, File)> {
        let found = list()?.into_iter().find(|it| self.matches(it)).with_context(|| {
            format!("{self}: this host has no such USB device: `lsusb` lists them")
        })?;
        let file = found.open()?;
        Ok((found, file))
    }
}

impl std::fmt::Display for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let vendor = self.vendor.map(|it| format!("vendorid={it:#06x}"));
        let product = self.product.map(|it| format!("productid={it:#06x}"));
        let bus = self.bus.map(|it| format!("hostbus={it}"));
        let port = self.port.as_ref().map(|it| format!("hostport={it}"));
        let address = self.address.map(|it| format!("hostaddr={it}"));
        let words: Vec<_> = [vendor, product, bus, port, address].into_iter().flatten().collect();
        f.write_str(&words.join(","))
    }
}

fn is_port(text: &str) -> bool {
    text.len() <= 32
        && text.split('.').all(|part| part.parse().is_ok_and(|it: u8| it > 0))
        && !text.contains('+')
}

/// A device of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    pub bus: u8,
    pub address: u8,
    pub port: String,
    pub vendor: u16,
    pub product: u16,
    #[serde(skip)]
    pub class: u8,
    /// The maker and the name that the device reports.
    pub name: String,
    /// Mb/s.
    pub speed: String,
}

impl Found {
    pub fn is_hub(&self) -> bool {
        self.class == HUB
    }

    pub fn node(&self) -> PathBuf {
        Path::new(NODES).join(format!("{:03}/{:03}", self.bus, self.address))
    }

    /// Opens the device for its use. It takes no interface of the device from the host's drivers.
    pub fn open(&self) -> anyhow::Result<File> {
        let node = self.node();
        let file = OpenOptions::new().read(true).write(true).open(&node);
        file.with_context(|| format!("{}: cannot open this USB device", node.display()))
    }
}

/// All devices of the host, hubs included, by bus and address. A host without USB has none.
pub fn list() -> anyhow::Result<Vec<Found>> {
    list_in(Path::new(SYSFS))
}

fn list_in(folder: &Path) -> anyhow::Result<Vec<Found>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| folder.display().to_string()),
    };
    // A device that is unplugged meanwhile is left out.
    let found = entries.take(MAX_DEVICES).flatten().filter_map(|entry| read(&entry.path()));
    let mut found: Vec<Found> = found.collect();
    found.sort_by_key(|it| (it.bus, it.address));
    Ok(found)
}

/// Reads a folder of sysfs. `None` for an interface, which has no address.
fn read(folder: &Path) -> Option<Found> {
    let text = |name: &str| {
        let text = fs::read(folder.join(name)).ok()?;
        let text = String::from_utf8_lossy(&text);
        let plain = text.trim().chars().filter(|it| !it.is_control()).take(MAX_NAME);
        Some(plain.collect::<String>())
    };
    let hex = |name: &str| u16::from_str_radix(&text(name)?, 16).ok();
    let names: Vec<String> =
        ["manufacturer", "product"].iter().filter_map(|name| text(name)).collect();
    Some(Found {
        bus: text("busnum")?.parse().ok()?,
        address: text("devnum")?.parse().ok()?,
        port: text("devpath")?,
        vendor: hex("idVendor")?,
        product: hex("idProduct")?,
        class: u8::try_from(hex("bDeviceClass")?).ok()?,
        name: names.join(" "),
        speed: text("speed").unwrap_or_default(),
    })
}

#[cfg(test)]
mod test {
    use super::*;

    fn put(folder: &Path, name: &str, values: &[(&str, &str)]) {
        let folder = folder.join(name);
        fs::create_dir(&folder).unwrap();
        for (name, value) in values {
            fs::write(folder.join(name), format!("{value}\n")).unwrap();
        }
    }

    fn host() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let common = [("busnum", "1"), ("speed", "12")];
        let device = |name: &str, own: &[(&str, &str)]| {
            put(folder.path(), name, &[&common[..], own].concat());
        };
        device(
            "1-2",
            &[
                ("devnum", "7"),
                ("devpath", "2"),
                ("idVendor", "0403"),
                ("idProduct", "6001"),
                ("bDeviceClass", "00"),
                ("manufacturer", "FTDI\u{7}"),
                ("product", &"x".repeat(500)),
            ],
        );
        device(
            "usb1",
            &[
                ("devnum", "1"),
                ("devpath", "0"),
                ("idVendor", "1d6b"),
                ("idProduct", "0002"),
                ("bDeviceClass", "09"),
            ],
        );
        // An interface, and a device whose numbers are no numbers.
        put(folder.path(), "1-2:1.0", &[("bInterfaceNumber", "00")]);
        device("1-3", &[("devnum", "300"), ("devpath", "3"), ("idVendor", "zz")]);
        folder
    }

    #[test]
    fn sysfs_is_listed_without_interfaces_and_with_printable_names() {
        let folder = host();
        let found = list_in(folder.path()).unwrap();
        assert_eq!(found.iter().map(|it| it.address).collect::<Vec<_>>(), [1, 7]);
        let serial = &found[1];
        assert!(serial.name.starts_with("FTDI xxx") && serial.name.len() == 5 + MAX_NAME);
        assert_eq!(serial.node(), Path::new("/dev/bus/usb/001/007"));
        assert_eq!(list_in(&folder.path().join("none")).unwrap(), []);
    }

    #[test]
    fn a_filter_matches_by_all_of_its_numbers_and_no_hub() {
        let folder = host();
        let found = list_in(folder.path()).unwrap();
        let all = |filter: Filter| -> Vec<u8> {
            found.iter().filter(|it| filter.matches(it)).map(|it| it.address).collect()
        };
        let vendor = Filter { vendor: Some(0x403), ..Filter::default() };
        assert_eq!(all(vendor.clone()), [7]);
        assert_eq!(all(Filter { product: Some(1), ..vendor.clone() }), [0; 0]);
        let port = Some("2".to_owned());
        assert_eq!(all(Filter { bus: Some(1), port: port.clone(), ..Filter::default() }), [7]);
        assert_eq!(all(Filter { bus: Some(2), port: port.clone(), ..vendor.clone() }), [0; 0]);
        assert_eq!(all(Filter { vendor: Some(0x1d6b), ..Filter::default() }), [0; 0], "a hub");
        assert_eq!(
            Filter { product: Some(0x6001), bus: Some(1), port, ..vendor }.to_string(),
            "vendorid=0x0403,productid=0x6001,hostbus=1,hostport=2"
        );
    }

    #[test]
    fn a_filter_that_describes_no_device_is_refused() {
        let port = |port: &str| Some(port.to_owned());
        let bus = Filter { bus: Some(1), ..Filter::default() };
        for (filter, good) in [
            (Filter::default(), false),
            (bus.clone(), false),
            (Filter { product: Some(1), ..Filter::default() }, false),
            (Filter { address: Some(2), ..Filter::default() }, false),
            (Filter { address: Some(2), ..bus.clone() }, true),
            (Filter { port: port("1.4"), ..bus.clone() }, true),
            (Filter { port: port("../4"), ..bus.clone() }, false),
            (Filter { port: port("+1"), ..bus }, false),
            (Filter { vendor: Some(1), ..Filter::default() }, true),
        ] {
            assert_eq!(filter.check().is_ok(), good, "{filter}");
        }
    }
}
