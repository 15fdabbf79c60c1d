//! Reads cabinets: archives of Microsoft's, here with a list of upgrade images (MS-CAB).
//!
//! Files are stored, or compressed with MSZIP (MS-MCI), blocks of deflate, each with the previous
//! block as its dictionary, or with LZX (MS-PATCH 2). Quantum is refused.
//!
//! Threats: all numbers come from the network. Counts and sizes are limited before memory is taken.

use anyhow::{Context as _, bail, ensure};
use lzxd::{Lzxd, WindowSize};
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

const MAGIC: &[u8] = b"MSCF\0\0\0\0";
const HEADER: usize = 36;
/// Flags of the header: cabinets before and after this one, and reserved fields.
const PARTS: u16 = 3;
const RESERVED: u16 = 4;
/// A block of MSZIP begins with this, and has at most 32 KiB.
const SIGNATURE: &[u8] = b"CK";
const BLOCK: usize = 32 << 10;
const MAX_NAME: usize = 260;
/// Longer files are refused.
const MAX_LENGTH: usize = 64 << 20;

/// The fields of a cabinet from some place on.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> anyhow::Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count).context("it ends early")?;
        self.0 = rest;
        Ok(taken)
    }

    fn u8(&mut self) -> anyhow::Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn u16(&mut self) -> anyhow::Result<u16> {
        let bytes = self.take(2)?;
        Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    fn u32(&mut self) -> anyhow::Result<usize> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
    }

    /// A text up to its zero byte.
    fn name(&mut self) -> anyhow::Result<&'a [u8]> {
        let end = self.0.iter().take(MAX_NAME).position(|byte| *byte == 0);
        let name = self.take(end.context("a name is too long")?)?;
        self.take(1)?;
        Ok(name)
    }
}

/// The content of the file with this name.
pub fn file(cabinet: &[u8], name: &str) -> anyhow::Result<Vec<u8>> {
    ensure!(cabinet.starts_with(MAGIC), "it is not a cabinet");
    let from = |at: usize| cabinet.get(at..).map(Reader).context("it ends early");
    let mut header = from(16)?;
    let files = header.u32()?;
    header.take(6)?;
    let (folders, count, flags) = (header.u16()?, header.u16()?, header.u16()?);
    ensure!(flags & PARTS == 0, "it is one of several");
    let mut folder = from(HEADER)?;
    let (mut folder_rest, mut block_rest) = (0, 0);
    if flags & RESERVED != 0 {
        let header_rest = folder.u16()?;
        (folder_rest, block_rest) = (usize::from(folder.u8()?), usize::from(folder.u8()?));
        folder.take(usize::from(header_rest))?;
    }
    let mut entry = from(files)?;
    for _ in 0..count {
        let (length, at, number) = (entry.u32()?, entry.u32()?, entry.u16()?);
        entry.take(6)?;
        if !entry.name()?.eq_ignore_ascii_case(name.as_bytes()) {
            continue;
        }
        ensure!(number < folders, "{name} is in no folder");
        let end = at.checked_add(length).filter(|end| *end <= MAX_LENGTH);
        let end = end.with_context(|| format!("{name} is too long"))?;
        folder.take(usize::from(number) * (8 + folder_rest))?;
        let (data, blocks, kind) = (folder.u32()?, folder.u16()?, folder.u16()?);
        let whole = unpack(from(data)?, blocks, Packing::of(kind)?, block_rest, end)?;
        return whole.get(at..end).map(<[u8]>::to_vec).context("it ends early");
    }
    bail!("it has no {name}")
}

/// How a folder is compressed.
enum Packing {
    Stored,
    Zip,
    Lzx(Box<Lzxd>),
}

impl Packing {
    fn of(kind: u16) -> anyhow::Result<Self> {
        Ok(match kind & 15 {
            0 => Self::Stored,
            1 => Self::Zip,
            3 => Self::Lzx(Box::new(Lzxd::new(window(kind >> 8)?))),
            other => bail!("its compression (type {other}) is unknown"),
        })
    }

    /// Appends a block.
    fn unpack(&mut self, packed: &[u8], length: usize, whole: &mut Vec<u8>) -> anyhow::Result<()> {
        match self {
            Self::Stored => {
                ensure!(packed.len() == length, "a block has another length");
                whole.extend_from_slice(packed);
            }
            Self::Zip => inflate(packed, length, whole)?,
            Self::Lzx(decoder) => {
                let block =
                    decoder.decompress_next(packed, length).context("a block is damaged")?;
                ensure!(block.len() == length, "a block is damaged");
                whole.extend_from_slice(block);
            }
        }
        Ok(())
    }
}

/// The window of LZX, whose length is a power of 2.
fn window(bits: u16) -> anyhow::Result<WindowSize> {
    Ok(match bits & 31 {
        15 => WindowSize::KB32,
        16 => WindowSize::KB64,
        17 => WindowSize::KB128,
        18 => WindowSize::KB256,
        19 => WindowSize::KB512,
        20 => WindowSize::MB1,
        21 => WindowSize::MB2,
        bits => bail!("its window has {bits} bits"),
    })
}

