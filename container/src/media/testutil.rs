//! CDs with the layout of Microsoft's, in memory: for tests and fuzz targets.

use std::collections::BTreeMap;

use super::SECTOR_BYTES;
use super::udf::crc;

/// The file systems of a CD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// UDF 1.02, and an empty ISO 9660 beside it: as Microsoft's.
    Bridge,
    /// The same with a metadata partition (UDF 2.50).
    Metadata,
    /// ISO 9660 only.
    Iso,
}

/// Paths of the boot images, which the boot catalog leads to.
pub const BIOS_IMAGE: &str = "boot/etfsboot.com";
pub const EFI_IMAGE: &str = "efi/microsoft/boot/efisys.bin";
pub const QUIET_IMAGE: &str = "efi/microsoft/boot/efisys_noprompt.bin";
pub const WIM: &str = "sources/install.wim";

/// Sectors of the boot catalog, of the volume descriptor sequence, and of UDF's anchor.
const CATALOG: usize = 22;
const SEQUENCE: usize = 32;
const ANCHOR: usize = 256;
/// First sector of the partition, of the descriptors in it, and of files.
const PARTITION: usize = 257;
const NODES: usize = 260;
const FILES: usize = 512;
const VOLUME: &str = "CCCOMA_X64FRE";

/// The sectors that have descriptors, for fuzz targets. Directories and file entries begin at the
/// last of them.
pub const DESCRIPTORS: [usize; 12] = [
    16,
    17,
    CATALOG,
    SEQUENCE,
    SEQUENCE + 1,
    SEQUENCE + 2,
    SEQUENCE + 3,
    ANCHOR,
    PARTITION,
    NODES,
    NODES + 1,
    NODES + 2,
];

/// XML of an image in a WIM.
pub fn image(index: u32, name: &str, edition: &str, kind: &str, architecture: u32) -> String {
    format!(
        "<IMAGE INDEX=\"{index}\"><DIRCOUNT>1</DIRCOUNT><WINDOWS><ARCH>{architecture}</ARCH>\
         <PRODUCTNAME>Microsoft® Windows® Operating System</PRODUCTNAME>\
         <EDITIONID>{edition}</EDITIONID><INSTALLATIONTYPE>{kind}</INSTALLATIONTYPE>\
         <LANGUAGES><LANGUAGE>ko-KR</LANGUAGE><DEFAULT>ko-KR</DEFAULT></LANGUAGES>\
         <VERSION><MAJOR>10</MAJOR><MINOR>0</MINOR><BUILD>26100</BUILD><SPBUILD>1742</SPBUILD>\
         </VERSION></WINDOWS><NAME>{name}</NAME><DISPLAYNAME>{name}</DISPLAYNAME></IMAGE>"
    )
}

/// Windows 11 for an architecture.
pub fn windows_11(architecture: u32) -> Vec<String> {
    let client = |index, name: &str, edition: &str| {
        image(index, &format!("Windows 11 {name}"), edition, "Client", architecture)
    };
    vec![client(1, "Home", "Core"), client(2, "Pro", "Professional")]
}

/// The header and the XML data of a WIM of `length` bytes, at whose end the XML data is.
pub fn wim_parts(length: u64, images: &[String]) -> (Vec<u8>, Vec<u8>) {
    let text = format!("\u{feff}<WIM>{}</WIM>", images.concat());
    let xml: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let mut header = vec![0; 208];
    let size = xml.len() as u64;
    put(&mut header, 0, b"MSWIM\0\0\0");
    put(&mut header, 8, &208_u32.to_le_bytes());
    put(&mut header, 12, &0x1_0d00_u32.to_le_bytes());
    put(&mut header, 40, &[1, 0, 1, 0]);
    put(&mut header, 44, &low(images.len()).to_le_bytes());
    put(&mut header, 72, &size.to_le_bytes());
    put(&mut header, 80, &length.saturating_sub(size).to_le_bytes());
    put(&mut header, 88, &size.to_le_bytes());
    (header, xml)
}

