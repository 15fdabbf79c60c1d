//! The XML of WIM files: elements, attributes and text. Document types do not occur there, and are
//! errors, so no entity is longer than its reference.

use anyhow::{Context as _, ensure};

/// Maximum depth of elements.
const MAX_DEPTH: usize = 32;

/// Part of a document.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event<'a> {
    /// A start tag: the path of the element from the root, and its attributes as they are written.
    Start(&'a [&'a str], &'a str),
    /// Text directly in the element of this path, without surrounding white space.
    Text(&'a [&'a str], String),
}

/// Calls `each` for every start tag and text, in order.
pub(super) fn read(
    text: &str,
    mut each: impl FnMut(Event<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut path: Vec<&str> = Vec::new();
    let mut rest = text.trim_start_matches('\u{feff}');
    while let Some(start) = rest.find('<') {
        let content = rest[..start].trim();
        if !content.is_empty() {
            each(Event::Text(&path, unescape(content)?))?;
        }
        rest = &rest[start..];
        if let Some(skipped) = skip(rest)? {
            rest = skipped;
            continue;
        }
        let (tag, after) = rest[1..].split_once('>').context("a tag without an end")?;
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            let open = path.pop().context("an end tag without a start tag")?;
            ensure!(name.trim_end() == open, "<{}> ends as </{}>", shown(open), shown(name));
            continue;
        }
        let (tag, empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
        let (name, attributes) = tag.split_once(char::is_whitespace).unwrap_or((tag, ""));
        ensure!(!name.is_empty(), "a tag without a name");
        path.push(name);
        ensure!(path.len() <= MAX_DEPTH, "more than {MAX_DEPTH} elements in one another");
        each(Event::Start(&path, attributes))?;
        if empty {
            path.pop();
        }
    }
    ensure!(
        path.is_empty(),
        "<{}> has no end",
        path.last().map_or_else(String::new, |it| shown(it))
    );
    Ok(())
}

/// The rest after a declaration or a comment.
fn skip(rest: &str) -> anyhow::Result<Option<&str>> {
    for (start, end) in [("<?", "?>"), ("<!--", "-->")] {
        if let Some(inner) = rest.strip_prefix(start) {
            let (_, after) = inner.split_once(end).with_context(|| format!("no {end}"))?;
            return Ok(Some(after));
        }
    }
    ensure!(!rest.starts_with("<!"), "a document type or CDATA, which WIM files do not have");
    Ok(None)
}

/// The value of an attribute.
pub(super) fn attribute(attributes: &str, wanted: &str) -> anyhow::Result<Option<String>> {
    let mut rest = attributes.trim_start();
    while let Some((name, after)) = rest.split_once('=') {
        let after = after.trim_start();
        let quote = after.chars().next().filter(|it| matches!(it, '"' | '\''));
        let quote = quote.context("an attribute without quotes")?;
        let (value, after) =
            after[1..].split_once(quote).context("an attribute without its closing quote")?;
        if name.trim_end() == wanted {
            return unescape(value).map(Some);
        }
        rest = after.trim_start();
    }
    Ok(None)
}

/// Replaces references to characters and to the five entities.
pub fn unescape(text: &str) -> anyhow::Result<String> {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('&') {
        plain.push_str(before);
        let (name, after) = after.split_once(';').context("a reference without an end")?;
        let character = character(name);
        plain.push(character.with_context(|| format!("&{}; is unknown", shown(name)))?);
        rest = after;
    }
    plain.push_str(rest);
    Ok(plain)
}

/// The character of a reference: a number, or one of the five entities.
pub fn character(name: &str) -> Option<char> {
    let number = match (name.strip_prefix("#x"), name.strip_prefix('#')) {
        (Some(hex), _) => u32::from_str_radix(hex, 16).ok(),
        (_, Some(decimal)) => decimal.parse().ok(),
        _ => None,
    };
    match name {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => number.and_then(char::from_u32),
    }
}

/// The start of a name, for an error.
fn shown(name: &str) -> String {
    name.chars().take(20).flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    fn all(text: &str) -> anyhow::Result<Vec<String>> {
        let mut all = Vec::new();
        read(text, |event| {
            all.push(match event {
                Event::Start(path, "") => path.join("/"),
                Event::Start(path, attributes) => format!("{} {attributes}", path.join("/")),
                Event::Text(path, text) => format!("{}={text}", path.join("/")),
            });
            Ok(())
        })?;
        Ok(all)
    }

    #[test]
    fn elements_text_and_attributes_are_found() {
        let text = "\u{feff}<?xml version='1'?><A><!-- <X> --> <B n=\"1\"> x &amp;&#x41;&#66; </B>\
                    <C/></A>";
        assert_eq!(all(text).unwrap(), ["A", "A/B n=\"1\"", "A/B=x &AB", "A/C"]);
        assert_eq!(attribute("a = '1' INDEX=\"&lt;2\"", "INDEX").unwrap().unwrap(), "<2");
        assert_eq!(attribute("", "INDEX").unwrap(), None);
    }

    #[test]
    fn broken_documents_are_errors() {
        let deep = "<a>".repeat(100);
        for text in [
            "<a>",
            "<a></b>",
            "</a>",
            "<a",
            "<>",
            "<a>&x;</a>",
            "<a>&</a>",
            "<a>&#xd800;</a>",
            "<!DOCTYPE a>",
            "<!--",
            "<?",
            &deep,
        ] {
            assert!(all(text).is_err(), "{text}");
        }
        assert!(attribute("a=1", "a").is_err() && attribute("a='1", "a").is_err());
    }
}
