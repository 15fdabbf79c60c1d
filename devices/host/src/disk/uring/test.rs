//! Tests of `uring`.

use std::fs::{self, File};
use std::path::Path;
use std::ptr;

use rustix::fs::{Advice, fadvise};

use super::super::driver::{ANSWER_TIMEOUT, Driver, piece};
use super::super::rehearsal::sparse;
use super::super::rings::Rings;
use super::super::{Config, Direct, open};
use super::*;

fn rings(path: &Path, count: u16) -> io::Result<Arc<Rings>> {
    Rings::new(&File::options().read(true).write(true).open(path)?, count).map(Arc::new)
}

fn disk(direct: Direct) -> Option<(tempfile::TempDir, Arc<dyn Image>)> {
    let folder = tempfile::tempdir().unwrap();
    let path = sparse(&folder, "disk", 8 << 20);
    if let Err(reason) = rings(&path, 1) {
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        skip::not_run(&test, &reason.to_string());
        return None;
    }
    let pattern: Vec<u8> = (0..8_u32 << 20).map(|it| (it / 512).to_le_bytes()[0]).collect();
    fs::write(&path, pattern).unwrap();
    let image = open(&Config { direct, ..Config::new(path) }, None).unwrap();
    Some((folder, image))
}

#[test]
fn handles_more_requests_and_pieces_than_the_ring_holds() {
    for direct in [Direct::Auto, Direct::Off] {
        let Some((_folder, image)) = disk(direct) else { return };
        let mut driver = Driver::new(&image);
        let count = usize::from(DEPTH) * 3;
        for number in 0..count as u64 {
            let offset = number * 512;
            driver.push(Operation::Read, offset, 512, &[piece(offset, 512)]);
        }
        driver.channel.submit();
        assert!(driver.wait(count).iter().all(|it| it.result == Ok(())));
        let pieces: Vec<_> = (0..4000).map(|it| piece((4 << 20) + it * 1024, 512)).collect();
        driver.execute(Operation::Read, 512, 4000 * 512, &pieces).unwrap();
        for (number, it) in (1_u32..).zip(&pieces) {
            let mut read = [0; 512];
            driver.memory.read(it.address, &mut read).unwrap();
            assert_eq!(read, [number.to_le_bytes()[0]; 512], "{direct:?} {number}");
        }
    }
}

#[test]
fn serves_pending_requests_when_all_earlier_ones_fall_back() {
    let Some((folder, image)) = disk(Direct::Off) else { return };
    let mut driver = Driver::new(&image);
    let count = usize::from(DEPTH) * 3;
    // A read of a truncated file returns nothing.
    File::options().write(true).open(folder.path().join("disk")).unwrap().set_len(0).unwrap();
    for number in 0..count as u64 {
        driver.push(Operation::Read, number * 512, 512, &[piece(number * 512, 512)]);
    }
    driver.channel.submit();
    let mut tags: Vec<u64> = driver.wait(count).iter().map(|it| it.tag).collect();
    tags.sort_unstable();
    tags.dedup();
    assert_eq!(tags.len(), count);
}

/// The kernel fails reads that wait for the page cache when their thread ends.
#[test]
fn reads_whose_thread_has_ended_are_complete() {
    let Some((folder, image)) = disk(Direct::Off) else { return };
    let file = File::open(folder.path().join("disk")).unwrap();
    file.sync_all().unwrap();
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    let mut driver = Driver::new(&image);
    let count = usize::from(DEPTH);
    let begin = move || {
        for number in 0..count as u64 {
            let offset = number << 14;
            driver.push(Operation::Read, offset, 4096, &[piece(offset, 4096)]);
        }
        driver.channel.submit();
        driver
    };
    let mut driver = std::thread::spawn(begin).join().unwrap();
    let failed = driver.wait(count).iter().filter(|it| it.result.is_err()).count();
    assert_eq!(failed, 0, "of {count}");
}

#[test]
fn refuses_memory_outside_of_ram_and_touches_none() {
    for direct in [Direct::Auto, Direct::Off] {
        let Some((_folder, image)) = disk(direct) else { return };
        let mut driver = Driver::new(&image);
        let end = 16 << 20;
        for pieces in [
            vec![piece(end, 4096)],
            vec![piece(end - 512, 4096)],
            vec![piece(u64::MAX - 100, 4096)],
            vec![piece(0, 2048), piece(end, 2048)],
        ] {
            let answer = driver.execute(Operation::Read, 8192, 4096, &pieces);
            assert_eq!(answer, Err(Fault::Refused), "{pieces:?}");
            let write = Operation::Write { durable: false };
            assert_eq!(driver.execute(write, 8192, 4096, &pieces), Err(Fault::Refused));
        }
        // A piece may span two regions of RAM.
        let pieces = [piece((8 << 20) - 2048, 4096)];
        driver.execute(Operation::Read, 8192, 4096, &pieces).unwrap();
        assert_eq!(driver.read(8192, 512).unwrap(), vec![16; 512]);
    }
}

