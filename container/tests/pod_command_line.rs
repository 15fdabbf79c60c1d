//! Runs `transom` as people and scripts do.

use std::process::{Command, Output};

/// Calls the program with these arguments and this environment only.
fn transom(words: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_transom"));
    command.args(words).env_clear().envs(environment.iter().copied());
    command.output().expect("the program runs")
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("what it prints is text")
}

fn complaint(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("what it prints is text")
}

#[test]
fn the_plan_of_the_probe_is_shown() {
    let small = [("VERSION", "probe"), ("RAM_SIZE", "64M"), ("DISK_DISABLE", "Y"), ("GPU", "Y")];
    let plan = transom(&["plan"], &small);
    assert_eq!(plan.status.code(), Some(0), "{}", complaint(&plan));
    let text = said(&plan);
    for line in ["VERSION=probe", "RAM_SIZE=64M", "runs: the probe", "warning: GPU has no effect"] {
        assert!(text.contains(line), "{line} in {text}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&said(&transom(&["plan", "--json"], &small))).expect("it is JSON");
    assert_eq!(json["source"]["kind"], "probe");
    assert_eq!(json["settings"]["DISK_DISABLE"], "Y");
}

#[test]
fn the_exit_status_matches_the_invalid_variable() {
    for (name, text, status) in [
        ("CPU_CORES", "x", 15),
        ("RAM_SIZE", "x", 16),
        ("NETWORK", "x", 24),
        ("MAC", "x", 28),
        ("BOOT_MODE", "x", 33),
        ("DEVICE", "x", 55),
        ("VERSION", "x", 58),
        ("LANGUAGE", "x", 62),
        ("DISK_SIZE", "x", 73),
        ("UUID", "x", 2),
    ] {
        let plan = transom(&["plan"], &[(name, text)]);
        assert_eq!(plan.status.code(), Some(status), "{name}");
        let sentence = complaint(&plan);
        assert!(sentence.starts_with(&format!("transom: {name}")), "{sentence}");
        assert_eq!(sentence.lines().count(), 1, "{sentence}");
    }
    let words = [("RAM_SIZE", "abc"), ("CPU_CORES", "x"), ("LANGUAGE", "Klingon")];
    let plan = transom(&["plan"], &words);
    let all = complaint(&plan);
    for name in words.map(|(name, _)| name) {
        assert!(all.lines().any(|it| it.starts_with(&format!("transom: {name}="))), "{all}");
    }
    assert_eq!((plan.status.code(), all.lines().count()), (Some(62), 3), "{all}");
    let words = [("VERSION", "tiny11"), ("RAM_MINIMUM", "1M"), ("RAM_SIZE", "64M")];
    let words = [&words[..], &[("STORAGE", "/not/there")]].concat();
    let download = transom(&["plan"], &words);
    assert_eq!(download.status.code(), Some(68), "{}", complaint(&download));
    assert!(complaint(&download).contains("/custom.iso"));
}

#[test]
fn answers_are_shown_without_secrets_unless_asked() {
    let words = [
        ("RAM_MINIMUM", "1M"),
        ("RAM_SIZE", "64M"),
        ("PASSWORD", "hush"),
        ("KEY", "ABCDE-12345-ABCDE-12345-ABCDE"),
        ("EDITION", "bakery"),
    ];
    let masked = transom(&["answers"], &words);
    assert_eq!(masked.status.code(), Some(0), "{}", complaint(&masked));
    let text = said(&masked);
    assert!(text.starts_with("<?xml") && text.contains("<Value>***</Value>"), "{text}");
    assert!(complaint(&masked).starts_with("warning: EDITION=bakery: "), "{}", complaint(&masked));
    // The password as the file has it.
    let encoded = "aAB1AHMAaABQAGEAcwBzAHcAbwByAGQA";
    assert!(!text.contains(encoded));
    assert!(said(&transom(&["answers", "--secrets"], &words)).contains(encoded));
    let script = said(&transom(&["answers", "SetupComplete.cmd"], &words));
    assert!(script.contains("/ipk ***\r\n"), "{script}");
    let unset = transom(&["answers", "--secrets"], &words[..2]);
    assert_eq!(unset.status.code(), Some(2), "{}", complaint(&unset));
    assert!(complaint(&unset).contains("PASSWORD is not set"));
}

#[test]
fn help_names_every_variable_and_wrong_arguments_are_reported() {
    let table = said(&transom(&["help", "env"], &[]));
    assert!(table.contains("RAM_SIZE: size, half, max [4G]"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 100));
    assert!(said(&transom(&["help", "env", "--markdown"], &[])).starts_with("# Variables"));
    assert!(said(&transom(&[], &[])).contains("transom plan"));
    assert!(said(&transom(&["plan", "--help"], &[])).starts_with("transom plan [--json]"));
    assert!(said(&transom(&["--version"], &[])).starts_with("transom "));
    assert!(said(&transom(&["exec", "--help"], &[])).starts_with("transom exec [--timeout"));
    let wrong = [
        &["pods"][..],
        &["pod", "x"],
        &["status", "x"],
        &["probe", "x"],
        &["shutdown", "--wait", "x"],
        &["screenshot"],
        &["plan", "x"],
        &["answers", "--all"],
        &["answers", "a", "b"],
        &["cp"],
        &["cp", "a"],
        &["cp", "a", "b"],
        &["cp", "-", "-"],
        &["cp", "-", "a"],
        &["cp", "--size", "x", "-", "a"],
        &["exec"],
        &["exec", "--timeout", "x", "true"],
        &["exec", "--timeout"],
        &["exec", "-i"],
        &["exec", "--what", "true"],
        &["exec", "--"],
        &["logs", "--tail"],
        &["help", "x"],
        &["help", "env", "x"],
    ];
    for words in wrong {
        let wrong = transom(words, &[]);
        assert_eq!(wrong.status.code(), Some(2), "{words:?}");
        assert_eq!(complaint(&wrong).lines().count(), 1);
    }
}
