//! Where Microsoft offers which version of Windows.
//!
//! Links, lengths and checksums of files are those that the reference image lists. Its mirrors are
//! not Microsoft's, and not among them.

use std::fmt::Write as _;

use super::digest::Checksum;
use crate::settings::version::Product;

/// A file of Microsoft's in English, at an address that does not change.
#[derive(Debug, PartialEq, Eq)]
pub struct File {
    /// The version, as in the names of files.
    pub id: &'static str,
    pub length: u64,
    sha256: &'static str,
    pub url: &'static str,
}

impl File {
    pub fn checksum(&self) -> Option<Checksum> {
        Checksum::sha256(self.sha256).ok()
    }

    fn name(&self) -> &'static str {
        self.url.rsplit('/').next().unwrap_or_default()
    }
}

#[rustfmt::skip]
const FILES: &[File] = &[
    File {
        id: "win11x64",
        length: 7_736_125_440,
        sha256: "d141f6030fed50f75e2b03e1eb2e53646c4b21e5386047cb860af5223f102a32",
        url: "https://software-static.download.prss.microsoft.com/dbazure/888969d5-f34g-4e03-ac9d-1f9786c66749/26200.6584.250915-1905.25h2_ge_release_svc_refresh_CLIENT_CONSUMER_x64FRE_en-us.iso",
    },
    File {
        id: "win11x64-enterprise-eval",
        length: 7_092_807_680,
        sha256: "a61adeab895ef5a4db436e0a7011c92a2ff17bb0357f58b13bbc4062e535e7b9",
        url: "https://software-static.download.prss.microsoft.com/dbazure/888969d5-f34g-4e03-ac9d-1f9786c66749/26200.6584.250915-1905.25h2_ge_release_svc_refresh_CLIENTENTERPRISEEVAL_OEMRET_x64FRE_en-us.iso",
    },
    File {
        id: "win11x64-enterprise-ltsc-eval",
        length: 5_112_850_432,
        sha256: "67cec5865eaa037a72ddc633a717a10a2bed50778862267223ddb9c60ef5da68",
        url: "https://software-static.download.prss.microsoft.com/dbazure/888969d5-f34g-4e03-ac9d-1f9786c66749/26100.1742.240906-0331.ge_release_svc_refresh_CLIENT_LTSC_EVAL_x64FRE_en-us.iso",
    },
    File {
        id: "win11x64-enterprise-iot-eval",
        length: 5_060_020_224,
        sha256: "2cee70bd183df42b92a2e0da08cc2bb7a2a9ce3a3841955a012c0f77aeb3cb29",
        url: "https://software-static.download.prss.microsoft.com/dbazure/998969d5-f34g-4e03-ac9d-1f9786c66749/26100.1742.240906-0331.ge_release_svc_refresh_CLIENT_IOT_LTSC_EVAL_x64FRE_en-us.iso",
    },
    File {
        id: "win10x64-enterprise-eval",
        length: 5_550_497_792,
        sha256: "ef7312733a9f5d7d51cfa04ac497671995674ca5e1058d5164d6028f0938d668",
        url: "https://software-static.download.prss.microsoft.com/dbazure/988969d5-f34g-4e03-ac9d-1f9786c66750/19045.2006.220908-0225.22h2_release_svc_refresh_CLIENTENTERPRISEEVAL_OEMRET_x64FRE_en-us.iso",
    },
    File {
        id: "win10x64-enterprise-ltsc-eval",
        length: 4_898_582_528,
        sha256: "e4ab2e3535be5748252a8d5d57539a6e59be8d6726345ee10e7afd2cb89fefb5",
        url: "https://software-download.microsoft.com/download/pr/19044.1288.211006-0501.21h2_release_svc_refresh_CLIENT_LTSC_EVAL_x64FRE_en-us.iso",
    },
    File {
        id: "win81x64-enterprise-eval",
        length: 3_961_473_024,
        sha256: "2dedd44c45646c74efc5a028f65336027e14a56f76686a4631cf94ffe37c72f2",
        url: "https://download.microsoft.com/download/B/9/9/B999286E-0A47-406D-8B3D-5B5AD7373A4A/9600.17050.WINBLUE_REFRESH.140317-1640_X64FRE_ENTERPRISE_EVAL_EN-US-IR3_CENA_X64FREE_EN-US_DV9.ISO",
    },
    File {
        id: "win2025-eval",
        length: 8_152_356_864,
        sha256: "7b052573ba7894c9924e3e87ba732ccd354d18cb75a883efa9b900ea125bfd51",
        url: "https://software-static.download.prss.microsoft.com/dbazure/998969d5-f34g-4e03-ac9d-1f9786c66749/26100.32230.260111-0550.lt_release_svc_refresh_SERVER_EVAL_x64FRE_en-us.iso",
    },
    File {
        id: "win2022-eval",
        length: 5_044_094_976,
        sha256: "3e4fa6d8507b554856fc9ca6079cc402df11a8b79344871669f0251535255325",
        url: "https://software-static.download.prss.microsoft.com/sg/download/888969d5-f34g-4e03-ac9d-1f9786c66749/SERVER_EVAL_x64FRE_en-us.iso",
    },
    File {
        id: "win2019-eval",
        length: 5_296_713_728,
        sha256: "549bca46c055157291be6c22a3aaaed8330e78ef4382c99ee82c896426a1cee1",
        url: "https://software-download.microsoft.com/download/pr/17763.737.190906-2324.rs5_release_svc_refresh_SERVER_EVAL_x64FRE_en-us_1.iso",
    },
    File {
        id: "win2019-hv",
        length: 3_022_784_512,
        sha256: "cb28984af65ba1085cd6ade5fdd3d9c75efe7618846513f9ad44f1397a409f85",
        url: "https://software-download.microsoft.com/download/pr/17763.557.190612-0019.rs5_release_svc_refresh_SERVERHYPERCORE_OEM_x64FRE_en-us.ISO",
    },
    File {
        id: "win2016-eval",
        length: 6_972_221_440,
        sha256: "1ce702a578a3cb1ac3d14873980838590f06d5b7101c5daaccbac9d73f1fb50f",
        url: "https://software-download.microsoft.com/download/pr/Windows_Server_2016_Datacenter_EVAL_en-us_14393_refresh.ISO",
    },
    File {
        id: "win2012r2-eval",
        length: 4_542_291_968,
        sha256: "6612b5b1f53e845aacdf96e974bb119a3d9b4dcb5b82e65804ab7e534dc7b4d5",
        url: "https://download.microsoft.com/download/6/2/A/62A76ABB-9990-4EFC-A4FE-C7D698DAEB96/9600.17050.WINBLUE_REFRESH.140317-1640_X64FRE_SERVER_EVAL_EN-US-IR3_SSS_X64FREE_EN-US_DV9.ISO",
    },
];

