//! The bytes that this process has read from storage and written to it, as the kernel counts them.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

pub(super) struct Transfers(Option<File>);

impl Transfers {
    /// Must be opened before the jail, which hides it.
    pub(super) fn open() -> Self {
        Self(File::open("/proc/self/io").ok())
    }

    /// `None` if the kernel does not count them.
    pub(super) fn bytes(&self) -> Option<u64> {
        let mut text = [0; 512];
        let count = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
        sum(std::str::from_utf8(text.get(..count)?).ok()?)
    }
}

fn sum(text: &str) -> Option<u64> {
    let bytes = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok()
    };
    bytes("read_bytes:")?.checked_add(bytes("write_bytes:")?)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_transfers_of_storage_count() {
        let text = "rchar: 9\nwchar: 8\nsyscr: 7\nsyscw: 6\nread_bytes: 4096\nwrite_bytes: 12288\n\
                    cancelled_write_bytes: 5\n";
        assert_eq!(sum(text), Some(16384));
        assert_eq!(sum("rchar: 9\n"), None);
        assert_eq!(Transfers(None).bytes(), None);
    }
}
