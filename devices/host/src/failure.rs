//! Errors that choose the exit status of the program, so that scripts can tell failures apart.

use std::fmt;

/// Each program has its own type of status, `S`.
#[derive(Debug)]
pub struct Failure<S> {
    status: S,
    sentence: String,
}

impl<S: Copy + fmt::Debug + Send + Sync + 'static> Failure<S> {
    /// `sentence` names the value, the reason and the way out.
    #[expect(clippy::new_ret_no_self, reason = "it is only ever used as an error")]
    pub fn new(status: S, sentence: impl Into<String>) -> anyhow::Error {
        Self { status, sentence: sentence.into() }.into()
    }

    /// The status of an error, if its chain contains a `Failure` of this type.
    pub fn status_of(error: &anyhow::Error) -> Option<S> {
        error.chain().find_map(|it| it.downcast_ref::<Self>()).map(|it| it.status)
    }
}

impl<S> fmt::Display for Failure<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl<S: fmt::Debug> std::error::Error for Failure<S> {}
