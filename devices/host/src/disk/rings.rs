//! The io_uring instances of one disk. They are created when the disk is opened. A channel
//! leases one and returns it when it is dropped.
//!
//! A system call filter does not see which operations a ring performs, and a ring could open
//! sockets. So before each ring is enabled, it is restricted (`IORING_REGISTER_RESTRICTIONS`, Linux
//! 5.10) to the operations of a disk: reads and writes of files that are already open. A jailed
//! process cannot create another ring, which would have no restrictions.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::register::Restriction;
use io_uring::{Builder, IoUring, opcode};

/// Size of the submission queue.
pub(super) const ENTRIES: u32 = 512;

/// The permitted operations.
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
/// `IOSQE_FIXED_FILE`: the entry uses a registered file.
const FIXED_FILE: u8 = 1;

/// The rings of a disk that are not leased.
pub(super) struct Rings(Mutex<Vec<IoUring>>);

impl Rings {
    /// Fails if the host does not support rings, or does not support restrictions.
    pub(super) fn new(file: &File, count: u16) -> io::Result<Self> {
        let rings = (0..count).map(|_| make(file)).collect::<io::Result<_>>()?;
        Ok(Self(Mutex::new(rings)))
    }

    /// If all rings are leased, creates another one, which fails in the jail.
    pub(super) fn lease(self: &Arc<Self>, file: &File) -> io::Result<Lease> {
        let spare = self.spare().pop();
        let ring = spare.map_or_else(|| make(file), Ok)?;
        Ok(Lease { ring: Some(ring), home: self.clone() })
    }

    fn spare(&self) -> MutexGuard<'_, Vec<IoUring>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A leased ring, which is returned when this is dropped. No request may be in flight then.
pub(super) struct Lease {
    /// `Some` until this is dropped.
    ring: Option<IoUring>,
    home: Arc<Rings>,
}

const HAS_RING: &str = "a lease has its ring until it is dropped";

impl Deref for Lease {
    type Target = IoUring;

    fn deref(&self) -> &IoUring {
        self.ring.as_ref().expect(HAS_RING)
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut IoUring {
        self.ring.as_mut().expect(HAS_RING)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.home.spare().extend(self.ring.take());
    }
}

/// Creates a ring with this file as its only registered file, restricted to `OPERATIONS`.
fn make(file: &File) -> io::Result<IoUring> {
    // Completions need not interrupt the thread, because it polls. Kernels before 5.19 lack this.
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
            io::ErrorKind::Unsupported => {
                io::Error::other("io_uring is not available on this host, or in the jail")
            }
            _ => error,
        }
    })
}
