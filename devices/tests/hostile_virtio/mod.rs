//! The virtio devices except virtio-net, each with a hostile driver.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::driver::{Driver, EVENT_IDX};
use devices::testutil::hostile::Actions;
use serde_json::{Value, json};

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
const ENTRIES: u16 = 32;
/// The device-specific feature bits. A driver may accept each of them or not.
const DEVICE_FEATURES: u64 = 0xff_ffff;
/// Guest addresses of a request and of its data.
const REQUEST: u64 = 0x8000;
const DATA: u64 = 0x9000;
/// Size of a disk, in bytes.
const DISK: u64 = 1 << 20;

/// A bit of the device status.
const NEEDS_RESET: u8 = 64;

type Bytes<'a> = dyn Iterator<Item = u8> + 'a;
type Chain = Vec<(u64, u32, bool)>;

/// A device to test: its configurations, and a function that builds well-formed requests with
/// random contents.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// The fields of each configuration, besides the slot.
    configs: &'static [fn(&Path) -> Value],
    build: fn(&mut Actions<&mut Bytes<'_>>, &Bench) -> Option<Chain>,
    /// A queue and a request for the final check. It works without any feature.
    final_request: (u16, &'static [(u64, u32, bool)]),
}

/// All devices.
pub(crate) const KINDS: &[Kind] = &[
    Kind {
        name: "virtio-rng",
        configs: &[|_| json!({})],
        build: |actions, _| Some(vec![(DATA, actions.length()?, true)]),
        final_request: (0, &[(DATA, 64, true)]),
    },
    Kind {
        name: "virtio-balloon",
        configs: &[|_| json!({ "size": "512K" }), |_| json!({ "reporting": false })],
        build: pages,
        final_request: (1, &[(DATA, 64, false)]),
    },
    Kind {
        name: "virtio-serial",
        configs: &[
            |_| json!({ "to": "none" }),
            |folder| json!({ "to": socket(folder) }),
            |folder| json!({ "name": "port", "to": socket(folder) }),
        ],
        build: message,
        final_request: (1, &[(DATA, 64, false)]),
    },
    Kind {
        name: "virtio-gpu",
        configs: &[|_| json!({ "memory": "4M", "mode": "640x480" })],
        build: drawing,
        // A command of zeros, which does not exist.
        final_request: (0, &[(DATA, 24, false), (DATA + 64, 24, true)]),
    },
    Kind {
        name: "virtio-blk",
        configs: &[
            |folder| json!({ "path": disk(folder), "queues": 2 }),
            |folder| json!({ "path": disk(folder), "sector": 4096 }),
            |folder| json!({ "path": disk(folder), "overlay": true, "iops": 2000 }),
            |folder| json!({ "path": disk(folder), "readonly": true }),
        ],
        build: request,
        // FLUSH, in a header of zeros.
        final_request: (0, &[(0xff000, 16, false), (0xff010, 1, true)]),
    },
    Kind {
        name: "virtio-scsi",
        configs: &[
            |folder| json!({ "path": disk(folder), "queues": 2 }),
            |folder| json!({ "path": disk(folder), "sector": 4096 }),
            |folder| json!({ "path": disk(folder), "overlay": true, "iops": 2000 }),
            |folder| json!({ "path": disk(folder), "readonly": true }),
        ],
        build: command,
        // A request to a target that does not exist.
        final_request: (2, &[(0xff000, 51, false), (0xff040, 108, true)]),
    },
];

/// Operation codes of SCSI commands. Some occur more than once to be used more often.
const OPCODES: [u8; 34] = [
    0x00, 0x03, 0x08, 0x0a, 0x12, 0x12, 0x1a, 0x1b, 0x25, 0x28, 0x28, 0x2a, 0x2a, 0x2f, 0x35, 0x41,
    0x41, 0x42, 0x42, 0x5a, 0x88, 0x88, 0x8a, 0x8a, 0x8f, 0x91, 0x93, 0x93, 0x9e, 0xa0, 0xa3, 0xa8,
    0xaa, 0xaf,
];

fn port(folder: &Path) -> PathBuf {
    folder.join("port")
}

fn socket(folder: &Path) -> String {
    format!("socket:{}", port(folder).display())
}

fn disk(folder: &Path) -> PathBuf {
    let path = folder.join("disk");
    let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    file.expect("a folder to write in").set_len(DISK).expect("a megabyte");
    path
}

/// Page frame numbers, or statistics.
fn pages(actions: &mut Actions<&mut Bytes<'_>>, bench: &Bench) -> Option<Chain> {
    for at in 0..u64::from(actions.byte()?) % 8 {
        let page = actions.short()? & if actions.byte()? < 200 { 0x1ff } else { 0xffff };
        bench.memory.write(REQUEST + 4 * at, &u32::from(page).to_le_bytes()).expect("memory");
    }
    let length = actions.length()?;
    // A report of free pages consists of device-writable memory.
    Some(vec![(REQUEST, length, length % 3 == 0)])
}

/// A control message of a port.
fn message(actions: &mut Actions<&mut Bytes<'_>>, bench: &Bench) -> Option<Chain> {
    let message = [actions.byte()? % 3, 0, 0, 0, actions.byte()? % 9, 0, actions.byte()? % 2, 0];
    bench.memory.write(REQUEST, &message).expect("memory");
    Some(vec![(REQUEST, 8, message[6] == 1 && message[4] == 8)])
}

/// A command for a display, mostly for one of four resources.
fn drawing(actions: &mut Actions<&mut Bytes<'_>>, bench: &Bench) -> Option<Chain> {
    let screen = bench.board.shared.screens.first()?;
    let small = |byte: u8| u32::from(byte % 4);
    let mut side = || actions.byte().map(|it| u32::from(it) << (it & 3));
    let rectangle = [side()?, side()?, side()?, side()?];
    let (id, command) = (small(actions.byte()?), u32::from(actions.byte()?));
    let format = [1, 2, 67, 121][usize::from(actions.byte()? % 4)];
    let list = [u32::from(actions.short()?) << 4, 0, actions.length()?, 0];
    let wild = actions.byte()?;
    let id = if wild > 250 { actions.word()? } else { id };
    let body: Vec<u32> = match command % 11 {
        1 => vec![id, format, rectangle[2], rectangle[3]],
        3 => [&rectangle[..], &[0, id]].concat(),
        4 => [&rectangle[..], &[id, 0]].concat(),
        5 => [&rectangle[..], &[4 * rectangle[0], 0, id, 0]].concat(),
        6 if wild < 200 => [&[id, 1][..], &list].concat(),
        6 => [&[id, actions.word()?][..], &list].concat(),
        9 => [&[0, rectangle[0], rectangle[1], 0, id][..], &[0; 3]].concat(),
        _ => vec![id, 0],
    };
    let kind = if command % 11 == 9 { 0x300 + (command & 1) } else { 0x100 + command % 11 };
    let words = [&[kind, small(wild), 1, 2, 3, 4][..], &body].concat();
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    bench.memory.write(REQUEST, &bytes).expect("memory");
    // A viewer looks and asks for another size meanwhile.
    if command > 230 {
        screen.set_preferred_size(rectangle[0], 8 * rectangle[1]);
    }
    let mode = screen.mode();
    screen.changed(&mut Vec::new());
    if let Some(mode) = mode {
        assert!(mode.start + u64::from(mode.stride) * u64::from(mode.height - 1) < 4 << 20);
        screen.read(mode.start, &mut vec![0; 4 * mode.width as usize]);
    }
    let length = u32::try_from(bytes.len()).expect("a few words");
    let room = if wild > 240 { actions.length()? } else { 1056 };
    Some(vec![(REQUEST, length, false), (DATA, room, true)])
}

/// Type, sector, data and status.
fn request(actions: &mut Actions<&mut Bytes<'_>>, bench: &Bench) -> Option<Chain> {
    let (kind, sector) = (actions.byte()?, u64::from(actions.byte()?) * 8);
    let sector = if actions.byte()? < 230 { sector } else { u64::MAX / 512 - sector };
    let mut header = u64::from(kind % 16).to_le_bytes().to_vec();
    header.extend(sector.to_le_bytes());
    bench.memory.write(REQUEST, &header).expect("memory");
    // A range to discard or to zero: sector, count and flags.
    let mut range = sector.to_le_bytes().to_vec();
    range.extend(actions.word()?.to_le_bytes());
    range.extend(u32::from(actions.byte()? % 4).to_le_bytes());
    bench.memory.write(DATA, &range).expect("memory");
    let length = actions.length()?;
    let length = if kind < 192 { length.min(0x8000).next_multiple_of(512) } else { length };
    let length = if kind % 16 > 8 { u32::from(actions.byte()? % 3) * 16 } else { length };
    let data = (DATA, length, matches!(kind % 16, 0 | 8));
    Some(vec![(REQUEST, 16, false), data, (REQUEST + 16, 1, true)])
}

/// Unit, tag, command, response and data, or a task management request.
fn command(actions: &mut Actions<&mut Bytes<'_>>, bench: &Bench) -> Option<Chain> {
    let (what, id) = (actions.byte()?, u64::from(actions.byte()? % 8));
    let unit = [1, what / 240, 0x40, actions.byte()? / 250, 0, 0, 0, 0];
    if what < 40 {
        let function = u32::from(actions.byte()? % 9);
        let bytes = [&u32::from(what / 36).to_le_bytes()[..], &function.to_le_bytes(), &unit];
        let bytes = [&bytes.concat()[..], &id.to_le_bytes()].concat();
        bench.memory.write(REQUEST, &bytes).expect("memory");
        return Some(vec![(REQUEST, 24, false), (REQUEST + 64, 5, true)]);
    }
    let mut cdb = [0; 32];
    cdb[0] = OPCODES[usize::from(actions.byte()?) % OPCODES.len()];
    // Only a few bytes are set, because small block numbers exist on the medium.
    for _ in 0..actions.byte()? & 7 {
        let at = usize::from(actions.byte()? & 0xf);
        cdb[at.max(1)] = actions.byte()?;
    }
    let blocks = actions.byte()? & 0xf;
    cdb[if cdb[0] < 0x80 { 8 } else { 13 }] = blocks;
    let request = [&unit[..], &id.to_le_bytes(), &[0, 0, 0], &cdb].concat();
    bench.memory.write(REQUEST, &request).expect("memory");
    let mut list = [0; 40];
    (list[1], list[3], list[15], list[19]) = (38, 32, actions.byte()?, blocks);
    bench.memory.write(DATA, &list).expect("memory");
    let outward = matches!(cdb[0], 0x0a | 0x2a | 0x41 | 0x42 | 0x8a | 0x93 | 0xaa);
    let length = match actions.byte()? {
        0..200 => u32::from(blocks) * 512,
        200..230 => 512,
        _ => actions.length()?,
    };
    let (header, response) = ((REQUEST, 51, false), (REQUEST + 0x100, 108, true));
    let data = (DATA, length, !outward);
    Some(if outward { vec![header, data, response] } else { vec![header, response, data] })
}

/// Runs the actions that the bytes describe, then checks that the device still works. The first
/// byte selects the configuration.
pub(crate) fn run(name: &str, folder: &Path, mut bytes: impl Iterator<Item = u8>) {
    let kind = KINDS.iter().find(|it| it.name == name).expect("a kind that is here");
    let Some(choice) = bytes.next() else { return };
    let mut fields = kind.configs[usize::from(choice) % kind.configs.len()](folder);
    let named = fields.get("name").is_some();
    fields["slot"] = json!("03.0");
    let config = Config::of_kind(name, fields).expect("it is in the registry").expect("its fields");
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    bench.board.add(name, |grants| config.build(grants)).expect("the board is empty");
    bench.board.run(Vec::new()).expect("power-on");
    let bytes: &mut Bytes<'_> = &mut bytes;
    let mut actions = Actions::new(bytes, RAM);
    let mut driver = start(&bench, EVENT_IDX | DEVICE_FEATURES);
    let mut peer = None;
    while step(&mut actions, kind, &mut driver, &mut peer, folder).is_some() {}
    drop((driver, peer));
    bench.board.reset().expect("power-on again");
    bench.memory.write(0xff000, &[4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).expect("memory");
    let mut driver = start(&bench, 0);
    assert_eq!(driver.status(), 15);
    let (queue, chain) = kind.final_request;
    driver.offer(queue, chain);
    driver.kick(queue);
    // Without control queues, only a console has a port.
    if !named {
        driver.wait(queue);
    }
}

fn start(bench: &Bench, features: u64) -> Driver<'_> {
    let mut driver = Driver::find(bench, AT);
    let offered = driver.features();
    assert!(driver.negotiate(features & offered));
    for queue in 0..u16::try_from(driver.queues.len()).expect("a few queues") {
        driver.enable(queue, ENTRIES);
    }
    driver.start();
    driver
}

/// Runs one action. Returns None at the end of the bytes.
fn step<'a>(
    actions: &mut Actions<&mut Bytes<'_>>,
    kind: &Kind,
    driver: &mut Driver<'a>,
    peer: &mut Option<UnixStream>,
    folder: &Path,
) -> Option<()> {
    let (what, bench) = (actions.byte()?, driver.bench);
    let queues = u16::try_from(driver.queues.len()).ok()?;
    let queue = u16::from(actions.byte()?) % queues;
    // A broken device ignores everything until it is reset.
    if what < 200 && driver.status() & NEEDS_RESET != 0 {
        *driver = start(bench, DEVICE_FEATURES | EVENT_IDX);
    }
    match what {
        0..110 => actions.corrupt_queue(driver, queue, ENTRIES)?,
        110..205 => {
            let chain = (kind.build)(actions, bench)?;
            driver.offer(queue, &chain);
            driver.kick(queue);
        }
        205..215 => driver.set_device(u64::from(actions.byte()? % 40), &[actions.byte()?]),
        215..225 => drop(bench.board.shared.balloon.set(u64::from(actions.short()?) << 4)),
        225..230 => {
            let size = DISK + u64::from(actions.byte()?) * 512;
            bench.board.shared.disks.all().iter().for_each(|disk| drop(disk.grow(Some(size))));
        }
        230..243 => talk(actions, peer, folder)?,
        // A new driver, with fewer or more features.
        _ => *driver = start(bench, u64::from(actions.short()?) | EVENT_IDX),
    }
    Some(())
}

/// The client of a port connects, sends, reads or disconnects.
fn talk(
    actions: &mut Actions<&mut Bytes<'_>>,
    peer: &mut Option<UnixStream>,
    folder: &Path,
) -> Option<()> {
    match (actions.byte()?, peer.as_mut()) {
        (0..20, _) => *peer = None,
        (_, None) => {
            *peer = UnixStream::connect(port(folder)).ok();
            peer.iter().for_each(|it| drop(it.set_nonblocking(true)));
        }
        (20..140, Some(peer)) => drop(peer.write(&vec![0x5a; actions.short()?.into()])),
        (_, Some(peer)) => drop(peer.read(&mut [0; 5000])),
    }
    Some(())
}
