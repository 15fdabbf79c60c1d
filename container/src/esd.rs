//! Makes an installation CD of an upgrade image (ESD), as Microsoft's Media Creation Tool does.
//!
//! Such an archive begins with three images: the files of the CD, Windows PE and Windows Setup. The
//! CD has the files of the first one, a `boot.wim` with the other two, in a compression that the
//! boot manager reads, and the archive itself without the three as `install.esd`.
//!
//! This is own code: no crate was found that decodes LZMS or encodes XPRESS, and those that write a
//! UDF ask for each file before they begin, while `boot.wim` is compressed into its place.
//!
//! Threats: an archive may be anything. Each blob is compared with its checksum, nothing is written
//! but the CD, and its length is known, and compared with the free space, before.

pub mod archive;
mod code;
mod disc;
mod images;
pub mod lzms;
pub mod tree;
mod writer;
mod xpress;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, ensure};

use self::archive::{Archive, Blob, Sha1};
use self::disc::{Boot, Directory, sectors};
use self::images::Images;
use self::tree::{Content, Node};
use self::writer::Writer;
use crate::media::SECTOR;
use crate::media::wim::header;

/// Images before the first edition.
const PARTS: usize = 3;
/// Places of boot images.
const BIOS: &str = "boot/etfsboot.com";
const EFI: [&str; 2] = ["efi/microsoft/boot/efisys_noprompt.bin", "efi/microsoft/boot/efisys.bin"];
const SOURCES: &str = "sources";
const BOOT_WIM: &str = "boot.wim";
const INSTALL: &str = "install.esd";
/// Bytes that are copied at once.
const BLOCK: usize = 4 << 20;
/// Maximum sectors of descriptors. Microsoft's media have about 1,500.
const MAX_DESCRIPTORS: u64 = 32 << 10;
/// Bytes that tables of `boot.wim` need at most.
const MARGIN: u64 = 64 << 20;

/// The CD that an archive becomes.
pub struct Plan {
    archive: Archive,
    root: Directory,
    /// Where the content of files of the CD is, in sectors behind the descriptors.
    places: BTreeMap<Sha1, u64>,
    /// Blobs of Windows PE and Setup, and how often they occur.
    boot: BTreeMap<Sha1, u32>,
    metadata: [Vec<u8>; 2],
    rest: images::Rest,
    install_at: u64,
    boot_at: u64,
}

impl Plan {
    pub fn new(mut archive: Archive) -> anyhow::Result<Self> {
        ensure!(archive.images() > PARTS, "it has no edition of Windows behind its Setup");
        let rest = images::without_first(&archive, PARTS)?;
        let media = tree::read(&archive.metadata(0)?).context("the files of the CD")?;
        let metadata = [archive.metadata(1)?, archive.metadata(2)?];
        let mut boot: BTreeMap<Sha1, u32> = BTreeMap::new();
        for metadata in &metadata {
            for (sha1, count) in tree::streams(metadata).context("Windows PE")? {
                *boot.entry(sha1).or_default() += count;
            }
        }
        let mut plan = Self {
            archive,
            root: Directory::default(),
            places: BTreeMap::new(),
            boot,
            metadata,
            rest,
            install_at: 0,
            boot_at: 0,
        };
        plan.lay_out(&media)?;
        Ok(plan)
    }

    /// Gives each file its place. `boot.wim`, whose length is not yet known, is the last one.
    fn lay_out(&mut self, media: &Node) -> anyhow::Result<()> {
        let mut next = 0;
        self.root = self.directory(media, &mut next)?;
        let length = self.archive.length() + self.rest.end.len() as u64;
        self.install_at = next;
        self.boot_at = next + sectors(length);
        let install = disc::File { name: INSTALL.to_owned(), place: next, length };
        let boot = disc::File { name: BOOT_WIM.to_owned(), place: self.boot_at, length: 0 };
        let files = &mut self.sources()?.files;
        files.retain(|it| ![BOOT_WIM, INSTALL].contains(&&*it.name.to_ascii_lowercase()));
        files.extend([install, boot]);
        let sectors = disc::first_sector(&self.root)?;
        ensure!(sectors <= MAX_DESCRIPTORS, "the files of the CD are too many");
        Ok(())
    }

    fn directory(&mut self, node: &Node, next: &mut u64) -> anyhow::Result<Directory> {
        let mut directory = Directory { name: node.name.clone(), ..Directory::default() };
        let Content::Directory(nodes) = &node.content else { return Ok(directory) };
        for node in nodes {
            let name = node.name.clone();
            match &node.content {
                Content::Directory(_) => directory.directories.push(self.directory(node, next)?),
                Content::File(sha1) if sha1.is_none() => {
                    directory.files.push(disc::File { name, place: 0, length: 0 });
                }
                Content::File(sha1) => {
                    let length = self.find(sha1)?.length;
                    let place = *self.places.entry(*sha1).or_insert(*next);
                    // The same content is on the CD once.
                    *next = (*next).max(place + sectors(length));
                    directory.files.push(disc::File { name, place, length });
                }
            }
        }
        Ok(directory)
    }

