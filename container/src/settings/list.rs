//! All known variables, by section. The list includes every variable of the reference image:
//! supported, translated, or with a sentence on what to use instead.

mod balloon;
mod machine;
mod network;
mod processor;
mod screen;
mod storage;
mod windows;

use super::variable::Variable;

pub struct Section {
    pub title: &'static str,
    /// In the order of the reference.
    pub variables: &'static [Variable],
}

/// In the order of the reference.
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

pub fn all() -> impl Iterator<Item = &'static Variable> {
    SECTIONS.iter().flat_map(|section| section.variables)
}

/// Finds a variable by its name or an alias.
pub fn find(name: &str) -> Option<&'static Variable> {
    all().find(|variable| variable.names().any(|own| own == name))
}
