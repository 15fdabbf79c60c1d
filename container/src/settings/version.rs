//! `VERSION`: a version of Windows, the probe, or an installation medium of the user.

use anyhow::{anyhow, bail, ensure};

use super::value::{GIB, MIB, Value, quote};

/// A known version of Windows.
#[derive(Debug, PartialEq, Eq)]
pub struct Product {
    /// The base of file names.
    pub id: &'static str,
    pub name: &'static str,
    /// Further accepted words, in lower case.
    words: &'static [&'static str],
    pub needs: Needs,
}

/// The minimum requirements of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Memory and disk, in bytes.
    Sizes(u64, u64),
    /// A BIOS and its chips. This machine has only UEFI.
    Bios,
}

const CLIENT11: Needs = Needs::Sizes(2 * GIB, 32 * GIB);
const CLIENT10: Needs = Needs::Sizes(2 * GIB, 16 * GIB);
const SERVER: Needs = Needs::Sizes(2 * GIB, 32 * GIB);

/// All known versions, with every word that the reference image accepts.
#[rustfmt::skip]
const PRODUCTS: &[Product] = &[
    Product { id: "win11x64", name: "Windows 11 Pro", needs: CLIENT11, words: &["11", "11p",
        "win11", "pro11", "win11p", "windows11", "windows 11"] },
    Product { id: "win11x64-enterprise-eval", name: "Windows 11 Enterprise", needs: CLIENT11,
        words: &["11e", "win11e", "windows11e", "windows 11e"] },
    Product { id: "win11x64-enterprise-ltsc-eval", name: "Windows 11 Enterprise LTSC",
        needs: CLIENT11, words: &["11l", "11ltsc", "ltsc11", "win11l", "win11-ltsc",
        "win11x64-ltsc"] },
    Product { id: "win11x64-enterprise-iot-eval", name: "Windows 11 IoT Enterprise LTSC",
        needs: CLIENT11, words: &["11i", "11iot", "iot11", "win11i", "win11-iot",
        "win11x64-iot"] },
    Product { id: "win10x64", name: "Windows 10 Pro", needs: CLIENT10, words: &["10", "10p",
        "win10", "pro10", "win10p", "windows10", "windows 10"] },
    Product { id: "win10x64-enterprise-eval", name: "Windows 10 Enterprise", needs: CLIENT10,
        words: &["10e", "win10e", "windows10e", "windows 10e"] },
    Product { id: "win10x64-enterprise-ltsc-eval", name: "Windows 10 Enterprise LTSC",
        needs: CLIENT10, words: &["10l", "10ltsc", "ltsc10", "win10l", "win10-ltsc",
        "win10x64-ltsc"] },
    Product { id: "win10x64-enterprise-iot-eval", name: "Windows 10 IoT Enterprise LTSC",
        needs: CLIENT10, words: &["10i", "10iot", "iot10", "win10i", "win10-iot",
        "win10x64-iot"] },
    Product { id: "win81x64", name: "Windows 8.1 Pro", needs: CLIENT10, words: &["8", "8p", "81",
        "81p", "pro8", "8.1", "win8", "win8p", "win81", "win81p", "windows 8"] },
    Product { id: "win81x64-enterprise-eval", name: "Windows 8.1 Enterprise", needs: CLIENT10,
        words: &["8e", "81e", "8.1e", "win8e", "win81e", "windows 8e"] },
    Product { id: "win7x64", name: "Windows 7", needs: Needs::Bios, words: &["7", "win7",
        "windows7", "windows 7"] },
    Product { id: "win7x64-ultimate", name: "Windows 7 Ultimate", needs: Needs::Bios,
        words: &["7u", "win7u", "windows7u"] },
    Product { id: "win7x64-enterprise", name: "Windows 7 Enterprise", needs: Needs::Bios,
        words: &["7e", "win7e", "windows7e"] },
    Product { id: "win7x86", name: "Windows 7 (32 bits)", needs: Needs::Bios, words: &["7x86",
        "win732", "windows7x86"] },
    Product { id: "win7x86-ultimate", name: "Windows 7 Ultimate (32 bits)", needs: Needs::Bios,
        words: &["7ux86", "7u32"] },
    Product { id: "win7x86-enterprise", name: "Windows 7 Enterprise (32 bits)",
        needs: Needs::Bios, words: &["7ex86", "7e32"] },
    Product { id: "winvistax64", name: "Windows Vista", needs: Needs::Bios, words: &["vista",
        "vs", "6", "winvista", "windowsvista", "windows vista"] },
    Product { id: "winvistax64-ultimate", name: "Windows Vista Ultimate", needs: Needs::Bios,
        words: &["vistu", "vu", "6u", "winvistu"] },
    Product { id: "winvistax64-enterprise", name: "Windows Vista Enterprise", needs: Needs::Bios,
        words: &["viste", "ve", "6e", "winviste"] },
    Product { id: "winvistax86", name: "Windows Vista (32 bits)", needs: Needs::Bios,
        words: &["vistax86", "vista32", "6x86", "windowsvistax86"] },
    Product { id: "winvistax86-ultimate", name: "Windows Vista Ultimate (32 bits)",
        needs: Needs::Bios, words: &["vux86", "vu32"] },
    Product { id: "winvistax86-enterprise", name: "Windows Vista Enterprise (32 bits)",
        needs: Needs::Bios, words: &["vex86", "ve32"] },
    Product { id: "winxpx86", name: "Windows XP", needs: Needs::Bios, words: &["xp", "xp32",
        "xpx86", "5", "5x86", "winxp", "winxp86", "windowsxp", "windows xp"] },
    Product { id: "winxpx64", name: "Windows XP (64 bits)", needs: Needs::Bios, words: &["xp64",
        "xpx64", "5x64", "winxp64", "windowsxp64", "windowsxpx64"] },
    Product { id: "win2kx86", name: "Windows 2000", needs: Needs::Bios, words: &["2k", "2000",
        "win2k", "win2000", "windows2k", "windows2000", "windows 2000"] },
    Product { id: "win9x", name: "Windows ME", needs: Needs::Bios, words: &["me", "winme",
        "windowsme", "windows me"] },
    Product { id: "win98", name: "Windows 98", needs: Needs::Bios, words: &["98", "98se",
        "win98se", "windows98", "windows98se", "windows 98"] },
    Product { id: "win95", name: "Windows 95", needs: Needs::Bios, words: &["95", "95c",
        "win95c", "windows95", "windows 95"] },
    Product { id: "win2025-eval", name: "Windows Server 2025", needs: SERVER, words: &["25",
        "2025", "win25", "win2025", "windows2025", "windows 2025"] },
    Product { id: "win2022-eval", name: "Windows Server 2022", needs: SERVER, words: &["22",
        "2022", "win22", "win2022", "windows2022", "windows 2022"] },
    Product { id: "win2019-eval", name: "Windows Server 2019", needs: SERVER, words: &["19",
        "2019", "win19", "win2019", "windows2019", "windows 2019"] },
    Product { id: "win2016-eval", name: "Windows Server 2016", needs: SERVER, words: &["16",
        "2016", "win16", "win2016", "windows2016", "windows 2016"] },
    Product { id: "win2019-hv", name: "Hyper-V Server 2019", needs: SERVER, words: &["hv",
        "hyperv", "hyper v", "hyper-v", "19hv", "2019hv", "win2019hv"] },
    Product { id: "win2012r2-eval", name: "Windows Server 2012 R2",
        needs: Needs::Sizes(GIB, 32 * GIB), words: &["2012", "2012r2", "win2012", "win2012r2",
        "windows2012", "windows 2012"] },
    Product { id: "win2008r2", name: "Windows Server 2008 R2", needs: Needs::Bios,
        words: &["2008", "2008r2", "2k8", "win2008", "windows2008", "windows 2008"] },
    Product { id: "win2003r2", name: "Windows Server 2003 R2", needs: Needs::Bios,
        words: &["2003", "2003r2", "2k3", "win2003", "windows2003", "windows 2003"] },
    Product { id: "core11", name: "Core 11", needs: Needs::Sizes(2 * GIB, 4 * GIB),
        words: &["core 11"] },
    Product { id: "tiny11", name: "Tiny 11", needs: Needs::Sizes(2 * GIB, 8 * GIB),
        words: &["tiny 11"] },
    Product { id: "tiny10", name: "Tiny 10", needs: Needs::Sizes(2 * GIB, 10 * GIB),
        words: &["tiny 10"] },
    Product { id: "reactos", name: "ReactOS", needs: Needs::Bios, words: &[] },
];

