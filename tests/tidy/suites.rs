//! The table of suites (`tests/suites`), which `./test` reads.
use std::collections::BTreeMap;

use crate::tree::{File, Finding, Tree};

const TABLE: &str = "tests/suites";

/// The table lists every integration test with its needs, and nothing else.
pub(crate) fn listed(tree: &Tree) -> Vec<Finding> {
    let Some(table) = tree.file(TABLE) else { return Vec::new() };
    let mut targets: BTreeMap<&str, &File> =
        tree.files.iter().filter_map(|file| Some((target(file)?, file))).collect();
    let mut findings = Vec::new();
    let rows = table.lines().filter(|(_, line)| !line.starts_with('#') && !line.is_empty());
    for (number, row) in rows {
        let columns: Vec<&str> = row.split(" | ").collect();
        let &[name, _, needs, minutes] = columns.as_slice() else {
            findings.push(Finding::new(TABLE, number, "a row without four columns"));
            continue;
        };
        let lab = needs.split(", ").any(|need| need == "lab");
        let what = match targets.remove(name) {
            None => format!("`{name}` is not a suite, or is listed twice"),
            Some(file) if lab != file.text.contains("\nuse transom_tests::suite") => {
                format!("`{name}`: wrong about the lab, which {} decides", file.path)
            }
            Some(_) if minutes.parse::<f32>().is_err() => format!("`{minutes}` is not a number"),
            Some(_) => continue,
        };
        findings.push(Finding::new(TABLE, number, what));
    }
    let missing = targets
        .values()
        .map(|file| Finding::new(&file.path, 1, format!("a suite that `{TABLE}` does not list")));
    findings.extend(missing);
    findings
}

/// Cargo's name of the integration test whose root this file is.
fn target(file: &File) -> Option<&str> {
    let (folder, name) = file.path.rsplit_once('/')?;
    let name = name.strip_suffix(".rs")?;
    if folder == "tests" || folder.ends_with("/tests") {
        return Some(name);
    }
    let (parent, folder) = folder.rsplit_once('/')?;
    (name == "main" && parent.ends_with("/tests")).then_some(folder)
}
