//! The transport with ordinary drivers, and with hostile ones.

use super::*;
use crate::device::Kind;
use crate::testutil::Bench;
use crate::testutil::driver::{
    Descriptor, Driver, EVENT_IDX, INDIRECT, INDIRECT_DESC, NEXT, Used, VERSION_1, WRITE,
};
use crate::virtio::Chain;
use crate::worker::Worker;

const AT: Address = Address::new(3, 0);
/// INTA of slot 3.
const GSI: u32 = 23;
const QUEUES: usize = 2;
/// A feature bit of the echo device.
const LOUD: u64 = 1 << 3;

/// Returns what it received. It holds chains that begin with `keep`.
#[derive(Default)]
struct Echo {
    config: Vec<u8>,
    worker: Option<Worker<Server>>,
}

#[derive(Default)]
struct Server {
    queues: Vec<Queue>,
    held: Vec<Chain>,
}

impl Server {
    fn serve(&mut self) {
        for queue in &mut self.queues {
            while let Some(chain) = queue.pop() {
                let length = usize::try_from(crate::virtio::length(&chain.readable)).unwrap();
                let mut bytes = vec![0; length];
                let read = queue.memory.gather(&chain.readable, &mut bytes);
                if bytes == b"keep" {
                    self.held.push(chain);
                    continue;
                }
                let echoed = read.and_then(|()| queue.memory.scatter(&chain.writable, &bytes));
                let written = if echoed.is_ok() { length } else { 0 };
                queue.push(chain, u32::try_from(written).unwrap());
            }
            queue.notify();
        }
    }
}

impl Virtio for Echo {
    fn identity(&self) -> Identity {
        Identity {
            id: 30,
            name: "echo",
            class: 0xff_0000,
            queues: vec![256; QUEUES],
            features: LOUD,
        }
    }
    fn config(&self) -> Vec<u8> {
        self.config.clone()
    }
    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config[offset..offset + data.len()].copy_from_slice(data);
    }
    fn start(&mut self, queues: Vec<Queue>, _: u64) -> anyhow::Result<()> {
        let bells = queues.iter().map(|queue| queue.bell.clone()).collect();
        let server = Server { queues, held: Vec::new() };
        self.worker = Some(Worker::spawn("echo", server, bells, |server, _| server.serve())?);
        Ok(())
    }
    fn stop(&mut self) -> Vec<Queue> {
        self.worker.take().map(Worker::stop).unwrap_or_default().queues
    }
    fn save(&self) -> Saved {
        Saved::of(&self.config)
    }
    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<Vec<u8>> = saved.take()?;
        self.config = saved.unwrap_or_else(|| vec![1, 2, 3, 4, 5]);
        Ok(())
    }
}