/// The system that the machine runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Version {
    /// The built-in guest, which displays what it finds.
    Probe,
    Windows(&'static Product),
    /// An installation medium at this URL.
    Url(String),
    /// An installation medium on the volume, by its file name.
    File(String),
}

impl Default for Version {
    fn default() -> Self {
        Self::Windows(&PRODUCTS[0])
    }
}

impl Version {
    /// Minimum memory and disk in bytes. Small numbers if the requirements are unknown.
    pub fn needs(&self) -> (u64, u64) {
        match self {
            Self::Windows(Product { needs: Needs::Sizes(memory, disk), .. }) => (*memory, *disk),
            Self::Probe => (64 * MIB, 0),
            _ => (130 * MIB, 0),
        }
    }

    pub fn name(&self) -> String {
        match self {
            Self::Probe => "the probe".into(),
            Self::Windows(product) => product.name.into(),
            Self::Url(url) => quote(&without_secrets(url)),
            Self::File(name) => quote(name),
        }
    }
}

const MEDIA: &[&str] = &[
    ".iso", ".esd", ".wim", ".img", ".zip", ".7z", ".rar", ".tar", ".gz", ".xz", ".bz2", ".cab",
    ".lzma",
];

impl Value for Version {
    const ACCEPTS: &'static str = "11, 11l, 10, 2025…, a URL, a file name, probe";

