//! What was said and has no effect on what the machine runs.

use std::path::Path;

use vmm::config::Config;

use super::Source;
use crate::settings::Settings;
use crate::settings::environment::Said;
use crate::settings::value::Value as _;

/// Variables of an installation that answers itself.
const INSTALLATION: [&str; 16] = [
    "EDITION",
    "REGION",
    "KEY",
    "COMMAND",
    "LOG",
    "AUTOLOGIN",
    "DOMAIN",
    "DOMAIN_OU",
    "WORKGROUP",
    "VERIFY",
    "REMOVE",
    "MIDO",
    "ESD",
    "CONNECTIONS",
    "UNPACK",
    "VERSION",
];

/// A sentence for each such thing.
pub(super) fn notes(said: &Said, source: &Source, root: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    if let Source::Medium(medium) = source {
        let is_its_name = |name: &str| name == "VERSION" && is_file(&said.settings);
        let names = INSTALLATION.into_iter().filter(|name| said.names.contains(name));
        let names: Vec<_> = names.filter(|name| !is_its_name(name)).collect();
        let has = if names.len() == 1 { "has" } else { "have" };
        if !names.is_empty() {
            notes.push(format!(
                "{} {has} no effect: a person installs what is on {}",
                names.join(", "),
                medium.display()
            ));
        }
    }
    if root.join("shared").is_dir() {
        notes.push(
            "/shared is mounted, and the guest does not see it: put files into /oem before the \
             installation, or copy them through a remote desktop"
                .to_owned(),
        );
    }
    let layout = said.settings.windows.keyboard.as_ref().map(|it| it.show());
    if let Some(layout) = layout.filter(|it| Config::default().set("keyboard", it).is_err()) {
        notes.push(format!(
            "KEYBOARD={layout}: no such layout of viewers is known: the screen takes keys as on \
             one of the United States"
        ));
    }
    notes
}

/// Whether the version is the name of a medium.
fn is_file(settings: &Settings) -> bool {
    matches!(settings.windows.version, crate::settings::version::Version::File(_))
}

#[cfg(test)]
mod test {
    use crate::settings::environment::read;

    use super::*;

    #[test]
    fn what_a_medium_makes_void_is_said_in_one_sentence() {
        let root = tempfile::tempdir().unwrap();
        let of = |words: &[(&str, &str)], source: &Source| {
            let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
            notes(&read(&words).unwrap(), source, root.path())
        };
        let medium = Source::Medium("/custom.iso".into());
        assert_eq!(of(&[("RAM_SIZE", "8G")], &medium), [""; 0]);
        assert_eq!(of(&[("VERSION", "my.iso")], &medium), [""; 0]);
        let words = [("EDITION", "core"), ("VERSION", "10"), ("RAM_SIZE", "8G")];
        assert_eq!(
            of(&words, &medium),
            ["EDITION, VERSION have no effect: a person installs what is on /custom.iso"]
        );
        // Who has it installed may go on saying how.
        assert_eq!(of(&words, &Source::Disk("/storage/data.img".into())), [""; 0]);
        let strange = of(&[("KEYBOARD", "zz-ZZ")], &Source::Probe);
        assert!(strange[0].starts_with("KEYBOARD=zz-ZZ: "), "{strange:?}");
        std::fs::create_dir(root.path().join("shared")).unwrap();
        assert!(of(&[], &Source::Probe)[0].starts_with("/shared is mounted"));
    }
}
