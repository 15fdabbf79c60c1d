//! Sets variables to any text.

use container::settings::environment::{Environment, read};
use container::settings::host::Host;
use container::settings::list;
use container::settings::settle::settle;
use container::settings::variable::Variable;

/// Sets the variable with this number to the text. An accepted value is shown and settled; an error
/// must be one line.
pub(crate) fn set(number: usize, text: &str) {
    let all: Vec<&Variable> = list::all().collect();
    let variable = all[number % all.len()];
    let environment: Environment = [(variable.name.into(), text.into())].into();
    let one_line = |sentence: &str| {
        assert!(!sentence.is_empty() && !sentence.contains(char::is_control), "{sentence:?}");
        assert!(sentence.len() < 4096, "{sentence}");
    };
    match read(&environment) {
        Ok(input) => {
            for warning in &input.warnings {
                one_line(warning);
            }
            if let Some(slot) = &variable.slot {
                let shown = (slot.show)(&input.settings);
                assert!(!shown.contains(char::is_control), "{}={shown:?}", variable.name);
            }
            let free_space = Some(1 << 40);
            let host = Host {
                memory: 64 << 30,
                free_space,
                further_space: [free_space; 5],
                ..Host::default()
            };
            match settle(&input, &host) {
                Ok((sizes, notes)) => {
                    assert!(sizes.processors > 0);
                    notes.iter().for_each(|note| one_line(note));
                }
                Err(error) => one_line(&format!("{error:#}")),
            }
        }
        Err(error) => {
            let sentence = format!("{error:#}");
            one_line(&sentence);
            assert!(sentence.starts_with(variable.name), "{sentence}");
        }
    }
}
