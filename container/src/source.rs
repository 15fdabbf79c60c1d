//! What the machine runs. The plan decides it; the firmware, the volume and the check of KVM go by
//! it.

use std::path::PathBuf;

use crate::settings::version::Version;

/// What the machine runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The guest that is built in.
    Probe,
    /// The disk, which Windows has started from before.
    Disk(PathBuf),
    /// A medium that is there.
    Medium(PathBuf),
    /// A medium that must be downloaded first.
    Download(Version),
}
