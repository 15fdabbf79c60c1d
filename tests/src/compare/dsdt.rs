//! The devices of an ACPI namespace, and their objects.
//!
//! A device has different names on two machines, so it is identified by its hardware ID, or by its
//! bridge and its address there. For methods, only their presence is compared.

use std::collections::{BTreeMap, BTreeSet};

use super::Facts;
use super::asl::Term;

/// Terms that contain devices, or are one.
const SCOPES: [&str; 4] = ["Device", "Processor", "Scope", "ThermalZone"];

#[derive(Default)]
struct Namespace<'a> {
    /// Keys are paths of scopes.
    scopes: BTreeMap<String, Vec<&'a Term>>,
    /// Paths of the scopes that are devices.
    devices: BTreeSet<String>,
}

impl<'a> Namespace<'a> {
    fn collect(&mut self, path: &str, terms: &'a [Term]) {
        for term in terms {
            if SCOPES.contains(&term.word.as_str()) {
                let inner = join(path, term.argument(0));
                if term.word != "Scope" {
                    self.devices.insert(inner.clone());
                }
                self.scopes.entry(inner.clone()).or_default();
                self.collect(&inner, &term.body);
            } else {
                self.scopes.entry(path.to_owned()).or_default().push(term);
            }
        }
    }

    fn value(&self, path: &str, name: &str) -> Option<&'a Term> {
        let mut terms = self.scopes.get(path)?.iter();
        let found = terms.find(|term| term.word == "Name" && term.argument(0) == name);
        found.and_then(|term| term.arguments.get(1))
    }

    /// The kind of a device: its hardware ID, or its address on its parent.
    fn kind(&self, path: &str) -> String {
        if let Some(id) = self.value(path, "_HID") {
            let id = id.arguments.first().unwrap_or(id);
            return id.word.trim_matches('"').to_owned();
        }
        let parent = path.rsplit_once('.').map_or("", |it| it.0);
        match self.value(path, "_ADR") {
            Some(address) => format!("{} address {}", self.kind(parent), number(&address.word)),
            None => path.to_owned(),
        }
    }

    /// The kind of each device, numbered if there are several of a kind.
    fn names(&self) -> BTreeMap<String, String> {
        let mut names = BTreeMap::new();
        let mut counts = BTreeMap::<String, usize>::new();
        for path in &self.devices {
            let kind = self.kind(path);
            let count = counts.entry(kind.clone()).or_default();
            *count += 1;
            names.insert(path.clone(), (kind, *count));
        }
        let name = |(path, (kind, number)): (String, (String, usize))| {
            let several = counts[&kind] > 1;
            (path, if several { format!("{kind} #{number}") } else { kind })
        };
        names.into_iter().map(name).collect()
    }
}

/// The absolute path of a name that is used in a scope.
fn join(path: &str, name: &str) -> String {
    match name.strip_prefix('\\') {
        Some("") => String::new(),
        Some(absolute) => absolute.to_owned(),
        None if path.is_empty() => name.to_owned(),
        None => format!("{path}.{name}"),
    }
}

/// A number in one format. AML has names for the most frequent numbers.
fn number(word: &str) -> String {
    let word = match word {
        "Zero" => "0x00",
        "One" => "0x01",
        word => word,
    };
    let digits = word.strip_prefix("0x").filter(|digits| !digits.is_empty());
    match digits.map(|digits| u64::from_str_radix(digits, 16)) {
        Some(Ok(number)) => format!("{number:#x}"),
        _ => word.to_owned(),
    }
}

pub(super) fn read(table: &str, terms: &[Term], facts: &mut Facts) {
    let mut namespace = Namespace::default();
    let block = terms.iter().find(|term| term.word == "DefinitionBlock");
    namespace.collect("", block.map_or(terms, |block| &block.body));
    let names = namespace.names();
    for path in &namespace.devices {
        facts.thing(format!("acpi {table} device {}", names[path]), "there");
    }
    for (path, terms) in &namespace.scopes {
        let name = names.get(path).map_or_else(
            || if path.is_empty() { "root".into() } else { path.clone() },
            |name| format!("device {name}"),
        );
        let prefix = format!("acpi {table} {name}");
        terms.iter().for_each(|term| object(&prefix, term, facts));
    }
    routes(table, &namespace, facts);
}

/// Names outside of the specification are ignored.
fn object(prefix: &str, term: &Term, facts: &mut Facts) {
    let name = term.argument(0);
    match term.word.as_str() {
        "Name" if name.starts_with('_') => {
            let Some(value) = term.arguments.get(1) else { return };
            match (name, value.word.as_str()) {
                (_, "ResourceTemplate") => {
                    for resource in &value.body {
                        facts.text(format!("{prefix} {name} {}", resource_text(resource)), "there");
                    }
                }
                ("_PRT", _) => {}
                _ => facts.text(format!("{prefix} {name}"), plain(value)),
            }
        }
        "Method" if name.starts_with('_') && name != "_PRT" => {
            facts.text(format!("{prefix} {name}"), "a method");
        }
        "OperationRegion" => {
            let words: Vec<_> = (1..4).map(|at| number(term.argument(at))).collect();
            facts.text(format!("{prefix} region {}", words.join(" ")), "there");
        }
        _ => {}
    }
}

