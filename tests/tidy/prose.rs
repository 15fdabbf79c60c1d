//! Words and openings that `STYLE.md` (Prose) rules out, in comments and in texts.
use crate::tree::{Finding, Source, Tree};

/// Openings of sentences without a proper subject.
const OPENINGS: &[&str] =
    &["What ", "Who ", "Whoever ", "Whose ", "Whom ", "Of ", "So many ", "As many "];

/// Phrases for which there is a usual technical word.
const PHRASES: &[&str] = &[
    "so many",
    "whoever",
    "is told",
    "are told",
    "was told",
    "been told",
    "be told",
    "nothing is said",
    "passed over",
    "without end",
    "of those who",
    "who asks",
    "is lent",
    "are lent",
    "what becomes",
    "what waits",
];

/// Files that quote the patterns.
const QUOTES: &[&str] = &["tests/tidy.rs", "tests/tidy/prose.rs"];

/// Checks comments and texts of Rust files.
pub(crate) fn plain(tree: &Tree) -> Vec<Finding> {
    let sources = tree.sources.iter().filter(|it| !QUOTES.contains(&it.path.as_str()));
    sources.flat_map(|source| [comments(source), texts(source)].concat()).collect()
}

fn comments(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Whether the next line of a comment begins a sentence.
    let mut begins = true;
    for (number, line) in source.text.lines().enumerate().map(|(index, it)| (index + 1, it)) {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            begins = true;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim();
        let sentences = comment.split_inclusive(['.', '!', '?', ':']).enumerate();
        let opening = sentences
            .filter(|(index, _)| *index > 0 || begins)
            .filter(|(index, text)| *index == 0 || text.starts_with(' '))
            .find_map(|(_, text)| OPENINGS.iter().find(|it| text.trim_start().starts_with(**it)));
        if let Some(opening) = opening {
            let what = format!("a sentence that begins with `{}`", opening.trim());
            findings.push(source.finding(number, what));
        }
        findings.extend(phrase(comment).map(|what| source.finding(number, what)));
        begins = comment.is_empty() || comment.ends_with(['.', '!', '?', ':']);
    }
    findings
}

fn texts(source: &Source) -> Vec<Finding> {
    let literals = source.tokens.iter().filter(|it| it.text.contains('"'));
    literals.filter_map(|it| Some(source.finding(it.start.line, phrase(&it.text)?))).collect()
}

/// The finding for a text with one of the phrases, as whole words.
fn phrase(text: &str) -> Option<String> {
    let text = text.to_lowercase();
    let letter = |it: Option<char>| it.is_some_and(char::is_alphanumeric);
    let found = PHRASES.iter().find(|phrase| {
        text.match_indices(**phrase).any(|(at, _)| {
            let (before, after) = (&text[..at], &text[at + phrase.len()..]);
            !letter(before.chars().next_back()) && !letter(after.chars().next())
        })
    })?;
    Some(format!("`{found}`, for which STYLE.md has a plain word"))
}
