//! Releases of Windows, their editions, and the choice of an image from a medium.

/// A release of Windows that can be installed unattended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    Windows81,
    Windows10,
    Windows11,
    Server2012R2,
    Server2016,
    Server2019,
    Server2022,
    Server2025,
    HyperV2019,
}

use Release::{
    HyperV2019, Server2012R2, Server2016, Server2019, Server2022, Server2025, Windows10, Windows11,
    Windows81,
};

/// The first matching start of an identifier wins.
const STARTS: [(&str, Release); 12] = [
    ("win11", Windows11),
    ("core11", Windows11),
    ("tiny11", Windows11),
    ("win10", Windows10),
    ("tiny10", Windows10),
    ("win81", Windows81),
    ("win2012r2", Server2012R2),
    ("win2016", Server2016),
    ("win2019-hv", HyperV2019),
    ("win2019", Server2019),
    ("win2022", Server2022),
    ("win2025", Server2025),
];

impl Release {
    /// The release of a product, by its identifier.
    pub fn of(id: &str) -> Option<Self> {
        STARTS.into_iter().find(|(start, _)| id.starts_with(start)).map(|(_, release)| release)
    }

    /// The release of this name.
    pub fn named(name: &str) -> Option<Self> {
        STARTS.into_iter().map(|(_, release)| release).find(|release| release.name() == name)
    }

    /// The reference image's identifier.
    pub fn id(self) -> &'static str {
        match self {
            Windows81 => "win81x64",
            Windows10 => "win10x64",
            Windows11 => "win11x64",
            Server2012R2 => "win2012r2",
            Server2016 => "win2016",
            Server2019 => "win2019",
            Server2022 => "win2022",
            Server2025 => "win2025",
            HyperV2019 => "win2019-hv",
        }
    }

    /// The start of its images' names.
    pub fn name(self) -> &'static str {
        match self {
            Windows81 => "Windows 8.1",
            Windows10 => "Windows 10",
            Windows11 => "Windows 11",
            Server2012R2 => "Windows Server 2012 R2",
            Server2016 => "Windows Server 2016",
            Server2019 => "Windows Server 2019",
            Server2022 => "Windows Server 2022",
            Server2025 => "Windows Server 2025",
            HyperV2019 => "Hyper-V Server 2019",
        }
    }

    /// The folder of its drivers in virtio-win.
    pub fn drivers(self) -> &'static str {
        match self {
            Windows81 => "w8.1",
            Windows10 => "w10",
            Windows11 => "w11",
            Server2012R2 => "2k12R2",
            Server2016 => "2k16",
            Server2019 | HyperV2019 => "2k19",
            Server2022 => "2k22",
            Server2025 => "2k25",
        }
    }

    pub fn is_client(self) -> bool {
        matches!(self, Windows81 | Windows10 | Windows11)
    }
}

/// How Setup recognizes the image to install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    Index(u32),
    Name,
    /// By the edition that the key is for.
    Key,
}

/// The image to install, of those on the medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub selection: Selection,
    /// Its name in the medium's list.
    pub name: String,
    /// A public key of Microsoft for setup, which activates nothing. Evaluation media have none.
    pub key: Option<&'static str>,
}

impl Image {
    /// An image with this number and name in a medium's list. One of the words is its edition,
    /// without hyphens.
    pub fn listed(
        release: Release,
        (index, name): (u32, &str),
        words: &[String],
        evaluation: bool,
    ) -> Self {
        let table = if release.is_client() { CLIENTS } else { SERVERS };
        let is_word = |word: &&str| words.contains(&word.replace('-', ""));
        let edition = table.iter().find(|edition| edition.words.iter().any(is_word));
        let key = edition.and_then(|edition| edition.key(release)).filter(|_| !evaluation);
        Self { selection: Selection::Index(index), name: name.to_owned(), key }
    }
}

struct Edition {
    /// Accepted words, as normalized by the variable EDITION.
    words: &'static [&'static str],
    /// The end of its images' names.
    suffix: &'static str,
    keys: &'static [(Release, &'static str)],
}

