//! The reference pages, generated from the code. `vmm help reference` prints them; `docs/` has a
//! copy, which a test compares.

use std::fmt::Write as _;

use devices::registry;

use crate::config::OPTIONS;
use crate::control::COMMANDS;
use crate::kvm::CAPABILITIES;

/// All pages, as Markdown.
pub fn all() -> String {
    let mut text = String::from("# Reference of `vmm`\n\nMade by `vmm help reference`.\n\n");
    text.push_str("## Options of `vmm run` and `vmm inspect`\n\n");
    text.push_str("The same words are the keys of `--config FILE.json`; `--config -` reads from ");
    text.push_str("standard input.\n\n");
    text.push_str("| option | value | meaning |\n|---|---|---|\n");
    for option in OPTIONS {
        let value = option.value.replace('|', "\\|");
        let value = if value.is_empty() { String::new() } else { format!("`{value}`") };
        writeln!(text, "| `--{}` | {value} | {} |", option.key, option.help.trim())
            .expect("a string takes all");
    }
    text.push_str("\n## Devices\n\n");
    text.push_str(
        "`--device KIND[,KEY=VALUE...]`, or `{\"kind\": KIND, KEY: VALUE, ...}` in JSON. `--disk \
         PATH[,KEY=VALUE...]` is `--device nvme,path=PATH[,KEY=VALUE...]`. `--display \
         WIDTHxHEIGHT[,KEY=VALUE...]` is `--device display,mode=WIDTHxHEIGHT[,KEY=VALUE...]`.\n",
    );
    text.push_str(&device_tables());
    text.push_str("\n## Commands of `vmm ctl`\n\n| command | meaning |\n|---|---|\n");
    for usage in COMMANDS {
        let call = usage.call().replace('|', "\\|");
        writeln!(text, "| `{call}` | {} |", usage.help.trim()).expect("a string takes all");
    }
    text.push_str("\n## KVM capabilities\n\n| capability | must | for |\n|---|---|---|\n");
    for it in CAPABILITIES {
        let must = if it.required { "yes" } else { "" };
        writeln!(text, "| {} | {must} | {} |", it.name, it.purpose).expect("a string takes all");
    }
    text.push_str(
        "\n## Exit statuses\n\n| status | meaning |\n|---|---|\n\
         | 0 | the guest switched itself off |\n\
         | 1 | a request could not be carried out |\n\
         | 2 | the command line or the configuration is wrong |\n\
         | 70 | KVM cannot run the guest: the message has registers and instruction bytes |\n\
         | 77 | the jail forbids a system call: the message has its number and the thread |\n\
         | 88 | KVM is missing, or cannot run this machine |\n\
         | 128 + N | ended by signal N |\n",
    );
    text
}

/// Generated from the devices' sources: kind, example, and the fields with name, type and meaning.
type Kind = (&'static str, &'static str, &'static [(&'static str, &'static str, &'static str)]);
const KINDS: &[Kind] = include!(concat!(env!("OUT_DIR"), "/fields.rs"));

/// The kinds of devices and their keys, for a terminal.
pub fn devices() -> String {
    let mut text = String::from("Devices: --device KIND[,KEY=VALUE...]\n");
    for (kind, example, fields) in KINDS {
        writeln!(text, "\n  {kind:<14}{}", plain(example)).expect("a string takes all");
        for (name, of, meaning) in *fields {
            let value = if default_of(kind, name).is_empty() { " (required)" } else { "" };
            writeln!(text, "      {name}={}{value}  {}", word(of), plain(meaning))
                .expect("a string takes all");
        }
    }
    text
}

/// The kinds of devices and their keys, as Markdown.
fn device_tables() -> String {
    let mut text = String::new();
    for (kind, example, fields) in KINDS {
        write!(text, "\n### `{kind}`\n\n{example}\n").expect("a string takes all");
        if fields.is_empty() {
            continue;
        }
        text.push_str("\n| key | value | default | meaning |\n|---|---|---|---|\n");
        for (name, of, meaning) in *fields {
            let default = match default_of(kind, name).as_str() {
                "" => "required".to_owned(),
                "null" => String::new(),
                value => format!("`{value}`"),
            };
            let of = word(of).replace('|', "\\|");
            writeln!(text, "| `{name}` | `{of}` | {default} | {meaning} |")
                .expect("a string takes all");
        }
    }
    text
}

/// The default value of a key, as JSON. Empty if the key is required.
fn default_of(kind: &str, name: &str) -> String {
    // Give required keys a value that they accept, so that the other keys show their defaults.
    let mut words = serde_json::json!({ "kind": kind });
    loop {
        match serde_json::from_value::<registry::Config>(words.clone()) {
            Ok(config) => {
                let shown = serde_json::to_value(config).unwrap_or_default();
                return if words.get(name).is_some() {
                    String::new()
                } else {
                    shown.get(name).map_or("null".into(), |it| it.to_string().replace('"', ""))
                };
            }
            Err(error) => {
                let sentence = error.to_string();
                let missing = sentence.split('`').nth(1).unwrap_or_default();
                if !sentence.starts_with("missing field") || words.get(missing).is_some() {
                    return String::new();
                }
                words[missing] = "x".into();
            }
        }
    }
}

/// The syntax of a type's values.
fn word(of: &str) -> String {
    let inner = of.strip_prefix("Option<").and_then(|it| it.strip_suffix('>')).unwrap_or(of);
    match inner {
        "bool" => "on|off".into(),
        "PathBuf" => "FILE".into(),
        "String" => "TEXT".into(),
        "Stream" => "stdio|file:PATH|socket:PATH|none".into(),
        "Address" => "SLOT".into(),
        "Format" => "raw|qcow2".into(),
        "Direct" | "Choice" => "auto|on|off".into(),
        "Rate" => "high|super".into(),
        "Resolution" => "WIDTHxHEIGHT".into(),
        "Sector" => "512|4096".into(),
        "u8" | "u16" | "u32" | "u64" | "usize" => "NUMBER".into(),
        other => other.to_uppercase(),
    }
}

/// Removes Markdown's backquotes, for terminals.
fn plain(text: &str) -> String {
    text.replace('`', "")
}
