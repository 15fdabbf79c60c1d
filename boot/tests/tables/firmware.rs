//! Runs the loader script as UEFI firmware does, with code that is independent of the crate's.

use std::collections::BTreeMap;

use boot::file::File;

use crate::sample::{Sample, samples};

/// A blob in the firmware's memory.
struct Blob {
    address: u64,
    bytes: Vec<u8>,
}

/// The result of running a script.
#[derive(Default)]
struct Loaded {
    blobs: BTreeMap<String, Blob>,
    /// The addresses that pointers lead to.
    pointees: Vec<u64>,
    /// The addresses that the firmware wrote back, by the name of the file.
    written_back: BTreeMap<String, u64>,
}

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    bytes[at..at + size].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn length(bytes: &[u8], at: usize) -> usize {
    usize::try_from(number(bytes, at, 4)).unwrap()
}

fn text(field: &[u8]) -> String {
    assert_eq!(field.len(), 56);
    let end = field.iter().position(|byte| *byte == 0).expect("a name without its 0");
    assert!(field[end..].iter().all(|byte| *byte == 0), "something behind a name");
    String::from_utf8(field[..end].to_vec()).unwrap()
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte))
}

/// Runs the script in `files`, and checks every rule that firmware has for scripts.
fn load(files: &[File]) -> Loaded {
    let file = |name: &str| files.iter().find(|file| file.name == name).expect(name);
    let script = &file("etc/table-loader").bytes;
    assert_eq!(script.len() % 128, 0);
    let mut loaded = Loaded::default();
    let mut next = 0x7E00_0000;
    let mut allocating = true;
    let mut summed: Vec<(String, usize, usize)> = vec![];
    for command in script.chunks(128) {
        let payload = &command[4..];
        let name = text(&payload[..56]);
        match number(command, 0, 4) {
            1 => {
                assert!(allocating, "{name} is allocated after something was done already");
                let align = number(payload, 56, 4);
                assert!(align.is_power_of_two() && align <= 4096, "{name} aligned to {align}");
                assert!((1..=2).contains(&payload[60]), "{name} in zone {}", payload[60]);
                let bytes = file(&name).bytes.clone();
                let length = bytes.len() as u64;
                // Firmware allocates whole pages.
                let old = loaded.blobs.insert(name.clone(), Blob { address: next, bytes });
                assert!(old.is_none(), "{name} is loaded twice");
                next += length.next_multiple_of(4096) + 0x3000;
            }
            2 => {
                allocating = false;
                let pointee = text(&payload[56..112]);
                let (at, size) = (length(payload, 112), usize::from(payload[116]));
                assert!(matches!(size, 1 | 2 | 4 | 8));
                let target = &loaded.blobs[&pointee];
                let (base, room) = (target.address, target.bytes.len() as u64);
                let blob = loaded.blobs.get_mut(&name).unwrap();
                let field = number(&blob.bytes, at, size);
                assert!(field < room, "a pointer in {name} to {field:#x} of {pointee}");
                let done = summed.iter().any(|(other, start, length)| {
                    *other == name && (*start..start + length).contains(&at)
                });
                assert!(!done, "a pointer at {at:#x} of {name} after its checksum");
                let value = base + field;
                assert!(size == 8 || value >> (8 * size) == 0);
                blob.bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
                loaded.pointees.push(value);
            }
            3 => {
                allocating = false;
                let [result, start, count] = [56, 60, 64].map(|at| length(payload, at));
                let bytes = &mut loaded.blobs.get_mut(&name).unwrap().bytes;
                assert!((start..start + count).contains(&result));
                assert_eq!(bytes[result], 0, "the checksum byte counts in its own checksum");
                bytes[result] = sum(&bytes[start..start + count]).wrapping_neg();
                summed.push((name, start, count));
            }
            4 => {
                allocating = false;
                loaded.write_back(name, payload);
            }
            other => panic!("command {other}"),
        }
    }
    loaded
}

impl Loaded {
    /// Writes an address into a file, as WRITE_POINTER requires.
    fn write_back(&mut self, file: String, payload: &[u8]) {
        let pointee = text(&payload[56..112]);
        let [to, offset] = [112, 116].map(|at| length(payload, at));
        assert_eq!((to, payload[120]), (0, 8), "a file of one address");
        let target = &self.blobs[&pointee];
        assert!(offset < target.bytes.len(), "an address beyond {pointee}");
        self.written_back.insert(file, target.address + offset as u64);
    }

