//! Forbidden and required words: attributes, markers, output, names, doc comments.
use syn::visit::Visit;

use crate::tree::{File, Finding, Source, Tree};

/// Files that may print to standard output: commands, tests, benchmarks and build scripts.
const PRINTERS: &[&str] = &[
    "vmm/src/main.rs",
    "vmm/src/cli.rs",
    "vmm/src/doctor.rs",
    "vmm/src/inspect.rs",
    "container/src/main.rs",
    // Part of build scripts, which talk to cargo.
    "vmm/screen/pack/src/lib.rs",
    "tests/",
    "benches/",
];

/// Names that say nothing.
const EMPTY_NAMES: &[&str] =
    &["manager", "handler", "helper", "helpers", "util", "utils", "common", "base", "core", "misc"];

/// Files that may contain the words of a skip: those that print or count them, and benchmarks.
const SPEAKS_OF_SKIPS: &[&str] =
    &["tests/skip/", "tests/src/tally.rs", "tests/tidy.rs", "tests/tidy/", "benches/"];

/// Files that contain the markers because they forbid them.
const NAMES_MARKERS: &[&str] = &["STYLE.md", "tests/tidy.rs", "tests/tidy/"];

/// No `#[allow]` in any form: an `expect` with a reason is reported once it is unnecessary.
pub(crate) fn allow(tree: &Tree) -> Vec<Finding> {
    each(tree, |source| {
        let outer = source.sequences(&["#", "[", "allow", "("]);
        let inner = source.sequences(&["#", "!", "[", "allow", "("]);
        let mut attributes = Attributes::of(source, |attribute| {
            let list = attribute.meta.require_list();
            attribute.path().is_ident("cfg_attr")
                && list.is_ok_and(|list| list.tokens.to_string().contains("allow ("))
        });
        attributes.extend(outer.chain(inner).map(|index| source.tokens[index].start.line));
        (attributes, "`allow` where `expect` with a reason belongs, at most 0: 1")
    })
}

/// No `#[ignore]`: a test that cannot run on a host reports that when it runs.
pub(crate) fn ignore(tree: &Tree) -> Vec<Finding> {
    each(tree, |source| {
        let lines = Attributes::of(source, |attribute| attribute.path().is_ident("ignore"));
        (lines, "an ignored test, at most 0: 1")
    })
}

/// A test that cannot run reports it through the crate `skip`, whose lines `./test` counts.
pub(crate) fn skips(tree: &Tree) -> Vec<Finding> {
    each(tree, |source| {
        let exempt = SPEAKS_OF_SKIPS.iter().any(|path| source.path.starts_with(path));
        let own = |text: &str| {
            let text = text.trim_start_matches(['b', 'r', '#', '"']).trim_start_matches("\\n");
            // An error may say that a system cannot run on a host.
            text.replace("cannot run here", "").contains("not run here")
                || text.starts_with("not run")
                || text.contains(": not run:")
        };
        let literals = source.tokens.iter().filter(|it| !exempt && it.text.contains('"'));
        let lines = literals.filter(|it| own(&it.text)).map(|it| it.start.line).collect();
        (lines, "a skip that is not counted; call `skip::not_run`, at most 0: 1")
    })
}

/// No `cfg(feature)` in code.
pub(crate) fn cfg_feature(tree: &Tree) -> Vec<Finding> {
    each(tree, |source| {
        let mut lines = Attributes::of(source, |attribute| {
            let list = attribute.meta.require_list();
            (attribute.path().is_ident("cfg") || attribute.path().is_ident("cfg_attr"))
                && list.is_ok_and(|list| list.tokens.to_string().contains("feature ="))
        });
        let asked = source.sequences(&["cfg", "!", "(", "feature"]);
        lines.extend(asked.map(|index| source.tokens[index].start.line));
        (lines, "`cfg(feature)`, at most 0: 1")
    })
}

