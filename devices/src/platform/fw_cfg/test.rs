//! Tests of `fw_cfg`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use super::*;
use crate::testutil::Bench;

const RAM: usize = 64 << 10;

/// Provides tables of a variable size, and counts how often they were built.
#[derive(Clone, Default)]
struct Fake {
    tables: Arc<AtomicUsize>,
    made: Arc<AtomicUsize>,
    written: Arc<Mutex<Vec<u8>>>,
    selected: Arc<AtomicU8>,
}

impl Fake {
    /// More than the file's size. The first byte counts the calls.
    fn computed(&self) -> Vec<u8> {
        vec![self.selected.fetch_add(1, Ordering::Relaxed).wrapping_add(1); 3]
    }
}

impl Source for Fake {
    fn keys(&mut self) -> Vec<(u16, Vec<u8>)> {
        vec![(5, vec![2, 0]), (0x11, vec![7; 40_000])]
    }
    fn files(&mut self) -> Vec<File> {
        let count = self.clone();
        let cell = self.written.clone();
        let written: OnWrite = Arc::new(move |bytes| *cell.lock().unwrap() = bytes.to_vec());
        let file = |name: &str, content| File { name: name.to_owned(), content };
        vec![
            file("opt/z", Content::Fixed(b"last".to_vec())),
            file("etc/table-loader", Content::Acpi(256)),
            file("etc/acpi/tables", Content::Acpi(4096)),
            file("etc/vmgenid_addr", Content::Writable(vec![1; 8], written)),
            file("opt/zz", Content::Computed(2, Arc::new(move || count.computed()))),
        ]
    }
    fn acpi(&mut self) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let tables = vec![0xaa; self.tables.load(Ordering::Relaxed)];
        let script = vec![u8::try_from(number).unwrap() + 1; 128];
        Ok(vec![("etc/acpi/tables".into(), tables), ("etc/table-loader".into(), script)])
    }
}

