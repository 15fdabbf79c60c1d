//! The numbers of STYLE.md: limits of length, width and count.
use std::collections::BTreeSet;

use proc_macro2::LineColumn;
use syn::visit::{self, Visit};

use crate::tree::{Finding, Source, Tree};

pub(crate) const FUNCTION_LINES: usize = 60;
pub(crate) const FILE_LINES: usize = 600;
/// A longer test module is a file `test.rs`.
const TEST_LINES: usize = 200;
const FIELDS: usize = 15;
const METHODS: usize = 7;
const PARAMETERS: usize = 5;
const ERROR_VARIANTS: usize = 9;
const COLUMNS: usize = 100;
/// Columns of scripts: there is no formatter, and a command reads best on one line.
const SCRIPT_COLUMNS: usize = 120;
const CRATES: usize = 171;

/// The functions that may be longer: file, function, limit. There is one, by design.
const LONGER: &[(&str, &str, usize)] = &[("vmm/src/machine.rs", "build", 90)];

/// The properties of a function that the rules check.
struct Function {
    name: String,
    line: usize,
    parameters: usize,
    /// It implements a trait, which determines its signature.
    bound: bool,
    body: Option<(LineColumn, LineColumn)>,
}

/// Collects every function of a file, nested ones too.
#[derive(Default)]
struct Functions {
    found: Vec<Function>,
    bound: bool,
}

impl Functions {
    fn of(source: &Source) -> Vec<Function> {
        let mut functions = Self::default();
        functions.visit_file(&source.syntax);
        functions.found
    }

    fn push(&mut self, signature: &syn::Signature, block: Option<&syn::Block>) {
        let braces = |block: &syn::Block| {
            (block.brace_token.span.open().end(), block.brace_token.span.close().start())
        };
        self.found.push(Function {
            name: signature.ident.to_string(),
            line: signature.ident.span().start().line,
            parameters: signature.inputs.iter().map(values).sum(),
            bound: self.bound,
            body: block.map(braces),
        });
    }

    /// Visits the inner items with `bound` set, and restores it.
    fn within(&mut self, bound: bool, visit: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.bound, bound);
        visit(self);
        self.bound = before;
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.within(false, |this| {
            this.push(&item.sig, Some(&item.block));
            visit::visit_item_fn(this, item);
        });
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.within(item.trait_.is_some(), |this| visit::visit_item_impl(this, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.push(&item.sig, Some(&item.block));
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.within(false, |this| {
            this.push(&item.sig, item.default.as_ref());
            visit::visit_trait_item_fn(this, item);
        });
    }
}

/// Lines with code in the body. Comments and blank lines do not count, as in clippy.
pub(crate) fn functions(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in &tree.sources {
        for function in Functions::of(source) {
            let Some((open, close)) = function.body else { continue };
            let inside = source.tokens.iter();
            let inside = inside.filter(|token| token.start >= open && token.end <= close);
            let lines: BTreeSet<usize> =
                inside.flat_map(|token| token.start.line..=token.end.line).collect();
            let longer = |(path, name, _): &&(&str, &str, usize)| {
                *path == source.path && *name == function.name
            };
            let limit = LONGER.iter().find(longer).map_or(FUNCTION_LINES, |longer| longer.2);
            if lines.len() > limit {
                let what =
                    format!("lines in `{}`, at most {limit}: {}", function.name, lines.len());
                findings.push(source.finding(function.line, what));
            }
        }
    }
    findings
}

/// Parameters, including `self`. Implementations of traits are exempt: they have no choice.
pub(crate) fn parameters(tree: &Tree) -> Vec<Finding> {
    let of = |source: &Source| {
        let functions = Functions::of(source).into_iter();
        let wide = functions.filter(|function| !function.bound && function.parameters > PARAMETERS);
        let finding = |function: Function| {
            let (name, count) = (function.name, function.parameters);
            let what = format!("parameters of `{name}`, at most {PARAMETERS}: {count}");
            source.finding(function.line, what)
        };
        wide.map(finding).collect::<Vec<_>>()
    };
    tree.sources.iter().flat_map(of).collect()
}

/// The values of a parameter: a tuple counts as its elements.
fn values(input: &syn::FnArg) -> usize {
    fn of(kind: &syn::Type) -> usize {
        match kind {
            syn::Type::Tuple(tuple) => tuple.elems.iter().map(of).sum(),
            syn::Type::Reference(reference) => of(&reference.elem),
            _ => 1,
        }
    }
    match input {
        syn::FnArg::Receiver(_) => 1,
        syn::FnArg::Typed(typed) => of(&typed.ty),
    }
}

/// Lines of a file without its test module. Test modules in files of their own are exempt.
pub(crate) fn files(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in &tree.sources {
        let count = source.text.lines().count();
        let product = (1..=count).filter(|line| !source.in_tests(*line)).count();
        let tests = count - product;
        if tests > TEST_LINES {
            let what =
                format!("lines of tests in the file of the code, at most {TEST_LINES}: {tests}");
            findings.push(source.finding(1, what));
        }
        if product > FILE_LINES && !source.path.ends_with("/test.rs") {
            let what = format!("lines without tests, at most {FILE_LINES}: {product}");
            findings.push(source.finding(1, what));
        }
    }
    findings
}

/// The number of parts of structs, traits and error enums.
struct Parts<'a> {
    source: &'a Source,
    fields: Vec<Finding>,
    methods: Vec<Finding>,
    variants: Vec<Finding>,
}

