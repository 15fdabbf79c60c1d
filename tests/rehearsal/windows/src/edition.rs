//! The images of a medium, and which of them Setup installs.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use super::console::say;
use super::drives::Drive;
use super::registry::{Registry, SETUP, SPECIALIZE, VERSION};
use super::xml::Element;
use super::{files, tool};

/// Keys that choose an edition without activating it (Microsoft: KMS client and generic keys).
const KEYS: [(&str, &str); 9] = [
    ("YTMG3-N6DKC-DKB77-7M9GH-8HVX7", "Core"),
    ("VK7JG-NPHTM-C97JM-9MPGT-3V66T", "Professional"),
    ("2B87N-8KFHP-DKV6R-Y2C8J-PKCKT", "ProfessionalN"),
    ("YNMGQ-8RYV3-4PGQ3-C8XTP-7CFBY", "Education"),
    ("XGVPP-NMH47-7TTHJ-W3FW7-8HV2C", "Enterprise"),
    ("NPPR9-FWDCX-D2C8J-H872K-2YT43", "Enterprise"),
    ("M7XTQ-FN8P6-TTKYV-9D4CC-J462D", "EnterpriseS"),
    ("TVRH6-WHNXV-R9WG3-9XRFY-MY832", "ServerStandard"),
    ("VDYBN-27WPP-V4HQT-9VMD4-VMK7H", "ServerStandard"),
];

#[derive(Debug)]
pub(crate) struct Edition {
    pub(crate) wim: PathBuf,
    pub(crate) index: String,
    pub(crate) name: String,
    edition: String,
    languages: Vec<String>,
}

impl Edition {
    pub(crate) fn is_windows_11(&self) -> bool {
        self.name.starts_with("Windows 11")
    }

    /// Applies it to a folder, and shows the percents. Returns the complaint, if that fails.
    pub(crate) fn apply(
        &self,
        to: &Path,
        show: &mut dyn FnMut(u32),
    ) -> anyhow::Result<Option<String>> {
        let [wim, folder] = [&self.wim, to].map(|path: &Path| path.display().to_string());
        let mut show = |piece: &str| {
            let percent = piece.rsplit_once('(').and_then(|(_, rest)| rest.split_once("%)"));
            percent
                .and_then(|(number, _)| number.trim().parse().ok())
                .into_iter()
                .for_each(&mut *show);
        };
        let arguments = ["apply", &wim, &self.index, &folder];
        let complaint = tool::watch("/bin/wimlib-imagex", &arguments, &mut show)?;
        if complaint.is_none() {
            // The registry of the image, which is generalized.
            let mut registry = Registry::default();
            registry.set(VERSION, "ProductName", &self.name);
            registry.set(SETUP, "Phase", SPECIALIZE);
            registry.write(to)?;
        }
        Ok(complaint)
    }
}

/// The images of the medium.
fn images(drives: &[Drive]) -> anyhow::Result<Vec<Edition>> {
    let names = ["sources/install.wim", "sources/install.esd"];
    let paths = drives.iter().filter(|it| it.is_cd);
    let mut paths = paths.flat_map(|it| names.map(|name| files::below(&it.root, name)));
    listed(&paths.find(|path| path.is_file()).context("no medium with images of Windows")?)
}

/// The images of a WIM, as it lists them.
pub(crate) fn listed(wim: &Path) -> anyhow::Result<Vec<Edition>> {
    let said = tool::run("/bin/wimlib-imagex", &["info", &wim.display().to_string()])?;
    let mut found: Vec<Edition> = Vec::new();
    for (key, value) in said.lines().filter_map(|line| line.split_once(':')) {
        let value = value.trim().to_owned();
        match (key.trim(), found.last_mut()) {
            ("Index", _) => found.push(Edition {
                wim: wim.to_owned(),
                index: value,
                name: String::new(),
                edition: String::new(),
                languages: Vec::new(),
            }),
            ("Name", Some(last)) => last.name = value,
            ("Edition ID", Some(last)) => last.edition = value,
            ("Languages", Some(last)) => {
                last.languages = value.split_whitespace().map(str::to_owned).collect();
            }
            _ => {}
        }
    }
    Ok(found)
}

/// The image that the answers choose: by index or name, by product key, or the only one.
pub(crate) fn choose(drives: &[Drive], setup: &Element, language: &str) -> anyhow::Result<Edition> {
    let mut images = images(drives)?;
    let evaluation = images.iter().any(|image| image.edition.ends_with("Eval"));
    let key = setup.at("UserData/ProductKey");
    ensure!(
        key.is_none() || !evaluation,
        "Windows cannot find the Microsoft Software License Terms: evaluation media take no key"
    );
    ensure!(setup.is("UserData/AcceptEula"), "nobody accepted the license terms");
    let edition = match key.and_then(|key| key.value("Key")) {
        Some(key) => {
            let found = KEYS.iter().find(|(it, _)| *it == key);
            Some(found.with_context(|| format!("{key}: Setup cannot validate the product key"))?.1)
        }
        None => None,
    };
    for data in setup.at("ImageInstall/OSImage/InstallFrom").into_iter().flat_map(|it| &it.children)
    {
        let (Some(key), Some(value)) = (data.value("Key"), data.value("Value")) else { continue };
        images.retain(|image| match key {
            "/IMAGE/INDEX" => image.index == value,
            _ => image.name == value,
        });
    }
    if let Some(edition) = edition {
        images.retain(|image| image.edition == edition);
    }
    let mut images = images.into_iter();
    let (Some(image), None) = (images.next(), images.next()) else {
        bail!("the answers choose no image of the medium, or several");
    };
    let has = image.languages.iter().any(|it| it.eq_ignore_ascii_case(language));
    ensure!(has, "UILanguage is {language}, and the medium has {:?}", image.languages);
    say!("image {} is installed: {}", image.index, image.name);
    Ok(image)
}
