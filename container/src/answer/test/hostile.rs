//! Hostile values of every variable of the list: each is refused or ignored in one sentence, or it
//! is data in the answer file and nowhere else.

use std::collections::BTreeSet;

use base64::Engine as _;

use super::*;
use crate::settings::list;
use crate::settings::settle::settle;

/// Variables whose use in scripts is their purpose.
const IN_SCRIPTS: [&str; 3] = ["COMMAND", "VERSION", "INSTALLER"];

fn check_sentence(sentence: &str) {
    let plain = !sentence.contains(char::is_control) && !sentence.contains('\u{202e}');
    assert!(plain && !sentence.is_empty(), "{sentence:?}");
}

fn is_secret(name: &str) -> bool {
    list::find(name).is_some_and(|variable| variable.kind().secret)
}

/// The answer file's texts, and the scripts.
struct Made {
    texts: Vec<String>,
    scripts: Vec<SetupFile>,
}

impl Made {
    /// `None` if no Windows is installed with these variables.
    fn of(input: &ParsedEnvironment) -> Option<Self> {
        let settings = &input.settings;
        let target = Target::of_version(&settings.windows).ok()?;
        let machine = from_settings::machine(settings, &BIG, settings.disk.controller.value);
        let (answers, warnings) = from_settings::answers(settings, &target, machine);
        warnings.iter().for_each(|warning| check_sentence(warning));
        let (file, scripts) = files(&answers, None, Secrets::Shown)
            .unwrap()
            .into_iter()
            .partition::<Vec<_>, _>(|file| file.name() == "Autounattend.xml");
        let file = String::from_utf8(file[0].bytes.clone()).unwrap();
        let root = tree(&file).unwrap();
        schema::validate(&root).unwrap();
        let mut all = Vec::new();
        collect(&root, &mut Vec::new(), &mut all);
        let texts = all.into_iter().map(|(_, text)| text).collect();
        Some(Self { texts, scripts })
    }
}

/// A password as the answer file has it: with the name of its element, in base 64.
fn hidden(value: &str) -> [String; 2] {
    ["Password", "AdministratorPassword"].map(|element| {
        let text = format!("{value}{element}");
        let bytes: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        base64::engine::general_purpose::STANDARD.encode(bytes)
    })
}

/// The number of times that the value is in the answer file, whole.
fn check(name: &str, value: &str, base: &[(&str, &str)]) -> usize {
    let others = base.iter().filter(|(own, _)| *own != name).copied();
    let words: Vec<_> = others.chain([(name, value)]).collect();
    let read = parsed(&words).and_then(|input| settle(&input, &roomy()).map(|_| input));
    let input = match read {
        Ok(input) => input,
        Err(error) => {
            let sentence = format!("{error:#}");
            check_sentence(&sentence);
            // Secrets are not shown.
            let is_shown = is_secret(name) && sentence.contains(value);
            assert!(!is_shown && sentence.contains(": "), "{name}: {sentence}");
            return 0;
        }
    };
    input.warnings.iter().for_each(|warning| check_sentence(warning));
    let usual = Made::of(&parsed(base).unwrap()).unwrap();
    let Some(made) = Made::of(&input) else { return 0 };
    if !IN_SCRIPTS.contains(&name) {
        assert!(made.scripts == usual.scripts, "{name}={value:?} is in a script");
    }
    let known: BTreeSet<_> = usual.texts.iter().collect();
    let is_new = |text: &&String| !known.contains(text);
    let new: Vec<_> = made.texts.iter().filter(is_new).collect();
    let whole = |text: &String| text == value || hidden(value).contains(text);
    let strange = new.iter().find(|text| !whole(text) && text.contains(value));
    assert_eq!(strange, None, "{name}={value:?} is part of another text");
    new.into_iter().filter(|text| whole(text)).count()
}

#[test]
fn hostile_values_of_every_variable_are_data_or_refused() {
    let long = "x".repeat(200);
    let domain = [("DOMAIN", "corp.example.com"), ("USERNAME", "me"), ("PASSWORD", "secret")];
    let script = [("INSTALLER", "script")];
    let mut arrived = BTreeSet::new();
    for variable in list::all() {
        for value in HOSTILE.into_iter().chain([long.as_str()]) {
            for base in [&[][..], &domain, &script] {
                if check(variable.name, value, base) > 0 {
                    arrived.insert(variable.name);
                }
            }
        }
    }
    // Windows takes such values in no other name or number.
    assert_eq!(arrived, ["DOMAIN_OU", "PASSWORD", "USERNAME", "WORKGROUP"].into());
}

#[test]
fn a_command_is_one_line_whatever_it_is() {
    for value in HOSTILE {
        let Ok(input) = parsed(&[("COMMAND", value)]) else {
            assert!(value.contains('\n'), "{value:?} is refused");
            continue;
        };
        let made = Made::of(&input).unwrap();
        let of = |name: &str| made.scripts.iter().find(|file| file.name() == name).unwrap();
        let install = String::from_utf8(of("install.bat").bytes.clone()).unwrap();
        assert_eq!(install.lines().next_back(), Some(value));
        let others = made.scripts.iter().filter(|file| file.name() != "install.bat");
        let usual = Made::of(&parsed(&[]).unwrap()).unwrap().scripts;
        assert!(others.eq(usual.iter()), "{value:?} is in another script");
    }
}
