//! The hardware that an installed Windows needs, kept on the volume: the controller of its disks
//! and the model of its network card. Windows may have no driver for others.

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
