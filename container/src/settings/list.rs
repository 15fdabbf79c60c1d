//! All variables that are known, by section. Every one of the reference image is here: done,
//! translated, or with a sentence that says what to use instead.

mod balloon;
mod machine;
mod network;
mod processor;
mod screen;
mod storage;
mod windows;

use super::variable::Variable;

/// Variables that belong together.
pub struct Section {
    /// Its heading.
    pub title: &'static str,
    /// Its lines.
    pub variables: &'static [Variable],
}

/// All of them, in the order in which people look for them.
pub const SECTIONS: &[Section] = &[
    Section { title: "Windows", variables: windows::WINDOWS },
    Section { title: "Account and names", variables: windows::ACCOUNT },
    Section { title: "Getting Windows", variables: windows::MEDIA },
    Section { title: "Processors and memory", variables: processor::PROCESSOR },
    Section { title: "Disks", variables: storage::STORAGE },
    Section { title: "Network", variables: network::NETWORK },
    Section { title: "Screen", variables: screen::SCREEN },
    Section { title: "Machine", variables: machine::MACHINE },
    Section { title: "Start, stop and messages", variables: machine::POD },
    Section { title: "Balloon", variables: balloon::BALLOON },
    Section { title: "Shared folders", variables: windows::SHARES },
];

/// Every variable of every section.
pub fn all() -> impl Iterator<Item = &'static Variable> {
    SECTIONS.iter().flat_map(|section| section.variables)
}

/// The variable of this name or alias.
pub fn find(name: &str) -> Option<&'static Variable> {
    all().find(|variable| variable.names().any(|own| own == name))
}
