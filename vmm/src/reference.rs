//! The reference pages, made from the code: `vmm help reference` prints them, `docs/` keeps a copy
//! that a test compares.

use std::fmt::Write as _;

use devices::registry;

use crate::config::OPTIONS;
use crate::control::COMMANDS;
use crate::kvm::CAPABILITIES;

/// All pages, as Markdown.
pub fn all() -> String {
    let mut text = String::from("# Reference of `vmm`\n\nMade by `vmm help reference`.\n\n");
    text.push_str("## Options of `vmm run` and `vmm inspect`\n\n");
    text.push_str("The same words are the keys of `--config FILE.json`.\n\n");
    text.push_str("| option | value | meaning |\n|---|---|---|\n");
    for option in OPTIONS {
        let value = option.value.replace('|', "\\|");
        let value = if value.is_empty() { String::new() } else { format!("`{value}`") };
        writeln!(text, "| `--{}` | {value} | {} |", option.key, option.help.trim())
            .expect("a string takes all");
    }
    text.push_str("\n## Devices\n\n");
    for line in devices().lines().skip(2) {
        writeln!(text, "{line}").expect("a string takes all");
    }
    text.push_str("\n## Commands of `vmm ctl`\n\n| command | meaning |\n|---|---|\n");
    for (name, help) in COMMANDS {
        writeln!(text, "| `{name}` | {} |", help.trim()).expect("a string takes all");
    }
    text.push_str("\n## KVM capabilities\n\n| capability | must | for |\n|---|---|---|\n");
    for it in CAPABILITIES {
        let must = if it.required { "yes" } else { "" };
        writeln!(text, "| {} | {must} | {} |", it.name, it.purpose).expect("a string takes all");
    }
    text.push_str(
        "\n## Exit statuses\n\n| status | meaning |\n|---|---|\n\
         | 0 | the guest switched itself off |\n\
         | 1 | something that was asked for cannot be done |\n\
         | 2 | the command line or the configuration is wrong |\n\
         | 70 | the guest did what KVM cannot run: the message has registers and bytes |\n\
         | 88 | no KVM, or one that cannot run what was asked for |\n\
         | 128 + N | ended by signal N |\n",
    );
    text
}

/// The kinds of devices.
pub fn devices() -> String {
    let mut text = String::from("Devices: --device KIND[,KEY=VALUE...]\n\n");
    for kind in registry::KINDS {
        writeln!(text, "- `{kind}`").expect("a string takes all");
    }
    text
}
