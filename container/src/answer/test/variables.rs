//! Each variable that touches the answer file changes the settings that the reference image
//! changes, and nothing else. The rows were compared with answer files that the scripts of the
//! reference image 6.05 made, with `COMPAT=dockur`.
//!
//! Beyond the reference image, the pass oobeSystem has the languages too.

use std::collections::BTreeMap;

use super::*;

/// Ends of the paths of settings, with their texts before and after the change.
type Changes<'a> = &'a [(&'a str, Option<&'a str>, Option<&'a str>)];

const LANGUAGES: [&str; 4] = ["UILanguage", "SystemLocale", "UserLocale", "InputLocale"];
/// The passwords `admin`, `gates` and `secret` of an account and of the administrator.
const ADMIN: &str = "YQBkAG0AaQBuAFAAYQBzAHMAdwBvAHIAZAA=";
const ADMINISTRATOR: &str =
    "YQBkAG0AaQBuAEEAZABtAGkAbgBpAHMAdAByAGEAdABvAHIAUABhAHMAcwB3AG8AcgBkAA==";
const GATES: &str = "ZwBhAHQAZQBzAFAAYQBzAHMAdwBvAHIAZAA=";
const GATES_ADMINISTRATOR: &str =
    "ZwBhAHQAZQBzAEEAZABtAGkAbgBpAHMAdAByAGEAdABvAHIAUABhAHMAcwB3AG8AcgBkAA==";
const SECRET: &str = "cwBlAGMAcgBlAHQAUABhAHMAcwB3AG8AcgBkAA==";
const SECRET_ADMINISTRATOR: &str =
    "cwBlAGMAcgBlAHQAQQBkAG0AaQBuAGkAcwB0AHIAYQB0AG8AcgBQAGEAcwBzAHcAbwByAGQA";

/// The settings of a file with their paths. Lists number their items.
fn settings(words: &[(&str, &str)]) -> BTreeMap<String, String> {
    let words = [&[("COMPAT", "dockur")], words].concat();
    let mut all = BTreeMap::new();
    walk(&tree(&made(&words)).unwrap(), "", &mut all);
    all
}

fn walk(element: &Element, path: &str, all: &mut BTreeMap<String, String>) {
    let names = ["pass", "name", "processorArchitecture"];
    let named = element.attributes.iter().filter(|(name, _)| names.contains(&name.as_str()));
    let named: Vec<_> = named.map(|(_, value)| value.as_str()).collect();
    let path = format!("{path}/{}{named:?}", element.name).replace("[]", "");
    if let Some(text) = element.text() {
        let number = (1..).find(|number| !all.contains_key(&format!("{path}#{number}")));
        all.insert(format!("{path}#{}", number.unwrap_or(0)), text.to_owned());
    }
    for child in element.children() {
        walk(child, &path, all);
    }
}

/// The differences between the files with and without these variables, without the numbers.
fn changes(base: &[(&str, &str)], words: &[(&str, &str)]) -> Vec<(String, [Option<String>; 2])> {
    let (before, after) = (settings(base), settings(&[base, words].concat()));
    let paths = before.keys().chain(after.keys().filter(|path| !before.contains_key(*path)));
    let both = paths.map(|path| (path, [before.get(path), after.get(path)]));
    let changed = both.filter(|(_, [before, after])| before != after);
    let plain = |path: &str| path.split('#').next().unwrap_or_default().to_owned();
    changed.map(|(path, values)| (plain(path), values.map(Option::<&String>::cloned))).collect()
}

fn check(base: &[(&str, &str)], words: &[(&str, &str)], wanted: Changes<'_>) {
    let found = changes(base, words);
    let fits = |(path, [before, after]): &(String, [Option<String>; 2]),
                (end, from, to): &(&str, Option<&str>, Option<&str>)| {
        path.ends_with(end) && before.as_deref() == *from && after.as_deref() == *to
    };
    for change in &found {
        assert!(wanted.iter().any(|it| fits(change, it)), "{words:?} changes {change:?}");
    }
    for want in wanted {
        assert!(found.iter().any(|it| fits(it, want)), "{words:?}: no {want:?} in {found:?}");
    }
}

#[test]
fn languages_regions_and_keyboards() {
    let from = Some("en-US");
    let korean = LANGUAGES.map(|name| (name, from, Some("ko-KR")));
    check(&[], &[("LANGUAGE", "ko")], &korean);
    let german = [("SystemLocale", from, Some("de-DE")), ("UserLocale", from, Some("de-DE"))];
    check(&[], &[("REGION", "de_DE")], &german);
    for (given, written) in [("fr-FR", "fr-FR"), ("0412:00000412", "0412:00000412")] {
        check(&[], &[("KEYBOARD", given)], &[("InputLocale", from, Some(written))]);
    }
}

#[test]
fn accounts_and_their_passwords() {
    let (from, to) = (Some("Docker"), Some("bill"));
    let named = [("FullName", from, to), ("/Name", from, to), ("Username", from, to)];
    check(&[], &[("USERNAME", "bill")], &named);
    let passwords = [
        ("LocalAccount/Password/Value", Some(ADMIN), Some(GATES)),
        ("AutoLogon/Password/Value", Some(ADMIN), Some(GATES)),
        ("AdministratorPassword/Value", Some(ADMINISTRATOR), Some(GATES_ADMINISTRATOR)),
    ];
    check(&[], &[("PASSWORD", "gates")], &passwords);
    let none = [
        ("AutoLogon/Username", from, None),
        ("AutoLogon/Enabled", Some("true"), None),
        ("AutoLogon/LogonCount", Some("65432"), None),
        ("AutoLogon/Password/Value", Some(ADMIN), None),
        ("AutoLogon/Password/PlainText", Some("false"), None),
    ];
    check(&[], &[("AUTOLOGIN", "N")], &none);
}

#[test]
fn names_and_sizes() {
    check(&[], &[("HOST", "box-1")], &[("ComputerName", Some("*"), Some("box-1"))]);
    let group = [("Identification/JoinWorkgroup", None, Some("OFFICE"))];
    check(&[], &[("WORKGROUP", "OFFICE")], &group);
    let width = [("HorizontalResolution", Some("1280"), Some("320"))];
    check(&[], &[("WIDTH", "320")], &width);
    check(&[], &[("HEIGHT", "200")], &[("VerticalResolution", Some("720"), Some("200"))]);
}

#[test]
fn disks_have_the_number_that_windows_gives_them() {
    for kind in ["nvme", "sata", "ide", "usb"] {
        check(&[], &[("DISK_TYPE", kind)], &[("DiskID", Some("1"), Some("0"))]);
    }
    for kind in ["blk", "virtio-blk", "scsi", "virtio-scsi"] {
        check(&[], &[("DISK_TYPE", kind)], &[]);
    }
}

#[test]
fn editions_of_servers_are_names_of_images() {
    for (version, edition, name) in [
        ("2025", "core", "Windows Server 2025 SERVERSTANDARDCORE"),
        ("2025", "datacenter-core", "Windows Server 2025 SERVERDATACENTERCORE"),
        ("2022", "datacenter", "Windows Server 2022 SERVERDATACENTER"),
        ("2016", "core", "Windows Server 2016 SERVERSTANDARDCORE"),
    ] {
        let usual = format!("Windows Server {version} SERVERSTANDARD");
        let change = [("MetaData/Value", Some(usual.as_str()), Some(name))];
        check(&[("VERSION", version)], &[("EDITION", edition)], &change);
    }
    check(&[("VERSION", "2025")], &[("EDITION", "standard")], &[]);
}

#[test]
fn a_domain_has_the_account() {
    let words = [
        ("DOMAIN", "corp.example.com"),
        ("DOMAIN_OU", "OU=a,DC=b"),
        ("USERNAME", "me"),
        ("PASSWORD", "secret"),
    ];
    let (docker, domain) = (Some("Docker"), Some("corp.example.com"));
    check(
        &[],
        &words,
        &[
            ("Identification/Credentials/Domain", None, domain),
            ("Identification/Credentials/Username", None, Some("me")),
            ("Identification/Credentials/Password", None, Some("secret")),
            ("Identification/JoinDomain", None, domain),
            ("Identification/MachineObjectOU", None, Some("OU=a,DC=b")),
            ("LocalAccount/Name", docker, None),
            ("LocalAccount/Group", Some("Administrators"), None),
            ("LocalAccount/Password/Value", Some(ADMIN), None),
            ("LocalAccount/Password/PlainText", Some("false"), None),
            ("DomainAccountList/DomainAccount/Name", None, Some("me")),
            ("DomainAccountList/DomainAccount/Group", None, Some("Administrators")),
            ("DomainAccountList/Domain", None, domain),
            ("AutoLogon/Username", docker, Some("me")),
            ("AutoLogon/Domain", None, domain),
            // The reference image writes it in plain text, and leaves the administrator's alone.
            ("AutoLogon/Password/Value", Some(ADMIN), Some(SECRET)),
            ("AdministratorPassword/Value", Some(ADMINISTRATOR), Some(SECRET_ADMINISTRATOR)),
        ],
    );
    let mut other = words;
    other[2].1 = "me@corp.example.com";
    let credentials = |words: &[_], name: &str| found(&made(words), &["Credentials", name]);
    assert_eq!(credentials(&other, "Username").as_deref(), Some("me@corp.example.com"));
    assert_eq!(credentials(&other, "Domain"), None, "the name has its domain already");
}

#[test]
fn variables_that_change_scripts_only() {
    let key = ("KEY", "ABCDE-12345-ABCDE-12345-ABCDE");
    for words in [key, ("COMMAND", "echo 1"), ("LOG", "Y"), ("EDITION", "pro")] {
        check(&[], &[words], &[]);
    }
    let text = |words: &[_], name: &str| {
        let files = files(&answers_of(words, &BIG).0, Some(b"echo 0"), Secrets::Shown).unwrap();
        let file = files.into_iter().find(|file| file.name() == name).unwrap();
        String::from_utf8(file.bytes).unwrap()
    };
    assert!(text(&[key], "SetupComplete.cmd").contains("/ipk ABCDE-"));
    assert!(text(&[("COMMAND", "echo 1")], "install.bat").ends_with("echo 1\r\n"));
    assert!(text(&[("LOG", "Y")], "RunInstall.cmd").contains("C:\\OEM\\install.log"));
    // The reference image has no time zones.
    let zone = [("Shell-Setup\", \"amd64\"]/TimeZone", None, Some("FLE Standard Time"))];
    check(&[], &[("TZ", "Europe/Kyiv")], &zone);
}