/// A small WIM.
pub fn wim(images: &[String]) -> Vec<u8> {
    let (_, xml) = wim_parts(0, images);
    let length = 208 + xml.len() as u64;
    let (header, xml) = wim_parts(length, images);
    [header, xml].concat()
}

/// An install CD with these images.
pub fn install_cd(layout: Layout, images: &[String]) -> Vec<u8> {
    let files = [
        (BIOS_IMAGE, vec![1; 4096]),
        (EFI_IMAGE, vec![2; 8192]),
        (QUIET_IMAGE, vec![3; 8192]),
        (WIM, wim(images)),
    ];
    cd(layout, &files)
}

/// A CD with these files.
pub fn cd(layout: Layout, files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut writer = Writer { layout, bytes: vec![0; FILES * SECTOR_BYTES], nodes: NODES };
    let mut root = Folder::default();
    for (path, content) in files {
        let sector = writer.append(content);
        root.add(path, File { sector, length: content.len() });
    }
    let top = match layout {
        Layout::Iso => writer.iso_folder(&root),
        Layout::Bridge | Layout::Metadata => {
            let root = writer.udf_folder(&root);
            writer.udf_volume(root);
            (NODES + 200, SECTOR_BYTES)
        }
    };
    writer.iso_volume(top);
    let sector = |path: &str| root.find(path).map_or(0, |file| file.sector);
    writer.boot_catalog(sector(BIOS_IMAGE), sector(EFI_IMAGE));
    writer.bytes
}

#[derive(Clone, Copy)]
struct File {
    sector: usize,
    length: usize,
}

#[derive(Default)]
struct Folder {
    folders: BTreeMap<String, Self>,
    files: BTreeMap<String, File>,
}

impl Folder {
    fn add(&mut self, path: &str, file: File) {
        match path.split_once('/') {
            Some((folder, rest)) => {
                self.folders.entry(folder.to_owned()).or_default().add(rest, file);
            }
            None => drop(self.files.insert(path.to_owned(), file)),
        }
    }

    fn find(&self, path: &str) -> Option<File> {
        match path.split_once('/') {
            Some((folder, rest)) => self.folders.get(folder)?.find(rest),
            None => self.files.get(path).copied(),
        }
    }
}

struct Writer {
    layout: Layout,
    bytes: Vec<u8>,
    /// The next free sector for descriptors.
    nodes: usize,
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn low(number: usize) -> u32 {
    u32::try_from(number).expect("a small CD")
}

/// Makes the tag of a UDF descriptor valid: its checksum and its CRC.
pub fn seal(sector: &mut [u8]) {
    let length = usize::from(u16::from_le_bytes([sector[10], sector[11]]));
    let end = (16 + length).min(sector.len());
    let sum = crc(&sector[16..end]).to_le_bytes();
    put(sector, 8, &sum);
    sector[4] = 0;
    sector[4] = sector[..16].iter().fold(0, |sum, byte| sum.wrapping_add(*byte));
}

impl Writer {
    fn at(&mut self, sector: usize) -> &mut [u8] {
        &mut self.bytes[sector * SECTOR_BYTES..][..SECTOR_BYTES]
    }

    /// Adds a file. Returns its sector.
    fn append(&mut self, content: &[u8]) -> usize {
        let sector = self.bytes.len() / SECTOR_BYTES;
        self.bytes.extend(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(SECTOR_BYTES), 0);
        sector
    }

    /// Puts descriptors that fill sectors. Returns the first sector.
    fn store(&mut self, content: &[u8]) -> usize {
        let sector = self.nodes;
        self.nodes += content.len().div_ceil(SECTOR_BYTES);
        put(&mut self.bytes, sector * SECTOR_BYTES, content);
        sector
    }

    /// Writes a descriptor with its tag.
    fn tagged(&mut self, sector: usize, tag: u16, fields: &[(usize, &[u8])]) {
        let bytes = self.at(sector);
        put(bytes, 0, &tag.to_le_bytes());
        put(bytes, 2, &[2, 0]);
        put(bytes, 10, &(2048_u16 - 16).to_le_bytes());
        for (at, value) in fields {
            put(bytes, *at, value);
        }
        seal(bytes);
    }

