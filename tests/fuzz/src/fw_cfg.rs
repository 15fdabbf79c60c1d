//! fw_cfg under a guest that selects, reads and transfers arbitrary items.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use devices::device::Kind;
use devices::platform::fw_cfg::{Content, File, OnWrite, Source, build};
use devices::testutil::Bench;
use devices::testutil::hostile::Actions;

const RAM: u64 = 1 << 16;
const SELECTOR: u64 = 0x510;
const DATA: u64 = 0x511;
const DMA_HIGH: u64 = 0x514;
const DMA_LOW: u64 = 0x518;
/// The size of the file that the guest writes, in bytes.
const WRITABLE: usize = 4096;

/// A kernel, and a file of each kind.
struct Items(Arc<AtomicU32>);

impl Source for Items {
    fn keys(&mut self) -> Vec<(u16, Vec<u8>)> {
        vec![(5, vec![1, 0]), (0x11, vec![0x5a; 40_000])]
    }

    fn files(&mut self) -> Vec<File> {
        let file = |name: &str, content| File { name: name.into(), content };
        let told: OnWrite =
            Arc::new(|bytes| assert_eq!(bytes.len(), WRITABLE, "the size of a file never changes"));
        vec![
            file("etc/e820", Content::Fixed(vec![7; 60])),
            file("etc/acpi/rsdp", Content::Acpi(36)),
            file("etc/acpi/tables", Content::Acpi(0x2000)),
            file("etc/table-loader", Content::Acpi(0x1000)),
            file("etc/written", Content::Writable(vec![0; WRITABLE], told)),
        ]
    }

    fn acpi(&mut self) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let file = |name: &str, length| (name.to_owned(), vec![1; length]);
        Ok(vec![
            file("etc/acpi/rsdp", 36),
            file("etc/acpi/tables", 0x1800),
            file("etc/table-loader", 0x800),
        ])
    }
}

/// Runs the device from power-on to its end. After a reset it must return its signature.
pub(crate) fn run(bytes: &[u8]) {
    let made = Arc::<AtomicU32>::default();
    let mut bench = Bench::new(usize::try_from(RAM).expect("it is small"));
    let items = Box::new(Items(made.clone()));
    bench.board.add("fw-cfg", |place| build(items, place)).expect("the board is empty");
    bench.board.run(Vec::new()).expect("power-on");
    let mut actions = Actions::new(bytes.iter().copied(), RAM);
    let mut resets = 1;
    while deed(&bench, &mut actions, &mut resets).is_some() {}
    assert!(
        made.load(Ordering::Relaxed) <= resets,
        "ACPI tables are made at most once after each reset"
    );
    bench.board.reset().expect("power-on again");
    bench.write(Kind::Port, SELECTOR, &[0, 0]);
    let name = [(); 4].map(|()| bench.read::<1>(Kind::Port, DATA)[0]);
    assert_eq!(name, *b"QEMU");
}

fn deed(
    bench: &Bench,
    actions: &mut Actions<impl Iterator<Item = u8>>,
    resets: &mut u32,
) -> Option<()> {
    match actions.byte()? {
        0..60 => bench.write(Kind::Port, SELECTOR, &key(actions)?.to_le_bytes()),
        60..90 => {
            for _ in 0..actions.byte()? {
                bench.read::<1>(Kind::Port, DATA);
            }
        }
        90..110 => bench.write(Kind::Port, DATA, &[actions.byte()?]),
        110..120 => drop(bench.read::<8>(Kind::Port, SELECTOR + u64::from(actions.byte()? % 16))),
        120..220 => {
            // struct FWCfgDmaAccess, whose fields are big-endian.
            let control = u32::from(key(actions)?) << 16 | u32::from(actions.byte()? & 0x1f);
            let (length, data) = (actions.length()?, actions.address()?);
            let access =
                [&control.to_be_bytes()[..], &length.to_be_bytes(), &data.to_be_bytes()].concat();
            let at = actions.address()?;
            bench.memory.write(at, &access).ok();
            let high = u32::try_from(at >> 32).expect("it is half of it");
            let low = u32::try_from(at & 0xffff_ffff).expect("it is half of it");
            bench.write(Kind::Port, DMA_HIGH, &high.to_be_bytes());
            bench.write(Kind::Port, DMA_LOW, &low.to_be_bytes());
        }
        220..240 => {
            bench.write(
                Kind::Port,
                SELECTOR + u64::from(actions.byte()? % 16),
                &[actions.byte()?; 8],
            );
        }
        240..252 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        _ => {
            *resets += 1;
            bench.board.reset().expect("power-on again");
        }
    }
    Some(())
}

/// A random key, mostly one that exists.
fn key(actions: &mut Actions<impl Iterator<Item = u8>>) -> Option<u16> {
    let number = actions.byte()?;
    Some(match number {
        0..150 => 0x20 + u16::from(number % 6),
        150..220 => [0, 1, 5, 0x11, 0x19][usize::from(number % 5)],
        _ => actions.short()?,
    })
}