/// The first `end` bytes of a folder.
fn unpack(
    mut data: Reader,
    blocks: u16,
    mut packing: Packing,
    rest: usize,
    end: usize,
) -> anyhow::Result<Vec<u8>> {
    let mut whole = Vec::new();
    for _ in 0..blocks {
        if whole.len() >= end {
            break;
        }
        data.take(4)?;
        let (packed, length) = (data.u16()?, usize::from(data.u16()?));
        data.take(rest)?;
        let packed = data.take(usize::from(packed))?;
        ensure!(length <= BLOCK, "a block is too long");
        packing.unpack(packed, length, &mut whole)?;
    }
    Ok(whole)
}

/// Appends a block. Its references reach into the blocks before.
fn inflate(packed: &[u8], length: usize, whole: &mut Vec<u8>) -> anyhow::Result<()> {
    let packed = packed.strip_prefix(SIGNATURE).context("a block without its signature")?;
    let before = whole.len();
    let start = before.saturating_sub(BLOCK);
    whole.resize(before + length, 0);
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, written) = decompress(
        &mut DecompressorOxide::new(),
        packed,
        &mut whole[start..],
        before - start,
        flags,
    );
    let fits = status == TINFLStatus::Done && written == length;
    ensure!(fits, "a block is damaged");
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    /// A cabinet with one file in stored blocks.
    fn stored(name: &str, content: &[u8]) -> Vec<u8> {
        let blocks: Vec<_> =
            content.chunks(1000).map(|block| (block.to_vec(), block.len())).collect();
        cabinet(0, name, content.len(), &blocks)
    }

    fn cabinet(kind: u16, name: &str, length: usize, blocks: &[(Vec<u8>, usize)]) -> Vec<u8> {
        let u32 = |number: usize| u32::try_from(number).unwrap().to_le_bytes();
        let u16 = |number: usize| u16::try_from(number).unwrap().to_le_bytes();
        let files = HEADER + 8;
        let data = files + 16 + name.len() + 1;
        let mut bytes = [MAGIC, &[0; 8], &u32(files), &[0; 4], &[3, 1]].concat();
        bytes.extend([u16(1), u16(1), u16(0), u16(7), u16(0)].concat());
        bytes.extend([&u32(data)[..], &u16(blocks.len()), &kind.to_le_bytes()].concat());
        bytes.extend([&u32(length)[..], &[0; 4], &[0; 8], name.as_bytes(), &[0]].concat());
        for (packed, length) in blocks {
            bytes.extend([&[0; 4][..], &u16(packed.len()), &u16(*length), packed].concat());
        }
        bytes
    }

    #[test]
    fn a_stored_file_is_read() {
        let content: Vec<u8> = (0..5000_u32).map(|it| (it % 251) as u8).collect();
        assert_eq!(file(&stored("products.xml", &content), "Products.XML").unwrap(), content);
        let error = file(&stored("a", &content), "b").unwrap_err().to_string();
        assert!(error.contains("has no b"), "{error}");
    }

    #[test]
    fn a_packed_file_is_read_block_by_block() {
        let content: Vec<u8> = b"<File>text</File>".iter().cycle().take(100_000).copied().collect();
        let blocks: Vec<_> = content
            .chunks(BLOCK)
            .map(|block| {
                let packed = miniz_oxide::deflate::compress_to_vec(block, 6);
                ([SIGNATURE, &packed].concat(), block.len())
            })
            .collect();
        let bytes = cabinet(1, "products.xml", content.len(), &blocks);
        assert_eq!(file(&bytes, "products.xml").unwrap(), content);
        // Cut off anywhere, it is refused.
        for length in (0..bytes.len()).step_by(37) {
            assert!(file(&bytes[..length], "products.xml").is_err(), "{length}");
        }
    }

    #[test]
    fn other_compressions_and_damage_are_refused() {
        let of = |bytes: &[u8]| file(bytes, "a").unwrap_err().to_string();
        assert!(of(b"PK\x03\x04").contains("not a cabinet"));
        let block = [(b"CKxxxx".to_vec(), 4)];
        assert!(of(&cabinet(0x1502, "a", 4, &block)).contains("type 2"));
        assert!(of(&cabinet(0x1503, "a", 4, &block)).contains("damaged"));
        assert!(of(&cabinet(0x0e03, "a", 4, &block)).contains("14 bits"));
        assert!(of(&cabinet(1, "a", 4, &block)).contains("damaged"));
        assert!(of(&cabinet(1, "a", 4, &[(b"xx".to_vec(), 4)])).contains("signature"));
        assert!(of(&cabinet(0, "a", 4, &[(vec![0; 3], 4)])).contains("another length"));
        assert!(of(&cabinet(0, "a", usize::from(u16::MAX) << 12, &[])).contains("too long"));
        assert!(of(&cabinet(0, "a", 4, &[])).contains("ends early"));
    }
}
