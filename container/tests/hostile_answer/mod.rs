//! Answer files of users, and lines of a guest that claim to be reports, with any bytes.

use std::sync::LazyLock;

use container::answer::custom::{self, Kind};
use container::answer::target::Target;
use container::answer::xml::Secrets;
use container::answer::{Answers, Machine, from_settings, parse, report};
use container::settings::Settings;

static ANSWERS: LazyLock<Answers> = LazyLock::new(|| {
    let settings = Settings::defaults();
    let target = Target::of_version(&settings.windows).expect("Windows 11");
    from_settings::answers(&settings, &target, Machine::default()).0
});

/// Changes the bytes as an answer file. A changed file can be changed again, and stays the same.
/// The first byte chooses the kind.
pub(crate) fn change(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let kind = if kind % 2 == 0 { Kind::Finished } else { Kind::Template };
    let change = |bytes: &[u8]| custom::adjust(bytes, kind, &ANSWERS, Secrets::Shown);
    match change(bytes) {
        Ok(made) => {
            parse::tree(&made).expect("a changed file is well-formed");
            assert_eq!(change(made.as_bytes()).expect("it is an answer file"), made);
        }
        Err(error) => assert!(!format!("{error:#}").is_empty()),
    }
    if let Ok(line) = std::str::from_utf8(bytes)
        && let Some(found) = report::read(line)
    {
        assert_eq!(report::read(&report::line(found)), Some(found));
    }
}