    /// A `long_ad` to a sector: of files in the physical partition, and of descriptors in the
    /// metadata partition if there is one.
    fn long_ad(&self, length: usize, sector: usize) -> [u8; 16] {
        let metadata = self.layout == Layout::Metadata && sector < FILES;
        let (first, partition) = if metadata { (NODES, 1_u8) } else { (PARTITION, 0) };
        let mut bytes = [0; 16];
        put(&mut bytes, 0, &low(length).to_le_bytes());
        put(&mut bytes, 4, &low(sector - first).to_le_bytes());
        bytes[8] = partition;
        bytes
    }

    /// A file entry. Returns its sector.
    fn node(&mut self, kind: u8, file: File) -> usize {
        let sector = self.store(&[0; SECTOR_BYTES]);
        self.file_entry(sector, kind, file);
        sector
    }

    fn file_entry(&mut self, sector: usize, kind: u8, file: File) {
        let extent = self.long_ad(file.length, file.sector);
        let length = (file.length as u64).to_le_bytes();
        let fields: [(usize, &[u8]); 6] =
            [(20, &[4]), (27, &[kind]), (34, &[1]), (56, &length), (172, &[16]), (176, &extent)];
        self.tagged(sector, 261, &fields);
    }

    /// A directory and everything in it. Returns the sector of its file entry.
    fn udf_folder(&mut self, folder: &Folder) -> usize {
        let entry = self.store(&[0; SECTOR_BYTES]);
        let mut content = self.identifier("", 0x0a, entry);
        for (name, folder) in &folder.folders {
            let entry = self.udf_folder(folder);
            content.extend(self.identifier(name, 2, entry));
        }
        for (name, file) in &folder.files {
            let entry = self.node(5, *file);
            content.extend(self.identifier(name, 0, entry));
        }
        let sector = self.store(&content);
        self.file_entry(entry, 4, File { sector, length: content.len() });
        entry
    }

    /// A file identifier descriptor.
    fn identifier(&self, name: &str, characteristics: u8, entry: usize) -> Vec<u8> {
        let name: Vec<u8> =
            if name.is_empty() { Vec::new() } else { [b"\x08", name.as_bytes()].concat() };
        let mut bytes = vec![0; (38 + name.len()).next_multiple_of(4)];
        put(&mut bytes, 0, &257_u16.to_le_bytes());
        let length = u16::try_from(bytes.len() - 16).expect("a short name");
        put(&mut bytes, 10, &length.to_le_bytes());
        bytes[18] = characteristics;
        bytes[19] = u8::try_from(name.len()).expect("a short name");
        put(&mut bytes, 20, &self.long_ad(SECTOR_BYTES, entry));
        put(&mut bytes, 38, &name);
        seal(&mut bytes);
        bytes
    }

    /// The volume, whose root directory has its file entry at this sector.
    fn udf_volume(&mut self, root: usize) {
        for (number, name) in [b"BEA01", b"NSR02", b"TEA01"].into_iter().enumerate() {
            put(self.at(19 + number), 1, name);
        }
        let metadata = self.layout == Layout::Metadata;
        let set = self.store(&[0; SECTOR_BYTES]);
        let root = self.long_ad(SECTOR_BYTES, root);
        self.tagged(set, 256, &[(400, &root)]);
        if metadata {
            // The metadata file, whose own address is in the physical partition.
            let length = (FILES - NODES) * SECTOR_BYTES;
            self.file_entry(PARTITION, 250, File { sector: FILES, length });
            let extent = [low(length).to_le_bytes(), low(NODES - PARTITION).to_le_bytes()].concat();
            put(self.at(PARTITION), 176, &extent);
            seal(self.at(PARTITION));
        }
        let mut name = [0; 32];
        put(&mut name, 0, b"\x08");
        put(&mut name, 1, VOLUME.as_bytes());
        name[31] = u8::try_from(VOLUME.len() + 1).expect("a short name");
        let start = low(PARTITION).to_le_bytes();
        let length = low(self.bytes.len() / SECTOR_BYTES - PARTITION).to_le_bytes();
        let set = self.long_ad(SECTOR_BYTES, set);
        let mut maps = vec![1, 6, 1, 0, 0, 0];
        if metadata {
            maps.extend([0; 64]);
            put(&mut maps, 6, &[2, 64]);
            put(&mut maps, 11, b"*UDF Metadata Partition");
        }
        let (count, bytes) = (1 + u8::from(metadata), low(maps.len()).to_le_bytes());
        for first in [SEQUENCE, SEQUENCE + 16] {
            self.tagged(first, 1, &[(24, &name)]);
            self.tagged(first + 1, 5, &[(188, &start), (192, &length)]);
            let fields: [(usize, &[u8]); 5] =
                [(212, &[0, 8]), (248, &set), (264, &bytes), (268, &[count]), (440, &maps)];
            self.tagged(first + 2, 6, &fields);
            self.tagged(first + 3, 8, &[]);
        }
        let [main, reserve] = [SEQUENCE, SEQUENCE + 16].map(|sector| low(sector).to_le_bytes());
        let fields: [(usize, &[u8]); 4] =
            [(16, &[0, 128]), (20, &main), (24, &[0, 128]), (28, &reserve)];
        self.tagged(ANCHOR, 2, &fields);
    }

