//! XML with namespaces, as a parser of others reads it: well-formed, and without a document type.

use std::path::Path;

use anyhow::Context as _;
use roxmltree::{Document, Node};

use super::files;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) children: Vec<Self>,
    /// The text, without that of children.
    pub(crate) text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attribute {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) value: String,
}

impl Element {
    pub(crate) fn attribute(&self, name: &str) -> Option<&str> {
        let found = self.attributes.iter().find(|it| it.namespace.is_empty() && it.name == name);
        found.map(|it| it.value.as_str())
    }

    fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// The element at this path of names.
    pub(crate) fn at(&self, path: &str) -> Option<&Self> {
        path.split('/').try_fold(self, |element, name| element.child(name))
    }

    /// The text of the element at this path.
    pub(crate) fn value(&self, path: &str) -> Option<&str> {
        self.at(path).map(|it| it.text.as_str())
    }

    pub(crate) fn is(&self, path: &str) -> bool {
        self.value(path) == Some("true")
    }

    /// A number that the schema has checked.
    pub(crate) fn number(&self, path: &str) -> anyhow::Result<u32> {
        let text = self.value(path).with_context(|| format!("{}: no {path}", self.name))?;
        text.parse().with_context(|| format!("{}: {path}: {text}", self.name))
    }
}

/// Reads a file.
pub(crate) fn read(path: &Path) -> anyhow::Result<Element> {
    parse(&files::text(path)?)
}

pub(crate) fn parse(text: &str) -> anyhow::Result<Element> {
    let text = text.trim_start_matches('\u{feff}');
    Ok(element(Document::parse(text)?.root_element()))
}

fn element(node: Node<'_, '_>) -> Element {
    let attribute = |it: roxmltree::Attribute<'_, '_>| Attribute {
        namespace: it.namespace().unwrap_or_default().to_owned(),
        name: it.name().to_owned(),
        value: it.value().to_owned(),
    };
    let name = node.tag_name();
    Element {
        namespace: name.namespace().unwrap_or_default().to_owned(),
        name: name.name().to_owned(),
        attributes: node.attributes().map(attribute).collect(),
        children: node.children().filter(Node::is_element).map(element).collect(),
        text: node.children().filter(Node::is_text).filter_map(|it| it.text()).collect(),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn elements_have_namespaces_and_their_own_text() {
        let text = "\u{feff}<?xml version=\"1.0\"?><a xmlns=\"urn:a\"><!-- <c/> -->\n  \
                    <b c='x&amp;y' w:d=\"e\" xmlns:w=\"urn:w\"><![CDATA[<]]>&amp;&#xD55C; </b>\
                    <f xmlns=\"\"/>\n</a>";
        let root = parse(text).unwrap();
        assert_eq!((root.namespace.as_str(), root.text.trim()), ("urn:a", ""));
        let child = root.at("b").unwrap();
        assert_eq!((child.attribute("c"), child.text.as_str()), (Some("x&y"), "<&한 "));
        assert_eq!((child.attributes[1].namespace.as_str(), child.attribute("d")), ("urn:w", None));
        assert_eq!(root.at("f").unwrap().namespace, "");
        for bad in ["", "<a>", "</a>", "<a/><a/>", "<x:a/>", "<a>&copy;</a>", "<a b='1' b='2'/>"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let entity = "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>";
        assert!(parse(entity).is_err(), "a document type");
    }
}
