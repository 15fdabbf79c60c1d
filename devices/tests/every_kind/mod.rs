//! A bench with a device of each kind of the registry.

use std::path::Path;

use devices::registry::Config;
use devices::testutil::Bench;
use host::swtpm::NO_SESSIONS;
use host::testutil::swtpm;
use serde_json::{Value, json};

/// Returns the required fields of a kind, and creates the files that they name.
type Fields = fn(&Path) -> Value;

/// Kinds that cannot be built from their defaults.
const MINIMAL: &[(&str, Fields)] = &[
    ("ahci-cdrom", disk),
    ("ahci-disk", disk),
    ("flash", flash),
    ("host-bridge", smm),
    ("lpc", smm),
    ("nvme", disk),
    ("tpm", tpm),
    ("usb-storage", disk),
    ("virtio-blk", disk),
    ("virtio-scsi", disk),
];

/// fff12b8d-7696-4c8b-a985-2747075b4f50: a variable store volume.
const NV_DATA: [u8; 16] = [
    0x8d, 0x2b, 0xf1, 0xff, 0x96, 0x76, 0x8b, 0x4c, 0xa9, 0x85, 0x27, 0x47, 0x07, 0x5b, 0x4f, 0x50,
];

/// Code that never runs, and a new empty variable store.
fn flash(folder: &Path) -> Value {
    let (code, vars) = (folder.join("code"), folder.join("vars"));
    std::fs::write(&code, [0x90; 0x8000]).unwrap();
    let mut volume = vec![0xff; 0x4000];
    // EFI_FIRMWARE_VOLUME_HEADER: file system GUID, length, signature.
    volume[0x10..0x20].copy_from_slice(&NV_DATA);
    volume[0x20..0x28].copy_from_slice(&0x4000_u64.to_le_bytes());
    volume[0x28..0x2c].copy_from_slice(b"_FVH");
    std::fs::write(&vars, volume).unwrap();
    json!({ "code": code, "vars": vars })
}

/// A chip set with system-management mode.
fn smm(_: &Path) -> Value {
    json!({ "smm": true })
}

/// A small disk, shared by all machines of a test.
fn disk(folder: &Path) -> Value {
    let path = folder.join("disk");
    let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    file.unwrap().set_len(1 << 20).unwrap();
    json!({ "path": path })
}

/// A TPM, created once for all machines of a test.
fn tpm(folder: &Path) -> Value {
    let path = folder.join("swtpm");
    if !path.exists() {
        swtpm::listen(&path, NO_SESSIONS);
    }
    json!({ "path": path })
}

/// The minimal configuration of a kind.
fn minimal(kind: &str, folder: &Path) -> Config {
    // Each kind of disk has its own file.
    let folder = folder.join(kind);
    std::fs::create_dir_all(&folder).unwrap();
    let fields = MINIMAL.iter().find(|it| it.0 == kind).map_or(json!({}), |it| it.1(&folder));
    match Config::of_kind(kind, fields) {
        Some(Ok(config)) => config,
        Some(Err(error)) => panic!(
            "`{kind}` cannot be built from its defaults ({error}): add its fields to MINIMAL"
        ),
        None => panic!("there is no `{kind}`"),
    }
}

/// Adds a device of this kind.
pub(crate) fn add(bench: &mut Bench, kind: &str, folder: &Path) {
    let mut config = minimal(kind, folder);
    if kind == "usb-host" {
        // This host may have no USB device to give away. Its own tests have one.
        config.detach_host_side();
    }
    if let Err(error) = bench.board.add(kind, |grants| config.build(grants)) {
        panic!("`{kind}` cannot be built: {error:#}");
    }
}
