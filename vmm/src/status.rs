//! How the process ends: what scripts tell apart has a status of its own.

use std::fmt;

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
        error
            .chain()
            .find_map(|it| it.downcast_ref::<Self>())
            .map_or(Status::Failed, |it| it.status)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Failure {}