    fn sources(&mut self) -> anyhow::Result<&mut Directory> {
        let fits = |it: &&mut Directory| it.name.eq_ignore_ascii_case(SOURCES);
        let found = self.root.directories.iter_mut().find(fits);
        found.context("the files of the CD have no folder of Setup")
    }

    fn find(&self, sha1: &Sha1) -> anyhow::Result<Blob> {
        self.archive.blob(sha1).copied().with_context(|| format!("no content with SHA-1 {sha1}"))
    }

    /// All blobs that are unpacked, in the order in which they are read fast. They do not overlap,
    /// so that nothing is unpacked twice.
    fn blobs(&self) -> anyhow::Result<Vec<Blob>> {
        let all: BTreeSet<_> = self.places.keys().chain(self.boot.keys()).collect();
        let blobs: anyhow::Result<Vec<Blob>> = all.into_iter().map(|it| self.find(it)).collect();
        let mut blobs = blobs?;
        blobs.sort_by_key(Blob::order);
        let fit = blobs.windows(2).all(|pair| pair[0].end() <= pair[1].order());
        ensure!(fit, "two contents are at the same place");
        Ok(blobs)
    }

    /// The maximum length of the CD. `boot.wim` is not longer than its content and tables.
    pub fn max_length(&self) -> anyhow::Result<u64> {
        let mut length = (disc::first_sector(&self.root)? + self.boot_at) * SECTOR;
        for sha1 in self.boot.keys() {
            length = length.saturating_add(self.find(sha1)?.length);
        }
        let metadata = self.metadata.iter().map(|it| it.len() as u64).sum::<u64>();
        Ok(length.saturating_add(metadata + MARGIN))
    }

    /// Writes the CD into an empty file. Reports bytes that are done, and their number.
    pub fn write(mut self, file: &File, report: &dyn Fn(u64, u64)) -> anyhow::Result<()> {
        let first = disc::first_sector(&self.root)?;
        let at = |place: u64| (first + place) * SECTOR;
        let blobs = self.blobs()?;
        let whole = blobs.iter().map(|it| it.length).sum::<u64>() + self.archive.length();
        let mut done = header::BYTES as u64;
        self.copy(file, at(self.install_at), &mut |count| {
            done += count;
            report(done, whole);
        })?;
        let mut boot = Writer::new(file, at(self.boot_at));
        for blob in blobs {
            let mut place = self.places.get(&blob.sha1).map(|place| at(*place));
            let count = self.boot.get(&blob.sha1);
            if count.is_some() {
                boot.begin(blob.length);
            }
            self.archive.read(&blob, &mut |part| {
                if let Some(place) = &mut place {
                    file.write_all_at(part, *place)?;
                    *place += part.len() as u64;
                }
                if count.is_some() {
                    boot.write(part)?;
                }
                done += part.len() as u64;
                report(done, whole);
                Ok(())
            })?;
            if let Some(count) = count {
                boot.end(blob.sha1, *count, 0)?;
            }
        }
        for metadata in &self.metadata {
            boot.add_metadata(metadata)?;
        }
        let length = boot.finish(&Images::of(&self.archive.xml, 1..PARTS)?)?;
        self.describe(file, length)
    }

    /// Copies the archive without its first images.
    fn copy(&self, file: &File, at: u64, report: &mut dyn FnMut(u64)) -> anyhow::Result<()> {
        file.write_all_at(&self.rest.header, at)?;
        let (mut offset, end) = (header::BYTES as u64, self.archive.length());
        let mut block = vec![0; BLOCK];
        while offset < end {
            let count = usize::try_from(end - offset).unwrap_or(BLOCK).min(BLOCK);
            self.archive.file().read_exact_at(&mut block[..count], offset)?;
            file.write_all_at(&block[..count], at + offset)?;
            offset += count as u64;
            report(count as u64);
        }
        Ok(file.write_all_at(&self.rest.end, at + end)?)
    }

    /// Writes the descriptors, which make the file a CD.
    fn describe(&mut self, file: &File, boot_length: u64) -> anyhow::Result<()> {
        let files = &mut self.sources()?.files;
        files.iter_mut().filter(|it| it.name == BOOT_WIM).for_each(|it| it.length = boot_length);
        let place = |path: &str| self.root.find(path).map(|file| file.place);
        let efi = EFI.into_iter().find_map(place);
        let efi = efi.context("the files of the CD have no boot image")?;
        let boot = Boot { bios: place(BIOS), efi };
        let end = disc::first_sector(&self.root)? + self.boot_at + sectors(boot_length);
        let (start, last) = disc::descriptors(&self.root, &boot, end)?;
        file.write_all_at(&last, end * SECTOR)?;
        Ok(file.write_all_at(&start, 0)?)
    }
}
