//! Documents and scripts: the paths and links in them exist, and scripts are executable.
use crate::tree::{File, Finding, Tree};

/// A path in a document starts with one of these, or is at the top of the repository.
const FOLDERS: &[&str] =
    &["vmm", "devices", "boot", "container", "deploy", "docs", "share", "tests", "benches", ".ci"];

/// Folders of one developer's machine, and the files that may name them nevertheless.
const MACHINE: &[(&str, &[&str])] = &[
    (concat!("/wo", "rk/"), &[]),
    (concat!("/ho", "me/"), &[]),
    // The lab builds a root file system, which contains such a folder.
    (concat!("/ro", "ot/"), &["tests/lab/"]),
];

fn papers(tree: &Tree) -> impl Iterator<Item = &File> {
    tree.files.iter().filter(|file| file.path.ends_with(".md"))
}

/// The lines of a document outside of code blocks.
fn prose(file: &File) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    file.lines().filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// Every path in backticks exists.
pub(crate) fn named_paths(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in papers(tree) {
        for (line, text) in prose(file) {
            let quoted = text.split('`').skip(1).step_by(2).filter_map(as_path);
            let missing =
                quoted.flat_map(|path| alternatives(&path)).filter(|path| !tree.has(path));
            let finding = |path| Finding::new(&file.path, line, format!("there is no `{path}`"));
            findings.extend(missing.map(finding));
        }
    }
    findings
}

/// The path at the start of the quoted text, if it looks like one of this repository.
fn as_path(quoted: &str) -> Option<String> {
    let word = quoted.split_whitespace().next()?;
    // `area: what` is the subject of a commit, `<x>`, `*` and `…` stand for something else.
    if word.ends_with(':') || word.contains(['<', '*', '…', '$']) {
        return None;
    }
    let path = word.split(':').next()?.trim_end_matches('/');
    if let Some(path) = path.strip_prefix("./") {
        return (!path.is_empty()).then(|| path.to_owned());
    }
    let top = !path.contains('/') && (path.ends_with(".md") || path.ends_with(".toml"));
    let below = path.split_once('/').is_some_and(|(folder, _)| FOLDERS.contains(&folder));
    (top || below).then(|| path.to_owned())
}

/// Expands `a/{b,c}.rs` to two paths.
fn alternatives(path: &str) -> Vec<String> {
    let parts = path.split_once('{').and_then(|(before, rest)| {
        rest.split_once('}').map(|(choices, after)| (before, choices, after))
    });
    let Some((before, choices, after)) = parts else { return vec![path.to_owned()] };
    choices
        .split(',')
        .flat_map(|choice| alternatives(&format!("{before}{choice}{after}")))
        .collect()
}

/// The target of every link to a file or a heading of this repository exists.
pub(crate) fn links(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in papers(tree) {
        for (line, text) in prose(file) {
            for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                if !target.contains("://")
                    && !target.starts_with("mailto:")
                    && !leads(tree, file, target)
                {
                    let what = format!("a link that leads nowhere: {target}");
                    findings.push(Finding::new(&file.path, line, what));
                }
            }
        }
    }
    findings
}

fn leads(tree: &Tree, from: &File, target: &str) -> bool {
    let (path, heading) = target.split_once('#').unwrap_or((target, ""));
    let path = if path.is_empty() { from.path.clone() } else { resolve(&from.path, path) };
    let paper = tree.file(&path);
    let found = |file: &File| prose(file).any(|(_, line)| anchor(line).as_deref() == Some(heading));
    tree.has(&path) && (heading.is_empty() || paper.is_some_and(found))
}

/// `path` as seen from the file `from`.
fn resolve(from: &str, path: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The anchor that GitHub makes from a heading.
fn anchor(line: &str) -> Option<String> {
    let heading = line.strip_prefix('#')?.trim_start_matches('#').trim();
    let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
    let letters = heading.chars().filter(kept).flat_map(char::to_lowercase);
    Some(letters.map(|letter| if letter == ' ' { '-' } else { letter }).collect())
}

/// No file contains a path of one developer's machine.
pub(crate) fn machine_paths(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in &tree.files {
        let allowed = |may: &[&str]| may.iter().any(|path| file.path.starts_with(path));
        for (folder, _) in MACHINE.iter().filter(|(_, may)| !allowed(may)) {
            let named = |line: &str| line.match_indices(folder).any(|(at, _)| starts(line, at));
            let lines = file.lines().filter(|(_, line)| named(line));
            let what = format!("a path of one machine: {folder}");
            findings.extend(lines.map(|(line, _)| Finding::new(&file.path, line, what.clone())));
        }
    }
    findings
}

/// Whether the path found at `at` begins there, and is not the end of a longer one.
fn starts(line: &str, at: usize) -> bool {
    let before = line[..at].chars().next_back();
    !before.is_some_and(|letter| letter.is_alphanumeric() || "._-~})*".contains(letter))
}

/// A script has both a `#!` line and the permission to execute. A `.sh` file is a script unless its
/// first line declares that it is sourced.
pub(crate) fn scripts(tree: &Tree) -> Vec<Finding> {
    let wrong = |file: &&File| {
        let named = file.path.ends_with(".sh") && !file.is_sourced();
        file.is_script() != (file.executable || named) || file.is_script() && !file.executable
    };
    let what = |file: &File| {
        if file.is_script() {
            "is a script, but may not be run (chmod +x)"
        } else {
            "is to be run, but has no `#!` line"
        }
    };
    tree.files.iter().filter(wrong).map(|file| Finding::new(&file.path, 1, what(file))).collect()
}
