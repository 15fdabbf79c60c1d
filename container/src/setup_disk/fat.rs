//! A FAT32 file system with given files (Microsoft's FAT specification 1.03), laid out in extents:
//! what is not in one reads as zeros. Files are contiguous, and nothing is ever changed.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::ensure;
use host::fnv;
use host::size::Size;

use super::content::Content;
use super::names::{self, ENTRY_BYTES, ShortName, ShortNames};
use super::tree::{Node, ROOT, Tree};
use crate::settings::value::{Value as _, in_mib, quote};

const SECTOR: u64 = 512;
const CLUSTER: u64 = 4096;
const CLUSTER_SECTORS: u8 = 8;
/// Sectors before the first FAT.
const RESERVED: u16 = 32;
const FATS: u8 = 2;
/// The FATs' lengths are multiples of this, so that clusters are aligned like pages.
const FAT_ALIGNMENT: u64 = CLUSTER / SECTOR;
/// The number of the first cluster, which is the root folder's.
const FIRST_CLUSTER: u32 = 2;
/// A file system of less than 65525 clusters is FAT16. The specification advises some distance.
const MIN_CLUSTERS: u64 = 65_600;
/// The disk is in memory until Windows is installed.
const MAX_BYTES: u64 = 2 << 30;
/// Entries of a folder (section 6.4).
const MAX_ENTRIES: usize = 65_536;
/// Sectors of the boot sector's copy, and of the free space's count after each of them.
const BACKUP_SECTOR: u16 = 6;
const INFO_SECTOR: u16 = 1;
const FIXED_MEDIUM: u8 = 0xf8;
const END_OF_CHAIN: u32 = 0x0fff_ffff;
const SIGNATURE: [u8; 2] = [0x55, 0xaa];

const LABEL_ATTRIBUTE: u8 = 0x08;
const FOLDER_ATTRIBUTE: u8 = 0x10;
const FILE_ATTRIBUTE: u8 = 0x20;
const SELF: &ShortName = b".          ";
const PARENT: &ShortName = b"..         ";

pub(super) const LABEL: &ShortName = b"SETUP      ";

/// A disk of this size, with contents at these offsets.
#[derive(Debug)]
pub struct Layout {
    pub(super) size: u64,
    pub(super) extents: Vec<(u64, Content)>,
}

impl Layout {
    /// Bytes of the contents, which the disk has in memory.
    pub fn bytes(&self) -> u64 {
        self.extents.iter().map(|(_, content)| content.length()).sum()
    }
}

/// The clusters of a file or folder; the first is 0 if there are none.
#[derive(Clone, Copy)]
struct Place {
    first: u32,
    count: u32,
}

pub(super) fn lay_out(tree: Tree) -> anyhow::Result<Layout> {
    let Tree(nodes) = tree;
    let (places, used) = place(&nodes)?;
    let clusters = u64::from(used).max(MIN_CLUSTERS);
    let fat_sectors = ((clusters + u64::from(FIRST_CLUSTER)) * 4)
        .div_ceil(SECTOR)
        .next_multiple_of(FAT_ALIGNMENT);
    let data = u64::from(RESERVED) + u64::from(FATS) * fat_sectors;
    let sectors = data + clusters * u64::from(CLUSTER_SECTORS);
    let offset = |place: Place| data * SECTOR + u64::from(place.first - FIRST_CLUSTER) * CLUSTER;
    let fat = fat(&places, used);
    let mut extents = Vec::new();
    for number in 0..u64::from(FATS) {
        let at = (u64::from(RESERVED) + number * fat_sectors) * SECTOR;
        extents.push((at, Content::Bytes(fat.clone())));
    }
    let mut identity = 0;
    for (number, node) in nodes.iter().enumerate().filter(|(_, node)| node.content.is_none()) {
        let bytes = folder(&nodes, &places, number);
        identity = fnv::hash(&bytes, identity ^ node.children.len() as u64);
        extents.push((offset(places[number]), Content::Bytes(bytes)));
    }
    for (place, node) in places.into_iter().zip(nodes) {
        if let Some(content) = node.content.filter(|_| place.count > 0) {
            extents.push((offset(place), content));
        }
    }
    let head = Head { sectors, fat_sectors, free: clusters - u64::from(used), used, identity };
    for start in [0, BACKUP_SECTOR] {
        let start = u64::from(start) * SECTOR;
        extents.push((start, Content::Bytes(head.boot_sector()?)));
        extents.push((start + u64::from(INFO_SECTOR) * SECTOR, Content::Bytes(head.info()?)));
    }
    Ok(Layout { size: sectors * SECTOR, extents })
}

