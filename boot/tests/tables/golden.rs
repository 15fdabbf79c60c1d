//! Compares every byte that a guest receives with the checked-in files.
//!
//! After an intended change, `GOLDEN=update cargo test -p boot` writes the files again.

use std::path::Path;

use boot::Image;
use boot::e820;
use boot::fw_cfg::{self, Files};
use boot::layout::PCIEXBAR;

use crate::sample::samples;

fn compare(name: &str, bytes: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("GOLDEN").is_some_and(|value| value == "update") {
        std::fs::write(&path, bytes).unwrap();
    }
    let golden = std::fs::read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
    let differs = golden.iter().zip(bytes).position(|(golden, byte)| golden != byte);
    assert!(
        golden == bytes,
        "{name}: {} bytes where {} were expected, the first difference at {:#x}",
        bytes.len(),
        golden.len(),
        differs.unwrap_or(golden.len().min(bytes.len()))
    );
}

/// An image as a hex dump with addresses, so that differences are readable.
fn dump(image: &Image) -> Vec<u8> {
    let mut text = String::new();
    for (address, bytes) in image {
        for (i, line) in bytes.chunks(16).enumerate() {
            let hex: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
            text += &format!("{:08x} {}\n", address + 16 * i as u64, hex.join(" "));
        }
    }
    text.into_bytes()
}

#[test]
fn firmware_files_match_the_golden_files() {
    for sample in samples() {
        let map = e820::for_firmware(sample.ram);
        let order = ["/pci@i0cf8/scsi@2/disk@0,0".to_owned()];
        let mut files = fw_cfg::files(&Files {
            e820: &map,
            smbios: &sample.smbios,
            boot_order: &order,
            boot_menu_ms: Some(3000),
        })
        .unwrap();
        files.extend(sample.tables().files());
        assert_eq!(files.len(), 10);
        for file in files {
            compare(&format!("{}-{}", sample.name, file.name.replace('/', "-")), &file.bytes);
        }
    }
}

#[test]
fn direct_boot_images_match_the_golden_files() {
    for sample in samples() {
        let (mut image, rsdp) = sample.tables().image().unwrap();
        assert_eq!(rsdp, 0xE_0000);
        image.extend(sample.smbios.image().unwrap());
        let map = e820::for_direct_boot(sample.ram, &PCIEXBAR);
        image.push((0, e820::bytes(&map)));
        compare(&format!("{}-direct.txt", sample.name), &dump(&image));
    }
}