    fn at(&self, address: u64) -> &[u8] {
        let holds = |blob: &&Blob| {
            (blob.address..blob.address + blob.bytes.len() as u64).contains(&address)
        };
        let blob = self.blobs.values().find(holds).expect("an address in no blob");
        &blob.bytes[usize::try_from(address - blob.address).unwrap()..]
    }

    /// Returns the table at `address` after checking its length and checksum.
    fn table(&self, address: u64) -> &[u8] {
        let bytes = self.at(address);
        let length = length(bytes, 4);
        let table = &bytes[..length];
        if !table.starts_with(b"FACS") {
            assert_eq!(sum(table), 0, "{}", String::from_utf8_lossy(&table[..4]));
        }
        table
    }

    fn rsdp(&self) -> &[u8] {
        &self.blobs["etc/acpi/rsdp"].bytes
    }

    fn roots(&self) -> Vec<u64> {
        let xsdt = self.table(number(self.rsdp(), 24, 8));
        xsdt[36..].chunks(8).map(|entry| number(entry, 0, 8)).collect()
    }
}

#[test]
fn firmware_finds_every_table_with_its_checksum() {
    for sample in samples() {
        let loaded = load(&sample.files());
        let rsdp = loaded.rsdp();
        assert!(rsdp.starts_with(b"RSD PTR ") && rsdp[15] == 2 && rsdp.len() == 36);
        assert_eq!((sum(&rsdp[..20]), sum(rsdp)), (0, 0));
        let roots = loaded.roots();
        let rsdt = loaded.table(number(rsdp, 16, 4));
        let narrow: Vec<_> = rsdt[36..].chunks(4).map(|entry| number(entry, 0, 4)).collect();
        assert_eq!(roots, narrow);
        let mut names: Vec<_> = roots.iter().map(|root| &loaded.table(*root)[..4]).collect();
        let mut expected: Vec<&[u8]> = vec![b"FACP", b"APIC", b"MCFG", b"SSDT", b"WAET"];
        if sample.name.contains("hpet") {
            expected.push(b"HPET");
        }
        if sample.has_tpm() {
            expected.push(b"TPM2");
        }
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected);
    }
}

#[test]
fn the_fadt_points_to_dsdt_and_facs() {
    for sample in samples() {
        let loaded = load(&sample.files());
        let roots = loaded.roots();
        let fadt = roots.iter().map(|root| loaded.table(*root)).find(|t| t.starts_with(b"FACP"));
        let fadt = fadt.unwrap();
        assert_eq!(fadt.len(), 244);
        let dsdt = number(fadt, 40, 4);
        assert_eq!(number(fadt, 140, 8), dsdt);
        assert!(loaded.table(dsdt).starts_with(b"DSDT"));
        let facs = number(fadt, 36, 4);
        assert_eq!(facs % 64, 0);
        assert!(loaded.table(facs).starts_with(b"FACS"));
        assert_eq!(number(fadt, 132, 8), 0);
        // The second pass of firmware installs the tables that pointers lead to: all must be there.
        for table in [dsdt, facs].iter().chain(&roots) {
            assert!(loaded.pointees.contains(table), "{table:#x}");
        }
    }
}

#[test]
fn the_tpm2_table_points_to_the_control_area_and_an_empty_log() {
    let sample = samples().into_iter().find(Sample::has_tpm).unwrap();
    let loaded = load(&sample.files());
    let mut tables = loaded.roots().into_iter().map(|root| loaded.table(root));
    let table = tables.find(|table| table.starts_with(b"TPM2")).unwrap();
    assert_eq!((table.len(), table[8]), (76, 4));
    assert_eq!(number(table, 36, 4), 0, "a client's");
    assert_eq!(number(table, 40, 8), 0xFED4_0040);
    assert_eq!(number(table, 48, 4), 7);
    assert_eq!(number(table, 64, 4), 0x1_0000);
    let log = loaded.at(number(table, 68, 8));
    assert_eq!(log.len(), 0x1_0000);
    assert!(log.iter().all(|byte| *byte == 0), "firmware treats nonzero bytes as a table");
}

#[test]
fn the_table_and_the_address_file_point_to_the_generation_id() {
    for sample in samples() {
        let id = sample.platform.generation_id;
        let loaded = load(&sample.files());
        let address = loaded.written_back["etc/vmgenid_addr"];
        assert_eq!(loaded.at(address)[..16], id);
        assert!(address.is_multiple_of(8), "Windows requires it");
        let tables: Vec<_> = loaded.roots().iter().map(|root| loaded.table(*root)).collect();
        let table = tables.into_iter().find(|table| table.starts_with(b"SSDT")).unwrap();
        assert_eq!(table[36..42], *b"\x08VGIA\x0c");
        assert_eq!(number(table, 42, 4) + 40, address);
        let (image, _) = sample.tables().image().unwrap();
        let at = |address| image.iter().find(|(at, _)| *at == address).map(|(_, bytes)| bytes);
        assert_eq!(at(boot::acpi::DIRECT_GENERATION_ID).unwrap()[..], id);
    }
}