fn bench() -> Bench {
    let mut bench = Bench::new(1 << 20);
    bench.board.add("echo", |grants| on_pci(Echo::default(), Some(AT), grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// Starts a driver with two queues of 16 entries.
fn driver(bench: &Bench, features: u64) -> Driver<'_> {
    let mut driver = Driver::find(bench, AT);
    assert!(driver.negotiate(features));
    driver.enable(0, 16);
    driver.enable(1, 16);
    driver.start();
    assert_eq!(driver.status(), 15);
    driver
}

fn put(driver: &mut Driver<'_>, bytes: &[u8]) -> u64 {
    let at = driver.allocate(bytes.len() as u64);
    driver.bench.memory.write(at, bytes).unwrap();
    at
}

/// Sends `words` through a queue, in two pieces each way, and returns the echo.
fn echo(driver: &mut Driver<'_>, queue: u16, words: &[u8]) -> Vec<u8> {
    let length = u32::try_from(words.len()).unwrap();
    let (from, to) = (put(driver, words), driver.allocate(words.len() as u64));
    let cut = length / 3;
    let (head, tail) = (u64::from(cut), length - cut);
    let pieces =
        [(from, cut, false), (from + head, tail, false), (to, tail, true), (to + 500, cut, true)];
    let first = driver.offer(queue, &pieces);
    driver.kick(queue);
    assert_eq!(driver.wait(queue), Used { head: first.into(), length });
    let mut got = driver.bytes(to, tail as usize);
    got.extend(driver.bytes(to + 500, cut as usize));
    got
}

/// Enables MSI-X. The message of vector n has data n.
fn messages(bench: &Bench) {
    let table = 0xc000_0000;
    for vector in 0..=QUEUES as u64 {
        bench.write(Kind::Memory, table + 16 * vector, &0xfee0_0000_u64.to_le_bytes());
        bench.write(Kind::Memory, table + 16 * vector + 8, &vector.to_le_bytes());
    }
    bench.write(Kind::Config, AT.config() + 0x40, &0x8000_0000_u32.to_le_bytes());
}

fn sent(bench: &Bench) -> Vec<u32> {
    bench.hypervisor.sent.lock().unwrap().drain(..).map(|message| message.data).collect()
}

#[test]
fn has_the_ids_that_windows_drivers_match() {
    let bench = bench();
    let driver = Driver::find(&bench, AT);
    assert_eq!(driver.config(0), [0xf4, 0x1a, 0x5e, 0x10]);
    assert_eq!(driver.config::<1>(8), [1], "revision");
    assert_eq!(driver.config(0x2c), [0xf4, 0x1a, 0, 0x11]);
    assert_eq!(driver.features(), LOUD | VERSION_1 | EVENT_IDX | INDIRECT_DESC | RING_RESET);
    assert_eq!(driver.number(18), 2);
    // The Windows drivers map at most one page of doorbells.
    assert_eq!(bench.hypervisor.bells().len(), QUEUES);
}

#[test]
fn echoes_on_every_queue_with_and_without_event_idx() {
    for features in [0, EVENT_IDX, EVENT_IDX | INDIRECT_DESC | LOUD] {
        let bench = bench();
        let mut driver = driver(&bench, features);
        for round in 0..40_u8 {
            let words: Vec<u8> = (0..99).map(|byte| byte ^ round).collect();
            assert_eq!(echo(&mut driver, u16::from(round % 2), &words), words);
        }
    }
}

#[test]
fn refuses_unoffered_features_and_legacy_drivers() {
    let bench = bench();
    let mut driver = Driver::find(&bench, AT);
    assert!(!driver.negotiate(1 << 5));
    driver.set_status(15);
    assert_eq!(driver.status(), 3, "no DRIVER_OK without FEATURES_OK");
    driver.set_status(0);
    driver.set_status(3);
    driver.set_status(11);
    assert_eq!(driver.status(), 3, "nothing accepted, not even VERSION_1");
    assert!(driver.negotiate(LOUD));
    driver.set_common(8, &0_u32.to_le_bytes());
    driver.set_common(12, &0_u32.to_le_bytes());
    assert_eq!(
        u32::from_le_bytes(driver.common(12)),
        u32::try_from(LOUD).unwrap(),
        "features cannot change any more"
    );
}

#[test]
fn invalid_queue_sizes_and_vectors_are_refused() {
    let bench = bench();
    let mut driver = Driver::find(&bench, AT);
    assert!(driver.negotiate(0));
    assert_eq!(driver.number(24), 256, "the maximum");
    for bad in [0_u16, 3, 100, 512, 0x8000, 0xffff] {
        driver.set_common(24, &bad.to_le_bytes());
        assert_eq!(driver.number(24), 256, "{bad} entries");
    }
    for (vector, read) in [(2_u16, 2), (3, 0xffff), (0xffff, 0xffff)] {
        for register in [16, 26] {
            driver.set_common(register, &vector.to_le_bytes());
            assert_eq!(driver.number(register), read);
        }
    }
    driver.set_common(22, &9_u16.to_le_bytes());
    assert_eq!(driver.number(24), 0, "no such queue");
    driver.set_common(28, &1_u16.to_le_bytes());
    driver.set_common(58, &1_u16.to_le_bytes());
}

#[test]
fn the_interrupt_line_is_high_until_isr_is_read() {
    let bench = bench();
    let mut driver = driver(&bench, 0);
    echo(&mut driver, 1, b"something");
    wait(|| bench.hypervisor.pins.is_high(GSI));
    assert_eq!((driver.isr(), driver.isr()), (1, 0));
    assert!(!bench.hypervisor.pins.is_high(GSI));
    assert_eq!(sent(&bench), [0; 0]);
}

fn wait(done: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !done() {
        assert!(start.elapsed().as_secs() < 10, "it never came");
        std::thread::yield_now();
    }
}

#[test]
fn messages_go_to_the_vector_of_the_queue() {
    let bench = bench();
    let mut driver = driver(&bench, 0);
    messages(&bench);
    for queue in [1, 0, 1] {
        echo(&mut driver, queue, b"something");
        wait(|| !bench.hypervisor.sent.lock().unwrap().is_empty());
        assert_eq!(sent(&bench), [u32::from(queue) + 1]);
    }
    assert!(!bench.hypervisor.pins.is_high(GSI));
    assert_eq!(driver.isr(), 1, "also for drivers that look at it in spite of MSI-X");
}

#[test]
fn does_not_interrupt_a_driver_that_disabled_interrupts() {
    let bench = bench();
    let mut plain = driver(&bench, 0);
    messages(&bench);
    // VIRTQ_AVAIL_F_NO_INTERRUPT.
    bench.memory.write(plain.queues[0].at[1], &1_u16.to_le_bytes()).unwrap();
    echo(&mut plain, 0, b"quiet");
    let mut indexed = driver(&bench, EVENT_IDX);
    // The driver wants an interrupt only for the third chain.
    let used_event = indexed.queues[0].at[1] + 4 + 2 * 16;
    bench.memory.write(used_event, &2_u16.to_le_bytes()).unwrap();
    for _ in 0..2 {
        echo(&mut indexed, 0, b"quiet");
    }
    bench.board.park();
    assert_eq!(sent(&bench), [0; 0]);
    bench.board.run(Vec::new()).unwrap();
    let mut indexed = driver(&bench, EVENT_IDX);
    messages(&bench);
    echo(&mut indexed, 0, b"loud");
    wait(|| sent(&bench) == [1]);
}

/// Writes invalid rings. The name beside it describes the attack.
type Attack = fn(&mut Driver<'_>);

const ATTACKS: &[(&str, Attack)] = &[
    ("an index beyond the ring", |driver| {
        let ring = driver.queues[0].at[1];
        driver.bench.memory.write(ring + 2, &0x8000_u16.to_le_bytes()).unwrap();
    }),
    ("a head beyond the table", |driver| driver.publish(0, 16)),
    ("an endless chain", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0x8000, length: 4, flags: NEXT, next: 1 },
        );
        driver.write_descriptor(
            0,
            1,
            Descriptor { address: 0x8000, length: 4, flags: NEXT, next: 0 },
        );
        driver.publish(0, 0);
    }),
    ("a successor beyond the table", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0x8000, length: 4, flags: NEXT, next: 77 },
        );
        driver.publish(0, 0);
    }),
    ("a readable piece after a writable one", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0x8000, length: 4, flags: NEXT | WRITE, next: 1 },
        );
        driver.write_descriptor(0, 1, Descriptor { address: 0x8000, length: 4, flags: 0, next: 0 });
        driver.publish(0, 0);
    }),
    ("more than 4 GiB", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0, length: u32::MAX, flags: NEXT | WRITE, next: 1 },
        );
        driver.write_descriptor(
            0,
            1,
            Descriptor { address: 0, length: u32::MAX, flags: WRITE, next: 0 },
        );
        driver.publish(0, 0);
    }),
    ("a table within a table", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0x8000, length: 32, flags: INDIRECT, next: 0 },
        );
        let table = [0x9000_u64.to_le_bytes(), (16 | 4_u64 << 32).to_le_bytes()].concat();
        driver.bench.memory.write(0x8000, &table).unwrap();
        driver.publish(0, 0);
    }),
    ("a table of odd length", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0x8000, length: 17, flags: INDIRECT, next: 0 },
        );
        driver.publish(0, 0);
    }),
    ("an empty table", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0x8000, length: 0, flags: INDIRECT, next: 0 },
        );
        driver.publish(0, 0);
    }),
    ("a table with a successor", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0x8000, length: 16, flags: INDIRECT | NEXT, next: 1 },
        );
        driver.publish(0, 0);
    }),
    ("a table outside of memory", |driver| {
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: u64::MAX - 15, length: 16, flags: INDIRECT, next: 0 },
        );
        driver.publish(0, 0);
    }),
    ("a table of a million entries", |driver| {
        // A table of zeros would end at once, so each entry points to itself.
        driver.write_descriptor(
            0,
            0,
            Descriptor { address: 0x8000, length: 16 << 20, flags: INDIRECT, next: 0 },
        );
        let entry = [0x9000_u64.to_le_bytes(), (4 | 1_u64 << 32).to_le_bytes()].concat();
        driver.bench.memory.write(0x8000, &entry).unwrap();
        driver.publish(0, 0);
    }),
    ("a chain that is still out", |driver| {
        let at = put(driver, b"keep");
        let head = driver.offer(0, &[(at, 4, false)]);
        driver.publish(0, head);
    }),
];

