//! A file that firmware reads from fw_cfg.

/// The longest name that the directory has room for: 56 bytes, of which the last is 0.
pub const NAME_MAX: usize = 55;

/// A named file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// What the firmware asks for.
    pub name: String,
    /// What it gets.
    pub bytes: Vec<u8>,
}

impl File {
    pub(crate) fn new(name: &str, bytes: Vec<u8>) -> Self {
        debug_assert!(name.len() <= NAME_MAX, "{name}");
        Self { name: name.to_owned(), bytes }
    }
}