/// The places of all nodes, one after the other, and the number of clusters in use.
fn place(nodes: &[Node]) -> anyhow::Result<(Vec<Place>, u32)> {
    let mut next = u64::from(FIRST_CLUSTER);
    let mut places = Vec::with_capacity(nodes.len());
    for (number, node) in nodes.iter().enumerate() {
        let length = match &node.content {
            Some(content) => content.length(),
            None => folder_length(nodes, number)?,
        };
        let path = || quote(&path(nodes, number));
        ensure!(
            length <= u64::from(u32::MAX),
            "{}: it has {}, and the file system of the set-up disk has no files of 4 GiB and \
             more: copy it through the network after the installation",
            path(),
            in_mib(length)
        );
        let count = length.div_ceil(CLUSTER);
        ensure!(
            (next + count) * CLUSTER <= MAX_BYTES,
            "{}: with it, the set-up disk would have more than {}, which it has in memory: copy \
             large files through the network after the installation",
            path(),
            Size(MAX_BYTES).show()
        );
        let first = if count == 0 { 0 } else { u32::try_from(next)? };
        places.push(Place { first, count: u32::try_from(count)? });
        next += count;
    }
    Ok((places, u32::try_from(next)? - FIRST_CLUSTER))
}

fn path(nodes: &[Node], mut number: usize) -> String {
    let mut names = Vec::new();
    while number != ROOT {
        names.push(nodes[number].name.as_str());
        number = nodes[number].parent;
    }
    names.reverse();
    names.join("/")
}

fn folder_length(nodes: &[Node], number: usize) -> anyhow::Result<u64> {
    let names = nodes[number].children.iter().map(|child| &nodes[*child].name);
    let count = own_entries(number) + names.map(|name| names::entry_count(name)).sum::<usize>();
    ensure!(
        count <= MAX_ENTRIES,
        "{}: the folder has more files than FAT can have: put some into another folder",
        quote(&path(nodes, number))
    );
    Ok((count * ENTRY_BYTES) as u64)
}

/// The label of the root, or `.` and `..`.
fn own_entries(number: usize) -> usize {
    if number == ROOT { 1 } else { 2 }
}

/// The used part of a FAT.
fn fat(places: &[Place], used: u32) -> Vec<u8> {
    let used = u64::from(used + FIRST_CLUSTER) * 4;
    let mut bytes = Vec::with_capacity(usize::try_from(used).unwrap_or_default());
    bytes.extend((END_OF_CHAIN & !0xff | u32::from(FIXED_MEDIUM)).to_le_bytes());
    bytes.extend(END_OF_CHAIN.to_le_bytes());
    for place in places {
        let last = place.first + place.count.saturating_sub(1);
        for next in (place.first..place.first + place.count).map(|cluster| cluster + 1) {
            let next = if next > last { END_OF_CHAIN } else { next };
            bytes.extend(next.to_le_bytes());
        }
    }
    bytes
}

/// The entries of a folder.
fn folder(nodes: &[Node], places: &[Place], number: usize) -> Vec<u8> {
    let node = &nodes[number];
    let mut bytes = Vec::new();
    if number == ROOT {
        let none = Place { first: 0, count: 0 };
        bytes.extend(entry(LABEL, LABEL_ATTRIBUTE, none, 0, UNIX_EPOCH));
    } else {
        // The root is cluster 0 here.
        let parent = match node.parent {
            ROOT => Place { first: 0, count: 0 },
            parent => places[parent],
        };
        bytes.extend(entry(SELF, FOLDER_ATTRIBUTE, places[number], 0, node.modified));
        bytes.extend(entry(PARENT, FOLDER_ATTRIBUTE, parent, 0, node.modified));
    }
    let mut short_names =
        ShortNames::of(node.children.iter().map(|child| nodes[*child].name.as_str()));
    for child in &node.children {
        let (place, child) = (places[*child], &nodes[*child]);
        let short_name = short_names.next(&child.name);
        bytes.extend(names::long_entries(&child.name, &short_name).into_iter().flatten());
        let (attribute, length) = match &child.content {
            Some(content) => (FILE_ATTRIBUTE, content.length()),
            None => (FOLDER_ATTRIBUTE, 0),
        };
        // `place` has checked the length.
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        bytes.extend(entry(&short_name, attribute, place, length, child.modified));
    }
    bytes
}

