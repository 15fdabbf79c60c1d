//! All kinds of devices on one board, and a guest with random accesses.

mod every_kind;

use std::time::{Duration, Instant};

use devices::grants::Claim;
use devices::registry::KINDS;
use devices::testutil::Bench;
use devices::testutil::hostile::Guest;
use host::testutil::in_time;
use host::testutil::noise::Noise;

const ACCESSES: u32 = 1_000_000;
/// Accesses between two checks of the host's resources.
const ROUND: u32 = 10_000;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Waits for the number of threads to return to `before`: a joined thread disappears a moment
/// later.
fn assert_threads(before: usize) {
    let end = Instant::now() + Duration::from_secs(10);
    while threads() != before {
        assert!(Instant::now() < end, "{} threads, not {before}", threads());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// The only test of this process, because it counts threads.
#[test]
fn a_million_accesses_leak_no_thread_and_no_memory() {
    in_time(Duration::from_secs(10), format_args!("{ROUND} accesses"), || (a_million(), ()));
}

/// Runs the accesses and returns the duration of the slowest round.
fn a_million() -> Duration {
    let folder = tempfile::tempdir().unwrap();
    let mut bench = Bench::new(1 << 20);
    for kind in KINDS {
        every_kind::add(&mut bench, kind, folder.path());
    }
    let before = threads();
    bench.board.run(Vec::new()).unwrap();
    let mut guest = Guest::new(&bench, Noise::new(1));
    let windows: Vec<_> = bench.board.claims().flat_map(|(_, claims)| claims).collect();
    let is_mapped = |claim: &&Claim| matches!(claim, Claim::Window(it) if it.at().is_some());
    let mut mapped = vec![false; windows.len()];
    let (mut warm, mut slowest) = (0, Duration::ZERO);
    for round in 0..ACCESSES / ROUND {
        let start = Instant::now();
        for access in 0..ROUND {
            assert!(guest.step());
            if access % 16 == 0 {
                mapped.iter_mut().zip(&windows).for_each(|(seen, it)| *seen |= is_mapped(it));
            }
        }
        slowest = slowest.max(start.elapsed());
        bench.events.lock().unwrap().clear();
        bench.hypervisor.sent.lock().unwrap().clear();
        if round == ACCESSES / ROUND / 4 {
            warm = resident();
        }
        if round % 10 == 9 {
            let saved = bench.board.park();
            assert_threads(before);
            bench.board.run(saved).unwrap();
        }
    }
    for (claim, seen) in windows.iter().zip(mapped) {
        assert!(seen || !matches!(claim, Claim::Window(_)), "{claim} was never reached");
    }
    let grown = resident().saturating_sub(warm);
    assert!(grown < 16 << 20, "{grown} bytes more than after a quarter of the accesses");
    drop(bench);
    assert_threads(before);
    slowest
}
