//! Help and reference: both are complete, and `docs/reference.md` equals the program's output.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use transom_tests::program::{finish, not_run, run_in, vmm};
use vmm::config::OPTIONS;
use vmm::control::COMMANDS;
use vmm::kvm::KvmSupport;

fn help(words: &[&str]) -> String {
    let ended = run_in(&std::env::temp_dir(), words).expect("vmm");
    assert_eq!((ended.status, ended.stderr.as_str()), (0, ""), "{words:?}");
    ended.stdout
}

#[test]
fn every_command_and_option_has_its_help() {
    let overview = help(&[]);
    assert_eq!(help(&["help"]), overview);
    assert_eq!(help(&["--help"]), overview);
    for verb in ["run", "inspect", "doctor", "ctl", "help", "version"] {
        assert!(overview.contains(&format!("vmm {verb}")), "{overview}");
        let text = help(&[verb, "--help"]);
        assert!(text.starts_with(&format!("vmm {verb}")) || verb == "help", "{text}");
        assert!(text.lines().count() > 2, "{text}");
    }
    for verb in ["run", "inspect"] {
        let text = help(&["help", verb]);
        for option in OPTIONS {
            let call = format!("  --{}", option.key);
            let mut lines = text.lines().skip_while(|line| !line.starts_with(&call));
            assert!(lines.next().is_some_and(|line| line.contains(option.value)), "{call}");
            assert!(lines.next().is_some_and(|line| line.trim().len() > 10), "{call}");
        }
    }
    let text = help(&["help", "ctl"]);
    for usage in COMMANDS {
        let (call, meaning) = (usage.call(), usage.help.trim());
        assert!(text.contains(&call) && text.contains(meaning), "{text}");
    }
    let text = help(&["help", "devices"]);
    for kind in devices::registry::KINDS {
        assert!(text.contains(kind), "{text}");
    }
    assert_eq!(help(&["version"]), help(&["--version"]));
}

#[test]
fn reference_md_matches_the_program() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference.md");
    let printed = help(&["help", "reference"]);
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == printed, "please run: target/test-fast/vmm help reference > docs/reference.md");
    for option in OPTIONS {
        assert!(printed.contains(&format!("`--{}`", option.key)), "{}", option.key);
    }
}

/// For an unknown field, serde's error lists the known ones.
#[test]
fn the_reference_has_every_field_of_every_device() {
    let printed = help(&["help", "reference"]);
    for kind in devices::registry::KINDS {
        let json = serde_json::json!({ "kind": kind, "no-such-field": 1 });
        let error = serde_json::from_value::<devices::registry::Config>(json).unwrap_err();
        let error = error.to_string();
        let heading = format!("### `{kind}`\n");
        let part = printed.split(&heading).nth(1).unwrap_or_else(|| panic!("no {heading}"));
        let part = part.split("\n##").next().expect("a part");
        let known = error.split("expected").nth(1).unwrap_or_default();
        let fields: Vec<_> = known.split('`').skip(1).step_by(2).collect();
        for field in &fields {
            assert!(part.contains(&format!("| `{field}` |")), "{kind}: no {field} in {part}");
        }
        let rows = part.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(rows, fields.len(), "{kind}: {error}: {part}");
    }
}

#[test]
fn the_log_level_follows_the_configuration() {
    if KvmSupport::of_this_host() == KvmSupport::None {
        not_run("the_log_level_follows_the_configuration", "there is no usable /dev/kvm");
        return;
    }
    // The guest and the control client reset the machine; resets are logged at level info.
    let said = |level: &str, format: &str| {
        let mut command = Command::new(vmm());
        command.args(["run", "--cmdline", "then=reset torture=1,1"]).args(["--control", "c"]);
        let folder = tempfile::tempdir().expect("a folder");
        command.current_dir(folder.path()).env("VMM_LOG", level).env("VMM_LOG_FORMAT", format);
        command.args(["--serial", "none"]);
        let mut running = transom_tests::program::Running::spawn(&mut command).expect("vmm");
        let path = folder.path().join("c");
        let mut client = transom_tests::program::connect(&path).expect("the control socket");
        client.ask(&vmm::control::Command::Reset).expect("a reset");
        client.ask(&vmm::control::Command::Quit).expect("an end");
        running.wait(transom_tests::program::PATIENCE).expect("an end");
        running.stderr.text()
    };
    assert!(said("info", "").contains("INFO reset 1 took"), "{}", said("info", ""));
    assert_eq!(said("warn", ""), "");
    assert_eq!(said("off", ""), "");
    let lines = said("info", "json");
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        assert_eq!(line["level"], "INFO");
    }
    assert!(lines.contains("reset 1 took"), "{lines}");
    let ended = finish(Command::new(vmm()).arg("version").env("VMM_LOG", "no=such=level"));
    let ended = ended.expect("vmm");
    assert_eq!(ended.status, 0);
    assert!(ended.stderr.contains("VMM_LOG=no=such=level is invalid"), "{}", ended.stderr);
}
