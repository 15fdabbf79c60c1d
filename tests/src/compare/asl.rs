//! Parses the output of `iasl -d` into a tree.

use std::fmt;

use anyhow::{Context, ensure};

/// A word, number or text, with the arguments and the body after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Term {
    /// Empty if parentheses or braces have no word before them.
    pub(super) word: String,
    /// The terms in parentheses.
    pub(super) arguments: Vec<Self>,
    /// The terms in braces.
    pub(super) body: Vec<Self>,
}

impl Term {
    /// The word of an argument, or an empty string.
    pub(super) fn argument(&self, at: usize) -> &str {
        self.arguments.get(at).map_or("", |term| &term.word)
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |terms: &[Self]| terms.iter().map(Self::to_string).collect::<Vec<_>>().join(",");
        f.write_str(&self.word)?;
        // Arguments that were left out at the end are empty terms.
        let filled = self.arguments.iter().rposition(|it| *it != Self::default());
        if let Some(last) = filled {
            write!(f, "({})", list(&self.arguments[..=last]))?;
        }
        if !self.body.is_empty() {
            write!(f, "{{{}}}", list(&self.body))?;
        }
        Ok(())
    }
}

/// Compilers do not print deeper nesting.
const DEPTH: usize = 100;

pub(super) fn parse(text: &str) -> anyhow::Result<Vec<Term>> {
    let tokens = tokens(text)?;
    let mut tokens = tokens.into_iter().peekable();
    let terms = list(&mut tokens, 0)?;
    ensure!(tokens.next().is_none(), "a closing bracket without an opening one");
    Ok(terms)
}

type Tokens = std::iter::Peekable<std::vec::IntoIter<String>>;

/// Reads terms up to a closing bracket, which it does not consume. A comma without a term before it
/// stands for an omitted argument.
fn list(tokens: &mut Tokens, depth: usize) -> anyhow::Result<Vec<Term>> {
    ensure!(depth < DEPTH, "brackets nested {DEPTH} deep");
    let mut terms = Vec::new();
    let mut separated = true;
    while let Some(token) = tokens.next_if(|it| it != ")" && it != "}") {
        if token == "," {
            if separated {
                terms.push(Term::default());
            }
            separated = true;
            continue;
        }
        separated = false;
        let mut term = Term::default();
        if token == "(" {
            term.arguments = bracket(tokens, ")", depth)?;
        } else if token == "{" {
            term.body = bracket(tokens, "}", depth)?;
        } else {
            term.word = token;
            if tokens.next_if(|it| it == "(").is_some() {
                term.arguments = bracket(tokens, ")", depth)?;
            }
        }
        if tokens.next_if(|it| it == "{").is_some() {
            term.body = bracket(tokens, "}", depth)?;
        }
        terms.push(term);
    }
    Ok(terms)
}

fn bracket(tokens: &mut Tokens, close: &str, depth: usize) -> anyhow::Result<Vec<Term>> {
    let terms = list(tokens, depth + 1)?;
    let found = tokens.next().with_context(|| format!("no {close} at the end"))?;
    ensure!(found == close, "{found} instead of {close}");
    Ok(terms)
}

/// Splits a listing into words, quoted texts and single characters, without comments.
fn tokens(text: &str) -> anyhow::Result<Vec<String>> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("/*") {
            rest.find("*/").context("a comment without an end")? + 2
        } else if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if first == '"' {
            rest[1..].find('"').context("a text without an end")? + 2
        } else if is_word(first) {
            rest.find(|it| !is_word(it)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(length);
        if !token.starts_with("/*") && !token.starts_with("//") {
            tokens.push(token.to_owned());
        }
        rest = after.trim_start();
    }
    Ok(tokens)
}

fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "_\\^.".contains(letter)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reads_devices_resources_and_packages() {
        let text = r#"
            Device (COM1) // a port
            {
                Name (_HID, EisaId ("PNP0501") /* 16550A */)  // _HID: Hardware ID
                Name (_CRS, ResourceTemplate ()
                {
                    IO (Decode16, 0x03F8, 0x03F8, 0x01, 0x08, )
                    IRQNoFlags () {4}
                })
                Method (_STA, 0, NotSerialized) { Return ((Local0 & 0x0F)) }
            }"#;
        let terms = parse(text).unwrap();
        assert_eq!(terms.len(), 1);
        assert_eq!((terms[0].word.as_str(), terms[0].argument(0)), ("Device", "COM1"));
        let crs = &terms[0].body[1].arguments[1];
        let shown: Vec<_> = crs.body.iter().map(Term::to_string).collect();
        assert_eq!(shown, ["IO(Decode16,0x03F8,0x03F8,0x01,0x08)", "IRQNoFlags{4}"]);
        assert_eq!(terms[0].body[2].argument(0), "_STA");
    }

    #[test]
    fn refuses_unbalanced_brackets() {
        assert!(parse("A (B {").is_err());
        assert!(parse("A (B })").is_err());
        assert!(parse("A )").is_err());
        assert!(parse(&"(".repeat(1000)).is_err());
        assert!(parse("\"").is_err());
    }
}
