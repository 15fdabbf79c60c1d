//! Dependencies: what each crate may use, and the few files that may use several crates.
use syn::visit::{self, Visit};

use crate::tree::{File, Finding, Source, Tree};

/// A folder, and the crates that its files must not name.
const STRANGERS: &[(&str, &[&str])] = &[
    ("devices/", &["kvm_ioctls", "kvm_bindings", "kvm", "boot", "jail", "screen", "vmm"]),
    ("devices/host/", &["devices"]),
    ("boot/", &["kvm_ioctls", "kvm_bindings", "kvm", "devices", "host", "vmm", "container"]),
    ("vmm/", &["container"]),
    ("vmm/jail/", &["kvm_ioctls", "kvm_bindings", "devices", "boot", "screen", "vmm"]),
    ("vmm/screen/", &["kvm_ioctls", "kvm_bindings", "devices", "boot", "jail", "vmm"]),
    ("share/", &["kvm_ioctls", "devices", "boot", "jail", "screen", "vmm", "container"]),
    ("container/", &["kvm_ioctls", "kvm_bindings", "boot"]),
];

/// Modules for I/O, which `boot` must not use: it takes bytes and returns bytes.
const OUTSIDE: &[&str] = &[
    "std::fs",
    "std::net",
    "std::process",
    "std::env",
    "std::thread",
    "std::os",
    "libc",
    "rustix",
];

/// The files of `vmm` that may use both `devices` and `boot`: the configuration and the recipe.
const BOTH: &[&str] = &["vmm/src/config.rs", "vmm/src/machine.rs", "vmm/src/machine/"];

/// The modules that `container` may use: of `vmm` the configuration and the control socket, of
/// `devices` the configurations that are part of the machine's.
const DOORS: &[(&str, &[&str])] = &[
    ("vmm", &["vmm::config", "vmm::control"]),
    (
        "devices",
        &[
            "devices::ahci",
            "devices::registry",
            "devices::virtio",
            "devices::usb",
            "devices::nvme",
            "devices::platform",
            "devices::display",
            "devices::e1000e",
        ],
    ),
];

/// A path in the source; `use` groups are expanded.
pub(crate) struct Path {
    pub(crate) text: String,
    pub(crate) line: usize,
}

impl Path {
    /// Whether it is `prefix` or something below it.
    fn is_in(&self, prefix: &str) -> bool {
        self.text.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    }
}

/// Collects every path of at least two names, also in macro arguments, and every `use`.
pub(crate) fn paths(source: &Source) -> Vec<Path> {
    let mut uses = Uses(Vec::new());
    uses.visit_file(&source.syntax);
    let mut paths = uses.0;
    let (tokens, mut index) = (&source.tokens, 0);
    let colons = |at: usize| {
        tokens.get(at).is_some_and(|token| token.is(":"))
            && tokens.get(at + 1).is_some_and(|token| token.is(":"))
    };
    let name = |at: usize| tokens.get(at).filter(|token| is_name(&token.text));
    while index < tokens.len() {
        if tokens[index].is("use") && !tokens.get(index + 1).is_some_and(|token| token.is("<")) {
            index += tokens[index..].iter().take_while(|token| !token.is(";")).count();
        }
        let Some(first) = name(index) else {
            index += 1;
            continue;
        };
        let mut text = first.text.clone();
        index += 1;
        while let (true, Some(next)) = (colons(index), name(index + 2)) {
            text = format!("{text}::{}", next.text);
            index += 3;
        }
        if text.contains("::") {
            paths.push(Path { text, line: first.start.line });
        }
    }
    paths
}

fn is_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// Expands `use` trees.
struct Uses(Vec<Path>);

impl Uses {
    fn add(&mut self, prefix: &str, tree: &syn::UseTree) {
        let mut leaf = |name: &syn::Ident| {
            self.0.push(Path { text: format!("{prefix}{name}"), line: name.span().start().line });
        };
        match tree {
            syn::UseTree::Path(path) => self.add(&format!("{prefix}{}::", path.ident), &path.tree),
            syn::UseTree::Name(name) => leaf(&name.ident),
            syn::UseTree::Rename(rename) => leaf(&rename.ident),
            syn::UseTree::Glob(glob) => {
                let text = prefix.trim_end_matches(':').to_owned();
                self.0.push(Path { text, line: glob.star_token.spans[0].start().line });
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add(prefix, tree));
            }
        }
    }
}

impl<'ast> Visit<'ast> for Uses {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add("", &item.tree);
        visit::visit_item_use(self, item);
    }
}