    /// A directory of ISO 9660 and everything in it. Returns its sector and length.
    fn iso_folder(&mut self, folder: &Folder) -> (usize, usize) {
        let mut content = [record(b"\0", 2, (0, 0)), record(b"\x01", 2, (0, 0))].concat();
        for (name, folder) in &folder.folders {
            let place = self.iso_folder(folder);
            content.extend(record(name.to_uppercase().as_bytes(), 2, place));
        }
        for (name, file) in &folder.files {
            let name = format!("{};1", name.to_uppercase());
            content.extend(record(name.as_bytes(), 0, (file.sector, file.length)));
        }
        (self.store(&content), content.len())
    }

    /// The primary volume descriptor, with its root directory at this sector, and the last one.
    fn iso_volume(&mut self, root: (usize, usize)) {
        let sectors = low(self.bytes.len() / SECTOR_BYTES).to_le_bytes();
        let bytes = self.at(16);
        put(bytes, 0, b"\x01CD001\x01");
        put(bytes, 80, &sectors);
        put(bytes, 156, &record(b"\0", 2, root));
        put(bytes, 318, b"MICROSOFT CORPORATION");
        put(self.at(18), 0, b"\xffCD001\x01");
    }

    fn boot_catalog(&mut self, bios: usize, efi: usize) {
        let bytes = self.at(17);
        put(bytes, 0, b"\0CD001\x01EL TORITO SPECIFICATION");
        put(bytes, 71, &low(CATALOG).to_le_bytes());
        let bytes = self.at(CATALOG);
        // The sum of its words is 0.
        put(bytes, 0, &[1, 0]);
        put(bytes, 28, &0_u16.wrapping_sub(1).wrapping_sub(0xaa55).to_le_bytes());
        put(bytes, 30, &[0x55, 0xaa]);
        put(bytes, 32, &[0x88, 0, 0, 0, 0, 0, 8, 0]);
        put(bytes, 40, &low(bios).to_le_bytes());
        put(bytes, 64, &[0x91, 0xef, 1, 0]);
        put(bytes, 96, &[0x88, 0, 0, 0, 0, 0, 1, 0]);
        put(bytes, 104, &low(efi).to_le_bytes());
    }
}

/// A directory record of ISO 9660.
fn record(name: &[u8], flags: u8, (sector, length): (usize, usize)) -> Vec<u8> {
    let mut bytes = vec![0; (33 + name.len()).next_multiple_of(2)];
    bytes[0] = u8::try_from(bytes.len()).expect("a short name");
    put(&mut bytes, 2, &low(sector).to_le_bytes());
    put(&mut bytes, 10, &low(length).to_le_bytes());
    bytes[25] = flags;
    bytes[32] = u8::try_from(name.len()).expect("a short name");
    put(&mut bytes, 33, name);
    bytes
}
