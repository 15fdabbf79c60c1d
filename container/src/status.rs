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
    /// The status of an error: its own, that of the first of several, or `Failed`.
    pub fn of(error: &anyhow::Error) -> Self {
        let first = || error.downcast_ref::<Several>().and_then(|several| several.0.first());
        Failure::find(error).unwrap_or_else(|| first().map_or(Self::Failed, Self::of))
    }

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
pub type Failure = host::failure::Failure<Status>;

/// Mistakes that were found together. Their status is that of the first.
#[derive(Debug)]
struct Several(Vec<anyhow::Error>);

/// All of these errors as one, or none.
///
/// # Errors
///
/// When there is one.
pub fn all(errors: Vec<anyhow::Error>) -> anyhow::Result<()> {
    let each = |error: anyhow::Error| match error.downcast::<Several>() {
        Ok(several) => several.0,
        Err(error) => vec![error],
    };
    let mut errors: Vec<_> = errors.into_iter().flat_map(each).collect();
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.remove(0)),
        _ => Err(Several(errors).into()),
    }
}

/// What there is to say of an error: a sentence for each mistake.
pub fn sentences(error: &anyhow::Error) -> Vec<String> {
    match error.downcast_ref::<Several>() {
        Some(several) => several.0.iter().map(|error| format!("{error:#}")).collect(),
        None => vec![format!("{error:#}")],
    }
}

impl fmt::Display for Several {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentences: Vec<_> = self.0.iter().map(|error| format!("{error:#}")).collect();
        f.write_str(&sentences.join("\n"))
    }
}

impl std::error::Error for Several {}
