//! Exit statuses: each outcome that scripts distinguish has its own.

/// Exit statuses. 128 + N means that signal N ended the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The guest powered off.
    Off = 0,
    /// A request could not be carried out.
    Failed = 1,
    /// The command line or the configuration is wrong.
    Usage = 2,
    /// The snapshot is damaged, or does not fit to this machine, its disks or this host.
    Snapshot = 66,
    /// KVM cannot run the guest (internal error, failed entry).
    Guest = 70,
    /// The jail forbids a system call.
    Jail = 77,
    /// The machine runs on elsewhere (`vmm ctl migrate`): it must not be started here again.
    Moved = 79,
    /// KVM is missing or unusable. The reference image uses the same status.
    NoKvm = 88,
}

impl Status {
    /// The exit status of an error: the one it carries, or `Failed`.
    pub fn of(error: &anyhow::Error) -> Self {
        Failure::status_of(error).unwrap_or(Self::Failed)
    }
}

pub type Failure = host::failure::Failure<Status>;
