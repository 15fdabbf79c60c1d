//! The limits of STYLE.md for C and assembly, which are not parsed.
use crate::limits::{FILE_LINES, FUNCTION_LINES};
use crate::tree::{File, Finding, Tree};

fn sources(tree: &Tree) -> impl Iterator<Item = &File> {
    tree.files.iter().filter(|file| file.is_c())
}

/// Lines of a file.
pub(crate) fn files(tree: &Tree) -> Vec<Finding> {
    let long = |file: &File| {
        let count = file.lines().count();
        let what = format!("lines, at most {FILE_LINES}: {count}");
        (count > FILE_LINES).then(|| Finding::new(&file.path, 1, what))
    };
    sources(tree).filter_map(long).collect()
}

/// Lines with code between a brace that opens in the first column and the one that closes there.
pub(crate) fn functions(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in sources(tree) {
        // Lines of the current function so far.
        let (mut function, mut comment) = (None, false);
        for (line, text) in file.lines() {
            let code = text.trim();
            comment |= code.starts_with("/*");
            if text.starts_with('{') {
                function = Some(0);
            } else if text.starts_with('}') {
                let count = function.take().filter(|count| *count > FUNCTION_LINES);
                findings.extend(count.map(|count| {
                    let what = format!("lines in a function, at most {FUNCTION_LINES}: {count}");
                    Finding::new(&file.path, line, what)
                }));
            } else if let Some(count) = &mut function {
                *count += usize::from(!code.is_empty() && !comment);
            }
            comment &= !code.ends_with("*/");
        }
    }
    findings
}

/// A file opens with a comment that says what it is.
pub(crate) fn heads(tree: &Tree) -> Vec<Finding> {
    let bare = sources(tree).filter(|file| {
        let head = file.text.trim_start();
        // `#` is assembly's.
        !(head.starts_with("/*") || file.path.ends_with(".S") && head.starts_with("# "))
    });
    bare.map(|file| Finding::new(&file.path, 1, "no comment says what the file is")).collect()
}