#[test]
fn direct_boot_tables_match_firmware_tables_except_addresses() {
    for sample in samples() {
        let tables = sample.tables();
        let (image, rsdp) = tables.image().unwrap();
        // The image, treated as if firmware had loaded it.
        let mut direct = Loaded::default();
        for (address, bytes) in image {
            let name = match address {
                boot::acpi::DIRECT_GENERATION_ID => "the VM Generation ID",
                _ if address == rsdp => "etc/acpi/rsdp",
                _ => "etc/acpi/tables",
            };
            direct.blobs.insert(name.into(), Blob { address, bytes });
        }
        let loaded = load(&sample.files());
        let names = |loaded: &Loaded| -> Vec<Vec<u8>> {
            loaded.roots().iter().map(|root| loaded.table(*root)[..4].to_vec()).collect()
        };
        assert_eq!(names(&direct), names(&loaded));
        for (direct, loaded) in direct
            .roots()
            .iter()
            .map(|r| direct.table(*r))
            .zip(loaded.roots().iter().map(|root| loaded.table(*root)))
        {
            match &direct[..4] {
                b"FACP" => {}
                // The checksum and the address of the VM Generation ID.
                b"SSDT" => {
                    assert_eq!(direct[10..42], loaded[10..42]);
                    assert_eq!(direct[46..], loaded[46..]);
                }
                // The log has length 0 and address 0: without firmware nothing writes one.
                b"TPM2" => {
                    assert_eq!(direct[10..64], loaded[10..64]);
                    assert_eq!(direct[64..], [0; 12]);
                }
                _ => assert_eq!(direct, loaded),
            }
        }
        assert_eq!((sum(&direct.rsdp()[..20]), sum(direct.rsdp())), (0, 0));
        let fadt = direct.table(direct.roots()[0]);
        assert!(direct.table(number(fadt, 140, 8)).starts_with(b"DSDT"));
        assert!(direct.table(number(fadt, 36, 4)).starts_with(b"FACS"));
    }
}

#[test]
fn the_loader_script_has_the_same_length_for_any_pci_layout() {
    let [mut sample, ..] = samples();
    let before = sample.tables().files();
    sample.platform.pcie = 0xE000_0000..0xF000_0000;
    sample.platform.windows = vec![0x1000_0000..0xE000_0000; 1];
    sample.platform.window64 = None;
    let after = sample.tables().files();
    assert_eq!(before[2].name, "etc/table-loader");
    assert_eq!(before[2].bytes.len(), after[2].bytes.len());
}

/// SMBIOS, read as firmware reads it.
#[test]
fn firmware_takes_the_smbios_anchor_and_every_structure() {
    for sample in samples() {
        let [anchor, tables] = sample.smbios.files().unwrap();
        let (anchor, tables) = (anchor.bytes, tables.bytes);
        assert!(anchor.len() == 24 && anchor.starts_with(b"_SM3_") && anchor[6] == 24);
        assert_eq!(sum(&anchor), 0);
        assert_eq!(number(&anchor, 12, 4), tables.len() as u64);
        let mut kinds = vec![];
        let mut handles = vec![];
        let mut rest = tables.as_slice();
        while !rest.is_empty() {
            let length = rest[1] as usize;
            let end = rest[length..].windows(2).position(|pair| pair == [0, 0]).unwrap();
            kinds.push(rest[0]);
            handles.push(number(rest, 2, 2));
            if rest[0] == 4 {
                assert_eq!(length, 0x30);
                let processors = &sample.smbios.processors;
                assert_eq!(number(rest, 0x2A, 2), u64::from(processors.cores));
                assert_eq!(number(rest, 0x2E, 2), u64::from(processors.cores * processors.threads));
            }
            rest = &rest[length + end + 2..];
        }
        let ranges = sample.ram.ranges().len();
        let mut expected = vec![1, 3, 4, 16, 17];
        expected.extend(vec![19; ranges]);
        expected.extend([32, 127]);
        assert_eq!(kinds, expected);
        handles.dedup();
        assert_eq!(handles.len(), kinds.len());
    }
}
