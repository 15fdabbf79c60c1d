//! ISO 9660 (ECMA-119) with Joliet names: files of media without UDF.
//!
//! Threats: as for UDF. Directories have a maximum length, and a search descends once for each part
//! of its path.

use anyhow::Context as _;

use super::tree::{Node, Tree};
use super::{Content, Extent, Image, SECTOR, sector, u32_at};

/// The first volume descriptor, and the maximum number of them.
const FIRST: u64 = 16;
const MAX_DESCRIPTORS: u64 = 16;
/// Volume descriptor types (ECMA-119 8.1.1).
const PRIMARY: u8 = 1;
const SUPPLEMENTARY: u8 = 2;
const TERMINATOR: u8 = 255;
const IDENTIFIER: &[u8] = b"CD001";
/// Escape sequences of UCS-2, which Joliet uses (ECMA-119 8.5.6).
const JOLIET: [&[u8]; 3] = [b"%/@", b"%/C", b"%/E"];
/// Offset of the root directory's record in a volume descriptor (8.4.18).
const ROOT: usize = 156;
/// Flags of a directory record: a directory; more records of the same file follow (9.1.6).
const DIRECTORY: u8 = 2;
const MULTI_EXTENT: u8 = 0x80;
/// Bytes of a directory record before its name (9.1).
const RECORD: usize = 33;

/// The primary or the Joliet volume.
pub struct Volume {
    root: Content,
    /// Names are UCS-2.
    joliet: bool,
}

struct Record<'a> {
    extent: Extent,
    flags: u8,
    name: &'a [u8],
}

impl Volume {
    /// `None` if the image has no ISO 9660.
    pub fn open(image: &(impl Image + ?Sized)) -> anyhow::Result<Option<Self>> {
        let mut found: Option<Self> = None;
        for number in FIRST..FIRST + MAX_DESCRIPTORS {
            let Some(bytes) = sector(image, number)? else { break };
            let joliet = JOLIET.iter().any(|escape| bytes[88..].starts_with(escape));
            if !bytes[1..].starts_with(IDENTIFIER) {
                continue;
            }
            match bytes[0] {
                PRIMARY if found.is_none() => {}
                SUPPLEMENTARY if joliet => {}
                TERMINATOR => break,
                _ => continue,
            }
            let joliet = joliet && bytes[0] == SUPPLEMENTARY;
            if let Some(record) = record(&bytes[ROOT..ROOT + RECORD + 1])? {
                let mut root = Content::default();
                root.push(record.extent)?;
                found = Some(Self { root, joliet });
            }
        }
        Ok(found)
    }

    /// The name without its version and without the dot of an empty extension.
    fn name(&self, bytes: &[u8]) -> String {
        let name: String = if self.joliet {
            let units = bytes.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
            char::decode_utf16(units).map(|it| it.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
        } else {
            bytes.iter().map(|byte| char::from(*byte)).collect()
        };
        let plain = name.split_once(';').map_or(&*name, |(plain, _)| plain);
        plain.strip_suffix('.').unwrap_or(plain).to_owned()
    }
}

impl Tree for Volume {
    type Entry = Node;

    fn root(&self) -> Node {
        Node { content: self.root.clone(), is_directory: true }
    }

    fn node(&self, _image: &(impl Image + ?Sized), entry: Node) -> anyhow::Result<Node> {
        Ok(entry)
    }

    /// A large file has several records, one after the other.
    fn each(
        &self,
        directory: &[u8],
        mut take: impl FnMut(String, Node) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let mut content = Content::default();
        // Records do not cross sectors. The rest of a sector is zeros.
        for sector in directory.chunks(usize::try_from(SECTOR)?) {
            let mut rest = sector;
            while let Some(record) = record(rest)? {
                content.push(record.extent)?;
                // The first two are the directory itself and the one above.
                let is_link = matches!(record.name, [0 | 1]);
                if record.flags & MULTI_EXTENT == 0 {
                    let content = std::mem::take(&mut content);
                    let is_directory = record.flags & DIRECTORY != 0;
                    let entry = Node { content, is_directory };
                    if !is_link && !take(self.name(record.name), entry)? {
                        return Ok(());
                    }
                }
                rest = &rest[usize::from(rest[0])..];
            }
        }
        Ok(())
    }
}

/// The directory record at the start of `bytes`; `None` if there is none.
fn record(bytes: &[u8]) -> anyhow::Result<Option<Record<'_>>> {
    let length = bytes.first().map_or(0, |it| usize::from(*it));
    if length <= RECORD || length > bytes.len() {
        return Ok(None);
    }
    let name = bytes.get(RECORD..RECORD + usize::from(bytes[32]));
    let name = name.filter(|name| RECORD + name.len() <= length).context("a long name")?;
    let extent = Extent {
        start: (u64::from(u32_at(bytes, 2)?) + u64::from(bytes[1])) * SECTOR,
        length: u32_at(bytes, 10)?.into(),
    };
    Ok(Some(Record { extent, flags: bytes[25], name }))
}
