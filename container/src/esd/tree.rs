//! The files of an image in a WIM: its metadata is a tree of directory entries (`DIRENTRY`), each
//! with the SHA-1 of its content.
//!
//! Threats: directories may be anywhere in the metadata, and share entries. Their depth and the
//! number of entries are limited, so that circles end, and all entries together are no longer than
//! the metadata, which limits their names and streams.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail, ensure};

use super::archive::Sha1;
use crate::media::{field, u16_at, u32_at, u64_at};

const MAX_ENTRIES: usize = 400_000;
const MAX_DEPTH: usize = 64;
/// Bytes of an entry before its name, and offsets in it.
const ENTRY_BYTES: usize = 102;
const ATTRIBUTES: usize = 8;
const CHILDREN: usize = 16;
const SHA1: usize = 64;
const STREAMS: usize = 96;
const NAME: usize = 100;
/// Bytes of a further stream before its name, and offsets in it.
const STREAM_BYTES: usize = 38;
const STREAM_SHA1: usize = 16;
const STREAM_NAME: usize = 36;
const IS_DIRECTORY: u32 = 0x10;
const IS_REPARSE_POINT: u32 = 0x400;

/// A file or a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    pub content: Content,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    File(Sha1),
    Directory(Vec<Node>),
}

impl Default for Content {
    fn default() -> Self {
        Self::Directory(Vec::new())
    }
}

/// Reads the root directory.
pub fn read(metadata: &[u8]) -> anyhow::Result<Node> {
    Reader::new(metadata).root()
}

/// How often each stream occurs, also those that are no content of a file.
pub fn streams(metadata: &[u8]) -> anyhow::Result<BTreeMap<Sha1, u32>> {
    let mut reader = Reader::new(metadata);
    reader.root()?;
    Ok(reader.streams)
}

struct Reader<'a> {
    metadata: &'a [u8],
    entries: usize,
    /// Bytes that further entries may have.
    rest: usize,
    streams: BTreeMap<Sha1, u32>,
}

/// An entry, and the place behind it and its streams.
struct Entry {
    node: Node,
    children: u64,
    next: usize,
}

impl<'a> Reader<'a> {
    fn new(metadata: &'a [u8]) -> Self {
        Self { metadata, entries: 0, rest: metadata.len(), streams: BTreeMap::new() }
    }

    fn root(&mut self) -> anyhow::Result<Node> {
        // The security descriptors come first.
        let length = u32_at(self.metadata, 0)?.max(8);
        let at = usize::try_from(length)?.next_multiple_of(8);
        let mut root = self.entry(at)?.context("no root directory")?;
        if let Content::Directory(children) = &mut root.node.content {
            *children = self.directory(root.children, 0)?;
        }
        Ok(root.node)
    }

    fn directory(&mut self, offset: u64, depth: usize) -> anyhow::Result<Vec<Node>> {
        ensure!(depth < MAX_DEPTH, "directories that are too deep");
        let mut nodes = Vec::new();
        if offset == 0 {
            return Ok(nodes);
        }
        let mut at = usize::try_from(offset)?;
        while let Some(mut entry) = self.entry(at)? {
            at = entry.next;
            if let Content::Directory(children) = &mut entry.node.content {
                *children = self.directory(entry.children, depth + 1)?;
            }
            nodes.push(entry.node);
        }
        Ok(nodes)
    }