#[test]
fn empty_requests_complete_at_once() {
    let Some((_folder, image)) = disk(Direct::Off) else { return };
    let mut driver = Driver::new(&image);
    driver.execute(Operation::Read, 0, 0, &[]).unwrap();
    driver.execute(Operation::Discard, 512, 0, &[]).unwrap();
    driver.execute(Operation::Write { durable: true }, 0, 0, &[]).unwrap();
}

#[test]
fn a_drop_waits_for_requests_in_flight() {
    for direct in [Direct::Auto, Direct::Off] {
        let Some((_folder, image)) = disk(direct) else { return };
        for round in 0..20 {
            let mut driver = Driver::new(&image);
            for number in 0..300 {
                let skew = if round % 2 == 0 { 0 } else { 4 };
                let pieces = [piece(number * 8192 + skew, 4096)];
                driver.push(Operation::Read, number * 4096, 4096, &pieces);
            }
            driver.channel.submit();
            let memory = driver.memory.clone();
            drop(driver);
            let before: Vec<u64> = sums(&memory);
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(before, sums(&memory), "memory changed after the channel was gone");
        }
    }
}

fn sums(memory: &Memory) -> Vec<u64> {
    let sum = |address| {
        let mut bytes = [0; 8192];
        memory.read(address, &mut bytes).unwrap();
        bytes.iter().map(|it| u64::from(*it)).sum()
    };
    (0..300).map(|number| sum(number * 8192)).collect()
}

#[test]
fn its_event_is_quiet_while_nothing_is_pending() {
    let Some((_folder, image)) = disk(Direct::Auto) else { return };
    let mut driver = Driver::new(&image);
    driver.write(0, &[1; 4096]).unwrap();
    driver.execute(Operation::Read, 0, 4096, &[piece(4, 4096)]).unwrap();
    driver.flush().unwrap();
    let event = driver.channel.event();
    let mut fds = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
    let soon = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&soon)), Ok(0));
    assert!(ANSWER_TIMEOUT > Duration::ZERO);
}

#[test]
fn a_ring_does_file_i_o_and_opens_no_socket() {
    let Some((folder, _image)) = disk(Direct::Off) else { return };
    let path = folder.path().join("disk");
    let other = File::open(&path).unwrap();
    let mut ring = rings(&path, 1).unwrap().lease(&other).unwrap();
    let (inet, stream) = (libc::AF_INET, libc::SOCK_STREAM);
    let peer = libc::sockaddr_un { sun_family: 1, sun_path: [0; 108] };
    let (peer, length) = ((&raw const peer).cast(), 2);
    let file = types::Fixed(0);
    for (entry, answer) in [
        (opcode::Nop::new().build(), 0),
        (opcode::Fsync::new(file).build(), 0),
        (opcode::Socket::new(inet, stream, 0).build(), -libc::EACCES),
        (opcode::Connect::new(file, peer, length).build(), -libc::EACCES),
        (opcode::Accept::new(file, ptr::null_mut(), ptr::null_mut()).build(), -libc::EACCES),
        (opcode::Send::new(file, ptr::null(), 0).build(), -libc::EACCES),
        (opcode::Close::new(file).build(), -libc::EACCES),
        (opcode::OpenAt::new(types::Fd(-1), c"/".as_ptr()).build(), -libc::EACCES),
    ] {
        // SAFETY: everything an entry points to outlives the answer, which the test waits for.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        let said = ring.completion().next().unwrap().result();
        assert_eq!(said, answer, "{entry:?}");
    }
    // The ring accepts no other files, and its restrictions cannot be lifted.
    let refused = ring.submitter().register_files_update(0, &[0]).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    let again = ring.submitter().register_restrictions(&mut []).unwrap_err();
    assert_eq!(again.raw_os_error(), Some(libc::EACCES));
}

#[test]
fn a_leased_ring_is_always_empty() {
    let Some((_folder, image)) = disk(Direct::Auto) else { return };
    for round in 0..50 {
        let mut driver = Driver::new(&image);
        // Some requests go to the fallback, which the ring polls.
        for number in 0..8 {
            driver.push(Operation::Read, 0, 4096, &[piece(number * 8192 + 4, 4096)]);
        }
        if round % 2 == 0 {
            driver.channel.submit();
        }
        drop(driver);
        let mut next = Driver::new(&image);
        next.write(512 * round, &[3; 512]).unwrap();
        assert_eq!(next.read(512 * round, 512).unwrap(), vec![3; 512]);
    }
}

#[test]
fn channels_without_a_ring_work_too() {
    let Some((_folder, image)) = disk(Direct::Off) else { return };
    let mut drivers: Vec<_> = (0..10).map(|_| Driver::new(&image)).collect();
    for (number, driver) in (0..).zip(&mut drivers) {
        driver.write(number * 512, &[7; 512]).unwrap();
    }
    assert_eq!(drivers[0].read(0, 512).unwrap(), vec![7; 512]);
}
