//! The report of `vmm doctor --run`: runs it on a host with recognizable names, checks the report
//! against its schema with a validator of others, and looks for secrets in it.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::lab;
use crate::python::PYTHON;

/// Name of the report, unless `--report` names another.
pub const REPORT: &str = "transom-doctor.json";
/// Part of the host's name, of the user's, and of a variable, in the environment of `command`.
const CANARY: &str = "canary";
/// Folders whose paths name users.
const FOLDERS: [&str; 2] = ["home", "root"];
const VALIDATE: &str = "
import json, sys, jsonschema
schema = json.load(open(sys.argv[1]))
jsonschema.Draft7Validator.check_schema(schema)
jsonschema.Draft7Validator(schema).validate(json.load(sys.stdin))
";

/// `vmm doctor --run` with these words, in a folder. As root, the host has another name.
pub fn command(program: &Path, folder: &Path, words: &[&str]) -> Command {
    let mut command = if rustix::process::geteuid().is_root() {
        let mut unshare = Command::new("unshare");
        let script = "echo host-of-canary > /proc/sys/kernel/hostname && exec \"$@\"";
        unshare.args(["--uts", "sh", "-ec", script, "sh"]).arg(program);
        unshare
    } else {
        Command::new(program)
    };
    command.args(["doctor", "--run"]).args(words).current_dir(folder);
    command.env("USER", "user-of-canary").env("CANARY", "value-of-canary");
    command
}

/// Checks a report, and returns it.
pub fn check(text: &str) -> Result<Value> {
    validate(text)?;
    has_no_secrets(text)?;
    Ok(serde_json::from_str(text)?)
}

/// Python's jsonschema refuses what does not follow the schema.
pub fn validate(text: &str) -> Result<()> {
    let schema = lab::repository().join("vmm/src/doctor/report.schema.json");
    let mut python = Command::new(PYTHON);
    python.args(["-c", VALIDATE]).arg(schema);
    python.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = python.spawn().context(PYTHON)?;
    child.stdin.take().context("a pipe")?.write_all(text.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Looks for names of the host and of its user, for addresses, and for numbers of this machine.
fn has_no_secrets(text: &str) -> Result<()> {
    let mut secrets = vec![CANARY.to_owned()];
    secrets.extend(FOLDERS.map(|folder| format!("/{folder}/")));
    for file in [
        "/etc/machine-id",
        "/sys/class/dmi/id/product_uuid",
        "/sys/class/dmi/id/product_serial",
        "/proc/sys/kernel/random/boot_id",
    ] {
        let number = std::fs::read_to_string(file).unwrap_or_default().trim().to_owned();
        secrets.extend(Some(number).filter(|number| number.len() > 4));
    }
    for secret in secrets {
        ensure!(!text.contains(&secret), "the report has {secret}: {text}");
    }
    let words = text.split(|letter: char| !letter.is_ascii_hexdigit() && !":.".contains(letter));
    for word in words {
        let parts: Vec<_> = word.split(':').collect();
        let mac = parts.len() == 6 && parts.iter().all(|part| part.len() == 2);
        let parts: Vec<_> = word.split('.').collect();
        let ip = parts.len() == 4 && parts.iter().all(|part| part.parse::<u8>().is_ok());
        ensure!(!mac && !ip, "the report has an address: {word}: {text}");
    }
    Ok(())
}

/// The step with this name.
pub fn step<'a>(report: &'a Value, name: &str) -> Result<&'a Value> {
    let mut steps = report["steps"].as_array().into_iter().flatten();
    steps.find(|step| step["name"] == name).with_context(|| format!("no step {name}: {report}"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn secrets_are_found() {
        let path = format!("/{}/x", FOLDERS[0]);
        for text in ["of-canary", "52:54:00:12:34:56", "192.168.1.20", &path] {
            assert!(has_no_secrets(&format!("{{\"a\": \"{text}\"}}")).is_err(), "{text}");
        }
        has_no_secrets("\"6.1.0-9\" \"0000:00:02.0\" 1.2 \"2026-11-25T22:40:00Z\"").unwrap();
    }
}
