//! Reads XML that users write: checks that it is well-formed, and finds where its elements are.
//!
//! Threats: a file of the user may be anything. Its length and depth are limited, entities other
//! than the predefined ones are refused, and so are document types, whose entities could grow
//! without limit.

use std::ops::Range;

use anyhow::{Context as _, bail, ensure};

use super::xml::{Content, Element, is_character};
use crate::media::xml::character;

/// Maximum length of a document, in bytes.
pub const MAX_LENGTH: usize = 1 << 20;
const MAX_DEPTH: usize = 64;
const MAX_ELEMENTS: usize = 20_000;

/// An element, and where it is in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Position in the list of its parent, which is before it. The root has none.
    pub parent: Option<usize>,
    pub name: String,
    pub attributes: Vec<(String, String)>,
    /// From the start of its first tag to the end of its last.
    pub whole: Range<usize>,
    /// Between its tags. Empty, at the end of the tag, for an element with only one.
    pub inner: Range<usize>,
    /// Its own text, without that of its children, entities replaced.
    pub text: String,
}

impl Node {
    /// The name without its prefix.
    pub fn local(&self) -> &str {
        self.name.rsplit(':').next().unwrap_or_default()
    }

    pub fn attribute(&self, name: &str) -> Option<&str> {
        let found = self.attributes.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Whether it was written as one tag.
    pub fn is_closed(&self) -> bool {
        self.inner.start == self.whole.end
    }
}

/// All elements of a document, parents before their children.
///
/// # Errors
///
/// If the text is not a well-formed document, with the line of the mistake.
pub fn read(text: &str) -> anyhow::Result<Vec<Node>> {
    ensure!(text.len() <= MAX_LENGTH, "it has more than {MAX_LENGTH} bytes: shorten it");
    let mut reader = Reader { text, at: 0, open: Vec::new(), nodes: Vec::new() };
    match reader.document() {
        Ok(()) => Ok(reader.nodes),
        Err(error) => {
            let read = text.get(..reader.at).unwrap_or(text);
            let line = read.matches('\n').count() + 1;
            Err(error.context(format!("line {line} is not valid XML")))
        }
    }
}

/// The document as a tree. Texts between elements are ignored.
pub fn tree(text: &str) -> anyhow::Result<Element> {
    let nodes = read(text)?;
    let mut root = None;
    let mut children: Vec<Vec<Element>> = nodes.iter().map(|_| Vec::new()).collect();
    for (index, node) in nodes.iter().enumerate().rev() {
        let mut own = std::mem::take(&mut children[index]);
        own.reverse();
        let empty = own.is_empty();
        let content = if empty { Content::Text(node.text.clone()) } else { Content::Children(own) };
        let (name, attributes) = (node.name.clone(), node.attributes.clone());
        let element = Element { name, attributes, content };
        match node.parent {
            Some(parent) => children[parent].push(element),
            None => root = Some(element),
        }
    }
    root.context("it has no element")
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    /// Indices of the elements that are not closed yet.
    open: Vec<usize>,
    nodes: Vec<Node>,
}

impl Reader<'_> {
    fn document(&mut self) -> anyhow::Result<()> {
        self.skip("\u{feff}");
        if self.rest().starts_with("<?xml") {
            self.until("?>")?;
        }
        while !self.rest().is_empty() {
            self.part()?;
        }
        ensure!(!self.nodes.is_empty(), "it has no element");
        let open = self.open.last().map(|index| self.nodes[*index].name.clone());
        ensure!(open.is_none(), "<{}> is not closed", open.unwrap_or_default());
        Ok(())
    }

    fn part(&mut self) -> anyhow::Result<()> {
        let rest = self.rest();
        if rest.starts_with("<!--") {
            self.at += "<!--".len();
            let comment = self.until("-->")?;
            let inner = comment.strip_suffix("-->").unwrap_or_default();
            ensure!(!inner.contains("--") && !inner.ends_with('-'), "a comment contains --");
        } else if rest.starts_with("<![CDATA[") {
            self.at += "<![CDATA[".len();
            let text = self.until("]]>")?.trim_end_matches("]]>").to_owned();
            self.characters(&text)?;
        } else if rest.starts_with("<!") {
            bail!("a document type is not supported: leave it out");
        } else if rest.starts_with("<?") {
            let target = self.until("?>")?;
            ensure!(!target[2..].starts_with("xml "), "the XML declaration is not at the start");
        } else if rest.starts_with("</") {
            self.end()?;
        } else if rest.starts_with('<') {
            self.start()?;
        } else {
            let length = rest.find('<').unwrap_or(rest.len());
            let raw = &rest[..length];
            ensure!(!raw.contains("]]>"), "]]> is not allowed in a text");
            let text = unescape(raw)?;
            self.at += length;
            self.characters(&text)?;
        }
        Ok(())
    }

