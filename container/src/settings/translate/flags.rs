//! `CPU_FLAGS`: processor features in QEMU's words.

use super::options::Options;
use super::table::{self, Scope, Translation};
use crate::settings::value::{Value, quote};

/// Processor flags. They only produce notes, because the features are always the host's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flags {
    /// The flags in normalized form.
    said: Vec<String>,
    notes: Vec<String>,
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
                (_, Some("off")) => (word.as_str(), false),
                _ => (word.as_str(), true),
            };
            // QEMU accepts both spellings of most features.
            let name = name.to_lowercase().replace('_', "-");
            let key = format!("{}{name}", if on { '+' } else { '-' });
            let group = name.split('-').next().unwrap_or_default();
            let group = format!("{}{group}-*", if on { '+' } else { '-' });
            let found = table::find(Scope::Flag, &key).or(table::find(Scope::Flag, &group));
            let why = match found {
                Some(Translation::BuiltIn) => None,
                Some(Translation::Ignored(why)) => Some(why),
                _ => Some("the guest's processors have the features of the host's"),
            };
            let note = why.map(|why| format!("{} has no effect: {why}", quote(&key)));
            flags.notes.extend(note);
            flags.said.push(key);
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

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_flag_is_supported_or_noted() {
        let flags = Flags::read("-hypervisor,kvm=off,+invtsc,hv_relaxed,-hv-evmcs,+zzz").unwrap();
        assert_eq!(flags.show(), "-hypervisor,-kvm,+invtsc,+hv-relaxed,-hv-evmcs,+zzz");
        let notes = flags.notes.join("\n");
        for word in ["-hypervisor", "-kvm", "-hv-evmcs", "+zzz"] {
            assert!(notes.contains(&format!("{word} has")), "{word} in {notes}");
        }
        assert!(!notes.contains("relaxed"), "{notes}");
        assert!(Flags::read("+a\u{1b}[0m").is_err());
    }
}
