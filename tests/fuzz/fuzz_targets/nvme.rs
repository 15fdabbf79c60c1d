//! An NVMe driver made of arbitrary bytes: it begins with an enabled controller and its admin
//! queue, fills memory, rings, configures, and has the machine parked and run on at any moment.
#![no_main]

use devices::backend::disk::{self, memory};
use devices::device::Kind;
use devices::nvme::Config;
use devices::testutil::Bench;
use libfuzzer_sys::fuzz_target;

/// Where the device sits, and where its registers are put.
const CONFIG: u64 = 2 << 15;
const REGISTERS: u64 = 0xc000_0000;
/// Of the guest's memory, and of the disk.
const RAM: usize = 1 << 18;
const DISK: u64 = 1 << 18;

fuzz_target!(|bytes: &[u8]| {
    let mut bench = Bench::new(RAM);
    let config = Config(disk::Config::new("disk"));
    bench.board.add("nvme", |place| config.attach(memory(DISK), place)).expect("an empty board");
    bench.board.run(Vec::new()).expect("power-on");
    let place = |bench: &Bench| {
        bench.write(Kind::Config, CONFIG + 0x10, &0xc000_0000_u32.to_le_bytes());
        bench.write(Kind::Config, CONFIG + 0x18, &0xd000_0000_u32.to_le_bytes());
        bench.write(Kind::Config, CONFIG + 4, &[6, 0]);
        // Admin queues of 64 entries at 0x1000 and 0x2000.
        for (at, value) in [(0x24, 0x3f_003f), (0x28, 0x1000), (0x30, 0x2000), (0x14, 0x46_0001)] {
            bench.write(Kind::Memory, REGISTERS + at, &u32::to_le_bytes(value));
        }
    };
    place(&bench);
    for step in bytes.chunks_exact(8) {
        let at = u64::from(u16::from_le_bytes([step[2], step[3]]));
        let value = &step[4..];
        match step[0] % 16 {
            // A dword of a command, and a ring.
            0..=7 => {
                let at = 0x1000 + (at & 0x3f) * 64 + u64::from(step[0] % 16) * 8;
                bench.memory.write(at, value).expect("it is RAM");
            }
            8 => bench.memory.write((at << 2) % (RAM as u64 - 4), value).expect("it is RAM"),
            9..=11 => {
                let bell = REGISTERS + 0x1000 + (at % 20) * 4;
                bench.write(Kind::Memory, bell, &[step[1] % 80, 0, 0, 0]);
            }
            12 => bench.write(Kind::Memory, REGISTERS + (at & 0x3ffc), value),
            13 => bench.write(Kind::Config, CONFIG + 4, &[step[1], 0]),
            14 => {
                let saved = bench.board.park();
                bench.board.run(saved).expect("what was just saved");
            }
            _ if step[1] < 16 => {
                bench.board.reset().expect("power-on again");
                place(&bench);
            }
            _ => drop(bench.read::<4>(Kind::Memory, REGISTERS + (at & 0x3c))),
        }
    }
    let saved = bench.board.park();
    bench.board.run(saved).expect("what was just saved");
});