    fn characters(&mut self, text: &str) -> anyhow::Result<()> {
        ensure!(text.chars().all(is_character), "it contains a character that XML lacks");
        match self.open.last() {
            Some(index) => self.nodes[*index].text.push_str(text),
            None => ensure!(text.trim().is_empty(), "there is text outside of the element"),
        }
        Ok(())
    }

    fn start(&mut self) -> anyhow::Result<()> {
        let start = self.at;
        ensure!(!self.open.is_empty() || self.nodes.is_empty(), "it has more than one element");
        ensure!(self.open.len() < MAX_DEPTH, "more than {MAX_DEPTH} elements contain each other");
        ensure!(self.nodes.len() < MAX_ELEMENTS, "it has more than {MAX_ELEMENTS} elements");
        self.at += 1;
        let name = self.name()?;
        let mut attributes: Vec<(String, String)> = Vec::new();
        let is_closed = loop {
            let had_blank = self.blanks();
            if self.skip("/>") {
                break true;
            }
            if self.skip(">") {
                break false;
            }
            ensure!(had_blank, "a blank is missing in <{name}>");
            let (own, value) = self.attribute()?;
            ensure!(attributes.iter().all(|(other, _)| *other != own), "{own} is there twice");
            attributes.push((own, value));
        };
        let (whole, inner) = (start..self.at, self.at..self.at);
        let parent = self.open.last().copied();
        if !is_closed {
            self.open.push(self.nodes.len());
        }
        self.nodes.push(Node { parent, name, attributes, whole, inner, text: String::new() });
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<()> {
        let start = self.at;
        self.at += 2;
        let name = self.name()?;
        self.blanks();
        ensure!(self.skip(">"), "</{name} is not complete");
        let index = self.open.pop().with_context(|| format!("</{name}> closes nothing"))?;
        let node = &mut self.nodes[index];
        ensure!(node.name == name, "</{name}> closes <{}>", node.name);
        (node.inner.end, node.whole.end) = (start, self.at);
        Ok(())
    }

    fn attribute(&mut self) -> anyhow::Result<(String, String)> {
        let name = self.name()?;
        self.blanks();
        ensure!(self.skip("="), "{name} has no value");
        self.blanks();
        let quote = if self.skip("\"") { "\"" } else { "'" };
        ensure!(quote == "\"" || self.skip("'"), "the value of {name} has no quotes");
        let value = self.until(quote)?;
        let value = &value[..value.len() - quote.len()];
        ensure!(!value.contains('<'), "the value of {name} contains <");
        // Blanks become spaces (3.3.3), unless they are escaped.
        let value = unescape(&value.replace(['\t', '\n', '\r'], " "))?;
        ensure!(value.chars().all(is_character), "{name} contains a character that XML lacks");
        Ok((name, value))
    }

    /// A name (2.3), or any other characters that cannot be confused with markup.
    fn name(&mut self) -> anyhow::Result<String> {
        let rest = self.rest();
        let inner = |letter: char| {
            letter.is_alphanumeric() || "_:-.".contains(letter) || letter == '\u{b7}'
        };
        let length = rest.find(|letter| !inner(letter)).unwrap_or(rest.len());
        let name = rest[..length].to_owned();
        let first = name.chars().next().filter(|it| it.is_alphabetic() || "_:".contains(*it));
        ensure!(first.is_some() && length <= 200, "a name is missing or invalid");
        self.at += length;
        Ok(name)
    }

    fn rest(&self) -> &str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn skip(&mut self, text: &str) -> bool {
        let is_there = self.rest().starts_with(text);
        self.at += if is_there { text.len() } else { 0 };
        is_there
    }

    /// Whether there were blanks.
    fn blanks(&mut self) -> bool {
        let rest = self.rest();
        let length = rest.len() - rest.trim_start_matches([' ', '\t', '\r', '\n']).len();
        self.at += length;
        length > 0
    }

    /// The text up to and including `end`.
    fn until(&mut self, end: &str) -> anyhow::Result<&str> {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let length = rest.find(end).with_context(|| format!("{end} is missing"))? + end.len();
        self.at += length;
        Ok(&rest[..length])
    }
}

/// Replaces references to characters and to the predefined entities (4.6).
fn unescape(raw: &str) -> anyhow::Result<String> {
    let mut text = String::with_capacity(raw.len());
    let raw = raw.replace("\r\n", "\n");
    let mut parts = raw.as_str();
    while let Some(start) = parts.find('&') {
        text.push_str(&parts[..start]);
        let rest = &parts[start + 1..];
        let end = rest.find(';').filter(|end| *end <= 10).context("& must be written as &amp;")?;
        let name = &rest[..end];
        let letter = character(name).filter(|letter| is_character(*letter));
        text.push(letter.with_context(|| format!("&{name}; is not defined"))?);
        parts = &rest[end + 1..];
    }
    text.push_str(parts);
    Ok(text)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn elements_know_their_places_and_texts() {
        let text = "<?xml version='1.0'?>\r\n<!-- a - b -->\n<a x='1' y = \"&lt;2\">b<c/>d<e>\
                    <![CDATA[<&]]>&#x1F600;</e >\n</a>\n<?target?>";
        let nodes = read(text).unwrap();
        let names: Vec<_> = nodes.iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["a", "c", "e"]);
        assert_eq!(nodes[0].attribute("y"), Some("<2"));
        assert_eq!(nodes[0].text, "bd\n");
        assert_eq!((nodes[1].parent, nodes[2].parent), (Some(0), Some(0)));
        assert_eq!(&text[nodes[1].whole.clone()], "<c/>");
        assert!(nodes[1].is_closed() && !nodes[2].is_closed());
        assert_eq!(&text[nodes[2].inner.clone()], "<![CDATA[<&]]>&#x1F600;");
        assert_eq!(nodes[2].text, "<&\u{1f600}");
    }

