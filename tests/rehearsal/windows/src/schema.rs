//! The components of Windows with their settings (Microsoft: Unattended Windows Setup Reference),
//! as far as they are rehearsed. Everything else than `schema.txt` lists is an error, as Setup's.

use anyhow::{Context as _, bail, ensure};

use super::xml::{Attribute, Element};

const UNATTEND: &str = "urn:schemas-microsoft-com:unattend";
const WCM: &str = "http://schemas.microsoft.com/WMIConfig/2002/State";
const IDENTITY: [(&str, &[&str]); 4] = [
    ("processorArchitecture", &["amd64", "wow64"]),
    ("publicKeyToken", &["31bf3856ad364e35"]),
    ("language", &["neutral"]),
    ("versionScope", &["nonSxS"]),
];
pub(crate) const PASSES: [&str; 7] = [
    "windowsPE",
    "offlineServicing",
    "generalize",
    "specialize",
    "auditSystem",
    "auditUser",
    "oobeSystem",
];

/// A line of the table.
#[derive(Clone, Copy, Debug)]
struct Rule<'a> {
    depth: usize,
    name: &'a str,
    kind: &'a str,
}

/// Reads the table: a component with its passes, and its settings below it, indented.
fn rules() -> Vec<Rule<'static>> {
    let lines = include_str!("schema.txt").lines().filter(|line| !line.trim().is_empty());
    let rule = |line: &'static str| {
        let text = line.trim_start();
        let (name, kind) = text.split_once(' ').unwrap_or((text, ""));
        Rule { depth: (line.len() - text.len()) / 2, name, kind }
    };
    lines.map(rule).collect()
}