impl<'a> Parts<'a> {
    fn of(source: &'a Source) -> Self {
        let (fields, methods, variants) = (Vec::new(), Vec::new(), Vec::new());
        let mut parts = Self { source, fields, methods, variants };
        parts.visit_file(&source.syntax);
        parts
    }

    fn over(&self, name: &syn::Ident, what: &str, limit: usize, count: usize) -> Option<Finding> {
        let what = format!("{what} of `{name}`, at most {limit}: {count}");
        (count > limit).then(|| self.source.finding(name.span().start().line, what))
    }
}

impl<'ast> Visit<'ast> for Parts<'_> {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        if !is_layout(&item.attrs) {
            let finding = self.over(&item.ident, "fields", FIELDS, item.fields.len());
            self.fields.extend(finding);
        }
        visit::visit_item_struct(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        let methods = item.items.iter().filter(|item| matches!(item, syn::TraitItem::Fn(_)));
        let finding = self.over(&item.ident, "methods", METHODS, methods.count());
        self.methods.extend(finding);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        if item.ident.to_string().ends_with("Error") {
            let count = item.variants.len();
            let finding = self.over(&item.ident, "variants", ERROR_VARIANTS, count);
            self.variants.extend(finding);
        }
        visit::visit_item_enum(self, item);
    }
}

/// Whether it is `#[repr(C)]`: a specification defines its fields.
fn is_layout(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let words = |meta: &syn::MetaList| meta.tokens.to_string();
        attribute.path().is_ident("repr")
            && attribute
                .meta
                .require_list()
                .is_ok_and(|meta| words(meta).split(',').any(|word| word.trim() == "C"))
    })
}

/// Fields of a struct that no specification defines.
pub(crate) fn fields(tree: &Tree) -> Vec<Finding> {
    tree.sources.iter().flat_map(|source| Parts::of(source).fields).collect()
}

/// Methods of a trait.
pub(crate) fn methods(tree: &Tree) -> Vec<Finding> {
    tree.sources.iter().flat_map(|source| Parts::of(source).methods).collect()
}

/// Variants of an enum whose name ends with `Error`.
pub(crate) fn variants(tree: &Tree) -> Vec<Finding> {
    tree.sources.iter().flat_map(|source| Parts::of(source).variants).collect()
}

/// Columns of code and scripts. A line with a link cannot be broken.
pub(crate) fn columns(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in &tree.files {
        let limit = match file {
            file if file.path.ends_with(".rs") || file.is_c() => COLUMNS,
            file if file.is_script() || file.is_sourced() => SCRIPT_COLUMNS,
            _ => continue,
        };
        for (line, text) in file.lines() {
            let count = text.chars().count();
            if count > limit && !text.contains("://") {
                let what = format!("columns, at most {limit}: {count}");
                findings.push(Finding::new(&file.path, line, what));
            }
        }
    }
    findings
}

/// Third-party crates in `Cargo.lock`; a higher limit needs a reason in `deny.toml`.
pub(crate) fn crates(tree: &Tree) -> Vec<Finding> {
    let Some(lock) = tree.file("Cargo.lock") else { return Vec::new() };
    let count = lock.lines().filter(|(_, line)| line.starts_with("source = ")).count();
    let what = format!("crates that are not ours, at most {CRATES}: {count}");
    (count > CRATES).then(|| Finding::new("Cargo.lock", 1, what)).into_iter().collect()
}

/// The two documents that must stay short enough to be read.
pub(crate) fn papers(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, limit) in [("STYLE.md", 150), ("ARCHITECTURE.md", 200)] {
        let count = tree.file(path).map_or(0, |file| file.lines().count());
        if count > limit {
            findings.push(Finding::new(path, 1, format!("lines, at most {limit}: {count}")));
        }
    }
    findings
}
