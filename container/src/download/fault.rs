//! Why a request or a download did not succeed, and whether it is tried again.

use std::fmt;

#[derive(Debug)]
pub enum Fault {
    /// The network or the server may answer better in a moment.
    Passing(anyhow::Error),
    /// The same request would end in the same way.
    Final(anyhow::Error),
    /// The host cannot take the file, whichever server has it.
    Host(anyhow::Error),
}

impl Fault {
    pub fn passing(sentence: impl fmt::Display) -> Self {
        Self::Passing(anyhow::anyhow!("{sentence}"))
    }

    pub fn last(sentence: impl fmt::Display) -> Self {
        Self::Final(anyhow::anyhow!("{sentence}"))
    }

    pub fn host(sentence: impl fmt::Display) -> Self {
        Self::Host(anyhow::anyhow!("{sentence}"))
    }
}

/// An error of the host, such as a full volume, is not the server's.
impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Self::Host(error.into())
    }
}

impl From<anyhow::Error> for Fault {
    fn from(error: anyhow::Error) -> Self {
        Self::Final(error)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passing(error) | Self::Final(error) | Self::Host(error) => write!(f, "{error:#}"),
        }
    }
}
