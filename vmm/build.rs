//! Collects the documentation of the devices' configuration from their sources, for
//! `src/reference.rs`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use anyhow::{Context, Result, ensure};

fn main() -> ExitCode {
    match collect_fields() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Paths relative to this package.
const DEVICES: &str = "../devices/src";
const HOST: &str = "../devices/host/src";

/// Parses a line of the registry: `"edu" Edu: crate::pci::edu::Config,`.
fn registered(line: &str) -> Option<(&str, &str)> {
    let (kind, rest) = line.trim().strip_prefix('"')?.split_once('"')?;
    let path = rest.split_once(": crate::")?.1.strip_suffix("::Config,")?;
    Some((kind, path))
}

/// Writes `fields.rs`: for each kind of device, the comments on its `Config` and on the fields.
fn collect_fields() -> Result<()> {
    let package = PathBuf::from(env::var("CARGO_MANIFEST_DIR").context("not started by cargo")?);
    let [devices, host] = [DEVICES, HOST].map(|folder| package.join(folder));
    println!("cargo::rerun-if-changed={}", devices.display());
    println!("cargo::rerun-if-changed={}", host.display());
    let registry = fs::read_to_string(devices.join("registry.rs")).context("registry.rs")?;
    let mut list = String::from("&[\n");
    let mut count = 0;
    for (kind, path) in registry.lines().filter_map(registered) {
        let source = module(&devices, path)?;
        let (text, mut fields) = config(&source).with_context(|| path.to_owned())?;
        if let Some(shared) = wrapped(&source) {
            fields = config(&module(&host, shared)?).with_context(|| shared.to_owned())?.1;
        }
        writeln!(list, "    ({kind:?}, {text:?}, &{fields:?}),")?;
        count += 1;
    }
    ensure!(count > 0, "no devices in registry.rs");
    list.push(']');
    let out = PathBuf::from(env::var("OUT_DIR").context("not started by cargo")?);
    fs::write(out.join("fields.rs"), list).context("fields.rs")
}

fn module(devices: &Path, path: &str) -> Result<String> {
    let file = devices.join(path.replace("::", "/"));
    let mut files = [file.join("config.rs"), file.with_extension("rs")];
    let found = files.iter_mut().find(|file| file.exists());
    let found = found.with_context(|| format!("{}: no such module", file.display()))?;
    fs::read_to_string(&*found).with_context(|| found.display().to_string())
}

/// The module of `host` whose `Config` this source wraps, if it does.
fn wrapped(source: &str) -> Option<&str> {
    let line = source.lines().find_map(|line| line.strip_prefix("pub struct Config(pub host::"))?;
    line.strip_suffix("::Config);")
}

type Field = (String, String, String);

/// The comment on `Config`, and name, type and comment of its fields. Parses line by line, which
/// works because the sources are formatted.
fn config(source: &str) -> Result<(String, Vec<Field>)> {
    let mut fields = Vec::new();
    let mut comment = String::new();
    let (mut own, mut dashes, mut skipped) = (None, false, false);
    for line in source.lines().map(str::trim) {
        dashes |= own.is_none() && line.contains("rename_all = \"kebab-case\"");
        skipped |= own.is_some() && line == "#[serde(skip)]";
        if let Some(text) = line.strip_prefix("///") {
            comment.push_str(text);
        } else if line.starts_with("pub struct Config") {
            own = Some(std::mem::take(&mut comment));
            if line.ends_with(['}', ';']) {
                break;
            }
        } else if own.is_some() && line == "}" {
            break;
        } else if let (true, Some(field)) = (own.is_some(), line.strip_prefix("pub ")) {
            let (name, kind) = field.trim_end_matches(',').split_once(": ").context("a field")?;
            let text = std::mem::take(&mut comment).trim().to_owned();
            let name = if dashes { name.replace('_', "-") } else { name.to_owned() };
            // A skipped field has no text form.
            if !std::mem::take(&mut skipped) {
                fields.push((name, kind.to_owned(), text));
            }
        } else if !line.starts_with("#[") {
            comment.clear();
            dashes &= own.is_some();
        }
    }
    let own = own.context("no `pub struct Config`")?;
    Ok((own.trim().to_owned(), fields))
}