#[test]
fn a_bad_ring_breaks_the_device_until_it_is_reset() {
    let bench = bench();
    for (what, attack) in ATTACKS {
        let mut driver = driver(&bench, INDIRECT_DESC);
        driver.isr();
        attack(&mut driver);
        driver.kick(0);
        wait(|| driver.status() == 15 | NEEDS_RESET);
        // The interrupt follows the status.
        wait(|| driver.isr() & 2 == 2);
        assert_eq!(driver.take(0), None, "{what}");
    }
    let mut driver = driver(&bench, 0);
    assert_eq!(echo(&mut driver, 0, b"as new"), b"as new");
}

#[test]
fn buffers_outside_of_memory_are_left_to_the_device() {
    let bench = bench();
    let mut driver = driver(&bench, 0);
    for address in [1 << 20, (1 << 20) - 2, u64::MAX - 1, 1 << 63] {
        driver.offer(0, &[(0x8000, 4, false), (address, 4, true)]);
        driver.kick(0);
        assert_eq!(driver.wait(0).length, 0, "{address:#x}");
    }
    driver.offer(0, &[(0x8000, 0, false), (0x8000, 0, true)]);
    driver.kick(0);
    assert_eq!(driver.wait(0).length, 0);
    assert_eq!(driver.status(), 15);
}

