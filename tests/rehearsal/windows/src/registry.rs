//! The registry: values by key and name, equal but for case.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};

const FILE: &str = "Windows/System32/config/registry";
const ROOTS: [&str; 4] = ["HKLM", "HKCU", "HKU", "HKCR"];
const TYPES: [&str; 3] = ["REG_DWORD", "REG_SZ", "REG_EXPAND_SZ"];

pub(crate) const SETUP: &str = "HKLM\\SYSTEM\\Setup";
pub(crate) const VERSION: &str = "HKLM\\SOFTWARE\\Microsoft\\Windows NT\\CurrentVersion";
/// Phases of an installation.
pub(crate) const SPECIALIZE: &str = "specialize";
pub(crate) const OOBE: &str = "oobeSystem";
pub(crate) const DONE: &str = "done";

pub(crate) const NAME: &str = "HKLM\\SYSTEM\\CurrentControlSet\\Control\\ComputerName";
pub(crate) const REMOTE: &str = "HKLM\\SYSTEM\\CurrentControlSet\\Control\\Terminal Server";

#[derive(Debug, Default)]
pub(crate) struct Registry {
    values: BTreeMap<String, String>,
    /// The hive that is loaded for a moment.
    hive: Option<String>,
}

impl Registry {
    pub(crate) fn read(windows: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(windows.join(FILE)).context("the registry")?;
        let pairs = text.lines().filter_map(|line| line.split_once('\t'));
        let values = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        Ok(Self { values, hive: None })
    }

    pub(crate) fn write(&self, windows: &Path) -> anyhow::Result<()> {
        let lines = self.values.iter().map(|(key, value)| format!("{key}\t{value}\n"));
        let text = lines.collect::<String>();
        let mut file = fs::File::create(windows.join(FILE)).context("the registry")?;
        file.write_all(text.as_bytes()).context("the registry")?;
        file.sync_all().context("the registry")
    }

    pub(crate) fn get(&self, key: &str, name: &str) -> Option<&str> {
        self.values.get(&place(key, name)).map(String::as_str)
    }

    pub(crate) fn set(&mut self, key: &str, name: &str, value: &str) {
        self.values.insert(place(key, name), value.to_owned());
    }

    pub(crate) fn is_set(&self, key: &str, name: &str) -> bool {
        self.get(key, name).is_some_and(|value| value != "0")
    }

    /// Does as `reg.exe` with these arguments.
    pub(crate) fn command(&mut self, words: &[String]) -> anyhow::Result<()> {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        match words.as_slice() {
            ["add", key, options @ ..] => self.add(key, options),
            ["load", key, file] => {
                ensure!(self.hive.is_none(), "a hive is loaded already");
                ensure!(file.to_ascii_lowercase().ends_with("ntuser.dat"), "{file}: no hive");
                self.hive = Some((*key).to_owned());
                Ok(())
            }
            ["unload", key] => {
                let loaded = self.hive.take();
                ensure!(loaded.as_deref() == Some(*key), "{key} is not loaded");
                Ok(())
            }
            other => bail!("reg.exe {other:?} is not rehearsed"),
        }
    }

    fn add(&mut self, key: &str, options: &[&str]) -> anyhow::Result<()> {
        let root = key.split('\\').next().unwrap_or_default();
        ensure!(ROOTS.contains(&root), "{key}: no such root");
        let below_hive =
            self.hive.as_ref().is_some_and(|hive| key.starts_with(&format!("{hive}\\")));
        ensure!(root != "HKU" || below_hive, "{key}: no such hive");
        let ["/v", name, "/t", kind, "/d", value, "/f"] = options else {
            bail!("reg.exe add {options:?} is not rehearsed");
        };
        ensure!(TYPES.contains(kind), "{kind}: no such type");
        ensure!(*kind != "REG_DWORD" || value.parse::<u32>().is_ok(), "{value}: no number");
        self.set(key, name, value);
        Ok(())
    }
}

fn place(key: &str, name: &str) -> String {
    format!("{key}\\\\{name}").to_uppercase()
}

#[cfg(test)]
mod test {
    use super::*;

    fn done(registry: &mut Registry, line: &str) -> bool {
        let words: Vec<_> = line.split('|').map(str::to_owned).collect();
        registry.command(&words).is_ok()
    }

    #[test]
    fn commands_change_values() {
        let mut registry = Registry::default();
        let set = "add|HKLM\\SYSTEM\\Setup|/v|One|/t|REG_DWORD|/d|1|/f";
        assert!(done(&mut registry, set) && registry.is_set("hklm\\system\\setup", "ONE"));
        assert!(!done(&mut registry, &set.replace("|1|", "|one|")));
        assert!(!done(&mut registry, &set.replace("HKLM", "HKLX")));
        assert!(!done(&mut registry, &set.replace("HKLM", "HKU\\mount")));
        assert!(done(&mut registry, "load|HKU\\mount|C:\\Users\\Default\\NTUSER.DAT"));
        assert!(done(&mut registry, &set.replace("HKLM", "HKU\\mount")));
        assert!(done(&mut registry, "unload|HKU\\mount"));
        assert!(!done(&mut registry, "unload|HKU\\mount"));
    }
}
