//! The rings of io_uring for one disk: made when the disk is opened, each lent to a channel, and
//! kept for the next one afterwards.
//!
//! No filter of system calls sees what a ring is asked for, and a ring could open sockets. So each
//! ring is restricted (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10) to the operations of a disk
//! before it is enabled: to reads and writes of files that are open already. A process in its jail
//! cannot make another one, which would have no restrictions.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::register::Restriction;
use io_uring::{Builder, IoUring, opcode};

/// Entries of a submission queue.
pub(super) const ENTRIES: u32 = 512;

/// The operations of a disk.
const OPERATIONS: [u8; 9] = [
    opcode::Nop::CODE,
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
];
/// `IOSQE_FIXED_FILE`: the entry names a registered file.
const FIXED_FILE: u8 = 1;

/// The rings of a disk that no channel has.
pub(super) struct Rings(Mutex<Vec<IoUring>>);

impl Rings {
    /// Makes this many rings on a file.
    ///
    /// # Errors
    ///
    /// When this host has no rings, or none that can be restricted.
    pub(super) fn new(file: &File, count: u16) -> io::Result<Self> {
        let rings = (0..count).map(|_| make(file)).collect::<io::Result<_>>()?;
        Ok(Self(Mutex::new(rings)))
    }

    /// Lends a ring on the file; one more is made where all are lent.
    ///
    /// # Errors
    ///
    /// When no more can be made, as in the jail.
    pub(super) fn lend(self: &Arc<Self>, file: &File) -> io::Result<Lent> {
        let spare = self.spare().pop();
        let ring = spare.map_or_else(|| make(file), Ok)?;
        Ok(Lent { ring: Some(ring), home: self.clone() })
    }

    fn spare(&self) -> MutexGuard<'_, Vec<IoUring>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A ring that goes back when it is dropped. Nothing may be in flight then.
pub(super) struct Lent {
    /// There until it is dropped.
    ring: Option<IoUring>,
    home: Arc<Rings>,
}

/// What `Lent::ring` guarantees.
const THERE: &str = "a ring that is lent is there";

impl Deref for Lent {
    type Target = IoUring;

    fn deref(&self) -> &IoUring {
        self.ring.as_ref().expect(THERE)
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut IoUring {
        self.ring.as_mut().expect(THERE)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.home.spare().extend(self.ring.take());
    }
}

/// A ring whose only registered file is this one, and which does nothing that a disk does not.
fn make(file: &File) -> io::Result<IoUring> {
    // Completions need not interrupt the thread: it asks. Not on kernels before 5.19.
    let ring = build(|builder| builder.setup_coop_taskrun().setup_taskrun_flag())
        .or_else(|_| build(|builder| builder))?;
    let submitter = ring.submitter();
    submitter.register_files(&[file.as_raw_fd()])?;
    let operations = OPERATIONS.into_iter().map(Restriction::sqe_op);
    let flags = Restriction::sqe_flags_allowed(FIXED_FILE);
    let mut all: Vec<_> = operations.chain([flags]).collect();
    submitter.register_restrictions(&mut all)?;
    submitter.register_enable_rings()?;
    Ok(ring)
}

fn build(more: impl FnOnce(&mut Builder) -> &mut Builder) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    more(builder.setup_clamp().setup_r_disabled()).build(ENTRIES).map_err(|error| {
        match error.kind() {
            io::ErrorKind::InvalidInput => io::Error::other("the kernel is older than 5.10"),
            // ENOSYS
            io::ErrorKind::Unsupported => io::Error::other("no new rings on this host or in jail"),
            _ => error,
        }
    })
}