fn bench(fake: &Fake) -> Bench {
    let mut bench = Bench::new(RAM);
    let source = Box::new(fake.clone());
    bench.board.add("fw-cfg", |grants| build(source, grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn select(bench: &Bench, key: u16) {
    bench.write(Kind::Port, 0x510, &key.to_le_bytes());
}

fn bytes(bench: &Bench, count: usize) -> Vec<u8> {
    (0..count).map(|_| bench.read::<1>(Kind::Port, 0x511)[0]).collect()
}

/// Starts a transfer as OVMF does, with the descriptor at 0x100 and its address written in two
/// halves. Returns the control field afterwards.
fn dma(bench: &Bench, control: u32, length: u32, target: u64) -> u32 {
    let mut descriptor = control.to_be_bytes().to_vec();
    descriptor.extend(length.to_be_bytes());
    descriptor.extend(target.to_be_bytes());
    bench.memory.write(0x100, &descriptor).unwrap();
    bench.write(Kind::Port, 0x514, &[0; 4]);
    bench.write(Kind::Port, 0x518, &0x100_u32.to_be_bytes());
    let mut control = [0; 4];
    bench.memory.read(0x100, &mut control).unwrap();
    u32::from_be_bytes(control)
}

fn ram<const N: usize>(bench: &Bench, address: u64) -> [u8; N] {
    let mut data = [0; N];
    bench.memory.read(address, &mut data).unwrap();
    data
}

/// The name, key and size of each file, as firmware reads them.
fn files(bench: &Bench) -> Vec<(String, u16, u32)> {
    select(bench, FILE_DIR);
    let count: [u8; 4] = bytes(bench, 4).try_into().unwrap();
    let entry = |_| {
        let entry = bytes(bench, 64);
        let name = entry[8..].split(|byte| *byte == 0).next().unwrap();
        let key = u16::from_be_bytes([entry[4], entry[5]]);
        let size = u32::from_be_bytes(entry[..4].try_into().unwrap());
        (String::from_utf8(name.to_vec()).unwrap(), key, size)
    };
    (0..u32::from_be_bytes(count)).map(entry).collect()
}

#[test]
fn powers_on_with_the_signature_and_reads_zeros_past_the_end() {
    let bench = bench(&Fake::default());
    assert_eq!(bytes(&bench, 6), b"QEMU\0\0");
    select(&bench, ID);
    assert_eq!(bytes(&bench, 5), [3, 0, 0, 0, 0]);
    select(&bench, 5);
    assert_eq!(bytes(&bench, 2), [2, 0]);
    select(&bench, 0x7777);
    assert_eq!(bytes(&bench, 3), [0; 3], "no such key");
    assert_eq!(bench.read(Kind::Port, 0x514), *b"QEMU CFG");
    assert_eq!(bench.read(Kind::Port, 0x518), *b" CFG");
}

#[test]
fn other_widths_and_offsets_have_no_effect() {
    let bench = bench(&Fake::default());
    bench.write(Kind::Port, 0x510, &[5]);
    bench.write(Kind::Port, 0x510, &[5, 0, 0, 0]);
    bench.write(Kind::Port, 0x511, b"x");
    bench.write(Kind::Port, 0x512, &[5, 0]);
    bench.write(Kind::Port, 0x516, &[0; 4]);
    assert_eq!(bench.read(Kind::Port, 0x510), [0xff, 0xff]);
    assert_eq!(bench.read(Kind::Port, 0x511), [0xff, 0xff]);
    assert_eq!(bench.read(Kind::Port, 0x513), [0xff]);
    assert_eq!(bytes(&bench, 4), b"QEMU", "nothing was selected, nothing was read");
}

#[test]
fn the_directory_is_sorted_and_sized_before_tables_are_built() {
    let fake = Fake::default();
    let bench = bench(&fake);
    let expected = [
        ("etc/acpi/tables", 0x20, 4096),
        ("etc/table-loader", 0x21, 256),
        ("etc/vmgenid_addr", 0x22, 8),
        ("opt/z", 0x23, 4),
        ("opt/zz", 0x24, 2),
    ];
    let expected = expected.map(|(name, key, size)| (name.to_owned(), key, size));
    assert_eq!(files(&bench), expected);
    assert_eq!(fake.made.load(Ordering::Relaxed), 0);
    select(&bench, 0x23);
    assert_eq!(bytes(&bench, 5), b"last\0");
}

#[test]
fn a_computed_file_is_computed_at_each_select() {
    let bench = bench(&Fake::default());
    for count in 1..3 {
        select(&bench, 0x24);
        assert_eq!(bytes(&bench, 3), [count, count, 0]);
    }
    select(&bench, 0x24);
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert_eq!(bytes(&bench, 1), [3], "a transfer goes on");
}

#[test]
fn tables_are_built_at_the_first_select_after_a_reset() {
    let fake = Fake::default();
    fake.tables.store(3, Ordering::Relaxed);
    let bench = bench(&fake);
    select(&bench, 0x21);
    assert_eq!(bytes(&bench, 130)[126..], [1, 1, 0, 0]);
    select(&bench, 0x20);
    assert_eq!(bytes(&bench, 4), [0xaa, 0xaa, 0xaa, 0]);
    let saved = bench.board.park();
    bench.board.run(saved.clone()).unwrap();
    select(&bench, 0x21);
    assert_eq!((bytes(&bench, 1), fake.made.load(Ordering::Relaxed)), (vec![1], 1));
    bench.board.reset().unwrap();
    select(&bench, 0x21);
    assert_eq!((bytes(&bench, 1), fake.made.load(Ordering::Relaxed)), (vec![2], 2));
    bench.board.park();
    bench.board.run(saved).unwrap();
    select(&bench, 0x21);
    assert_eq!(bytes(&bench, 1), [1], "the tables of the snapshot");
}

#[test]
fn tables_that_do_not_fit_leave_all_files_empty() {
    let fake = Fake::default();
    fake.tables.store(4097, Ordering::Relaxed);
    let bench = bench(&fake);
    for key in [0x20, 0x21] {
        select(&bench, key);
        assert_eq!(bytes(&bench, 128), [0; 128]);
    }
    assert_eq!(fake.made.load(Ordering::Relaxed), 1, "asked once, not per select");
}

#[test]
fn dma_reads_skips_selects_and_clears_its_control_word() {
    let bench = bench(&Fake::default());
    bench.memory.write(0x1000, &[0xee; 16]).unwrap();
    assert_eq!(dma(&bench, 0x0023 << 16 | CTL_SELECT | CTL_SKIP, 1, 0), 0);
    assert_eq!(dma(&bench, CTL_READ, 6, 0x1000), 0);
    assert_eq!(ram(&bench, 0x1000), *b"ast\0\0\0\xee");
    select(&bench, 0x11);
    assert_eq!(dma(&bench, CTL_READ, 40_001, 0x2000), 0, "more than one chunk");
    assert_eq!(ram(&bench, 0x2000 + 39_999), [7, 0]);
    for control in [0, 1, CTL_WRITE, CTL_SKIP, u32::MAX, 0xffff_ffe0] {
        assert_eq!(dma(&bench, control, u32::MAX, u64::MAX), 0);
    }
    // A descriptor that is not in RAM, in one write: nothing happens.
    bench.write(Kind::Port, 0x514, &u64::MAX.to_be_bytes());
    bench.write(Kind::Port, 0x514, &(RAM as u64 - 8).to_be_bytes());
}

#[test]
fn a_4_gib_read_stops_at_the_end_of_ram() {
    let bench = bench(&Fake::default());
    bench.memory.write(0x8000, &vec![0xee; RAM - 0x8000]).unwrap();
    select(&bench, SIGNATURE);
    assert_eq!(dma(&bench, CTL_READ, u32::MAX, 0x8000), 0);
    assert_eq!(ram(&bench, 0x8000), *b"QEMU\0");
    assert_eq!(ram(&bench, RAM as u64 - 4), [0; 4]);
    assert_eq!(dma(&bench, CTL_READ, u32::MAX, RAM as u64), 0);
}

#[test]
fn only_writable_files_are_written_and_their_owner_is_notified() {
    let fake = Fake::default();
    let bench = bench(&fake);
    assert_eq!(*fake.written.lock().unwrap(), [1; 8], "reported at power-on");
    bench.memory.write(0x1000, &[9; 16]).unwrap();
    dma(&bench, 0x0022 << 16 | CTL_SELECT | CTL_SKIP, 4, 0);
    dma(&bench, CTL_WRITE, 2, 0x1000);
    assert_eq!(*fake.written.lock().unwrap(), [1, 1, 1, 1, 9, 9, 1, 1]);
    dma(&bench, CTL_WRITE, 3, 0x1000);
    dma(&bench, 0x0022 << 16 | CTL_SELECT | CTL_WRITE, 8, RAM as u64 - 4);
    dma(&bench, 0x0023 << 16 | CTL_SELECT | CTL_WRITE, 4, 0x1000);
    assert_eq!(bytes(&bench, 1), [0], "the offset moved on");
    select(&bench, 0x22);
    assert_eq!(bytes(&bench, 8), [1, 1, 1, 1, 9, 9, 1, 1], "too long, or not RAM");
    select(&bench, 0x23);
    assert_eq!(bytes(&bench, 4), b"last");
    let saved = bench.board.park();
    bench.board.reset().unwrap();
    assert_eq!(*fake.written.lock().unwrap(), [1; 8]);
    bench.board.run(saved).unwrap();
    assert_eq!(fake.written.lock().unwrap()[4], 9);
}

#[test]
fn park_keeps_the_selector_the_offset_and_half_a_dma_address() {
    let bench = bench(&Fake::default());
    select(&bench, 0x23);
    bytes(&bench, 2);
    bench.write(Kind::Port, 0x514, &[0, 0, 0, 1]);
    let saved = bench.board.park();
    bench.board.run(saved.clone()).unwrap();
    assert_eq!(bench.board.park(), saved);
    bench.board.run(saved).unwrap();
    // The high half still applies: this descriptor is at 4 GiB, where there is no memory.
    bench.memory.write(0x100, &CTL_SKIP.to_be_bytes()).unwrap();
    bench.write(Kind::Port, 0x518, &0x100_u32.to_be_bytes());
    assert_eq!(ram(&bench, 0x100), CTL_SKIP.to_be_bytes());
    assert_eq!(bytes(&bench, 2), b"st");
    bench.board.reset().unwrap();
    assert_eq!(bytes(&bench, 4), b"QEMU");
}

#[test]
fn refuses_items_that_do_not_fit_the_interface() {
    struct Bad(u16, Vec<&'static str>);
    impl Source for Bad {
        fn keys(&mut self) -> Vec<(u16, Vec<u8>)> {
            vec![(self.0, Vec::new())]
        }
        fn files(&mut self) -> Vec<File> {
            let file = |name: &&str| File {
                name: (*name).to_owned(),
                content: Content::Fixed(Vec::new()),
            };
            self.1.iter().map(file).collect()
        }
        fn acpi(&mut self) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
            bail!("none")
        }
    }
    let long = "a name that is longer than the fifty-five bytes it may have";
    for (key, files, why) in [
        (0, vec![], "0x0 is taken"),
        (0x19, vec![], "0x19 is taken"),
        (0x20, vec![], "0x20 is reserved for files"),
        (2, vec!["a", "b", "a"], "two fw_cfg files a"),
        (2, vec![""], "invalid name of a fw_cfg file \"\""),
        (2, vec!["a\0b"], "invalid name of a fw_cfg file"),
        (2, vec![long], "55 printable ASCII"),
    ] {
        let source = Box::new(Bad(key, files));
        let error = Bench::new(4096).board.add("fw-cfg", |grants| build(source, grants));
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn survives_a_million_random_accesses() {
    let fake = Fake::default();
    fake.tables.store(100, Ordering::Relaxed);
    let bench = bench(&fake);
    // xorshift64 with a fixed seed: the same million values in every run.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..1_000_000 {
        let (what, number) = (random(), random());
        let [a, b, ..] = number.to_le_bytes();
        let port = BASE + u64::from(a) % (LENGTH + 2);
        match what % 8 {
            0 => select(&bench, u16::from(b) % 0x28),
            1 => drop(bench.read::<1>(Kind::Port, port)),
            2 => drop(bench.read::<4>(Kind::Port, port)),
            3 => bench.write(Kind::Port, port, &number.to_le_bytes()[..usize::from(b % 9).max(1)]),
            4 => bench.write(Kind::Port, 0x514, &(number % (RAM as u64 + 64)).to_be_bytes()),
            _ => {
                // Mostly plausible values. Every 64th length and address is random.
                let wild = what >> 8 & 63 == 0;
                let control = u32::from(a) | (u32::from(b) % 0x28) << 16;
                let length = u32::try_from(number >> 32).unwrap();
                let length = if wild { length } else { length % 300 };
                let target = if wild { random() } else { random() % (RAM as u64 + 100) };
                dma(&bench, control, length, target);
            }
        }
    }
    assert_eq!(fake.made.load(Ordering::Relaxed), 1);
    assert_eq!(fake.written.lock().unwrap().len(), 8);
    select(&bench, SIGNATURE);
    assert_eq!(bytes(&bench, 4), b"QEMU");
}