/// No crate names or depends on a crate that it must not use.
pub(crate) fn crates(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (folder, strangers) in STRANGERS {
        for source in tree.sources.iter().filter(|source| source.path.starts_with(folder)) {
            for path in paths(source) {
                if let Some(stranger) = strangers.iter().find(|name| path.is_in(name)) {
                    let what = format!("`{}`: {folder} must not know `{stranger}`", path.text);
                    findings.push(source.finding(path.line, what));
                }
            }
        }
        let manifest = tree.file(&format!("{folder}Cargo.toml"));
        for (line, name) in manifest.into_iter().flat_map(|it| dependencies(it, "dependencies]")) {
            if strangers.contains(&name.replace('-', "_").as_str()) {
                let what = format!("{folder} must not depend on `{name}`");
                findings.push(Finding::new(&format!("{folder}Cargo.toml"), line, what));
            }
        }
    }
    findings
}

/// The keys of a manifest's tables whose heading ends with `heading`.
pub(crate) fn dependencies(manifest: &File, heading: &str) -> Vec<(usize, String)> {
    let (mut within, mut found) = (false, Vec::new());
    for (number, line) in manifest.lines() {
        if line.starts_with('[') {
            within = line.trim().ends_with(heading);
        } else if let (true, Some(end)) = (within, line.find(['.', '=', ' '])) {
            found.push((number, line[..end].to_owned()));
        }
    }
    found
}

/// `boot` is pure: it takes a configuration, and returns bytes and their addresses.
pub(crate) fn boot_is_pure(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in tree.sources.iter().filter(|source| source.path.starts_with("boot/src/")) {
        let product = paths(source).into_iter().filter(|path| !source.in_tests(path.line));
        for path in product {
            if OUTSIDE.iter().any(|outside| path.is_in(outside)) {
                let what = format!("`{}`: boot does no I/O", path.text);
                findings.push(source.finding(path.line, what));
            }
        }
    }
    findings
}

/// Only the recipe uses both `devices` and `boot`.
pub(crate) fn both(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in tree.sources.iter().filter(|source| source.path.starts_with("vmm/src/")) {
        if BOTH.iter().any(|path| source.path.starts_with(path)) {
            continue;
        }
        let paths = paths(source);
        let first = |name: &str| paths.iter().find(|path| path.is_in(name));
        if let (Some(device), Some(boot)) = (first("devices"), first("boot")) {
            let what = format!("`{}` and `{}` in one file", device.text, boot.text);
            findings.push(source.finding(device.line.max(boot.line), what));
        }
    }
    findings
}

/// The loop of a vCPU passes accesses to the bus, and uses nothing else of `devices`.
pub(crate) fn vcpu_knows_the_bus(tree: &Tree) -> Vec<Finding> {
    let sources = tree.sources.iter().filter(|source| source.path == "vmm/src/vcpu.rs");
    let of = |source: &Source| {
        let device = |path: &Path| path.is_in("devices") && !path.is_in("devices::bus");
        let paths = paths(source).into_iter().filter(device);
        let what = |path: &Path| format!("`{}`: a vCPU knows the bus alone", path.text);
        paths.map(|path| source.finding(path.line, what(&path))).collect::<Vec<_>>()
    };
    sources.flat_map(of).collect()
}

/// `container` starts `vmm` as a process: it shares the configuration and the control socket.
pub(crate) fn doors(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in tree.sources.iter().filter(|source| source.path.starts_with("container/")) {
        for path in paths(source) {
            let of = DOORS.iter().find(|(name, _)| path.is_in(name));
            let Some((_, doors)) = of else { continue };
            if !doors.iter().any(|door| path.is_in(door)) {
                let what = format!("`{}`: container knows {} alone", path.text, doors.join(", "));
                findings.push(source.finding(path.line, what));
            }
        }
    }
    findings
}

/// Every crate uses the workspace's table of lints. The freestanding guest has its own.
pub(crate) fn lints(tree: &Tree) -> Vec<Finding> {
    let crates = tree.files.iter().filter(|file| {
        let member = file.text.contains("[package]");
        file.name() == "Cargo.toml" && member
    });
    // A crate that is a workspace of its own needs another compiler, or many packages.
    let crates = crates.filter(|file| !file.text.contains("\n[workspace]\n"));
    let lacks = crates.filter(|file| !file.text.contains("[lints]\nworkspace = true"));
    lacks.map(|file| Finding::new(&file.path, 1, "no `[lints] workspace = true`")).collect()
}