impl Edition {
    fn key(&self, release: Release) -> Option<&'static str> {
        self.keys.iter().find(|(own, _)| *own == release).map(|(_, key)| *key)
    }
}

/// The key of an edition that is the same for Windows 11 and 10.
const fn both(key: &'static str) -> [(Release, &'static str); 2] {
    [(Windows11, key), (Windows10, key)]
}

/// Editions for clients.
#[rustfmt::skip]
const CLIENTS: &[Edition] = &[
    Edition { words: &["pro", "professional"], suffix: " Pro", keys: &[
        (Windows11, "VK7JG-NPHTM-C97JM-9MPGT-3V66T"), (Windows10, "VK7JG-NPHTM-C97JM-9MPGT-3V66T"),
        (Windows81, "GCRJD-8NW9H-F2CDX-CCM8D-9D6T9")] },
    Edition { words: &["pro-n", "professional-n"], suffix: " Pro N",
        keys: &both("2B87N-8KFHP-DKV6R-Y2C8J-PKCKT") },
    Edition { words: &["workstation", "workstations", "pro-workstation", "pro-workstations",
        "pro-for-workstations"], suffix: " Pro for Workstations",
        keys: &both("DXG7C-N36C4-C4HTG-X4T3X-2YV77") },
    Edition { words: &["workstation-n", "workstations-n", "pro-workstation-n", "pro-workstations-n",
        "pro-n-for-workstations", "professional-workstation-n"], suffix: " Pro N for Workstations",
        keys: &both("WYPNQ-8C467-V2W6J-TX4WX-WT2RQ") },
    Edition { words: &["home", "core"], suffix: " Home",
        keys: &both("YTMG3-N6DKC-DKB77-7M9GH-8HVX7") },
    Edition { words: &["home-n", "n"], suffix: " Home N",
        keys: &both("4CPRK-NM3K3-X6XXQ-RXX86-WXCHW") },
    Edition { words: &["home-single-language", "single-language", "home-sl"],
        suffix: " Home Single Language", keys: &both("BT79Q-G7N6G-PGBYW-4YWX6-6F4BT") },
    Edition { words: &["education", "edu"], suffix: " Education",
        keys: &both("YNMGQ-8RYV3-4PGQ3-C8XTP-7CFBY") },
    Edition { words: &["education-n"], suffix: " Education N",
        keys: &both("84NGF-MHBT6-FXBX8-QWJK7-DRR8H") },
    Edition { words: &["pro-education"], suffix: " Pro Education",
        keys: &both("8PTT6-RNW4C-6V7J2-C2D3X-MHBPB") },
    Edition { words: &["pro-education-n", "professional-education-n"], suffix: " Pro Education N",
        keys: &both("GJTYN-HDMQY-FRR76-HVGC7-QPF8P") },
    Edition { words: &["enterprise"], suffix: " Enterprise",
        keys: &both("NPPR9-FWDCX-D2C8J-H872K-2YT43") },
    Edition { words: &["enterprise-n"], suffix: " Enterprise N",
        keys: &both("WGGHN-J84D6-QYCPR-T7PJ7-X766F") },
    Edition { words: &["ltsc", "enterprise-ltsc"], suffix: " Enterprise LTSC",
        keys: &both("M7XTQ-FN8P6-TTKYV-9D4CC-J462D") },
    // Before IoT Enterprise, whose words its images have, too.
    Edition { words: &["iot-ltsc", "iot-enterprise-ltsc"],
        suffix: " IoT Enterprise LTSC", keys: &[
        (Windows11, "CGK42-GYN6Y-VD22B-BX98W-J8JXD"),
        (Windows10, "QPM6N-7J2WJ-P88HH-P3YRH-YY74H")] },
    Edition { words: &["iot", "iot-enterprise", "enterprise-iot"],
        suffix: " IoT Enterprise", keys: &both("XQQYW-NFFMW-XJPBH-K8732-CKFFD") },
];

