//! A qcow2 image from an untrusted source, opened and then written by a guest.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use devices::testutil::Bench;
use devices::testutil::hostile::Actions;
use host::disk::{self, Changes, Channel, Config, Fault, Image, Operation, Request, wait};
use host::memory::{Memory, Piece};
use host::testutil::noise::Noise;

/// Sizes of the disk and of guest memory.
const DISK_BYTES: usize = 64 << 10;
const DISK: u64 = DISK_BYTES as u64;
const RAM: u64 = 256 << 10;
/// Bits of table entries.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Cluster numbers of the structures: refcount table and block, L1 and L2 table, data, and a
/// compressed cluster, which takes two.
const REFTABLE: usize = 1;
const REFCOUNTS: usize = 2;
const L1: usize = 3;
const L2: usize = 4;
const FILLED: usize = 5;
const PACKED: usize = 6;
const CLUSTERS: usize = 8;
/// Bytes that fill the data cluster, the compressed cluster, and the backing file.
const PLAIN: u8 = 0x11;
const INFLATED: u8 = 0x22;
const BELOW: u8 = 0x33;
const BELOW_BYTES: usize = 40 << 10;
/// Offset of the backing file's name in the header, and fields that writers change (size, L1
/// entries, unknown features).
const NAME: usize = 256;
const CHANGED: [std::ops::Range<usize>; 3] = [24..32, 36..40, 88..96];
/// Offset of the header byte whose lowest bit marks an image in use. It stays set if damage
/// prevents closing the image.
const DIRTY: usize = 79;
/// Limit for the image's size on the host.
const MAX_HOST_BYTES: u64 = 64 << 20;
/// Limit for the growth of this process's peak memory.
const MAX_MEMORY_GROWTH: u64 = 96 << 20;
/// Header fields: length and offset of L1, offset and length of the refcount table.
const L1_ENTRIES: usize = 36;
const L1_OFFSET: usize = 40;
const REFTABLE_OFFSET: usize = 48;
const REFTABLE_CLUSTERS: usize = 56;
/// The bits of an entry with the offset of its table.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// An image in memory.
struct TestImage {
    bytes: Vec<u8>,
    cluster: usize,
}

