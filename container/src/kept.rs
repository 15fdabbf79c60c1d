//! The hardware that an installed Windows needs, kept on the volume: the controller of its disks
//! and the model of its network card. Windows may have no driver for others. Also the address that
//! the guest has in user mode, which it keeps when it goes on in another pod.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::Error;

use crate::files;
use crate::settings::NetworkKind;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::translate::Translated;
use crate::settings::value::Value;
use crate::settings::words::Mask;

/// Extension of the file with the controller, as in older versions of the reference image.
pub const TYPE: &str = "type";
/// Extension of the file with the network card.
pub const ADAPTER: &str = "adapter";

/// Extension of the file with the guest's address in user mode, as `10.0.2.15/24`.
pub const ADDRESS: &str = "address";

/// Gives a guest that goes on the address that it has, unless IP or MASK is set.
pub fn recall_address(input: &mut ParsedEnvironment, folder: &Path) {
    let network = &mut input.settings.network;
    let set = ["IP", "MASK"].iter().any(|name| input.names.contains(name));
    if set || network.kind != NetworkKind::User {
        return;
    }
    let path = folder.join(format!("{}.{ADDRESS}", input.settings.pod.process()));
    let Ok(text) = files::read(&path) else { return };
    let kept = text.trim().split_once('/');
    let kept = kept.and_then(|(address, prefix)| Some((address.parse(), prefix.parse().ok()?)));
    match kept {
        Some((Ok(address), prefix)) if (1..=30).contains(&prefix) => {
            (network.address, network.mask) = (Some(address), Mask(prefix));
        }
        _ => {
            let path = path.display();
            input.warnings.push(format!("{path}: it has no address: set IP, or delete the file"));
        }
    }
}

/// Applies the controller and the card of the volume, unless DISK_TYPE or ADAPTER is set.
pub fn recall(input: &mut ParsedEnvironment, volume: &Path) {
    if let Some(kept) = read(input, volume, ("DISK_TYPE", TYPE)) {
        input.settings.disk.controller = kept;
    }
    if let Some(kept) = read(input, volume, ("ADAPTER", ADAPTER)) {
        input.settings.network.adapter = kept;
    }
}

/// The choice in a file of the volume.
fn read<T>(
    input: &mut ParsedEnvironment,
    volume: &Path,
    (variable, extension): (&'static str, &str),
) -> Option<Translated<T>>
where
    Translated<T>: Value,
{
    if input.names.contains(variable) {
        return None;
    }
    let path = volume.join(format!("{}.{extension}", input.settings.pod.process()));
    let known = match files::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        read => read.map_err(Error::from).and_then(|text| match text.trim() {
            "" => Ok(None),
            text => Value::read(text).map(Some),
        }),
    };
    known.unwrap_or_else(|error| {
        let path = path.display();
        input.warnings.push(format!("{path}: {error}: set {variable}, or delete the file"));
        None
    })
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::*;
    use crate::settings::Settings;
    use crate::settings::translate::{Adapter, Bus};

    /// The controller, the card and the number of warnings.
    fn recalled(file: &str, text: &str, names: &[&'static str]) -> (Bus, Adapter, usize) {
        let volume = tempfile::tempdir().unwrap();
        fs::write(volume.path().join(file), text).unwrap();
        let names = names.iter().copied().collect();
        let settings = Settings::defaults();
        let mut input = ParsedEnvironment { names, settings, ..ParsedEnvironment::default() };
        recall(&mut input, volume.path());
        let settings = &input.settings;
        (settings.disk.controller.value, settings.network.adapter.value, input.warnings.len())
    }

    #[test]
    fn a_guest_keeps_its_address_unless_another_one_is_set() {
        let folder = tempfile::tempdir().unwrap();
        let recalled = |text: &str, names: &[&'static str]| {
            fs::write(folder.path().join("windows.address"), text).unwrap();
            let mut input = ParsedEnvironment {
                names: names.iter().copied().collect(),
                settings: Settings::defaults(),
                ..ParsedEnvironment::default()
            };
            input.settings.network.kind = NetworkKind::User;
            recall_address(&mut input, folder.path());
            let network = input.settings.network;
            (network.address.map(|it| it.to_string()), network.mask.0, input.warnings.len())
        };
        let default = Settings::defaults().network.mask.0;
        assert_eq!(recalled("10.1.2.3/16\n", &[]), (Some("10.1.2.3".into()), 16, 0));
        assert_eq!(recalled("10.1.2.3/16\n", &["IP"]), (None, default, 0));
        for wrong in ["", "10.1.2.3", "10.1.2.3/31", "10.1.2.3/0", "10.1.2/16", "::1/64"] {
            assert_eq!(recalled(wrong, &[]), (None, default, 1), "{wrong}");
        }
    }

    #[test]
    fn the_volume_keeps_the_controller_of_the_installation() {
        let of = |text: &str, names: &[&'static str]| {
            let (bus, _, warnings) = recalled("windows.type", text, names);
            (bus, warnings)
        };
        assert_eq!(of("nvme\n", &[]), (Bus::Nvme, 0));
        assert_eq!(of("blk", &[]), (Bus::Blk, 0));
        assert_eq!(of("blk", &["DISK_TYPE"]), (Bus::Scsi, 0));
        assert_eq!(of("", &[]), (Bus::Scsi, 0));
        assert_eq!(of("x\u{1b}[2J", &[]), (Bus::Scsi, 1));
        assert_eq!(of(&"x".repeat(5000), &[]), (Bus::Scsi, 1));
    }

    #[test]
    fn the_volume_keeps_the_network_card_of_the_installation() {
        let of = |text: &str, names: &[&'static str]| {
            let (_, adapter, warnings) = recalled("windows.adapter", text, names);
            (adapter, warnings)
        };
        assert_eq!(of("e1000e\n", &[]), (Adapter::E1000e, 0));
        assert_eq!(of("e1000e\n", &["ADAPTER"]), (Adapter::Virtio, 0));
        assert_eq!(of("", &[]), (Adapter::Virtio, 0));
        assert_eq!(of(&"x".repeat(5000), &[]), (Adapter::Virtio, 1));
    }
}