/// No `[features]` in a manifest.
pub(crate) fn features(tree: &Tree) -> Vec<Finding> {
    let manifests = tree.files.iter().filter(|file| file.name() == "Cargo.toml");
    let features = |file: &File| {
        let lines = file.lines().filter(|(_, line)| line.trim() == "[features]");
        lines
            .map(|(line, _)| Finding::new(&file.path, line, "cargo features, at most 0: 1"))
            .collect::<Vec<_>>()
    };
    manifests.flat_map(features).collect()
}

/// No markers of unfinished work: they belong in an issue.
pub(crate) fn todo(tree: &Tree) -> Vec<Finding> {
    let mut findings = each(tree, |source| {
        let todo = source.sequences(&["todo", "!"]);
        let lines = todo.chain(source.sequences(&["unimplemented", "!"]));
        let lines = lines.map(|index| source.tokens[index].start.line).collect();
        (lines, "unfinished code, at most 0: 1")
    });
    let exempt = |file: &&File| !NAMES_MARKERS.iter().any(|path| file.path.starts_with(path));
    for file in tree.files.iter().filter(exempt) {
        for (line, text) in file.lines() {
            let mut words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            if let Some(word) = words.find(|word| matches!(*word, "TODO" | "FIXME" | "XXX")) {
                let what = format!("`{word}` where an issue belongs, at most 0: 1");
                findings.push(Finding::new(&file.path, line, what));
            }
        }
    }
    findings
}

/// Standard output carries the answer of a command; everything else is logged.
pub(crate) fn println(tree: &Tree) -> Vec<Finding> {
    each(tree, |source| {
        let printer = PRINTERS.iter().any(|path| source.path.starts_with(path));
        if printer || source.path.ends_with("/build.rs") {
            return (Vec::new(), "");
        }
        let lines = source.sequences(&["println", "!"]).chain(source.sequences(&["print", "!"]));
        let lines = lines.map(|index| source.tokens[index].start.line).collect();
        (lines, "`println!` outside of a command's answer, at most 0: 1")
    })
}

/// Folders, files and modules have names that say what they are.
pub(crate) fn names(tree: &Tree) -> Vec<Finding> {
    let empty = |name: &str| {
        let mut words = name.split(['_', '-', '.', '/']);
        words.any(|word| EMPTY_NAMES.contains(&word))
    };
    let mut findings = Vec::new();
    for source in &tree.sources {
        if empty(&source.path) {
            findings.push(source.finding(1, format!("a name that says nothing: {}", source.path)));
        }
        for index in source.sequences(&["mod"]) {
            let Some(name) = source.tokens.get(index + 1) else { continue };
            if empty(&name.text) {
                let what = format!("a module name that says nothing: {}", name.text);
                findings.push(source.finding(name.start.line, what));
            }
        }
    }
    findings
}

/// Every Rust file says in its first lines what it is.
pub(crate) fn headings(tree: &Tree) -> Vec<Finding> {
    let headed = |source: &&Source| source.syntax.attrs.iter().any(|it| it.path().is_ident("doc"));
    let bare = tree.sources.iter().filter(|source| !headed(source));
    bare.map(|source| source.finding(1, "a file without `//!`")).collect()
}

/// Collects the lines of the attributes for which `wanted` is true.
struct Attributes<F> {
    wanted: F,
    lines: Vec<usize>,
}

impl<F: Fn(&syn::Attribute) -> bool> Attributes<F> {
    fn of(source: &Source, wanted: F) -> Vec<usize> {
        let mut attributes = Self { wanted, lines: Vec::new() };
        attributes.visit_file(&source.syntax);
        attributes.lines
    }
}

impl<'ast, F: Fn(&syn::Attribute) -> bool> Visit<'ast> for Attributes<F> {
    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if (self.wanted)(attribute) {
            self.lines.push(attribute.pound_token.span.start().line);
        }
    }
}

/// One finding with the rule's sentence for every line that `rule` returns.
fn each(tree: &Tree, rule: impl Fn(&Source) -> (Vec<usize>, &'static str)) -> Vec<Finding> {
    let findings = |source: &Source| {
        let (lines, what) = rule(source);
        lines.into_iter().map(|line| source.finding(line, what)).collect::<Vec<_>>()
    };
    tree.sources.iter().flat_map(findings).collect()
}
