//! Exit statuses. They are those of the reference image, so that scripts written for it keep
//! working.

use std::fmt;

/// Added to the number of a signal, it is the status of a pod that the signal ended.
pub const SIGNALS: u8 = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// A request cannot be carried out. Also every error without a status of its own.
    Failed = 1,
    /// The command line is invalid, or a variable that has no status of its own.
    Usage = 2,
    /// `STORAGE` is missing or cannot be written.
    Storage = 13,
    Processors = 15,
    Memory = 16,
    Dhcp = 20,
    Network = 24,
    /// A MAC address or a network mask.
    Address = 28,
    /// A kind of network that is not supported.
    Unsupported = 29,
    Boot = 33,
    /// A device or an image does not exist.
    Missing = 55,
    Version = 58,
    Language = 62,
    /// The ISO image that the user provides.
    Iso = 64,
    /// The state of the volume: nothing can be done without the risk of losing data.
    State = 66,
    Download = 68,
    /// The size or kind of a disk.
    Disk = 73,
    /// An answer file, or a file of the user's for Windows' setup.
    Setup = 86,
    NoKvm = 88,
    /// A program in the guest exceeded `--timeout`.
    TimedOut = 124,
    /// The guest has no agent, or it does not answer.
    Agent = 125,
    /// The agent cannot run the program.
    NotRun = 126,
    /// The program does not exist in the guest.
    NotFound = 127,
}

/// Statuses that the pod sends to a command.
const SENT: [Status; 3] = [Status::Agent, Status::NotRun, Status::NotFound];

impl Status {
    /// The status of an error: its own, that of the first of several, or `Failed`.
    pub fn of(error: &anyhow::Error) -> Self {
        let first = || error.downcast_ref::<Errors>().and_then(|several| several.0.first());
        Failure::status_of(error).unwrap_or_else(|| first().map_or(Self::Failed, Self::of))
    }

    pub fn code(self) -> u8 {
        self as u8
    }

    /// The status that the pod sent as this number.
    pub fn of_code(code: u8) -> Self {
        SENT.into_iter().find(|it| it.code() == code).unwrap_or(Self::Failed)
    }
}

/// The error with this status, unless it has one of its own.
pub fn with(status: Status, error: anyhow::Error) -> anyhow::Error {
    match Status::of(&error) {
        Status::Failed => Failure::new(status, format!("{error:#}")),
        _ => error,
    }
}

pub type Failure = host::failure::Failure<Status>;

/// The status is that of the first error.
#[derive(Debug)]
struct Errors(Vec<anyhow::Error>);

/// Joins these errors to one. Succeeds if there are none.
pub fn all(errors: Vec<anyhow::Error>) -> anyhow::Result<()> {
    let each = |error: anyhow::Error| match error.downcast::<Errors>() {
        Ok(several) => several.0,
        Err(error) => vec![error],
    };
    let mut errors: Vec<_> = errors.into_iter().flat_map(each).collect();
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.remove(0)),
        _ => Err(Errors(errors).into()),
    }
}

/// The sentences of an error: one for each joined error.
pub fn sentences(error: &anyhow::Error) -> Vec<String> {
    match error.downcast_ref::<Errors>() {
        Some(several) => several.0.iter().map(|error| format!("{error:#}")).collect(),
        None => vec![format!("{error:#}")],
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentences: Vec<_> = self.0.iter().map(|error| format!("{error:#}")).collect();
        f.write_str(&sentences.join("\n"))
    }
}

impl std::error::Error for Errors {}