    #[test]
    fn names_have_prefixes() {
        let nodes = read("\u{feff}<u:a xmlns:u=\"x\"/>").unwrap();
        assert_eq!((nodes[0].local(), nodes[0].name.as_str()), ("a", "u:a"));
    }

    #[test]
    fn malformed_files_are_refused_with_their_line() {
        for text in [
            "",
            "x",
            "<a>",
            "</a>",
            "<a></b>",
            "<a/><b/>",
            "<a/>x",
            "<a b/>",
            "<a b=1/>",
            "<a b='<'/>",
            "<a b='1'c='2'/>",
            "<a b='1' b='2'/>",
            "<a>&nope;</a>",
            "<a>&</a>",
            "<a>&#0;</a>",
            "<a>&#xD800;</a>",
            "<a>\u{1}</a>",
            "<a>]]></a>",
            "<a><!-- -- --></a>",
            "<a><!-- x</a>",
            "<a><![CDATA[x</a>",
            "<!DOCTYPE a><a/>",
            "<1/>",
            "< a/>",
            "<a",
            "<a/><?xml version='1.0'?>",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        let error = format!("{:#}", read("<a>\n<b>\n</a>").unwrap_err());
        assert_eq!(error, "line 3 is not valid XML: </a> closes <b>");
    }

    #[test]
    fn sizes_are_limited() {
        let deep = "<a>".repeat(100) + &"</a>".repeat(100);
        assert!(format!("{:#}", read(&deep).unwrap_err()).contains("contain each other"));
        let many = format!("<a>{}</a>", "<b/>".repeat(MAX_ELEMENTS));
        assert!(format!("{:#}", read(&many).unwrap_err()).contains("more than 20000 elements"));
        assert!(read(&" ".repeat(MAX_LENGTH + 1)).is_err());
        // Many references take no longer than other text.
        let references = format!("<a>{}</a>", "&lt;".repeat(200_000));
        assert_eq!(read(&references).unwrap()[0].text.len(), 200_000);
    }
}