#[test]
fn rings_that_are_not_memory_break_the_device() {
    let bench = bench();
    for area in [32, 40, 48] {
        for at in [0xfff8_u64, 0x10_0000, !0xf, 0x1_0000_0001] {
            let mut driver = Driver::find(&bench, AT);
            assert!(driver.negotiate(0));
            driver.enable(0, 16);
            driver.set_common(58, &1_u16.to_le_bytes());
            for register in [32, 40, 48] {
                driver.set_common(register, &0x2000_u64.to_le_bytes());
            }
            // 0xfff8 is not aligned for a descriptor table, but for the other two rings.
            driver.set_common(area, &at.to_le_bytes());
            driver.set_common(28, &1_u16.to_le_bytes());
            driver.start();
            let broken = driver.status() & NEEDS_RESET != 0;
            assert_eq!(broken, at != 0xfff8 || area == 32, "{area}: {at:#x}");
        }
    }
}

#[test]
fn a_chain_in_flight_survives_a_park() {
    let bench = bench();
    let mut driver = driver(&bench, 0);
    let at = put(&mut driver, b"keep");
    let answer = driver.allocate(4);
    let head = driver.offer(0, &[(at, 4, false), (answer, 4, true)]);
    driver.kick(0);
    assert_eq!(echo(&mut driver, 1, b"behind it"), b"behind it");
    // The result shows that the device took the chain again.
    let saved = bench.board.park();
    bench.memory.write(at, b"give").unwrap();
    bench.board.run(saved).unwrap();
    assert_eq!(driver.wait(0), Used { head: head.into(), length: 4 });
    assert_eq!(driver.bytes(answer, 4), b"give");
    assert_eq!(echo(&mut driver, 0, b"and on"), b"and on");
}

