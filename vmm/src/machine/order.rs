//! The order in which firmware boots, as the paths of OpenFirmware by which it finds devices
//! (OVMF, `QemuBootOrderLib`).

use anyhow::{bail, ensure};
use devices::board::Board;
use devices::grants::Claim;
use devices::pci::Address;

/// The paths of what these names stand for.
///
/// # Errors
///
/// When there is no such device, it is nothing to boot from, or it is named twice.
pub(super) fn paths(names: &[String], board: &Board) -> anyhow::Result<Vec<String>> {
    let mut paths = Vec::new();
    for name in names {
        let Some(path) = path(name, board) else {
            let all: Vec<_> =
                board.claims().map(|it| it.0).filter(|it| path(it, board).is_some()).collect();
            if all.is_empty() {
                bail!("--boot {name}: this machine has nothing to boot from");
            }
            bail!("--boot {name}: that is nothing to boot from, but: {}", all.join(", "));
        };
        ensure!(!paths.contains(&path), "--boot {name}: it is named twice");
        paths.push(path);
    }
    Ok(paths)
}

/// The path of a device, if firmware can boot from it.
fn path(name: &str, board: &Board) -> Option<String> {
    let kind = kind_of(name);
    if kind == "usb-storage" {
        let (controller, port) = board.usb().port(name)?;
        let at = board.claims().filter(|it| kind_of(it.0) == "xhci").nth(controller)?;
        // Ports count from 1.
        return Some(format!(
            "/pci@i0cf8/usb@{}/storage@{:x}/channel@0/disk@0,0",
            slot(at.1)?,
            port + 1
        ));
    }
    let at = slot(board.claims().find(|it| it.0 == name)?.1)?;
    Some(match kind {
        // The second number is the EUI-64, which needs a number that the IEEE sells.
        "nvme" => format!("/pci@i0cf8/pci8086,5845@{at}/namespace@1,0"),
        "virtio-blk" => format!("/pci@i0cf8/scsi@{at}/disk@0,0"),
        "virtio-scsi" => format!("/pci@i0cf8/scsi@{at}/channel@0/disk@0,0"),
        "virtio-net" => format!("/pci@i0cf8/ethernet@{at}/ethernet-phy@0"),
        _ => return None,
    })
}

/// `nvme` of `nvme.2`.
fn kind_of(name: &str) -> &str {
    name.split('.').next().unwrap_or_default()
}

/// A PCI slot in the words of OpenFirmware: device, and function where it is not 0.
fn slot(claims: &[Claim]) -> Option<String> {
    claims.iter().find_map(|claim| match claim {
        Claim::Pci(at, _) => Some(unit(*at)),
        _ => None,
    })
}

fn unit(at: Address) -> String {
    match at.function {
        0 => format!("{:x}", at.device),
        function => format!("{:x},{function:x}", at.device),
    }
}