/// The rules directly below a rule, each with those below itself.
fn below<'a, 'b>(rules: &'b [Rule<'a>]) -> Vec<(Rule<'a>, &'b [Rule<'a>])> {
    let Some(depth) = rules.first().map(|rule| rule.depth) else { return Vec::new() };
    let starts = rules.iter().enumerate().filter(|(_, rule)| rule.depth == depth);
    let part = |(at, rule): (usize, &Rule<'a>)| {
        let rest = &rules[at + 1..];
        let end = rest.iter().position(|rule| rule.depth <= depth).unwrap_or(rest.len());
        (*rule, &rest[..end])
    };
    starts.map(part).collect()
}

/// Fails as Setup does where a file is not as it should be. The error names the pass and the
/// place.
pub(crate) fn check(root: &Element) -> anyhow::Result<()> {
    is(root, "unattend")?;
    ensure!(root.attributes.is_empty(), "unattend has attributes");
    let mut last = None;
    for settings in &root.children {
        is(settings, "settings")?;
        let pass = settings.attribute("pass").context("settings without a pass")?;
        let place = PASSES.iter().position(|name| *name == pass);
        ensure!(place.is_some(), "{pass}: no such pass");
        ensure!(place > last, "the pass {pass} comes twice, or too late");
        last = place;
        let mut seen = Vec::new();
        for component in &settings.children {
            let identity = identity(component)?;
            ensure!(!seen.contains(&identity), "pass [{pass}]: {identity:?} comes twice");
            seen.push(identity);
            check_component(pass, component).with_context(|| {
                format!("Windows could not parse or process the answer file for pass [{pass}]")
            })?;
        }
    }
    Ok(())
}

fn is(element: &Element, name: &str) -> anyhow::Result<()> {
    ensure!(element.name == name, "{} where {name} belongs", element.name);
    ensure!(element.namespace == UNATTEND, "{name} is in the namespace {:?}", element.namespace);
    Ok(())
}

/// The name and the architecture of a component.
fn identity(component: &Element) -> anyhow::Result<(&str, &str)> {
    is(component, "component")?;
    let name = component.attribute("name").context("a component without a name")?;
    for (key, allowed) in IDENTITY {
        let value = component.attribute(key).with_context(|| format!("{name}: no {key}"))?;
        ensure!(allowed.contains(&value), "{name}: {key}=\"{value}\"");
    }
    ensure!(component.attributes.len() == IDENTITY.len() + 1, "{name}: other attributes");
    Ok((name, component.attribute("processorArchitecture").unwrap_or_default()))
}

fn check_component(pass: &str, component: &Element) -> anyhow::Result<()> {
    let rules = rules();
    let name = component.attribute("name").unwrap_or_default();
    let components = below(&rules);
    let found = components.iter().find(|(rule, _)| rule.name == name);
    let (rule, settings) = found.with_context(|| format!("{name}: no such component"))?;
    ensure!(rule.kind.split(',').any(|it| it == pass), "{name} is not for this pass");
    check_group(component, settings).context(name.to_owned())
}

/// Checks the settings in an element: all known, in the schema's order, and none twice.
fn check_group(group: &Element, rules: &[Rule<'_>]) -> anyhow::Result<()> {
    let rules = below(rules);
    ensure!(group.text.trim().is_empty(), "{}: text {:?}", group.name, group.text);
    let mut last = None;
    for child in &group.children {
        ensure!(child.namespace == UNATTEND, "{}: the namespace {:?}", child.name, child.namespace);
        let place = rules.iter().position(|(rule, _)| rule.name == child.name);
        let place = place.with_context(|| format!("{}: no setting {}", group.name, child.name))?;
        let (rule, below) = rules[place];
        let several = rule.kind == "+";
        ensure!(
            last < Some(place) || several && last == Some(place),
            "{}: {} comes twice, or too late",
            group.name,
            child.name
        );
        last = Some(place);
        check_setting(child, rule, below).with_context(|| child.name.clone())?;
    }
    check_order(group)
}

fn check_setting(setting: &Element, rule: Rule<'_>, below: &[Rule<'_>]) -> anyhow::Result<()> {
    let several = rule.kind == "+";
    let allowed = |it: &Attribute| {
        several
            && it.namespace == WCM
            && (it.name == "action" && it.value == "add" || it.name == "keyValue")
    };
    ensure!(setting.attributes.iter().all(allowed), "attributes {:?}", setting.attributes);
    let acts = setting.attributes.iter().any(|it| it.name == "action");
    ensure!(acts == several, "wcm:action belongs to each item of a list, and to nothing else");
    if several || rule.kind.is_empty() {
        return check_group(setting, below);
    }
    ensure!(setting.children.is_empty(), "it has settings, and is a value");
    check_value(&setting.text, rule.kind)
}

/// Items of a list are numbered, each number once.
fn check_order(list: &Element) -> anyhow::Result<()> {
    let mut numbers = Vec::new();
    for item in list.children.iter().filter(|item| item.at("Order").is_some()) {
        let number = item.number("Order")?;
        ensure!(!numbers.contains(&number), "{}: Order {number} comes twice", list.name);
        numbers.push(number);
    }
    Ok(())
}

fn check_value(text: &str, kind: &str) -> anyhow::Result<()> {
    let (word, limit) = kind.split_once(' ').unwrap_or((kind, ""));
    match word {
        "bool" => ensure!(["true", "false"].contains(&text), "{text:?} is no boolean"),
        "word" => ensure!(limit.split('|').any(|it| it == text), "{text:?} is not in {limit}"),
        "number" => {
            let (low, high) = limit.split_once("..").context("the table")?;
            let number: u32 = text.parse().with_context(|| format!("{text:?} is no number"))?;
            let range = low.parse()?..=high.parse()?;
            ensure!(range.contains(&number), "{number} is not in {limit}");
        }
        "text" => {
            let length = text.encode_utf16().count();
            ensure!((1..=limit.parse()?).contains(&length), "{length} characters");
        }
        other => bail!("{other}: no such type in the table"),
    }
    Ok(())
}

#[cfg(test)]
mod test;