#[test]
fn resetting_one_queue_does_not_disturb_the_others() {
    let bench = bench();
    let mut driver = driver(&bench, 0);
    echo(&mut driver, 0, b"before");
    echo(&mut driver, 1, b"before");
    driver.set_common(22, &0_u16.to_le_bytes());
    driver.set_common(58, &1_u16.to_le_bytes());
    assert_eq!((driver.number(58), driver.number(28)), (0, 0), "done, and not enabled");
    assert_eq!(echo(&mut driver, 1, b"meanwhile"), b"meanwhile");
    driver.enable(0, 32);
    assert_eq!(echo(&mut driver, 0, b"afterwards"), b"afterwards");
    assert_eq!(echo(&mut driver, 1, b"still"), b"still");
}

#[test]
fn a_reset_completes_and_clears_all_state() {
    let bench = bench();
    let mut driver = driver(&bench, EVENT_IDX);
    echo(&mut driver, 0, b"before");
    driver.set_device(0, &[9]);
    let at = put(&mut driver, b"keep");
    driver.offer(0, &[(at, 4, false)]);
    driver.kick(0);
    driver.set_status(0);
    assert_eq!((driver.status(), driver.isr()), (0, 0));
    assert_eq!(driver.device(0), [1], "what was written is gone");
    for register in [28, 32, 40, 48] {
        assert_eq!(driver.number(register), 0, "{register}");
    }
    assert_eq!((driver.number(24), driver.number(26)), (256, 0xffff));
    let mut driver = self::driver(&bench, 0);
    assert_eq!(echo(&mut driver, 0, b"as new"), b"as new");
}

#[test]
fn the_generation_changes_with_the_configuration() {
    let bench = bench();
    let driver = Driver::find(&bench, AT);
    let generation = || driver.common::<1>(21)[0];
    let first = generation();
    assert_eq!(generation(), first);
    driver.set_device(1, &[7, 8]);
    assert_eq!(driver.device(0), [1, 7, 8, 4, 5, 0, 0, 0], "bytes beyond the end read as zeros");
    assert_ne!(generation(), first);
    driver.set_device(4, &[1, 1]);
    assert_eq!(driver.device(4), [5, 0], "a write beyond the end is dropped");
}

#[test]
fn configuration_space_gives_access_to_the_structures() {
    let bench = bench();
    let driver = Driver::find(&bench, AT);
    let set = |register: u64, value: u32| {
        bench.write(Kind::Config, AT.config() + register, &value.to_le_bytes());
    };
    let window = |offset: u32, length: u32| {
        set(WINDOW_BAR, BAR.into());
        set(WINDOW_BAR + 4, offset);
        set(WINDOW_BAR + 8, length);
    };
    assert_eq!(driver.config::<2>(WINDOW)[0], VENDOR);
    window(0x2000, 4);
    assert_eq!(driver.config(WINDOW_DATA), [1, 2, 3, 4]);
    window(20, 1);
    set(WINDOW_DATA, 3);
    assert_eq!((driver.status(), driver.config(WINDOW_DATA)), (3, [3, 0, 0, 0]));
    for (offset, length) in [(0x4000, 4), (0x3fff, 2), (u32::MAX, 4), (0, 3), (0, 0), (0, 8)] {
        window(offset, length);
        assert_eq!(driver.config(WINDOW_DATA), [0xff; 4], "{offset:#x}, {length}");
        set(WINDOW_DATA, 0);
    }
    assert_eq!(driver.status(), 3, "and nothing was written");
}

#[test]
fn without_bus_mastering_no_queue_runs() {
    let bench = bench();
    let mut driver = driver(&bench, 0);
    bench.write(Kind::Config, AT.config() + 4, &2_u16.to_le_bytes());
    let at = put(&mut driver, b"quiet");
    driver.offer(0, &[(at, 5, false)]);
    driver.kick(0);
    bench.board.park();
    assert_eq!((driver.take(0), bench.hypervisor.pins.is_high(GSI)), (None, false));
}
