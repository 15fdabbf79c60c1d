//! Prints the reference of variables: `transom help env`, and `docs/variables.md`, which is
//! generated from it.

use std::fmt::Write as _;

use crate::settings::list::SECTIONS;
use crate::settings::variable::{Support, Variable};

/// The terminal's width in columns, limited to 40 to 160; 100 if standard output is not a terminal.
pub fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    let columns = size.map_or(0, |size| usize::from(size.ws_col));
    match columns {
        0 => 100,
        columns => columns.clamp(40, 160),
    }
}

/// The meaning of a variable, and whether it is translated or ignored.
fn meaning(variable: &Variable) -> String {
    let meaning = variable.meaning.split_whitespace().collect::<Vec<_>>().join(" ");
    match variable.support {
        Support::Full => meaning,
        Support::Translated => format!("{meaning} QEMU's words are translated."),
        Support::Ignored(instead) => format!("{meaning} No effect: {instead}."),
    }
}

/// The default; none for a secret, which is made, or explained in the meaning.
fn default(variable: &Variable) -> &'static str {
    if variable.kind().secret { "" } else { variable.default }
}

/// All names of a variable: its own, its aliases, and NAME_FILE.
fn names(variable: &Variable) -> Vec<String> {
    let mut names: Vec<String> = variable.names().map(str::to_owned).collect();
    names.extend(variable.kind().file.then(|| format!("{}_FILE", variable.name)));
    names
}

pub fn table(width: usize) -> String {
    let mut text = String::from(
        "Variables of the environment. Blanks and quotes around a value are ignored (except in \
         passwords), and an empty value means unset. A switch is Y or N, in any of the usual \
         words. NAME_FILE names a file that contains the value.\n",
    );
    text = wrap(&text, 0, width);
    for section in SECTIONS {
        write!(text, "\n{}\n", section.title.to_uppercase()).expect("a string takes all");
        for variable in section.variables {
            let mut head = format!("  {}", names(variable).join(", "));
            let (accepts, default) = (variable.kind().accepts, default(variable));
            if !accepts.is_empty() {
                write!(head, ": {accepts}").expect("a string takes all");
            }
            if !default.is_empty() {
                write!(head, " [{default}]").expect("a string takes all");
            }
            text.push_str(&wrap(&head, 4, width));
            text.push_str(&wrap(&format!("      {}", meaning(variable)), 6, width));
        }
    }
    text
}

/// All lines but the first are indented.
fn wrap(text: &str, indent: usize, width: usize) -> String {
    let first = text.len() - text.trim_start().len();
    let mut lines = " ".repeat(first);
    let mut column = first;
    for (index, word) in text.split_whitespace().enumerate() {
        let length = word.chars().count();
        if index > 0 && column + 1 + length > width {
            write!(lines, "\n{}", " ".repeat(indent)).expect("a string takes all");
            column = indent;
        } else if index > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines.push('\n');
    lines
}

/// The contents of `docs/variables.md`.
pub fn markdown() -> String {
    let mut text = String::from(
        "# Variables of the container\n\nMade by `transom help env --markdown`.\n\n\
         Blanks and quotes around a value are ignored (except in passwords), and an empty value \
         means unset. A switch is `Y` or `N`, or yes, true, 1, on, enable, enabled and their \
         opposites. Sizes are binary: `8G`, `8GB` and `8192M` are the same. `NAME_FILE` names a \
         file that contains the value, where the table lists it; a line feed at its end is \
         ignored. An unknown variable with a name close to one of these is reported in the log, \
         with the name that was probably meant.\n",
    );
    for section in SECTIONS {
        write!(text, "\n## {}\n\n", section.title).expect("a string takes all");
        text.push_str("| variable | value | default | meaning |\n|---|---|---|---|\n");
        for variable in section.variables {
            let names: Vec<_> = names(variable).iter().map(|name| format!("`{name}`")).collect();
            let accepts = variable.kind().accepts.replace('|', "\\|");
            let default = match default(variable) {
                "" => String::new(),
                default => format!("`{default}`"),
            };
            let meaning = meaning(variable).replace('|', "\\|");
            writeln!(text, "| {} | {accepts} | {default} | {meaning} |", names.join(", "))
                .expect("a string takes all");
        }
    }
    text.push_str(STATUSES);
    text
}

const STATUSES: &str = "
## Exit statuses

Where `dockurr/windows` has a status for an error, this is the same one.

| status | meaning |
|---|---|
| 0 | success |
| 1 | a request cannot be carried out, or another error |
| 2 | a variable or the command line is invalid |
| 13 | `STORAGE` is missing or cannot be written |
| 15 | `CPU_CORES` |
| 16 | `RAM_SIZE` |
| 20 | `DHCP` |
| 24 | the network |
| 28 | a MAC address or a mask |
| 29 | a kind of network that is not supported |
| 33 | `BOOT_MODE` |
| 55 | a device or an image does not exist |
| 58 | `VERSION` |
| 62 | `LANGUAGE` |
| 64 | the ISO image |
| 66 | the state of the volume: no step is safe |
| 68 | the download is not possible |
| 70 | KVM cannot run an instruction of the guest: the log has registers and bytes |
| 73 | the size or kind of a disk |
| 77 | the machine made a system call that its jail forbids: the log has its number |
| 86 | an answer file, or the files in `/oem` |
| 88 | no KVM |
| 124 | `transom exec`: the program runs longer than `--timeout` |
| 125 | `transom exec`: no agent answers in the guest |
| 126 | `transom exec`: the agent cannot run the program |
| 127 | `transom exec`: the program does not exist in the guest |
| 128 + N | ended by signal N: 143 when an engine stops the pod, 137 when it kills it |
";

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn variables_md_matches_the_program() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/variables.md");
        let kept = std::fs::read_to_string(path).unwrap_or_default();
        let hint = "please run: target/test-fast/transom help env --markdown > docs/variables.md";
        assert!(kept == markdown(), "{hint}");
    }

    #[test]
    fn the_table_fits_the_terminal() {
        for width in [40, 80, 100] {
            let table = table(width);
            let long = |line: &&str| {
                // A word alone may be longer than a narrow line.
                line.chars().count() > width && line.trim().contains(' ')
            };
            assert_eq!(table.lines().find(long), None);
            for variable in crate::settings::list::all() {
                assert!(table.contains(variable.name), "{}", variable.name);
            }
        }
    }

    #[test]
    fn secrets_have_no_default() {
        assert!(table(100).contains("PASSWORD, PASSWORD_FILE: secret text\n"));
        assert!(markdown().contains("| `PASSWORD`, `PASSWORD_FILE` | secret text |  |"));
    }

    #[test]
    fn every_variable_has_a_description() {
        for variable in crate::settings::list::all() {
            let meaning = meaning(variable);
            let end = meaning.ends_with('.') && !meaning.ends_with("..");
            assert!(end && meaning.len() > 12, "{}: {meaning}", variable.name);
            let known = variable.slot.is_some();
            let kept = matches!(variable.support, Support::Full | Support::Translated);
            assert_eq!(known, kept, "{}", variable.name);
        }
    }
}