#[rustfmt::skip]
const SERVERS: &[Edition] = &[
    Edition { words: &["standard", "desktop-experience", "server-with-a-gui"],
        suffix: " SERVERSTANDARD", keys: STANDARD },
    Edition { words: &["core", "standard-core", "standardcore", "server-core", "servercore",
        "core-installation"], suffix: " SERVERSTANDARDCORE", keys: STANDARD },
    Edition { words: &["datacenter"], suffix: " SERVERDATACENTER", keys: DATACENTER },
    Edition { words: &["datacenter-core", "datacentercore"],
        suffix: " SERVERDATACENTERCORE", keys: DATACENTER },
    Edition { words: &["datacenter-azure", "datacenter-azure-edition", "azure"],
        suffix: " SERVERTURBINE", keys: &[
        (Server2022, "NTBV8-9K7Q8-V27C6-M2BTV-KHMXV"),
        (Server2025, "XGN3F-F394H-FD2MY-PP6FD-8MCRC")] },
];

const STANDARD: &[(Release, &str)] = &[
    (Server2012R2, "D2N9P-3P6X9-2R39C-7RTCD-MDVJX"),
    (Server2016, "WC2BQ-8NRM3-FDDYY-2BFGV-KHKQY"),
    (Server2019, "N69G4-B89J2-4G8F4-WWYCC-J464C"),
    (Server2022, "VDYBN-27WPP-V4HQT-9VMD4-VMK7H"),
    (Server2025, "TVRH6-WHNXV-R9WG3-9XRFY-MY832"),
];
const DATACENTER: &[(Release, &str)] = &[
    (Server2012R2, "W3GGN-FT8W3-Y4M27-J84CP-Q3VJ9"),
    (Server2016, "CB7KF-BWN84-R7R2Y-793K2-8XDDG"),
    (Server2019, "WMDGN-G9PQG-XVVXX-R3X43-63DFG"),
    (Server2022, "WX4NM-KYWYW-QJJR4-XV3QB-6VM33"),
    (Server2025, "D764K-2NDRG-47T6Q-P8T8W-YP6DF"),
];

/// The image of an edition. The second value is false if the edition is not one of this release,
/// and the usual one replaces it. `id` is the identifier of the product: the usual edition of
/// Windows 11 Enterprise LTSC is not Pro.
pub fn image(id: &str, release: Release, edition: Option<&str>) -> (Image, bool) {
    let is_evaluation = id.ends_with("-eval") || release == HyperV2019;
    let table = if release.is_client() { CLIENTS } else { SERVERS };
    let find = |word: &str| table.iter().find(|edition| edition.words.contains(&word));
    let chosen = edition.map(|word| word.trim_end_matches("-eval")).and_then(find);
    let usual = find(usual(id)).unwrap_or(&table[0]);
    let known = edition.is_none() || chosen.is_some();
    // Evaluation media of clients and of Hyper-V Server have no editions to choose from.
    if is_evaluation && (release.is_client() || release == HyperV2019) {
        // Media of Enterprise LTSC have IoT Enterprise LTSC as their second image.
        let index = if id.contains("iot") { 2 } else { 1 };
        let name = match release {
            HyperV2019 => format!("{} SERVERHYPERCORE", release.name()),
            _ => format!("{}{} Evaluation", release.name(), usual.suffix),
        };
        return (Image { selection: Selection::Index(index), name, key: None }, edition.is_none());
    }
    let found = chosen.unwrap_or(usual);
    let key = found.key(release).filter(|_| !is_evaluation);
    // Media of Windows 11 and 10 in other languages may have other names. The key selects there.
    let by_key = key.is_some() && matches!(release, Windows10 | Windows11);
    let selection = match by_key {
        true => Selection::Key,
        false => old_index(release, found).map_or(Selection::Name, Selection::Index),
    };
    let home = release == Windows81 && found.suffix == " Home";
    let suffix = if home { "" } else { found.suffix };
    let name = format!("{}{suffix}", release.name());
    (Image { selection, name, key }, known)
}

