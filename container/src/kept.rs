//! The hardware that an installed Windows needs, kept on the volume: the controller of its disks
//! and the model of its network card. Windows may have no driver for others. Also the address that
//! the guest has in user mode, which it keeps when it goes on in another pod.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::Error;

use crate::files;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::translate::Translated;
use crate::settings::value::Value;

/// Extension of the file with the controller, as in older versions of the reference image.
pub const TYPE: &str = "type";
/// Extension of the file with the network card.
pub const ADAPTER: &str = "adapter";

/// Extension of the file with the guest's address in user mode.
pub const ADDRESS: &str = "address";

/// Gives a guest that goes on the address that it has, unless IP or MASK is set.
pub fn recall_address(input: &mut ParsedEnvironment, folder: &Path) {
    let path = folder.join(format!("{}.{ADDRESS}", input.settings.pod.process()));
    let set = ["IP", "MASK"].iter().any(|name| input.names.contains(name));
    let Some(text) = files::read(&path).ok().filter(|_| !set) else { return };
    match text.trim().parse() {
        Ok(kept) => input.settings.network.kept = Some(kept),
        Err(error) => {
            let path = path.display();
            input.warnings.push(format!("{path}: {error}: set IP, or delete the file"));
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
            let names = names.iter().copied().collect();
            let settings = Settings::defaults();
            let mut input = ParsedEnvironment { names, settings, ..ParsedEnvironment::default() };
            recall_address(&mut input, folder.path());
            (input.settings.network.kept.map(|it| it.to_string()), input.warnings.len())
        };
        let text = "10.1.2.3/16 10.1.0.1";
        assert_eq!(recalled(&format!("{text}\n"), &[]), (Some(text.into()), 0));
        assert_eq!(recalled(text, &["IP"]), (None, 0));
        assert_eq!(recalled("10.1.2.3/16", &[]), (None, 1));
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
