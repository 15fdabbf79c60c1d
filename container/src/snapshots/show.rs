//! Snapshots for people and programs.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::create::Made;
use super::manifest::{Kind, Manifest};
use super::{Listed, Name};
use crate::settings::value::in_mib;
use crate::setup_disk::fat::civil;

const DAY: u64 = 86_400;

/// UTC, as in `2026-01-31 23:59`.
fn date(seconds: u64) -> String {
    let (year, month, day) = civil(seconds / DAY);
    let minutes = seconds % DAY / 60;
    format!("{year}-{month:02}-{day:02} {:02}:{:02}", minutes / 60, minutes % 60)
}

fn size(bytes: u64) -> String {
    in_mib(bytes)
}

pub fn table(all: &[Listed]) -> String {
    if all.is_empty() {
        return "there are no snapshots\n".to_owned();
    }
    let heads = ("NAME", "CREATED (UTC)", "SIZE", "THE GUEST FINDS");
    let mut text = format!("{:<20} {:<16}  {:>8}  {}\n", heads.0, heads.1, heads.2, heads.3);
    for Listed { name, manifest, taken } in all {
        let name = name.as_str();
        match manifest {
            Ok(it) => {
                let (date, size, kind) = (date(it.created), size(*taken), it.kind.words());
                writeln!(text, "{name:<20} {date}  {size:>8}  {kind}")
            }
            Err(why) => writeln!(text, "{name:<20} cannot be used: {why}"),
        }
        .expect("a string takes all");
    }
    text
}

pub fn json(all: &[Listed]) -> String {
    let object = |it: &Listed| match &it.manifest {
        Ok(manifest) => json!({
            "name": it.name, "created": manifest.created, "kind": manifest.kind, "bytes": it.taken,
            "disks": disks(manifest),
        }),
        Err(why) => json!({ "name": it.name, "error": why }),
    };
    format!("{:#}\n", Value::from_iter(all.iter().map(object)))
}

/// Images of disks.
fn disks(manifest: &Manifest) -> Vec<&str> {
    let names = manifest.files.iter().map(|entry| entry.file.as_str());
    names.filter(|name| name.ends_with(".img") || name.ends_with(".qcow2")).collect()
}

pub fn made(made: &Made) -> String {
    let Manifest { name, kind, .. } = &made.manifest;
    let mut text = format!("{}: {}", name.as_str(), kind.words());
    if let Some(held) = &made.held {
        match &held.frozen {
            Err(why) if *kind == Kind::PowerCut => write!(text, ": {why}"),
            _ => Ok(()),
        }
        .and_then(|()| write!(text, ". The guest stood still for {:.2} s", held.seconds))
        .expect("a string takes all");
    }
    text + "\n"
}

pub fn deleted(name: &Name) -> String {
    format!("{} is deleted\n", name.as_str())
}

pub fn restored(manifest: &Manifest) -> String {
    let next = match manifest.kind {
        Kind::Memory => "the next start continues where it was",
        _ => "the next start boots its disk",
    };
    format!("{} is restored: {next}\n", manifest.name.as_str())
}
