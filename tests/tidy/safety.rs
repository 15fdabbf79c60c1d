//! `unsafe`: the files that may use it, and the comments that it needs.
use syn::visit::{self, Visit};

use crate::tree::{Finding, Source, Tree};

/// The files that may use `unsafe`, each with the reason.
///
/// An addition to this list is a change of the architecture, and is reviewed as one.
const UNSAFE: &[(&str, &str)] = &[
    ("devices/host/src/disk/device.rs", "the ioctl that gives back room of a block device"),
    ("devices/host/src/disk/uring/test.rs", "a ring for a test, made as the kernel has it"),
    ("devices/host/src/disk/uring.rs", "the ring that carries a disk's requests to the kernel"),
    ("devices/host/src/net/arrivals.rs", "the ioctls of a tap's filter"),
    ("devices/host/src/net/packet.rs", "the interface that a socket of packets hears"),
    ("devices/host/src/net/tap.rs", "the ioctls of a tap device"),
    ("devices/host/src/share_blocks.rs", "the ioctl by which files share blocks"),
    ("devices/host/src/testutil/tap.rs", "a thread's move into a network namespace"),
    ("devices/host/src/usb/usbfs.rs", "the ioctls of an open USB device, and its transfers"),
    ("vmm/src/heap.rs", "a setting of the allocator"),
    ("vmm/src/kvm/fd.rs", "KVM's ioctls, and the shared run page of a processor"),
    ("vmm/src/ram.rs", "the mapping of guest memory"),
    ("vmm/jail/src/kernel.rs", "leaving the network, and what a refused call's signal tells"),
];

/// Freestanding guest code, which can harm only its own guest.
const GUESTS: [&str; 2] = ["vmm/probe/guest/", "vmm/probe/init/"];

fn is_guest(source: &Source) -> bool {
    GUESTS.iter().any(|folder| source.path.starts_with(folder))
}

/// Crate roots that forbid `unsafe`, which the workspace only denies.
const FORBIDDING: &[&str] =
    &["boot/src/lib.rs", "container/src/lib.rs", "container/src/main.rs", "tests/src/lib.rs"];

/// No unlisted file contains `unsafe`, and no listed file is without it.
pub(crate) fn listed(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in tree.sources.iter().filter(|source| !is_guest(source)) {
        let used = source.sequences(&["unsafe"]).next();
        match (used, UNSAFE.iter().find(|(path, _)| *path == source.path)) {
            (Some(index), None) => findings.push(source.finding(
                source.tokens[index].start.line,
                "`unsafe` in a file that is not on the list in tests/tidy/safety.rs",
            )),
            (None, Some((_, reason))) => findings
                .push(source.finding(1, format!("listed for `unsafe`, without need: {reason}"))),
            _ => {}
        }
    }
    findings
}

/// `#![forbid(unsafe_code)]` in the crates that never need it.
pub(crate) fn forbidden(tree: &Tree) -> Vec<Finding> {
    let root = |source: &&Source| {
        let test = source.path.strip_prefix("tests/").is_some_and(|rest| !rest.contains('/'));
        test || FORBIDDING.contains(&source.path.as_str())
    };
    let attribute = ["#", "!", "[", "forbid", "(", "unsafe_code", ")", "]"];
    let lacks = |source: &&Source| source.sequences(&attribute).next().is_none();
    let roots = tree.sources.iter().filter(root).filter(lacks);
    roots.map(|source| source.finding(1, "no `#![forbid(unsafe_code)]`")).collect()
}

/// A `// SAFETY:` above every block and every `unsafe impl`; no `pub unsafe fn` at all.
pub(crate) fn reasons(tree: &Tree) -> Vec<Finding> {
    let of = |source: &Source| {
        let mut blocks = Blocks(Vec::new());
        blocks.visit_file(&source.syntax);
        let bare = blocks.0.into_iter().filter(|line| !explained(source, *line));
        let mut findings: Vec<Finding> =
            bare.map(|line| source.finding(line, "`unsafe` without `// SAFETY:` above")).collect();
        for index in source.sequences(&["pub", "unsafe", "fn"]) {
            let line = source.tokens[index].start.line;
            let guest = is_guest(source);
            findings.extend((!guest).then(|| source.finding(line, "a `pub unsafe fn`")));
        }
        findings
    };
    tree.sources.iter().flat_map(of).collect()
}

/// Whether there is a `SAFETY` comment between the line and the blank line, brace or end of a
/// statement before it.
fn explained(source: &Source, line: usize) -> bool {
    let lines: Vec<&str> = source.text.lines().take(line).map(str::trim).collect();
    if lines.last().is_some_and(|line| line.contains("SAFETY:")) {
        return true;
    }
    let above = lines.iter().rev().skip(1);
    let end = |line: &&&str| line.is_empty() || (line.ends_with(['{', '}', ';']) && !comment(line));
    above.take_while(|line| !end(line)).any(|line| comment(line) && line.contains("SAFETY:"))
}

fn comment(line: &str) -> bool {
    line.starts_with("//")
}

/// The lines of unsafe blocks and implementations.
struct Blocks(Vec<usize>);

impl<'ast> Visit<'ast> for Blocks {
    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.0.push(block.unsafe_token.span.start().line);
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.0.extend(item.unsafety.map(|token| token.span.start().line));
        visit::visit_item_impl(self, item);
    }
}
