//! The boot order, as the OpenFirmware paths by which firmware finds devices (OVMF,
//! `QemuBootOrderLib`).

use anyhow::{bail, ensure};
use devices::board::Board;
use devices::grants::Claim;
use devices::pci::Address;

/// OpenFirmware paths. Fails if a device does not exist, is not bootable, or is listed twice.
pub(super) fn paths(names: &[String], board: &Board) -> anyhow::Result<Vec<String>> {
    let mut paths = Vec::new();
    for name in names {
        let Some(path) = path(name, board) else {
            let all: Vec<_> =
                board.claims().map(|it| it.0).filter(|it| path(it, board).is_some()).collect();
            if all.is_empty() {
                bail!("--boot {name}: this machine has no bootable device");
            }
            bail!("--boot {name}: not a bootable device; bootable: {}", all.join(", "));
        };
        ensure!(!paths.contains(&path), "--boot {name}: it is listed twice");
        paths.push(path);
    }
    Ok(paths)
}

/// The path of a device, if firmware can boot from it.
fn path(name: &str, board: &Board) -> Option<String> {
    let kind = kind_of(name);
    if kind == "usb-storage" {
        let (controller, port) = board.shared.usb.port(name)?;
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
        // The second number is the EUI-64. It is 0, because real ones are assigned by the IEEE.
        "nvme" => format!("/pci@i0cf8/pci8086,5845@{at}/namespace@1,0"),
        // Port 0, without a port multiplier.
        "ahci-cdrom" | "ahci-disk" => format!("/pci@i0cf8/pci8086,2922@{at}/drive@0/disk@0"),
        "virtio-blk" => format!("/pci@i0cf8/scsi@{at}/disk@0,0"),
        "virtio-scsi" => format!("/pci@i0cf8/scsi@{at}/channel@0/disk@0,0"),
        "e1000e" | "virtio-net" => format!("/pci@i0cf8/ethernet@{at}/ethernet-phy@0"),
        _ => return None,
    })
}

/// The kind in a device's name: `nvme` in `nvme.2`.
fn kind_of(name: &str) -> &str {
    name.split('.').next().unwrap_or_default()
}

/// An OpenFirmware unit address: the device number, and the function unless it is 0.
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