/// The number of an edition on all media of Server 2012 R2, whose names vary.
fn old_index(release: Release, edition: &Edition) -> Option<u32> {
    const ORDER: [&str; 4] = ["standard-core", "standard", "datacenter-core", "datacenter"];
    let is_it = |word: &&str| edition.words.contains(word);
    let numbered = (1..).zip(ORDER).filter(|_| release == Server2012R2);
    numbered.into_iter().find(|(_, word)| is_it(word)).map(|(number, _)| number)
}

/// The usual edition of a product.
pub fn usual(id: &str) -> &'static str {
    let words = [("ltsc", "ltsc"), ("iot", "iot"), ("enterprise", "enterprise")];
    let found = words.into_iter().find(|(part, _)| id.contains(part));
    found.map_or(if id.starts_with("win20") { "standard" } else { "pro" }, |(_, word)| word)
}

#[cfg(test)]
mod test {
    use super::*;

    fn chosen(id: &str, edition: Option<&str>) -> (String, Selection, Option<&'static str>, bool) {
        let (image, known) = image(id, Release::of(id).unwrap(), edition);
        (image.name, image.selection, image.key, known)
    }

    #[test]
    fn consumer_media_are_chosen_from_by_key() {
        let pro = Some("VK7JG-NPHTM-C97JM-9MPGT-3V66T");
        let wanted = ("Windows 11 Pro".to_owned(), Selection::Key, pro, true);
        assert_eq!(chosen("win11x64", None), wanted);
        assert_eq!(chosen("win11x64", Some("bakery")), (wanted.0, wanted.1, pro, false));
        let home = chosen("win10x64", Some("home"));
        assert_eq!((&*home.0, home.1), ("Windows 10 Home", Selection::Key));
        let name = chosen("win11x64", Some("education-n"));
        let key = Some("84NGF-MHBT6-FXBX8-QWJK7-DRR8H");
        assert_eq!(name, ("Windows 11 Education N".into(), Selection::Key, key, true));
        let words = ["iot", "iotltsc", "iotenterpriseltsc", "enterpriseiot"].map(str::to_owned);
        let listed = |words: &[String]| Image::listed(Windows10, (1, "any"), words, false).key;
        assert_eq!(listed(&words), Some("QPM6N-7J2WJ-P88HH-P3YRH-YY74H"));
        assert_eq!(listed(&words[..1]), Some("XQQYW-NFFMW-XJPBH-K8732-CKFFD"));
        assert_eq!(chosen("win81x64", Some("home")).0, "Windows 8.1");
        assert_eq!(chosen("win81x64", None).1, Selection::Name);
    }

    #[test]
    fn evaluation_media_get_no_key() {
        assert_eq!(chosen("win11x64-enterprise-eval", None).1, Selection::Index(1));
        assert_eq!(chosen("win10x64-enterprise-iot-eval", None).1, Selection::Index(2));
        assert_eq!(chosen("win2012r2-eval", None).1, Selection::Index(2));
        assert_eq!(chosen("win2012r2-eval", Some("datacenter")).1, Selection::Index(4));
        let core = chosen("win2025-eval", Some("core"));
        let name = "Windows Server 2025 SERVERSTANDARDCORE".to_owned();
        assert_eq!(core, (name, Selection::Name, None, true));
        assert_eq!(chosen("win2019-hv", None).2, None);
        let retail = image("win2022", Server2022, Some("datacenter")).0;
        assert_eq!(retail.key, Some("WX4NM-KYWYW-QJJR4-XV3QB-6VM33"));
    }

    #[test]
    fn keys_are_keys_and_words_are_unique() {
        for table in [CLIENTS, SERVERS] {
            let words: Vec<_> = table.iter().flat_map(|it| it.words).collect();
            for (index, word) in words.iter().enumerate() {
                assert!(!words[..index].contains(word), "{word} twice");
            }
            for (_, key) in table.iter().flat_map(|it| it.keys) {
                let groups: Vec<_> = key.split('-').map(str::len).collect();
                assert_eq!(groups, [5; 5], "{key}");
            }
        }
    }
}
