//! How the process ends: what scripts tell apart has a status of its own.

/// Exit statuses. 128 + N is: ended by signal N.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The guest switched itself off.
    Off = 0,
    /// Something that was asked for cannot be done.
    Failed = 1,
    /// The command line or the configuration is wrong.
    Usage = 2,
    /// The guest did what the hypervisor cannot run (internal error, failed entry).
    Guest = 70,
    /// A system call that the jail forbids.
    Jail = 77,
    /// No KVM, or one that cannot be used: as in the reference image.
    NoKvm = 88,
}

impl Status {
    /// The status of an error: its own, or `Failed`.
    pub fn of(error: &anyhow::Error) -> Self {
        Failure::find(error).unwrap_or(Self::Failed)
    }
}

/// An error with a status of its own.
pub type Failure = host::failure::Failure<Status>;
