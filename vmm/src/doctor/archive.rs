//! An initial RAM disk: a cpio archive in the format that Linux unpacks (`newc`, Linux,
//! `Documentation/driver-api/early-userspace/buffer-format.rst`).

/// Mode of an entry, and the number of a device node.
struct Kind {
    mode: u32,
    number: (u32, u32),
}

const FOLDER: Kind = Kind { mode: 0o040_755, number: (0, 0) };
const PROGRAM: Kind = Kind { mode: 0o100_755, number: (0, 0) };
const TRAILER: Kind = Kind { mode: 0, number: (0, 0) };
const CHARACTER_DEVICE: u32 = 0o020_600;
const END: &str = "TRAILER!!!";

#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    count: u32,
}

impl Archive {
    pub(super) fn folder(&mut self, name: &str) {
        self.entry(name, &FOLDER, &[]);
    }

    /// A file that may be executed.
    pub(super) fn program(&mut self, name: &str, bytes: &[u8]) {
        self.entry(name, &PROGRAM, bytes);
    }

    pub(super) fn device(&mut self, name: &str, number: (u32, u32)) {
        self.entry(name, &Kind { mode: CHARACTER_DEVICE, number }, &[]);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry(END, &TRAILER, &[]);
        self.bytes
    }

    /// The caller limits sizes to less than 4 GiB.
    fn entry(&mut self, name: &str, kind: &Kind, bytes: &[u8]) {
        self.count += 1;
        let Kind { mode, number: (major, minor) } = *kind;
        let length = |length: usize| u32::try_from(length).expect("the caller's limit");
        let (size, name_size) = (length(bytes.len()), length(name.len() + 1));
        // Inode, mode, user, group, links, time, size, device, device of the node, name, checksum.
        let numbers = [self.count, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_size, 0];
        self.bytes.extend(b"070701");
        for number in numbers {
            self.bytes.extend(format!("{number:08x}").bytes());
        }
        self.bytes.extend(name.bytes().chain([0]));
        self.align();
        self.bytes.extend(bytes);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn entries_are_aligned_and_end_with_a_trailer() {
        let mut archive = Archive::default();
        archive.folder("dev");
        archive.device("dev/console", (5, 1));
        archive.program("init", b"12345");
        let bytes = archive.finish();
        let (mut at, mut names) = (0, Vec::new());
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let number = |index: usize| {
                let text = &bytes[at + 6 + 8 * index..at + 14 + 8 * index];
                usize::from_str_radix(std::str::from_utf8(text).unwrap(), 16).unwrap()
            };
            let (size, name) = (number(6), number(11));
            names.push(String::from_utf8_lossy(&bytes[at + 110..at + 109 + name]).into_owned());
            if size > 0 {
                let start = (at + 110 + name).next_multiple_of(4);
                assert_eq!(&bytes[start..start + size], b"12345");
            }
            at = ((at + 110 + name).next_multiple_of(4) + size).next_multiple_of(4);
        }
        assert_eq!(names, ["dev", "dev/console", "init", END]);
    }
}
