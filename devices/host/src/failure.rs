//! Errors with an exit status of their own, for scripts that tell failures apart.

use std::fmt;

/// One sentence, and the program's own kind of status.
#[derive(Debug)]
pub struct Failure<S> {
    status: S,
    sentence: String,
}

impl<S: Copy + fmt::Debug + Send + Sync + 'static> Failure<S> {
    /// One sentence with the value, the reason and the way out.
    #[expect(clippy::new_ret_no_self, reason = "it is only ever used as an error")]
    pub fn new(status: S, sentence: impl Into<String>) -> anyhow::Error {
        Self { status, sentence: sentence.into() }.into()
    }

    /// The status of an error, if it has one of this kind.
    pub fn find(error: &anyhow::Error) -> Option<S> {
        error.chain().find_map(|it| it.downcast_ref::<Self>()).map(|it| it.status)
    }
}

impl<S> fmt::Display for Failure<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl<S: fmt::Debug> std::error::Error for Failure<S> {}