/// A page of Microsoft's that gives links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// The page for everybody, and the number of the product there.
    Consumer(&'static str, u32),
    /// A page of the evaluation centre, and which of its links for a language it is, from 0.
    Evaluation(&'static str, usize),
    /// The catalog of upgrade images: the number of the link to it, and the edition in it.
    Upgrade(u32, &'static str),
}

const WINDOWS_11: &str = "https://www.microsoft.com/en-us/software-download/windows11";
const WINDOWS_10: &str = "https://www.microsoft.com/en-us/software-download/windows10ISO";

const PAGES: &[(&str, Page)] = &[
    ("win11x64", Page::Consumer(WINDOWS_11, 3321)),
    ("win10x64", Page::Consumer(WINDOWS_10, 2618)),
    ("win11x64-enterprise-eval", Page::Evaluation("windows-11-enterprise", 0)),
    ("win11x64-enterprise-ltsc-eval", Page::Evaluation("windows-11-enterprise", 1)),
    ("win11x64-enterprise-iot-eval", Page::Evaluation("windows-11-iot-enterprise-ltsc-eval", 0)),
    ("win2025-eval", Page::Evaluation("windows-server-2025", 0)),
    ("win2022-eval", Page::Evaluation("windows-server-2022", 0)),
    ("win2019-eval", Page::Evaluation("windows-server-2019", 0)),
    ("win2019-hv", Page::Evaluation("hyper-v-server-2019", 0)),
    ("win2016-eval", Page::Evaluation("windows-server-2016", 0)),
    ("win2012r2-eval", Page::Evaluation("windows-server-2012-r2", 0)),
];

const CATALOG_11: u32 = 2_156_292;
const CATALOG_10: u32 = 841_361;

/// Versions that are in a catalog of upgrade images. Enterprise is there without its time limit.
const UPGRADES: [(&str, Page); 4] = [
    ("win11x64", Page::Upgrade(CATALOG_11, "Professional")),
    ("win10x64", Page::Upgrade(CATALOG_10, "Professional")),
    ("win11x64-enterprise-eval", Page::Upgrade(CATALOG_11, "Enterprise")),
    ("win10x64-enterprise-eval", Page::Upgrade(CATALOG_10, "Enterprise")),
];

/// Versions that Microsoft has never published, with the project that did.
const OTHERS: [(&str, &str); 3] = [("tiny11", "NTDEV"), ("tiny10", "NTDEV"), ("core11", "NTDEV")];

pub fn page(id: &str) -> Option<Page> {
    PAGES.iter().find(|(own, _)| *own == id).map(|(_, page)| *page)
}

/// The catalog of upgrade images with a version.
pub fn upgrade(id: &str) -> Option<Page> {
    UPGRADES.iter().find(|(own, _)| *own == id).map(|(_, page)| *page)
}

pub fn file(id: &str) -> Option<&'static File> {
    FILES.iter().find(|file| file.id == id)
}

/// The file with this name, at whatever address it is.
pub fn named(name: &str) -> Option<&'static File> {
    FILES.iter().find(|file| file.name().eq_ignore_ascii_case(name))
}