/// A value on one line, with its numbers in one format.
fn plain(term: &Term) -> String {
    let list = |terms: &[Term]| terms.iter().map(plain).collect::<Vec<_>>().join(" ");
    match term.word.as_str() {
        "Package" => format!("{{{}}}", list(&term.body)),
        "EisaId" => list(&term.arguments).trim_matches('"').to_owned(),
        _ if term.arguments.is_empty() && term.body.is_empty() => {
            number(&term.word).trim_matches('"').to_owned()
        }
        _ => term.to_string(),
    }
}

/// A resource, without the tags and types that the compiler adds.
fn resource_text(term: &Term) -> String {
    let mut term = term.clone();
    while term.arguments.last().is_some_and(|it| {
        it.word.is_empty() || ["TypeStatic", "AddressRangeMemory"].contains(&it.word.as_str())
    }) {
        term.arguments.pop();
    }
    term.to_string()
}

/// The interrupt line of each pin of each slot, from every routing table with fixed lines: the one
/// for the I/O APIC.
fn routes(table: &str, namespace: &Namespace<'_>, facts: &mut Facts) {
    let lines = fixed_lines(namespace);
    for term in namespace.scopes.values().flatten() {
        if term.word != "Name" {
            continue;
        }
        let entries = term.arguments.get(1).map_or(&[][..], |package| &package.body);
        for entry in entries.iter().filter(|entry| entry.body.len() == 4) {
            let [address, pin, source, index] = &entry.body[..] else { continue };
            let line = match number(&source.word).as_str() {
                "0x0" => Some(number(&index.word)),
                _ => lines.get(source.word.trim_start_matches(['\\', '^'])).cloned(),
            };
            if let (Some(line), "Package") = (line, entry.word.as_str()) {
                let (address, pin) = (number(&address.word), number(&pin.word));
                facts.text(format!("acpi {table} route {address} pin {pin}"), line);
            }
        }
    }
}

/// Link devices with exactly one line, by their name without the path.
fn fixed_lines(namespace: &Namespace<'_>) -> BTreeMap<String, String> {
    let mut lines = BTreeMap::new();
    for path in &namespace.devices {
        let Some(resources) = namespace.value(path, "_CRS") else { continue };
        let interrupts: Vec<_> =
            resources.body.iter().filter(|term| term.word == "Interrupt").collect();
        if let ([interrupt], Some(name)) = (&interrupts[..], path.rsplit('.').next())
            && let [line] = &interrupt.body[..]
        {
            lines.insert(name.to_owned(), number(&line.word));
        }
    }
    lines
}

#[cfg(test)]
mod test {
    use super::super::{Value, asl};
    use super::*;

    fn facts(text: &str) -> BTreeMap<String, Value> {
        let mut facts = Facts::default();
        read("DSDT", &asl::parse(text).unwrap(), &mut facts);
        facts.0
    }

    fn value(facts: &BTreeMap<String, Value>, name: &str) -> String {
        match &facts[name] {
            Value::Text(text) => text.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn devices_are_identified_by_hid_or_address() {
        let found = facts(
            r#"DefinitionBlock ("", "DSDT") {
                Scope (\_SB) { Device (PCI0) { Name (_HID, EisaId ("PNP0A08")) } }
                Scope (_SB.PCI0) { Device (SF8) {
                    Name (_ADR, 0x001F0000)
                    Device (A) { Name (_HID, "X") Name (_UID, One) }
                    Device (B) { Name (_HID, "X") Method (_STA, 0) { Return (One) } }
                } }
                Name (_S5, Package (0x02) { Zero, 0x05 })
            }"#,
        );
        assert!(found.contains_key("acpi DSDT device PNP0A08"));
        assert!(found.contains_key("acpi DSDT device PNP0A08 address 0x1f0000"));
        assert_eq!(value(&found, "acpi DSDT device X #1 _UID"), "0x1");
        assert_eq!(value(&found, "acpi DSDT device X #2 _STA"), "a method");
        assert_eq!(value(&found, "acpi DSDT root _S5"), "{0x0 0x5}");
    }

    #[test]
    fn both_routing_notations_are_equal() {
        let link = facts(
            r#"Device (GSIE) { Name (_HID, "L") Name (_CRS, ResourceTemplate () {
                Interrupt (ResourceConsumer, Level, ActiveHigh, Shared, ,, ) { 0x00000014, }
            }) }
            Name (PRTA, Package (0x01) { Package (0x04) { 0xFFFF, Zero, GSIE, Zero } })
            Name (PRTP, Package (0x01) { Package (0x04) { 0xFFFF, Zero, LNKE, Zero } })"#,
        );
        let direct =
            facts("Name (_PRT, Package (0x01) { Package (0x04) { 0xFFFF, Zero, Zero, 0x14 } })");
        let name = "acpi DSDT route 0xffff pin 0x0";
        assert_eq!(value(&link, name), "0x14");
        assert_eq!(value(&direct, name), "0x14");
    }
}
