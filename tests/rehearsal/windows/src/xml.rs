//! XML with namespaces. Expat's `xmlwf` reads a file and writes it in canonical form, which has no
//! comments, declarations or own entities; only that form is read here.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};

use super::tool;

const FOLDER: &str = "/run/xml";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) children: Vec<Self>,
    /// The text without that of children.
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

/// Reads a file, which must be well-formed.
pub(crate) fn read(path: &Path) -> anyhow::Result<Element> {
    fs::create_dir_all(FOLDER)?;
    let name = path.file_name().and_then(|name| name.to_str()).context("a name")?;
    let said = tool::run("/bin/xmlwf", &["-n", "-d", FOLDER, &path.display().to_string()])?;
    ensure!(said.is_empty(), "{said}");
    parse(&fs::read_to_string(Path::new(FOLDER).join(name))?)
}

/// Reads canonical text.
pub(crate) fn parse(text: &str) -> anyhow::Result<Element> {
    let mut open = vec![Element::default()];
    let mut rest = text;
    while !rest.is_empty() {
        let (before, after) = rest.split_once('<').unwrap_or((rest, ""));
        let top = open.last_mut().context("an end without a start")?;
        top.text.push_str(&plain(before)?);
        let Some((tag, after)) = after.split_once('>') else { break };
        rest = after;
        if tag.starts_with('?') {
            continue;
        }
        if tag.starts_with('/') {
            let mut ended = open.pop().context("an end without a start")?;
            if !ended.children.is_empty() {
                ended.text.clear();
            }
            open.last_mut().context("an end without a start")?.children.push(ended);
        } else {
            open.push(start(tag)?);
        }
    }
    let mut document =
        open.pop().filter(|_| open.is_empty()).context("an element that does not end")?;
    document.children.pop().context("no element")
}

/// A start tag: `n1:name xmlns:n1="…" other="…" n2:third="…" xmlns:n2="…"`.
fn start(tag: &str) -> anyhow::Result<Element> {
    let (name, mut rest) = tag.split_once(' ').unwrap_or((tag, ""));
    let mut pairs = Vec::new();
    while !rest.is_empty() {
        let (key, after) = rest.split_once("=\"").context("an attribute")?;
        let (value, after) = after.split_once('"').context("an attribute")?;
        pairs.push((key.trim_start(), plain(value)?));
        rest = after;
    }
    let of = |name: &str| -> anyhow::Result<(String, String)> {
        let Some((prefix, local)) = name.split_once(':') else {
            return Ok((String::new(), name.to_owned()));
        };
        let declared = pairs.iter().find(|(key, _)| key.strip_prefix("xmlns:") == Some(prefix));
        Ok((declared.context("no such prefix")?.1.clone(), local.to_owned()))
    };
    let (namespace, name) = of(name)?;
    let mut attributes = Vec::new();
    for (key, value) in pairs.iter().filter(|(key, _)| !key.starts_with("xmlns:")) {
        let (namespace, name) = of(key)?;
        attributes.push(Attribute { namespace, name, value: value.clone() });
    }
    Ok(Element { namespace, name, attributes, ..Element::default() })
}

fn plain(text: &str) -> anyhow::Result<String> {
    let mut made = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('&') {
        let (entity, after) = after.split_once(';').context("an entity that does not end")?;
        made.push_str(before);
        made.push(match entity {
            "amp" => '&',
            "lt" => '<',
            "gt" => '>',
            "quot" => '"',
            "#9" => '\t',
            "#10" => '\n',
            "#13" => '\r',
            other => bail!("&{other}; is not canonical"),
        });
        rest = after;
    }
    Ok(made + rest)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_expat_writes_is_read() {
        let text = "<n1:a xmlns:n1=\"urn:a\"><?pi x?>&#10;  <n1:b xmlns:n1=\"urn:a\" \
                    c=\"x&amp;&quot;y\" n2:d=\"e\" xmlns:n2=\"urn:w\">&lt;&amp;한 </n1:b><f></f>\
                    &#10;</n1:a>";
        let root = parse(text).unwrap();
        assert_eq!((root.namespace.as_str(), root.text.as_str()), ("urn:a", ""));
        let child = root.at("b").unwrap();
        assert_eq!((child.attribute("c"), child.text.as_str()), (Some("x&\"y"), "<&한 "));
        assert_eq!((child.attributes[1].namespace.as_str(), child.attribute("d")), ("urn:w", None));
        assert_eq!(root.at("f").unwrap().namespace, "");
        for bad in ["", "<a>", "</a>", "<a></a></a>", "<x:a></x:a>", "<a>&copy;</a>"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