impl TestImage {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let end = (at + bytes.len()).min(self.bytes.len());
        if let Some(to) = self.bytes.get_mut(at..end) {
            to.copy_from_slice(&bytes[..to.len()]);
        }
    }

    /// A valid image.
    fn new(bits: u32, version: u32, backed: bool) -> Self {
        let cluster = 1_usize << bits;
        let mut image = Self { bytes: vec![0; cluster * CLUSTERS], cluster };
        let at = |number: usize| (number * cluster) as u64;
        image.put(0, b"QFI\xfb");
        let entries = DISK.div_ceil((cluster * cluster / 8) as u64);
        let small = [(4, version), (20, bits), (56, 1), (96, 4), (100, 104)];
        small.iter().for_each(|(at, field)| image.put(*at, &field.to_be_bytes()));
        image.put(36, &entries.to_be_bytes()[4..]);
        for (to, field) in [(24, DISK), (40, at(L1)), (48, at(REFTABLE))] {
            image.put(to, &field.to_be_bytes());
        }
        if backed {
            image.put(8, &(NAME as u64).to_be_bytes());
            image.put(16, &5_u32.to_be_bytes());
            image.put(NAME, b"below");
        }
        image.put(REFTABLE * cluster, &at(REFCOUNTS).to_be_bytes());
        (0..CLUSTERS).for_each(|it| image.put(REFCOUNTS * cluster + 2 * it, &[0, 1]));
        image.put(L1 * cluster, &(at(L2) | COPIED).to_be_bytes());
        let sectors = (cluster as u64 + 4) / 512;
        let packed = COMPRESSED | at(PACKED) | sectors << (62 - (bits - 8));
        let zero = if version == 3 { ZERO } else { 0 };
        for (slot, entry) in [at(FILLED) | COPIED, packed, zero].into_iter().enumerate() {
            image.put(L2 * cluster + 8 * slot, &entry.to_be_bytes());
        }
        image.put(FILLED * cluster, &vec![PLAIN; cluster]);
        // A final deflate block that is stored uncompressed: length, and its complement.
        let length = u16::try_from(cluster).expect("a small cluster");
        let mut deflated = vec![1];
        deflated.extend(length.to_le_bytes());
        deflated.extend((!length).to_le_bytes());
        deflated.extend(vec![INFLATED; cluster]);
        image.put(PACKED * cluster, &deflated);
        image
    }

    /// Overwrites one number.
    fn damage<B: Iterator<Item = u8>>(&mut self, actions: &mut Actions<B>) -> Option<()> {
        let (place, at) = (actions.byte()?, usize::from(actions.byte()?));
        let value = self.number(actions)?;
        let (wide, cluster) = (value.to_be_bytes(), self.cluster);
        match place {
            0..70 => self.put(at % 28 * 4, &wide[4..]),
            70..90 => self.put(at % 14 * 8, &wide),
            90..120 => self.put(L1 * cluster + at % 4 * 8, &wide),
            120..180 => self.put(L2 * cluster + at % 16 * 8, &wide),
            180..200 => self.put(REFCOUNTS * cluster + at % 32 * 2, &wide[6..]),
            200..220 => self.put(REFTABLE * cluster + at % 4 * 8, &wide),
            220..250 => self.put(at * 256 + usize::from(actions.byte()?), &wide[7..]),
            250..254 => self.bytes.resize(at * 512, 0),
            254 => self.crowd_l1(16 * at),
            255 => self.crowd_refcounts((12 << 20) / self.cluster),
        }
        Some(())
    }

    /// A second L1 at the end whose entries all point to the same table.
    fn crowd_l1(&mut self, count: usize) {
        let at = self.bytes.len().next_multiple_of(self.cluster);
        self.bytes.resize(at, 0);
        let entry = (L2 * self.cluster) as u64 | COPIED;
        self.bytes.extend(entry.to_be_bytes().repeat(count));
        self.put(L1_ENTRIES, &(count as u64).to_be_bytes()[4..]);
        self.put(L1_OFFSET, &(at as u64).to_be_bytes());
    }

    /// Many refcount blocks that count missing clusters, in an image that was not closed.
    fn crowd_refcounts(&mut self, count: usize) {
        // Once is enough, because it takes memory as well.
        if self.bytes.len() > 1 << 20 {
            return;
        }
        let first = self.bytes.len().next_multiple_of(self.cluster);
        self.bytes.resize(first, 0);
        self.bytes.extend([0, 1].repeat(count * self.cluster / 2));
        let table = self.bytes.len();
        let blocks = (0..count).map(|it| first + it * self.cluster);
        for block in std::iter::once(REFCOUNTS * self.cluster).chain(blocks) {
            self.bytes.extend((block as u64).to_be_bytes());
        }
        let clusters = (self.bytes.len() - table).div_ceil(self.cluster);
        self.bytes.resize(table + clusters * self.cluster, 0);
        self.put(REFCOUNTS * self.cluster, &[0, 1].repeat(self.cluster / 2));
        self.put(REFTABLE_OFFSET, &(table as u64).to_be_bytes());
        self.put(REFTABLE_CLUSTERS, &(clusters as u64).to_be_bytes()[4..]);
        self.put(DIRTY, &[1]);
    }

    /// A number as in images, mostly an offset of a cluster.
    fn number<B: Iterator<Item = u8>>(&self, actions: &mut Actions<B>) -> Option<u64> {
        let (kind, low) = (actions.byte()?, u64::from(actions.byte()?));
        let cluster = low % 16 * self.cluster as u64;
        Some(match kind {
            0..60 => cluster | COPIED,
            60..90 => cluster | low >> 4,
            90..120 => cluster | COMPRESSED | (low >> 4) << 58,
            120..160 => low,
            160..180 => 1 << (low % 64),
            180..200 => u64::MAX << (low % 64),
            200..220 => cluster << 32 | COPIED,
            _ => u64::from(actions.word()?) << 32 | u64::from(actions.word()?),
        })
    }

    /// The contents of the disk, for an undamaged image.
    fn content(&self, backed: bool, version: u32) -> Vec<Option<u8>> {
        let mut content = vec![Some(0); DISK_BYTES];
        if backed {
            content[..BELOW_BYTES].fill(Some(BELOW));
        }
        let zero = if version == 3 || !backed { 0 } else { BELOW };
        for (slot, byte) in [PLAIN, INFLATED, zero].into_iter().enumerate() {
            content[slot * self.cluster..(slot + 1) * self.cluster].fill(Some(byte));
        }
        content
    }
}

