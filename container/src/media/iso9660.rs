//! ISO 9660 (ECMA-119) with Joliet names: files of media without UDF.
//!
//! Threats: as for UDF. Directories have a maximum length, and a search descends once for each part
//! of its path.

use anyhow::Context as _;

use super::{Content, Extent, Image, MAX_DIRECTORY, SECTOR, same_name, sector, u32_at};

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

    /// The file at a path whose parts are separated by slashes. `None` if it does not exist, or is
    /// a directory.
    pub fn find(
        &self,
        image: &(impl Image + ?Sized),
        path: &str,
    ) -> anyhow::Result<Option<Content>> {
        let (mut content, mut is_directory) = (self.root.clone(), true);
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if !is_directory {
                return Ok(None);
            }
            let entries = content.all(image, MAX_DIRECTORY).context("a directory")?;
            let Some((next, directory)) = self.entry(&entries, part)? else { return Ok(None) };
            (content, is_directory) = (next, directory);
        }
        Ok((!is_directory).then_some(content))
    }

    /// Content of an entry, and whether it is a directory. A large file has several records.
    fn entry(&self, directory: &[u8], wanted: &str) -> anyhow::Result<Option<(Content, bool)>> {
        let mut content = Content::default();
        // Records do not cross sectors. The rest of a sector is zeros.
        for sector in directory.chunks(usize::try_from(SECTOR)?) {
            let mut rest = sector;
            while let Some(record) = record(rest)? {
                if same_name(&self.name(record.name), wanted) {
                    content.push(record.extent)?;
                    if record.flags & MULTI_EXTENT == 0 {
                        return Ok(Some((content, record.flags & DIRECTORY != 0)));
                    }
                }
                rest = &rest[usize::from(rest[0])..];
            }
        }
        Ok(None)
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
