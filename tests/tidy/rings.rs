//! No dependency cycles between crates, nor between modules of a crate.
use std::collections::{BTreeMap, BTreeSet};

use crate::direction::{dependencies, paths};
use crate::tree::{Finding, Source, Tree};

/// The maximum number of dependency edges from the top crate to the bottom.
const DEPTH: usize = 3;

type Edges = BTreeMap<String, BTreeSet<String>>;

/// The product's crates depend on each other without cycles, at most three deep.
pub(crate) fn crates(tree: &Tree) -> Vec<Finding> {
    let is_product = |path: &str| !path.starts_with("tests/") && !path.starts_with("benches/");
    let manifests = tree.files.iter().filter(|file| file.name() == "Cargo.toml");
    let named: BTreeMap<_, _> = manifests
        .filter(|file| is_product(&file.path))
        .filter_map(|file| Some((package(&file.text)?, file)))
        .collect();
    let edges: Edges = named
        .iter()
        .map(|(name, file)| {
            let used = dependencies(file, "[dependencies]").into_iter().map(|(_, used)| used);
            (name.clone(), used.filter(|used| named.contains_key(used)).collect())
        })
        .collect();
    let mut findings = Vec::new();
    for (name, file) in &named {
        let what = match way_back(name, &edges) {
            Some(ring) => format!("a ring of crates: {}", ring.join(" -> ")),
            None if depth(name, &edges) > DEPTH => {
                format!("{DEPTH} edges of crates, and not {}", depth(name, &edges))
            }
            None => continue,
        };
        findings.push(Finding::new(&file.path, 1, what));
    }
    findings
}

fn package(manifest: &str) -> Option<String> {
    let (_, package) = manifest.split_once("[package]\nname = \"")?;
    Some(package.split_once('"')?.0.to_owned())
}

/// The length of the longest path. There must be no cycle.
fn depth(name: &str, edges: &Edges) -> usize {
    let below = edges.get(name).into_iter().flatten();
    below.map(|next| 1 + depth(next, edges)).max().unwrap_or(0)
}

/// The shortest path from a node back to itself.
fn way_back(start: &str, edges: &Edges) -> Option<Vec<String>> {
    let mut ways = vec![vec![start.to_owned()]];
    let mut seen = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let last = way.last().expect("a way has a start");
            for next in edges.get(last).into_iter().flatten() {
                let way: Vec<_> = way.iter().chain([next]).cloned().collect();
                if next == start {
                    return Some(way);
                }
                if seen.insert(next.clone()) {
                    longer.push(way);
                }
            }
        }
        ways = longer;
    }
    None
}

/// The files of a crate use each other without cycles. Uses within a family, which is a folder's
/// own file and the files in the folder, do not count. Nor do tests.
pub(crate) fn modules(tree: &Tree) -> Vec<Finding> {
    let roots: BTreeSet<_> = tree
        .sources
        .iter()
        .filter_map(|source| source.path.strip_suffix("src/lib.rs"))
        .map(|folder| format!("{folder}src/"))
        .collect();
    roots.iter().flat_map(|root| rings(tree, root)).collect()
}

fn rings(tree: &Tree, root: &str) -> Vec<Finding> {
    let files = tree.sources.iter().filter_map(|source| {
        let name = module(source.path.strip_prefix(root)?);
        Some((name, source))
    });
    let files: BTreeMap<_, _> = files.collect();
    let names: BTreeSet<_> = files.keys().cloned().collect();
    let edges: Edges = files
        .iter()
        .filter(|(name, _)| !name.split("::").any(|part| part.starts_with("test")))
        .map(|(name, source)| (name.clone(), used(name, source, &names)))
        .collect();
    let mut found = BTreeSet::new();
    let mut findings = Vec::new();
    for (name, source) in files {
        let Some(ring) = way_back(&name, &edges).filter(|_| !found.contains(&name)) else {
            continue;
        };
        findings.push(source.finding(1, format!("a ring of modules: {}", ring.join(" -> "))));
        found.extend(ring);
    }
    findings
}

/// The module path of a file: `a::b` for `a/b.rs` and `a/b/mod.rs`; empty for the root.
fn module(path: &str) -> String {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if matches!(path, "lib" | "main") { String::new() } else { path.replace('/', "::") }
}

/// The other modules that this module names outside of its tests.
fn used(name: &str, source: &Source, names: &BTreeSet<String>) -> BTreeSet<String> {
    let product = paths(source).into_iter().filter(|path| !source.in_tests(path.line));
    let others = product.filter_map(|path| target(name, &path.text, names));
    let is_family = |other: &str| {
        other.is_empty() || is_below(other, name) || is_below(name, other) || other == name
    };
    others.filter(|other| !is_family(other)).collect()
}

fn is_below(name: &str, other: &str) -> bool {
    name.strip_prefix(other).is_some_and(|rest| rest.starts_with("::"))
}

/// The deepest file that a path leads into.
fn target(name: &str, path: &str, names: &BTreeSet<String>) -> Option<String> {
    let mut parts = path.split("::").peekable();
    let mut at: Vec<&str> = name.split("::").collect();
    match parts.next()? {
        "crate" => at.clear(),
        "self" => {}
        "super" => {
            at.pop();
            while parts.next_if_eq(&"super").is_some() {
                at.pop();
            }
        }
        _ => return None,
    }
    for part in parts {
        at.push(part);
        if !names.contains(&at.join("::")) {
            at.pop();
            break;
        }
    }
    Some(at.join("::"))
}
