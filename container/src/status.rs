//! How the process ends: the exit statuses of the reference image, so that scripts that know it
//! know us.

use std::fmt;

/// What is wrong, as an exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Something that was asked for cannot be done.
    Failed = 1,
    /// The command line is wrong, or a variable that has no status of its own.
    Usage = 2,
    /// `STORAGE` is missing or cannot be written.
    Storage = 13,
    /// The number of processors.
    Processors = 15,
    /// The size of memory.
    Memory = 16,
    /// `DHCP`.
    Dhcp = 20,
    /// The kind of network.
    Network = 24,
    /// A MAC address or a network mask.
    Address = 28,
    /// A kind of network that cannot be served.
    Unsupported = 29,
    /// The boot mode.
    Boot = 33,
    /// A device or an image that is not there.
    Missing = 55,
    /// The version of Windows.
    Version = 58,
    /// The language.
    Language = 62,
    /// The ISO that the user gives.
    Iso = 64,
    /// Too little memory or disk for this version.
    Minimum = 67,
    /// What is to be downloaded cannot be had.
    Download = 68,
    /// The size or kind of a disk.
    Disk = 73,
    /// No KVM.
    NoKvm = 88,
    /// A program in the guest takes longer than it may.
    TimedOut = 124,
    /// No agent answers in the guest.
    Agent = 125,
    /// The agent cannot run a program.
    NotRun = 126,
    /// There is no such program in the guest.
    NotFound = 127,
}

/// Those that the pod tells a command of.
const TOLD: [Status; 3] = [Status::Agent, Status::NotRun, Status::NotFound];

impl Status {
    /// The number that the process exits with.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The one with this number, as the pod tells it.
    pub fn of_code(code: u8) -> Self {
        TOLD.into_iter().find(|it| it.code() == code).unwrap_or(Self::Failed)
    }
}

/// An error with a status of its own.
#[derive(Debug)]
pub struct Failure {
    status: Status,
    sentence: String,
}

impl Failure {
    /// One sentence with the value, the reason and the way out.
    #[expect(clippy::new_ret_no_self, reason = "it is only ever used as an error")]
    pub fn new(status: Status, sentence: impl Into<String>) -> anyhow::Error {
        Self { status, sentence: sentence.into() }.into()
    }

    /// The status of an error: its own, or `Failed`.
    pub fn status(error: &anyhow::Error) -> Status {
        let own = error.chain().find_map(|it| it.downcast_ref::<Self>());
        own.map_or(Status::Failed, |it| it.status)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Failure {}