/// An entry of a folder (section 6).
fn entry(
    name: &ShortName,
    attribute: u8,
    place: Place,
    length: u32,
    modified: SystemTime,
) -> [u8; ENTRY_BYTES] {
    let mut entry = [0; ENTRY_BYTES];
    let mut put = |at: usize, bytes: &[u8]| entry[at..at + bytes.len()].copy_from_slice(bytes);
    let [date, time] = date_and_time(modified).map(u16::to_le_bytes);
    let [low, high] = [place.first & 0xffff, place.first >> 16].map(u32::to_le_bytes);
    put(0, name);
    put(11, &[attribute]);
    put(14, &time);
    put(16, &date);
    put(18, &date);
    put(20, &high[..2]);
    put(22, &time);
    put(24, &date);
    put(26, &low[..2]);
    put(28, &length.to_le_bytes());
    entry
}

/// The date and the time of an entry, which are those of UTC here. Years are 1980 to 2107.
fn date_and_time(time: SystemTime) -> [u16; 2] {
    const DAY: u64 = 86_400;
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, seconds) = (seconds / DAY, seconds % DAY);
    let (year, month, day) = civil(days);
    let (year, month, day) = match year {
        ..1980 => (1980, 1, 1),
        1980..=2107 => (year, month, day),
        _ => (2107, 12, 31),
    };
    let date = ((year - 1980) << 9) | (month << 5) | day;
    let time = ((seconds / 3600) << 11) | ((seconds / 60 % 60) << 5) | (seconds % 60 / 2);
    [date, time].map(|number| u16::try_from(number).unwrap_or_default())
}

/// Year, month and day of the Gregorian calendar, from days since 1970. Years begin with March
/// here, so that a leap day is the last of its year.
pub fn civil(days: u64) -> (u64, u64, u64) {
    let days = days.min(100_000) + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

/// The numbers in the boot sector and in the sector of the free space.
struct Head {
    sectors: u64,
    fat_sectors: u64,
    /// Clusters that are free, and in use.
    free: u64,
    used: u32,
    /// The lower half is the volume's serial number.
    identity: u64,
}

impl Head {
    /// Section 3.
    fn boot_sector(&self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(SECTOR)?];
        let mut put = |at: usize, value: &[u8]| {
            bytes[at..at + value.len()].copy_from_slice(value);
        };
        put(0, &[0xeb, 0x58, 0x90]);
        put(3, b"MSWIN4.1");
        put(11, &u16::try_from(SECTOR)?.to_le_bytes());
        put(13, &[CLUSTER_SECTORS]);
        put(14, &RESERVED.to_le_bytes());
        put(16, &[FATS]);
        put(21, &[FIXED_MEDIUM]);
        // Sectors of a track, and heads, which nothing uses.
        put(24, &63_u16.to_le_bytes());
        put(26, &255_u16.to_le_bytes());
        put(32, &u32::try_from(self.sectors)?.to_le_bytes());
        put(36, &u32::try_from(self.fat_sectors)?.to_le_bytes());
        put(44, &FIRST_CLUSTER.to_le_bytes());
        put(48, &INFO_SECTOR.to_le_bytes());
        put(50, &BACKUP_SECTOR.to_le_bytes());
        // The number of the drive, and the mark of the three fields after it.
        put(64, &[0x80, 0, 0x29]);
        put(67, &self.identity.to_le_bytes()[..4]);
        put(71, LABEL);
        put(82, b"FAT32   ");
        put(510, &SIGNATURE);
        Ok(bytes)
    }

    /// Section 5.
    fn info(&self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(SECTOR)?];
        let mut put = |at: usize, value: &[u8]| {
            bytes[at..at + value.len()].copy_from_slice(value);
        };
        put(0, b"RRaA");
        put(484, b"rrAa");
        put(488, &u32::try_from(self.free)?.to_le_bytes());
        put(492, &(self.used + FIRST_CLUSTER).to_le_bytes());
        put(510, &SIGNATURE);
        Ok(bytes)
    }
}

#[cfg(test)]
mod test {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let of = |seconds: u64| {
            let [date, time] = date_and_time(UNIX_EPOCH + Duration::from_secs(seconds));
            let date = [1980 + (date >> 9), date >> 5 & 15, date & 31];
            (date, [time >> 11, time >> 5 & 63, (time & 31) * 2])
        };
        for (seconds, date, time) in [
            (0, [1980, 1, 1], [0, 0, 0]),
            (315_532_800, [1980, 1, 1], [0, 0, 0]),
            (951_782_400 + 3599, [2000, 2, 29], [0, 59, 58]),
            (1_735_689_599, [2024, 12, 31], [23, 59, 58]),
            (4_107_542_400, [2100, 3, 1], [0, 0, 0]),
            (1 << 40, [2107, 12, 31], [0, 12, 16]),
        ] {
            let found = of(seconds);
            assert_eq!(found.0, date, "{seconds}");
            assert!(seconds == 1 << 40 || found.1 == time, "{seconds}: {found:?}");
        }
    }
}
