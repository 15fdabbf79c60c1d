//! `CPU_FLAGS`: processor features in QEMU's words.

use std::collections::BTreeSet;

use vmm::config::{Hide, Vendor};

use super::options::Options;
use super::table::{self, Scope, Translation};
use crate::settings::value::{Value, quote};

/// Processor flags: what is hidden or shown, and notes on the rest, which is always the host's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flags {
    /// The flags in normalized form.
    said: Vec<String>,
    notes: Vec<String>,
    /// Whether nested virtualization was switched on or off.
    pub nested: Option<bool>,
    pub hidden: BTreeSet<Hide>,
    /// The vendor in Hyper-V's leaves.
    pub vendor: Option<Vendor>,
}

impl Value for Flags {
    const ACCEPTS: &'static str = "+feature or -feature, comma-separated";

    fn read(text: &str) -> anyhow::Result<Self> {
        let text = String::read(text)?;
        let options = Options::read(&text);
        let mut flags = Self::default();
        let first = Some((options.first, None)).filter(|(word, _)| !word.is_empty());
        for (word, value) in first.into_iter().chain(options.rest) {
            let (name, on) = match (word.split_at_checked(1), value.as_deref()) {
                (Some(("+", name)), _) => (name, true),
                (Some(("-", name)), _) => (name, false),
                (_, Some("off" | "no" | "n" | "false")) => (word.as_str(), false),
                _ => (word.as_str(), true),
            };
            // QEMU accepts both spellings of most features.
            let name = name.to_lowercase().replace('_', "-");
            flags.add(&name, on, value.as_deref().unwrap_or_default());
        }
        Ok(flags)
    }
    fn show(&self) -> String {
        quote(&self.said.join(","))
    }
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

impl Flags {
    /// Adds a flag. The last of several with the same name wins.
    fn add(&mut self, name: &str, on: bool, value: &str) {
        let key = format!("{}{name}", if on { '+' } else { '-' });
        let known = Hide::ALL.iter().find(|(word, _)| *word == name || ALIAS == (name, word));
        let why = match (name, known) {
            ("vmx" | "svm", _) => {
                self.nested = Some(on);
                None
            }
            ("hv-vendor-id", _) if on => {
                let letters: String = value.chars().take(Vendor::LENGTH).collect();
                self.vendor = Vendor::try_from(letters).ok();
                self.vendor.is_none().then_some("give 1 to 12 characters of ASCII")
            }
            (_, Some((_, feature))) if on => {
                self.hidden.remove(feature);
                None
            }
            (_, Some((_, feature))) => {
                self.hidden.insert(*feature);
                None
            }
            _ => without_effect(name, &key),
        };
        self.notes.extend(why.map(|why| format!("{} has no effect: {why}", quote(&key))));
        self.said.push(key);
    }
}

/// QEMU has two names for one feature.
const ALIAS: (&str, &str) = ("hv-apicv", "hv-avic");

/// The reason why a flag has no effect, unless the machine is always like this.
fn without_effect(name: &str, key: &str) -> Option<&'static str> {
    let group = name.split('-').next().unwrap_or_default();
    let group = format!("{}{group}-*", &key[..1]);
    let found = table::find(Scope::Flag, key).or(table::find(Scope::Flag, &group));
    match found {
        Some(Translation::BuiltIn) => None,
        Some(Translation::Ignored(why)) => Some(why),
        _ => Some("the guest's processors have the features of the host's"),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_flag_is_supported_or_noted() {
        let flags = Flags::read("+invtsc,hv_relaxed,-hv-evmcs,+hv-evmcs,+zzz,-kvm-pv-eoi").unwrap();
        assert_eq!(flags.show(), "+invtsc,+hv-relaxed,-hv-evmcs,+hv-evmcs,+zzz,-kvm-pv-eoi");
        let notes = flags.notes.join("\n");
        for word in ["+hv-evmcs", "+zzz", "-kvm-pv-eoi"] {
            assert!(notes.contains(&format!("{word} has")), "{word} in {notes}");
        }
        assert_eq!(flags.notes.len(), 3, "{notes}");
        assert!(flags.hidden.is_empty() && flags.nested.is_none());
        assert!(Flags::read("+a\u{1b}[0m").is_err());
    }

    #[test]
    fn a_hidden_hypervisor_is_hidden() {
        let flags =
            Flags::read("-hypervisor,kvm=off,hv_ipi=no,-hv_apicv,hv_vendor_id=AMDisbetter!x");
        let flags = flags.unwrap();
        let hidden = [Hide::Kvm, Hide::Hypervisor, Hide::HvIpi, Hide::HvAvic];
        assert_eq!(flags.hidden, BTreeSet::from(hidden));
        assert_eq!(flags.vendor.unwrap().to_string(), "AMDisbetter!", "as in QEMU, it is cut");
        assert!(flags.notes.is_empty(), "{:?}", flags.notes);
    }

    #[test]
    fn the_last_of_two_flags_wins() {
        let flags = Flags::read("kvm=off,kvm=on,+vmx,-svm,hv-ipi,-hv-ipi").unwrap();
        assert_eq!((flags.nested, flags.hidden), (Some(false), BTreeSet::from([Hide::HvIpi])));
        assert_eq!(Flags::read("-vmx,svm=on").unwrap().nested, Some(true));
        let vendor = Flags::read("hv_vendor_id=").unwrap();
        assert!(vendor.vendor.is_none() && vendor.notes[0].contains("1 to 12"), "{vendor:?}");
    }
}