    /// The entry at an offset. `None` is the end of a directory.
    fn entry(&mut self, at: usize) -> anyhow::Result<Option<Entry>> {
        let bytes = self.metadata.get(at..).context("a directory beyond its metadata")?;
        let length = usize::try_from(u64_at(bytes, 0)?)?;
        if length <= 8 {
            return Ok(None);
        }
        self.entries += 1;
        ensure!(self.entries <= MAX_ENTRIES, "more than {MAX_ENTRIES} files");
        ensure!((ENTRY_BYTES..=bytes.len()).contains(&length), "an entry of {length} bytes");
        let attributes = u32_at(bytes, ATTRIBUTES)?;
        let name = name(&bytes[..length], ENTRY_BYTES, u16_at(bytes, NAME)?)?;
        let mut sha1 = Sha1(field(bytes, SHA1)?);
        self.note(sha1);
        let mut next = length.next_multiple_of(8);
        for _ in 0..u16_at(bytes, STREAMS)? {
            let stream = bytes.get(next..).context("a stream beyond its metadata")?;
            let length = usize::try_from(u64_at(stream, 0)?)?;
            ensure!((STREAM_BYTES..=stream.len()).contains(&length), "a stream of {length} bytes");
            let content = Sha1(field(stream, STREAM_SHA1)?);
            self.note(content);
            // The stream without a name is the file's content.
            if u16_at(stream, STREAM_NAME)? == 0 && sha1.is_none() {
                sha1 = content;
            }
            next += length.next_multiple_of(8);
        }
        let rest = self.rest.checked_sub(next.min(bytes.len()));
        self.rest = rest.context("directories that share their entries")?;
        let is_link = attributes & IS_REPARSE_POINT != 0;
        let content = match attributes & IS_DIRECTORY != 0 && !is_link {
            true => Content::default(),
            false => Content::File(if is_link { Sha1::default() } else { sha1 }),
        };
        let children = u64_at(bytes, CHILDREN)?;
        Ok(Some(Entry { node: Node { name, content }, children, next: at + next }))
    }

    fn note(&mut self, sha1: Sha1) {
        if !sha1.is_none() {
            *self.streams.entry(sha1).or_default() += 1;
        }
    }
}

fn name(bytes: &[u8], at: usize, length: u16) -> anyhow::Result<String> {
    let bytes = bytes.get(at..at + usize::from(length)).context("a name beyond its entry")?;
    let units = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    let name: Result<String, _> = char::decode_utf16(units).collect();
    match name {
        Ok(name) if !name.contains(['/', '\\', '\0']) => Ok(name),
        _ => bail!("a name that is none"),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// An entry of this length, with a name that may be longer than itself.
    fn entry(length: usize, name: u16, attributes: u32, children: u64) -> Vec<u8> {
        let mut bytes = vec![b'a'; length];
        bytes[..ENTRY_BYTES].fill(0);
        bytes[..8].copy_from_slice(&(length as u64).to_le_bytes());
        bytes[ATTRIBUTES..ATTRIBUTES + 4].copy_from_slice(&attributes.to_le_bytes());
        bytes[CHILDREN..CHILDREN + 8].copy_from_slice(&children.to_le_bytes());
        bytes[NAME..NAME + 2].copy_from_slice(&name.to_le_bytes());
        bytes
    }

    /// Metadata with these entries in the root directory.
    fn metadata(entries: &[u8]) -> Vec<u8> {
        let root = entry(104, 0, IS_DIRECTORY, 120);
        [&[8, 0, 0, 0, 0, 0, 0, 0][..], &root, &[0; 8], entries, &[0; 8]].concat()
    }

    #[test]
    fn a_name_is_within_its_entry() {
        let good = metadata(&entry(112, 8, 0, 0));
        let Content::Directory(nodes) = read(&good).unwrap().content else { panic!("a file") };
        assert_eq!(nodes.len(), 1);
        // Each name would be all entries behind it.
        let entries = entry(112, 60_000, 0, 0).repeat(1000);
        let error = read(&metadata(&entries)).unwrap_err().to_string();
        assert_eq!(error, "a name beyond its entry");
    }

    #[test]
    fn directories_that_share_entries_are_refused() {
        let shared = 120 + 3 * 112 + 8;
        let folders = entry(112, 8, IS_DIRECTORY, shared).repeat(3);
        let entries = [&folders[..], &[0; 8], &entry(112, 8, 0, 0).repeat(200)].concat();
        for error in [
            read(&metadata(&entries)).unwrap_err(),
            // A circle.
            read(&metadata(&entry(112, 8, IS_DIRECTORY, 120).repeat(200))).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(error.contains("share") || error.contains("too deep"), "{error}");
        }
    }
}
