//! The MSI-X table, its control word and the interrupts of a device, in any order. The device sends
//! only messages that the guest wrote, and leaves nothing pending once all is unmasked.

use devices::device::Kind;
use devices::registry::Config;
use devices::testutil::Bench;
use serde_json::json;

/// The device's configuration space, and the addresses of its registers and its table.
const CONFIG: u64 = 4 << 15;
const REGISTERS: u64 = 0xc000_0000;
const TABLE: u64 = 0xd000_0000;
/// The MSI-X capability's control word, and its enable bit.
const CONTROL: u64 = CONFIG + 0x42;
const ENABLE: u16 = 1 << 15;
/// The device's interrupt raise register.
const RAISE: u64 = REGISTERS + 0x60;
/// The pending bits, in the table's BAR.
const PENDING: u64 = TABLE + 0x800;

/// Runs the input: each 6 bytes are an access.
pub(crate) fn run(bytes: &[u8]) {
    let mut bench = Bench::new(4096);
    let config = Config::of_kind("edu", json!({ "slot": "04.0" })).expect("it is in the registry");
    let config = config.expect("a slot is all it takes");
    bench.board.add("edu", |place| config.build(place)).expect("the board is empty");
    bench.board.run(Vec::new()).expect("power-on");
    bench.write(Kind::Config, CONFIG + 0x10, &0xc000_0000_u32.to_le_bytes());
    bench.write(Kind::Config, CONFIG + 0x14, &0xd000_0000_u32.to_le_bytes());
    bench.write(Kind::Config, CONFIG + 4, &[6, 0]);
    for step in bytes.chunks_exact(6) {
        let (what, at) = (step[0], u64::from(step[1]) * 16 + u64::from(step[0] >> 4));
        let value = &step[2..];
        match what % 8 {
            0 => bench.write(Kind::Memory, TABLE + at, value),
            1 => bench.write(Kind::Memory, TABLE + u64::from(step[1] % 16), value),
            2 => bench.write(Kind::Memory, TABLE + at, &value.repeat(2)),
            3 => assert_eq!(bench.read::<8>(Kind::Memory, PENDING + 8), [0; 8], "one vector"),
            4 => bench.write(Kind::Config, CONTROL, &value[..2]),
            5 | 6 => bench.write(Kind::Memory, RAISE, value),
            _ => {
                let saved = bench.board.park();
                bench.board.run(saved.clone()).expect("what was just saved");
                assert_eq!(bench.board.park(), saved);
                bench.board.run(saved).expect("what was just saved");
            }
        }
    }
    for message in bench.hypervisor.sent.lock().expect("no panic").drain(..) {
        assert_eq!(message.address & 3, 0, "MSI addresses are aligned");
    }
    bench.write(Kind::Config, CONTROL, &ENABLE.to_le_bytes());
    bench.write(Kind::Memory, TABLE + 12, &[0; 4]);
    assert_eq!(
        bench.read::<1>(Kind::Memory, PENDING),
        [0],
        "an unmasked vector must not stay pending"
    );
    let address = bench.read::<8>(Kind::Memory, TABLE);
    bench.hypervisor.sent.lock().expect("no panic").clear();
    bench.write(Kind::Memory, RAISE, &1_u32.to_le_bytes());
    let sent = bench.hypervisor.sent.lock().expect("no panic");
    let sent: Vec<_> = sent.iter().map(|message| message.address.to_le_bytes()).collect();
    assert_eq!(sent, [address], "one message to the address in the table");
}
