//! A guest's disk driver for tests: sends one request at a time, or a few at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ram::GuestMemoryMmap;
use rustix::event::{PollFd, PollFlags, poll};
use vm_memory::GuestAddress;

use super::{Channel, Completion, Fault, Image, Operation, Request};
use crate::memory::{Memory, Piece};

/// How long a test waits for answers.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) struct Driver {
    pub(super) channel: Box<dyn Channel>,
    pub(super) memory: Memory,
    tag: u64,
}

/// 16 MiB of RAM in two regions, so that pieces can cross their border.
pub(super) fn ram() -> Memory {
    let ranges = [(GuestAddress(0), 8 << 20), (GuestAddress(8 << 20), 8 << 20)];
    Memory::new(Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap()))
}

pub(super) fn piece(address: u64, length: usize) -> Piece {
    Piece { address, length: length.try_into().unwrap() }
}

impl Driver {
    pub(super) fn new(image: &Arc<dyn Image>) -> Self {
        let memory = ram();
        Self { channel: image.channel(&memory).unwrap(), memory, tag: 0 }
    }

    /// Pushes a request for `length` bytes from `offset` on and returns its tag.
    pub(super) fn push(
        &mut self,
        operation: Operation,
        offset: u64,
        length: u64,
        pieces: &[Piece],
    ) -> u64 {
        self.tag += 1;
        let pieces = pieces.to_vec();
        self.channel.push(Request { tag: self.tag, operation, offset, length, pieces });
        self.tag
    }

    /// Waits for `count` answers as a worker does: polls the event, then reaps.
    pub(super) fn wait(&mut self, count: usize) -> Vec<Completion> {
        let mut done = Vec::new();
        let end = Instant::now() + ANSWER_TIMEOUT;
        while done.len() < count {
            assert!(Instant::now() < end, "{} of {count} after {ANSWER_TIMEOUT:?}", done.len());
            let event = self.channel.event();
            let tick = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
            if poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&tick)).unwrap() > 0 {
                self.channel.reap(&mut done);
            }
        }
        done
    }

    /// Sends one request and waits for its answer.
    pub(super) fn execute(
        &mut self,
        operation: Operation,
        offset: u64,
        length: u64,
        pieces: &[Piece],
    ) -> Result<(), Fault> {
        let tag = self.push(operation, offset, length, pieces);
        self.channel.submit();
        let done = self.wait(1).pop().unwrap();
        assert_eq!((done.tag, done.pieces.as_slice()), (tag, pieces));
        done.result
    }

    pub(super) fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>, Fault> {
        self.memory.write(0, &vec![0xee; length]).unwrap();
        self.execute(Operation::Read, offset, length as u64, &[piece(0, length)])?;
        let mut data = vec![0; length];
        self.memory.read(0, &mut data).unwrap();
        Ok(data)
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Fault> {
        self.memory.write(0, data).unwrap();
        let write = Operation::Write { durable: false };
        self.execute(write, offset, data.len() as u64, &[piece(0, data.len())])
    }

    pub(super) fn flush(&mut self) -> Result<(), Fault> {
        self.execute(Operation::Flush, 0, 0, &[])
    }
}
