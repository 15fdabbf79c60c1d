//! The files of the repository, with the Rust files parsed, for the rules.
use std::fmt;
use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use proc_macro2::{Delimiter, LineColumn, Span, TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A violation of a rule, printed as `path:line: what, the limit, the value`.
#[derive(Clone)]
pub(crate) struct Finding {
    path: String,
    line: usize,
    what: String,
}

impl Finding {
    pub(crate) fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// A file of the repository.
#[derive(Clone)]
pub(crate) struct File {
    /// Relative to the top of the repository, with `/`.
    pub(crate) path: String,
    /// Empty for a file that is not UTF-8.
    pub(crate) text: String,
    pub(crate) executable: bool,
}

impl File {
    pub(crate) fn new(path: &str, text: impl Into<String>) -> Self {
        Self { path: path.to_owned(), text: text.into(), executable: false }
    }

    pub(crate) fn executable(mut self) -> Self {
        self.executable = true;
        self
    }

    /// The part of the path after the last `/`.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Every line with its number, from 1.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }

    /// Whether its first line is a `#!` line (`#![` is Rust).
    pub(crate) fn is_script(&self) -> bool {
        self.text.starts_with("#!") && !self.text.starts_with("#![")
    }

    /// Whether it is C or assembly.
    pub(crate) fn is_c(&self) -> bool {
        [".c", ".h", ".S"].iter().any(|ending| self.path.ends_with(ending))
    }

    /// Whether scripts source it: its first line names the shell for shellcheck.
    pub(crate) fn is_sourced(&self) -> bool {
        self.text.starts_with("# shellcheck shell=")
    }
}

/// A Rust file, parsed.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) tokens: Vec<Token>,
    pub(crate) syntax: syn::File,
    /// The lines of items that are compiled only for tests.
    tests: Vec<RangeInclusive<usize>>,
}

/// A token with its line. A group becomes its opening and its closing token.
pub(crate) struct Token {
    pub(crate) text: String,
    pub(crate) start: LineColumn,
    pub(crate) end: LineColumn,
}

impl Token {
    pub(crate) fn is(&self, text: &str) -> bool {
        self.text == text
    }
}

impl Source {
    fn parse(file: &File) -> Result<Self, Finding> {
        let wrong = |error: syn::Error| {
            Finding::new(&file.path, error.span().start().line, format!("{error}"))
        };
        let stream: TokenStream = syn::parse_str(&file.text).map_err(wrong)?;
        let mut tokens = Vec::new();
        flatten(stream.clone(), &mut tokens);
        let syntax = syn::parse2(stream).map_err(wrong)?;
        let mut tests = Tests(Vec::new());
        tests.visit_file(&syntax);
        let (path, text) = (file.path.clone(), file.text.clone());
        Ok(Self { path, text, tokens, syntax, tests: tests.0 })
    }

    /// Whether the line is in a `#[cfg(test)]` item.
    pub(crate) fn in_tests(&self, line: usize) -> bool {
        self.tests.iter().any(|lines| lines.contains(&line))
    }

    pub(crate) fn finding(&self, line: usize, what: impl Into<String>) -> Finding {
        Finding::new(&self.path, line, what)
    }

    /// The index of the first of these tokens, where they follow one another.
    pub(crate) fn sequences<'a>(&'a self, wanted: &'a [&str]) -> impl Iterator<Item = usize> + 'a {
        let matches = move |window: &[Token]| {
            window.iter().zip(wanted).all(|(token, wanted)| token.is(wanted))
        };
        let windows = self.tokens.windows(wanted.len()).enumerate();
        windows.filter(move |(_, window)| matches(window)).map(|(index, _)| index)
    }
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    let token = |text: String, span: Span| Token { text, start: span.start(), end: span.end() };
    for tree in stream {
        let TokenTree::Group(group) = tree else {
            tokens.push(token(tree.to_string(), tree.span()));
            continue;
        };
        let (open, close) = match group.delimiter() {
            Delimiter::Parenthesis => ("(", ")"),
            Delimiter::Brace => ("{", "}"),
            Delimiter::Bracket => ("[", "]"),
            Delimiter::None => ("", ""),
        };
        tokens.push(token(open.to_owned(), group.span_open()));
        flatten(group.stream(), tokens);
        tokens.push(token(close.to_owned(), group.span_close()));
    }
}

/// Collects the lines of items under `#[cfg(test)]`.
struct Tests(Vec<RangeInclusive<usize>>);

impl<'ast> Visit<'ast> for Tests {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        let test =
            |meta: &syn::MetaList| meta.path.is_ident("cfg") && meta.tokens.to_string() == "test";
        if attributes.iter().any(|attribute| attribute.meta.require_list().is_ok_and(test)) {
            let span = item.span();
            self.0.push(span.start().line..=span.end().line);
        } else {
            visit::visit_item(self, item);
        }
    }
}

/// All files, the parsed ones, and the parser's errors.
pub(crate) struct Tree {
    pub(crate) files: Vec<File>,
    pub(crate) sources: Vec<Source>,
    pub(crate) unparsed: Vec<Finding>,
}

impl Tree {
    pub(crate) fn of(files: Vec<File>) -> Self {
        let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
        let (mut sources, mut unparsed) = (Vec::new(), Vec::new());
        for file in rust {
            match Source::parse(file) {
                Ok(source) => sources.push(source),
                Err(finding) => unparsed.push(finding),
            }
        }
        Self { files, sources, unparsed }
    }

    /// This repository: tracked files, and untracked ones that are not ignored.
    pub(crate) fn here() -> Self {
        let top = top();
        let files = listed(&top).into_iter().filter_map(|path| {
            let meta = std::fs::symlink_metadata(top.join(&path)).ok()?;
            let bytes = meta.is_file().then(|| std::fs::read(top.join(&path)).ok())??;
            let text = String::from_utf8(bytes).unwrap_or_default();
            let executable = meta.permissions().mode() & 0o111 != 0;
            Some(File { path, text, executable })
        });
        let mut files: Vec<File> = files.collect();
        files.sort_by(|one, other| one.path.cmp(&other.path));
        Self::of(files)
    }

    pub(crate) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Whether a file or folder has this path.
    pub(crate) fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let within = |file: &File| {
            file.path
                .strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        path.is_empty() || self.files.iter().any(within)
    }
}

/// The top of the repository.
pub(crate) fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The paths of all files. Without git (a source archive), all but the output of builds.
fn listed(top: &Path) -> Vec<String> {
    let mut git = Command::new("git");
    git.arg("-C").arg(top).args(["-c", "safe.directory=*", "ls-files", "-z"]);
    git.args(["--cached", "--others", "--exclude-standard"]);
    match git.output() {
        Ok(output) if output.status.success() && !output.stdout.is_empty() => {
            let names = String::from_utf8_lossy(&output.stdout);
            names.split_terminator('\0').map(ToOwned::to_owned).collect()
        }
        _ => {
            let mut paths = Vec::new();
            walk(top, "", &mut paths);
            paths
        }
    }
}

fn walk(folder: &Path, prefix: &str, paths: &mut Vec<String>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = format!("{prefix}{name}");
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && name != "target" && name != ".git" => {
                walk(&entry.path(), &format!("{path}/"), paths);
            }
            Ok(kind) if kind.is_file() => paths.push(path),
            _ => {}
        }
    }
}
