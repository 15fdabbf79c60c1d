//! A file that firmware reads from fw_cfg.

/// The maximum length of a name: the directory has 56 bytes for it, including the 0 at the end.
pub const NAME_MAX: usize = 55;

/// A file, as fw_cfg offers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub name: String,
    pub bytes: Vec<u8>,
}

impl File {
    pub(crate) fn new(name: &str, bytes: Vec<u8>) -> Self {
        debug_assert!(name.len() <= NAME_MAX, "{name}");
        Self { name: name.to_owned(), bytes }
    }
}