/// A guest that uses the disk.
struct Guest {
    image: std::sync::Arc<dyn Image>,
    channel: Box<dyn Channel>,
    memory: Memory,
    /// The expected contents, for bytes that are known. None for a damaged image.
    known: Option<Vec<Option<u8>>>,
    tag: u64,
}

impl Guest {
    fn open(config: &Config, known: Option<Vec<Option<u8>>>) -> anyhow::Result<Self> {
        let image = disk::open(config, None)?;
        let memory = Bench::new(usize::try_from(RAM)?).memory;
        let channel = image.channel(&memory)?;
        Ok(Self { image, channel, memory, known, tag: 0 })
    }

    /// Sends one request and waits for it.
    fn ask(&mut self, operation: Operation, offset: u64, length: u32) -> Result<(), Fault> {
        self.tag += 1;
        let pieces = match operation {
            Operation::Read | Operation::Write { .. } => vec![Piece { address: 0, length }],
            _ => Vec::new(),
        };
        let (tag, length) = (self.tag, length.into());
        self.channel.push(Request { tag, operation, offset, length, pieces });
        self.channel.submit();
        let (mut done, start) = (Vec::new(), Instant::now());
        loop {
            self.channel.reap(&mut done);
            if let Some(done) = done.pop() {
                assert_eq!(done.tag, tag);
                return done.result;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "{operation:?} does not end");
            wait(&*self.channel);
        }
    }

    fn read(&mut self, offset: u64, length: u32) -> Option<Vec<u8>> {
        self.ask(Operation::Read, offset, length).ok()?;
        let mut data = vec![0; length as usize];
        self.memory.read(0, &mut data).expect("it is RAM");
        Some(data)
    }

    /// Reads, and compares with the expected contents.
    fn check(&mut self, offset: u64, length: u32) {
        let data = self.read(offset, length);
        let Some(known) = &self.known else { return };
        let data = data.expect("a sound image is read");
        let start = usize::try_from(offset).expect("a small disk");
        let same = data.iter().zip(&known[start..]).all(|(is, was)| was.is_none_or(|it| it == *is));
        assert!(same, "{length} bytes at {offset:#x} are not what was written");
    }

    /// Updates the expected contents.
    fn expect_byte(&mut self, offset: u64, length: u32, byte: Option<u8>) {
        if let Some(known) = &mut self.known {
            let start = usize::try_from(offset).expect("a small disk");
            known[start..start + length as usize].fill(byte);
        }
    }

    fn step<B: Iterator<Item = u8>>(&mut self, actions: &mut Actions<B>) -> Option<()> {
        let (what, at, length) = (actions.byte()?, actions.byte()?, actions.byte()?);
        let size = self.image.geometry().size;
        let block = self.image.geometry().logical_block;
        let length = u32::from(length % 16 + 1) * 512;
        let (offset, length) = (u64::from(at) * 512, length.next_multiple_of(block));
        let offset = offset.next_multiple_of(block.into());
        let sound = self.known.is_some();
        if sound && offset + u64::from(length) > size {
            return Some(());
        }
        let done = match what {
            0..80 => {
                self.check(offset, length);
                return Some(());
            }
            80..170 => {
                let byte = actions.byte()?;
                self.memory.write(0, &vec![byte; length as usize]).expect("it is RAM");
                let done = self.ask(Operation::Write { durable: what % 8 == 0 }, offset, length);
                self.expect_byte(offset, length, Some(byte));
                done
            }
            170..190 => self.ask(Operation::Flush, 0, 0),
            190..210 => {
                self.expect_byte(offset, length, None);
                self.ask(Operation::Discard, offset, length)
            }
            210..245 => {
                let unmap = what % 2 == 0;
                let done = self.ask(Operation::WriteZeroes { unmap }, offset, length);
                self.expect_byte(offset, length, Some(0));
                done
            }
            _ => {
                self.image.grow(Some(size + u64::from(block) * u64::from(at))).ok();
                let size = usize::try_from(self.image.geometry().size).unwrap_or(usize::MAX);
                self.known.iter_mut().for_each(|it| it.resize(size, Some(0)));
                return Some(());
            }
        };
        assert!(!sound || done.is_ok(), "{what}: {done:?} of a sound image");
        Some(())
    }
}

