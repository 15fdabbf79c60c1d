//! Sizes of downloads for people.

/// A size for people, as in `7.2 GB`.
pub(super) fn size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        1_000_000_000.. => (1_000_000_000, "GB"),
        1_000_000.. => (1_000_000, "MB"),
        _ => return format!("{bytes} bytes"),
    };
    let tenths = bytes / (unit / 10);
    format!("{}.{} {name}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn sizes_are_for_people() {
        assert_eq!(
            [0, 999, 1_500_000, 7_736_125_440].map(size),
            ["0 bytes", "999 bytes", "1.5 MB", "7.7 GB"]
        );
    }
}