/// Why a version cannot be downloaded, or `None` if it can.
pub fn refusal(product: &Product) -> Option<String> {
    let mut sentence = format!("VERSION: {} cannot be downloaded: ", product.name);
    let maker = OTHERS.iter().find(|(id, _)| *id == product.id);
    match maker {
        Some((_, maker)) => write!(
            sentence,
            "Microsoft does not publish it, and other sources are not used, because nobody vouches \
             for what is in them: get its ISO from {maker}"
        ),
        None if page(product.id).is_none() && file(product.id).is_none() => {
            write!(sentence, "Microsoft no longer offers it: use an ISO that you have")
        }
        None => return None,
    }
    .expect("a string takes all");
    Some(format!("{sentence}, and mount it as /custom.iso, or copy it onto the volume"))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::download::address::Address;
    use crate::download::ask::is_microsofts;
    use crate::settings::value::Value as _;
    use crate::settings::version::Version;

    fn product(id: &str) -> &'static Product {
        match Version::read(id) {
            Ok(Version::Windows(product)) => product,
            other => panic!("{id}: {other:?}"),
        }
    }

    #[test]
    fn each_file_is_microsofts_and_has_a_checksum() {
        for file in FILES {
            assert_eq!(product(file.id).id, file.id);
            assert!(is_microsofts(file.url), "{}", file.url);
            assert!(file.checksum().is_some() && file.length > 2 << 30, "{}", file.id);
            // A CD has whole sectors.
            assert!(file.length.is_multiple_of(2048), "{}", file.id);
            assert!(file.name().to_lowercase().ends_with(".iso"), "{}", file.url);
            assert_eq!(named(&file.name().to_uppercase()), Some(file));
            assert_eq!(FILES.iter().filter(|other| other.id == file.id).count(), 1);
        }
    }

    #[test]
    fn each_page_is_of_a_version() {
        for (id, page) in PAGES.iter().chain(&UPGRADES) {
            assert_eq!(product(id).id, *id);
            assert!(refusal(product(id)).is_none());
            match page {
                Page::Consumer(url, edition) => {
                    assert!(is_microsofts(url) && *edition > 0, "{url}");
                }
                Page::Evaluation(name, _) => {
                    let url = format!("https://www.microsoft.com/evalcenter/download-{name}");
                    assert!(Address::read(&url).is_ok(), "{url}");
                }
                Page::Upgrade(catalog, edition) => {
                    assert!(
                        *catalog > 0 && id.contains("enterprise") == (*edition != "Professional")
                    );
                }
            }
        }
    }

    #[test]
    fn a_version_that_microsoft_does_not_offer_is_refused_with_the_way_out() {
        let offered = [
            "11", "11e", "11l", "11i", "10", "10e", "10l", "8e", "2025", "2022", "2019", "2016",
            "hv", "2012",
        ];
        for word in offered {
            assert_eq!(refusal(product(word)), None, "{word}");
        }
        for (word, reason) in [
            ("tiny11", "NTDEV"),
            ("tiny10", "NTDEV"),
            ("core11", "NTDEV"),
            ("8", "no longer"),
            ("10i", "no longer"),
        ] {
            let sentence = refusal(product(word)).unwrap();
            assert!(sentence.contains(reason) && sentence.contains("/custom.iso"), "{sentence}");
            assert!(sentence.contains(product(word).name), "{sentence}");
        }
    }
}
