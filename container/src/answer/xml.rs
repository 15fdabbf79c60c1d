//! XML trees, and their text (Extensible Markup Language 1.0, fifth edition).

use std::fmt::Write as _;

use anyhow::ensure;

use super::script::CRLF;

/// The namespaces of answer files.
pub const UNATTEND: &str = "urn:schemas-microsoft-com:unattend";
pub const WCM: &str = "http://schemas.microsoft.com/WMIConfig/2002/State";

/// Replaces secrets in a text that is shown.
const MASK: &str = "***";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    pub name: String,
    pub attributes: Vec<(String, String)>,
    pub content: Content,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    Text(String),
    /// A text that is masked unless the reader may see secrets.
    Secret(String),
    Children(Vec<Element>),
}

/// Whether secrets are written as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Secrets {
    Shown,
    Masked,
}

impl Secrets {
    pub fn of(self, secret: &str) -> &str {
        match self {
            Self::Shown => secret,
            Self::Masked => MASK,
        }
    }
}

/// An element with a text.
pub fn text(name: &str, value: impl ToString + Copy) -> Element {
    new(name, Content::Text(value.to_string()))
}

pub fn secret(name: &str, value: String) -> Element {
    new(name, Content::Secret(value))
}

pub fn group(name: &str, children: Vec<Element>) -> Element {
    new(name, Content::Children(children))
}

fn new(name: &str, content: Content) -> Element {
    Element { name: name.to_owned(), attributes: Vec::new(), content }
}

impl Element {
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.attributes.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn attribute(&self, name: &str) -> Option<&str> {
        let found = self.attributes.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn children(&self) -> &[Self] {
        if let Content::Children(children) = &self.content { children } else { &[] }
    }

    pub fn text(&self) -> Option<&str> {
        match &self.content {
            Content::Text(text) | Content::Secret(text) => Some(text),
            Content::Children(_) => None,
        }
    }
}

/// The text of a document, with the line ends of Windows.
pub fn document(root: &Element, secrets: Secrets) -> String {
    let mut text = format!("<?xml version=\"1.0\" encoding=\"utf-8\"?>{CRLF}");
    write(root, 0, secrets, &mut text);
    text
}

/// The text of an element within a document of others, which says its namespaces itself.
pub fn fragment(element: Element, secrets: Secrets) -> String {
    let element = element.with("xmlns", UNATTEND).with("xmlns:wcm", WCM);
    let mut text = String::new();
    write(&element, 0, secrets, &mut text);
    text
}

fn write(element: &Element, depth: usize, secrets: Secrets, to: &mut String) {
    let name = &element.name;
    write!(to, "{:depth$}<{name}", "", depth = 2 * depth).expect("a string takes all");
    for (name, value) in &element.attributes {
        write!(to, " {name}=\"{}\"", escape(value)).expect("a string takes all");
    }
    match &element.content {
        Content::Children(children) if !children.is_empty() => {
            write!(to, ">{CRLF}").expect("a string takes all");
            for child in children {
                write(child, depth + 1, secrets, to);
            }
            write!(to, "{:depth$}</{name}>{CRLF}", "", depth = 2 * depth)
                .expect("a string takes all");
        }
        content => {
            let text = match content {
                Content::Text(text) => text,
                Content::Secret(text) => secrets.of(text),
                Content::Children(_) => "",
            };
            let text = escape(text);
            match text.is_empty() {
                true => write!(to, "/>{CRLF}").expect("a string takes all"),
                false => write!(to, ">{text}</{name}>{CRLF}").expect("a string takes all"),
            }
        }
    }
}

/// The text with all characters replaced that markup could start or end with, in contents and in
/// attributes (2.4).
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // A parser would replace them by other blanks (2.11, 3.3.3).
            '\t' | '\n' | '\r' => {
                write!(escaped, "&#{};", u32::from(letter)).expect("a string takes all");
            }
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// Checks that XML can contain all characters of a text (2.2).
pub fn check(text: &str) -> anyhow::Result<()> {
    let bad = text.chars().find(|letter| !is_character(*letter));
    let shown = bad.map_or(0, u32::from);
    ensure!(bad.is_none(), "XML cannot contain the character U+{shown:04X}: leave it out");
    Ok(())
}

pub(super) fn is_character(letter: char) -> bool {
    match letter {
        '\t' | '\n' | '\r' => true,
        '\u{fffe}' | '\u{ffff}' => false,
        letter => letter >= ' ',
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn texts_arrive_as_they_are() {
        let hostile = "\"quotes\" & <b> ]]> 'x' \u{1f600} &amp;\n\t";
        let root = group("a", vec![text("b", hostile).with("c", hostile), text("d", "")]);
        let made = document(&root, Secrets::Shown);
        assert_eq!(super::super::parse::tree(&made).unwrap(), root);
    }

    #[test]
    fn secrets_are_masked() {
        let root = group("a", vec![secret("b", "hush".into())]);
        let made = |secrets| document(&root, secrets);
        assert!(made(Secrets::Shown).contains("<b>hush</b>"));
        assert!(made(Secrets::Masked).contains("<b>***</b>"));
    }

    #[test]
    fn characters_that_xml_lacks_are_refused() {
        for text in ["\0", "a\u{7}", "\u{fffe}", "\u{ffff}", "\u{1b}"] {
            assert!(check(text).is_err(), "{text:?}");
        }
        check("a\t\r\n\u{e000}\u{10ffff}\u{85}").unwrap();
    }
}
