//! Moves a running machine to another process, perhaps on another host, over a connected stream.
//!
//! Its memory is sent while it runs, and again what it writes meanwhile (`departure`). When what is
//! left can be sent within the allowed pause, the machine stops, and the rest and the state of its
//! processors and devices follow (`stream` has the messages). The other end (`arrival`) builds the
//! machine like one that is restored from a snapshot.
//!
//! Never both run on, also if the connection is cut. The locks of the disks decide: the source
//! gives them up before it sends the state, and the other end takes them. If the source does not
//! hear that the machine runs there, it goes on only after it took all locks again, and if the
//! disks have not changed. A machine without such a lock runs on at the other end only when the
//! source has agreed.

pub mod arrival;
pub mod departure;
pub mod pages;
pub mod parts;
pub mod stream;

use kvm_bindings::kvm_cpuid_entry2;
use serde::{Deserialize, Serialize};

use crate::config::Config;

/// The description of a machine, which the other end compares before memory is sent.
#[derive(Serialize, Deserialize)]
pub struct Hello {
    /// That of the state.
    pub format: u32,
    pub config: Config,
    pub cpuid: Vec<Vec<kvm_cpuid_entry2>>,
    /// The lengths of all parts of memory: RAM, then the memory of devices.
    pub parts: Vec<u64>,
}
