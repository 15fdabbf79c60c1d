//! The source that the machine runs from. The plan selects it; the firmware, the volume and the KVM
//! check depend on it.

use std::path::PathBuf;

use crate::settings::version::Version;

/// The guest, or the drive that the machine boots from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Probe,
    /// A disk that Windows has booted from before.
    Disk(PathBuf),
    Medium(PathBuf),
    /// A version of Windows whose ISO image would have to be downloaded first.
    Download(Version),
}