/// Builds an image from the bytes, uses it as they say, and opens it again.
pub(crate) fn run(folder: &Path, mut bytes: impl Iterator<Item = u8>) {
    let (Some(flags), Some(shape), Some(damage_count)) = (bytes.next(), bytes.next(), bytes.next())
    else {
        return;
    };
    let backed = shape & 4 != 0;
    let version = if shape & 8 == 0 { 3 } else { 2 };
    let mut image = TestImage::new([9, 9, 10, 12][usize::from(shape % 4)], version, backed);
    let path = files(folder);
    let writes = flags & 0x38 != 0;
    let mut config = Config::new(&path);
    config.readonly = !writes;
    config.overlay = if flags & 0xc0 == 0xc0 { Changes::Writes } else { Changes::None };
    config.discard = flags & 1 == 0;
    // Rarely, the bytes themselves are the image.
    if shape > 250 {
        image.bytes = bytes.collect();
        use_image(
            &path,
            &image.bytes,
            &config,
            None,
            &mut Actions::new(Noise::new(7).take(200), RAM),
        );
        return;
    }
    let mut actions = Actions::new(bytes, RAM);
    let damage_count = damage_count % 12;
    for _ in 0..damage_count {
        if image.damage(&mut actions).is_none() {
            return;
        }
    }
    let known = (damage_count == 0 && writes).then(|| image.content(backed, version));
    use_image(&path, &image.bytes, &config, known, &mut actions);
}

/// Whether two entries of L1 point to the same table.
fn has_duplicate_tables(image: &[u8]) -> bool {
    let number = |at: usize, length: usize| {
        let bytes = image.get(at..at + length).unwrap_or_default();
        bytes.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    };
    let table = image.get(number(L1_OFFSET, 8)..).unwrap_or_default();
    let entries = table.as_chunks().0.iter().take(number(L1_ENTRIES, 4));
    let mut places: Vec<_> = entries.map(|it| u64::from_be_bytes(*it) & OFFSET).collect();
    places.retain(|at| *at != 0);
    places.sort_unstable();
    places.windows(2).any(|pair| pair[0] == pair[1])
}

/// Peak resident memory of this process, in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("a process");
    let line = status.lines().find_map(|it| it.strip_prefix("VmHWM:")).expect("its memory");
    let kib = line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
    kib << 10
}

/// Creates the backing file and returns the path of the image.
fn files(folder: &Path) -> PathBuf {
    let below = folder.join("below");
    if !below.exists() {
        fs::write(&below, [BELOW; BELOW_BYTES]).expect("a folder to write in");
    }
    folder.join("image.qcow2")
}

fn use_image<B: Iterator<Item = u8>>(
    path: &Path,
    bytes: &[u8],
    config: &Config,
    known: Option<Vec<Option<u8>>>,
    actions: &mut Actions<B>,
) {
    static BEFORE: OnceLock<u64> = OnceLock::new();
    let before = BEFORE.get_or_init(peak);
    fs::write(path, bytes).expect("a folder to write in");
    let sound = known.is_some();
    let mut guest = match Guest::open(config, known) {
        Ok(guest) => guest,
        Err(error) => {
            assert!(!sound, "a sound image: {error:#}");
            assert!(peak() - before < MAX_MEMORY_GROWTH, "{} bytes for an image", peak() - before);
            return;
        }
    };
    let written = !config.readonly && config.overlay == Changes::None;
    assert!(!written || !has_duplicate_tables(bytes), "two entries point to the same table");
    while guest.step(actions).is_some() {}
    let known = if config.overlay == Changes::None { guest.known.take() } else { None };
    drop(guest);
    assert!(peak() - before < MAX_MEMORY_GROWTH, "{} bytes for an image", peak() - before);
    let found = fs::metadata(path).expect("it is there");
    assert!(found.blocks() * 512 < MAX_HOST_BYTES, "{} bytes", found.blocks() * 512);
    let mut after = [0; 512];
    fs::File::open(path).and_then(|file| file.read_at(&mut after, 0)).expect("it is there");
    for at in (0..bytes.len().min(512)).filter(|at| !CHANGED.iter().any(|it| it.contains(at))) {
        let ours = u8::from(at == DIRTY && !sound);
        assert_eq!(bytes[at] | ours, after[at] | ours, "the guest reached byte {at} of the header");
    }
    let mut config = config.clone();
    (config.readonly, config.overlay) = (true, Changes::None);
    let Ok(mut guest) = Guest::open(&config, known) else {
        assert!(!sound, "a sound image is not opened again");
        return;
    };
    let size = guest.image.geometry().size.min(2 * DISK);
    for at in (0..size).step_by(512) {
        guest.check(at, 512);
    }
}