    fn read(text: &str) -> anyhow::Result<Self> {
        let small = text.to_lowercase();
        if small == "probe" {
            return Ok(Self::Probe);
        }
        if small.starts_with("http:") || small.starts_with("https:") {
            return url(text);
        }
        let named = |product: &&Product| product.id == small || product.words.contains(&&*small);
        if let Some(product) = PRODUCTS.iter().find(named) {
            let supported = product.needs != Needs::Bios;
            ensure!(
                supported,
                "{} needs a BIOS, and this machine has UEFI: choose Windows 8.1, Server 2012 R2 or \
                 newer",
                product.name
            );
            return Ok(Self::Windows(product));
        }
        if let Some((scheme, _)) = small.split_once("://") {
            bail!("{}:// is not supported: give an address with https://", quote(scheme));
        }
        if MEDIA.iter().any(|end| small.ends_with(end)) {
            let plain = !text.contains(['/', '\\']) && !text.contains(char::is_control);
            ensure!(
                plain && !text.starts_with('.') && text.len() <= 200,
                "give the name of the medium without a folder: it must be on the volume (STORAGE)"
            );
            return Ok(Self::File(text.to_owned()));
        }
        Err(unknown(&small))
    }
    fn show(&self) -> String {
        match self {
            Self::Probe => "probe".into(),
            Self::Windows(product) => product.id.into(),
            Self::Url(url) => quote(&without_secrets(url)),
            Self::File(name) => quote(name),
        }
    }
}

fn url(text: &str) -> anyhow::Result<Version> {
    let host = text.split_once("://").map(|(_, rest)| rest.split(['/', '?', '#']).next());
    let host = host.flatten().map(|host| host.rsplit('@').next().unwrap_or_default());
    let plain = !text.contains(|letter: char| letter.is_control() || letter.is_whitespace());
    let fits = host.is_some_and(|host| !host.is_empty()) && plain;
    ensure!(fits, "the URL is invalid: give one like https://example.com/windows.iso");
    Ok(Version::Url(text.to_owned()))
}

/// The text with the credentials of a URL replaced: name and password before the host, and the
/// query, which holds the signature of signed links.
pub(crate) fn without_secrets(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (host, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (path, query) = path.split_at(path.find(['?', '#']).unwrap_or(path.len()));
    let shown = host.rsplit_once('@').map_or(host.to_owned(), |(_, host)| format!("***@{host}"));
    format!("{scheme}://{shown}{path}{}", if query.is_empty() { "" } else { "?***" })
}

fn unknown(text: &str) -> anyhow::Error {
    let words = PRODUCTS.iter().filter(|product| product.needs != Needs::Bios);
    let words: Vec<&str> = words.flat_map(|it| it.words.iter().chain([&it.id]).copied()).collect();
    let near = super::near::nearest(text, &words);
    let hint = near.map(|near| format!("did you mean {near}?"));
    let hint = hint.unwrap_or_else(|| {
        "give a version like 11, 11l, 10, 2025 or 2022, the URL or the file name of an ISO, or \
         probe"
            .into()
    });
    anyhow!("the version is unknown: {hint}")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_name_identifies_one_product() {
        let mut all = Vec::new();
        for product in PRODUCTS {
            for word in product.words.iter().chain([&product.id]) {
                assert!(!all.contains(word), "{word} twice");
                all.push(*word);
                match Version::read(&word.to_uppercase()) {
                    Ok(version) => assert_eq!(version, Version::Windows(product)),
                    Err(error) => {
                        assert_eq!(product.needs, Needs::Bios, "{word}");
                        assert!(error.to_string().contains(product.name), "{error}");
                    }
                }
            }
        }
        assert_eq!(Version::default(), Version::read("11").unwrap());
    }

    #[test]
    fn media_are_given_by_url_or_by_file() {
        let url = "https://example.com/a.iso";
        assert_eq!(Version::read(url).unwrap(), Version::Url(url.into()));
        assert_eq!(Version::read("My Win.ISO").unwrap(), Version::File("My Win.ISO".into()));
        assert_eq!(Version::read("Probe").unwrap(), Version::Probe);
        for bad in ["../x.iso", "/x.iso", ".iso", "http://", "https:///x", "http:x", "x\n.iso"] {
            assert!(Version::read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_address_is_shown_without_credentials() {
        let url = "https://me:secret@example.com/a.iso?sig=secret#secret";
        assert_eq!(Version::read(url).unwrap().show(), "https://***@example.com/a.iso?***");
    }

    #[test]
    fn a_typo_gets_a_hint() {
        let hint = |text: &str| Version::read(text).unwrap_err().to_string();
        assert!(hint("win111").contains("did you mean win11"), "{}", hint("win111"));
        assert!(hint("ubuntu").contains("give a version like 11"));
    }
}
