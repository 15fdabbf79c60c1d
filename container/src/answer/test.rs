//! Answer files of whole environments: golden files, and values that try to break out.
//!
//! `TRANSOM_GOLDEN=write` writes the golden files anew.

mod hostile;
mod variables;

use std::path::PathBuf;
use std::process::Command;

use super::parse::tree;
use super::target::Target;
use super::xml::Secrets;
use super::*;
use crate::settings::environment::{self, ParsedEnvironment};
use crate::settings::settle::Sizes;
use crate::settings::value::GIB;

const BIG: Sizes = Sizes { processors: 4, memory: 8 * GIB, disk: 64 * GIB, more: [None; 5] };

fn parsed(words: &[(&str, &str)]) -> anyhow::Result<ParsedEnvironment> {
    environment::read(&words.iter().map(|(name, text)| (name.into(), text.into())).collect())
}

fn answers_of(words: &[(&str, &str)], sizes: &Sizes) -> (Answers, Vec<String>) {
    let input = parsed(words).unwrap();
    let settings = &input.settings;
    let target = Target::of_version(&settings.windows).unwrap();
    let bus = settings.disk.controller.value;
    from_settings::answers(settings, &target, from_settings::machine(settings, sizes, bus))
}

fn made(words: &[(&str, &str)]) -> String {
    let (answers, _) = answers_of(words, &BIG);
    autounattend(&answers, Secrets::Shown).unwrap()
}

/// Twelve environments, by the names of their golden files.
const GOLDEN: [(&str, &[(&str, &str)]); 12] = [
    ("windows-11", &[("PASSWORD", "pa ss"), ("BOOT_MODE", "windows_secure")]),
    (
        "windows-11-korean",
        &[
            ("LANGUAGE", "Korean"),
            ("REGION", "ko-KR"),
            ("KEYBOARD", "ko-KR"),
            ("USERNAME", "bill"),
            ("PASSWORD", "gates"),
        ],
    ),
    ("windows-11-as-reference", &[("COMPAT", "dockur")]),
    ("windows-11-home", &[("EDITION", "home"), ("DISK_TYPE", "nvme"), ("AUTOLOGIN", "N")]),
    (
        "windows-11-script",
        &[("INSTALLER", "script"), ("BOOT_MODE", "windows_secure"), ("HOST", "box-1")],
    ),
    ("windows-11-enterprise", &[("VERSION", "11e"), ("TZ", "Europe/Kyiv")]),
    ("windows-10", &[("VERSION", "10"), ("WORKGROUP", "OFFICE"), ("WIDTH", "1920")]),
    ("windows-10-ltsc", &[("VERSION", "10l"), ("KEYBOARD", "00010407"), ("LANGUAGE", "de")]),
    ("windows-8.1", &[("VERSION", "8"), ("REGION", "en-AU")]),
    (
        "server-2025-core",
        &[
            ("VERSION", "2025"),
            ("EDITION", "core"),
            ("DOMAIN", "corp.example.com"),
            ("DOMAIN_OU", "OU=pods & \"nodes\",DC=corp"),
            ("USERNAME", "joiner@corp.example.com"),
            ("PASSWORD", "]]>&<\"'"),
        ],
    ),
    ("server-2019", &[("VERSION", "2019"), ("DISK_TYPE", "sata"), ("HEIGHT", "1080")]),
    ("server-2012-r2", &[("VERSION", "2012"), ("EDITION", "datacenter"), ("COMPAT", "dockur")]),
];

fn golden(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/answer/golden");
    folder.join(format!("{name}.xml"))
}

#[test]
fn twelve_environments_make_their_golden_files() {
    for (name, words) in GOLDEN {
        let made = made(words);
        let path = golden(name);
        if std::env::var_os("TRANSOM_GOLDEN").is_some_and(|it| it == "write") {
            std::fs::write(&path, &made).unwrap();
        }
        let wanted = std::fs::read_to_string(&path).unwrap();
        let differs = made.lines().zip(wanted.lines()).find(|(made, wanted)| made != wanted);
        assert!(made == wanted, "{name}: {differs:?}");
        schema::validate(&tree(&wanted).unwrap()).unwrap();
    }
}

#[test]
fn other_programs_read_them() {
    for (name, _) in GOLDEN {
        let Ok(lint) = Command::new("xmllint").arg("--noout").arg(golden(name)).output() else {
            return skip::not_run("other_programs_read_them", "there is no xmllint");
        };
        assert!(lint.status.success(), "{}", String::from_utf8_lossy(&lint.stderr));
    }
}

/// The text of an element, as a parser of others reads it.
fn found(file: &str, path: &[&str]) -> Option<String> {
    let root = tree(file).unwrap();
    let mut all = Vec::new();
    collect(&root, &mut Vec::new(), &mut all);
    all.into_iter().find(|(own, _)| own.ends_with(path)).map(|(_, text)| text)
}

fn collect<'a>(
    element: &'a Element,
    path: &mut Vec<&'a str>,
    all: &mut Vec<(Vec<&'a str>, String)>,
) {
    path.push(&element.name);
    if let Some(text) = element.text() {
        all.push((path.clone(), text.to_owned()));
    }
    for child in element.children() {
        collect(child, path, all);
    }
    path.pop();
}

const HOSTILE: [&str; 9] = [
    "\"",
    "a\"b'c",
    "a&b&amp;c",
    "]]>",
    "<x/>",
    "\u{1f600}",
    "a\nb",
    "%PATH%^!",
    "\u{202e}x\u{301}",
];

#[test]
fn hostile_values_arrive_exactly_or_are_refused() {
    let long = "x".repeat(200);
    let values = HOSTILE.into_iter().chain([long.as_str()]);
    let domain = [("DOMAIN", "corp.example.com"), ("USERNAME", "me"), ("PASSWORD", "secret")];
    type Case<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a str)]);
    let cases: [Case<'_>; 12] = [
        ("USERNAME", &["LocalAccount", "Name"], &[]),
        ("USERNAME", &["Credentials", "Username"], &domain),
        ("PASSWORD", &["Credentials", "Password"], &domain),
        ("DOMAIN_OU", &["MachineObjectOU"], &domain),
        ("DOMAIN", &["JoinDomain"], &domain),
        ("WORKGROUP", &["JoinWorkgroup"], &[]),
        ("HOST", &["ComputerName"], &[]),
        ("REGION", &["UserLocale"], &[]),
        ("KEYBOARD", &["InputLocale"], &[]),
        ("EDITION", &["MetaData", "Value"], &[("VERSION", "2025")]),
        ("TZ", &["TimeZone"], &[]),
        ("WIDTH", &["HorizontalResolution"], &[]),
    ];
    let mut arrived = 0;
    for value in values {
        for (name, path, base) in &cases {
            let others = base.iter().filter(|(own, _)| own != name);
            let words: Vec<_> = others.copied().chain([(*name, value)]).collect();
            let Ok(input) = parsed(&words) else { continue };
            let Ok(_) = crate::settings::settle::settle(&input, &roomy()) else { continue };
            let text = found(&made(&words), path);
            // An unknown edition or time zone, or an invalid number, only warns.
            let is_replaced = ["EDITION", "TZ", "WIDTH"].contains(name);
            assert!(is_replaced || text.as_deref() == Some(value), "{name}={value}: {text:?}");
            arrived += 1;
        }
    }
    assert!(arrived > 20, "{arrived}");
}

fn roomy() -> crate::settings::host::Host {
    let free_space = Some(1 << 40);
    crate::settings::host::Host { memory: 64 << 30, free_space, ..Default::default() }
}

#[test]
fn passwords_arrive_exactly() {
    use base64::Engine as _;
    for value in ["\"", "]]>&<'", "\u{1f600}", " x ", &"x".repeat(127)] {
        let file = made(&[("PASSWORD", value)]);
        for element in ["Password", "AdministratorPassword"] {
            let text = found(&file, &[element, "Value"]).unwrap();
            let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
            let units = bytes.chunks_exact(2).map(|it| u16::from_le_bytes([it[0], it[1]]));
            let text = String::from_utf16(&units.collect::<Vec<_>>()).unwrap();
            assert_eq!(text.strip_suffix(element), Some(value));
        }
    }
}

#[test]
fn characters_without_a_place_in_xml_are_refused() {
    let words = [("USERNAME", "a\u{ffff}")];
    let (answers, _) = answers_of(&words, &BIG);
    let error = format!("{:#}", autounattend(&answers, Secrets::Shown).unwrap_err());
    assert!(error.contains("FullName") && error.contains("U+FFFF"), "{error}");
}

#[test]
fn checks_are_bypassed_only_where_the_machine_lacks_something() {
    let checks = |words: &[_], sizes| {
        let (answers, _) = answers_of(words, &sizes);
        let made = autounattend(&answers, Secrets::Shown).unwrap();
        let all = ["TPM", "SecureBoot", "RAM", "Storage", "CPU"];
        all.map(|it| made.contains(&format!("Bypass{it}Check")))
    };
    let secure = ("BOOT_MODE", "windows_secure");
    assert_eq!(checks(&[secure], BIG), [false; 5]);
    assert_eq!(checks(&[], BIG), [true, true, false, false, false]);
    assert_eq!(checks(&[("TPM", "Y")], BIG), [false, true, false, false, false]);
    let small = Sizes { processors: 1, memory: GIB, disk: GIB, more: [None; 5] };
    assert_eq!(checks(&[secure], small.clone()), [false, false, true, true, true]);
    assert_eq!(checks(&[("VERSION", "10")], small), [false; 5]);
    let reference = [true, true, true, false, false];
    assert_eq!(checks(&[("COMPAT", "dockur"), secure], BIG), reference);
}

#[test]
fn safer_defaults_give_way_to_the_reference() {
    let own = made(&[]);
    let reference = made(&[("COMPAT", "dockur")]);
    let nla = |file: &str| found(file, &["UserAuthentication"]).unwrap();
    assert_eq!((nla(&own).as_str(), nla(&reference).as_str()), ("1", "0"));
    assert_eq!(found(&own, &["EnableLUA"]), None);
    assert_eq!(found(&reference, &["EnableLUA"]).as_deref(), Some("false"));
    let script = |words: &[_]| setup_complete::text(&answers_of(words, &BIG).0, Secrets::Shown);
    assert!(!script(&[]).contains("NoAutoUpdate"));
    assert!(script(&[("COMPAT", "dockur")]).contains("NoAutoUpdate"));
}

#[test]
fn the_time_zone_is_that_of_tz_or_of_the_region() {
    let zone = |words: &[_]| found(&made(words), &["TimeZone"]);
    assert_eq!(zone(&[("TZ", "Asia/Seoul")]).as_deref(), Some("Korea Standard Time"));
    assert_eq!(zone(&[("REGION", "de-DE")]).as_deref(), Some("W. Europe Standard Time"));
    assert_eq!(zone(&[("COMPAT", "dockur")]), None);
    // The clock of a machine without TZ is in UTC.
    let universal = |words: &[_]| made(words).contains("RealTimeIsUniversal");
    assert!(universal(&[]) && !universal(&[("TZ", "Asia/Seoul")]));
    assert!(universal(&[("TZ", "Asia/Seoul"), ("ARGUMENTS", "-rtc base=utc")]));
    assert!(!universal(&[("COMPAT", "dockur")]));
    let (_, warnings) = answers_of(&[("TZ", "CET-1CEST")], &BIG);
    assert!(warnings[0].starts_with("TZ=CET-1CEST: "), "{warnings:?}");
}

#[test]
fn no_secret_is_shown_unless_asked() {
    let key = "ABCDE-12345-ABCDE-12345-ABCDE";
    let words = [("PASSWORD", "hush hush"), ("KEY", key), ("DOMAIN", "corp"), ("USERNAME", "me")];
    let (answers, _) = answers_of(&words, &BIG);
    let text = |secrets| {
        let files = files(&answers, Some(b"echo"), secrets).unwrap();
        let texts = files.into_iter().map(|file| String::from_utf8(file.bytes).unwrap());
        texts.collect::<String>()
    };
    let (shown, masked) = (text(Secrets::Shown), text(Secrets::Masked));
    assert!(shown.contains("hush hush") && shown.contains(key));
    assert!(!masked.contains("hush") && !masked.contains(key) && masked.contains("/ipk ***"));
    assert!(!masked.contains("aAB1AHMAaA"), "the password in base 64");
}

#[test]
fn files_have_the_line_ends_of_windows() {
    let words = [("COMMAND", "echo 1"), ("INSTALLER", "script")];
    let (answers, _) = answers_of(&words, &BIG);
    let files = files(&answers, None, Secrets::Shown).unwrap();
    let names: Vec<_> = files.iter().map(SetupFile::name).collect();
    let wanted = [
        "Autounattend.xml",
        "SetupComplete.cmd",
        "RunInstall.cmd",
        "ErrorHandler.cmd",
        "install.bat",
        "transom.cmd",
    ];
    assert_eq!(names, wanted);
    for file in files {
        let text = String::from_utf8(file.bytes).unwrap();
        assert!(text.ends_with("\r\n") && !text.replace("\r\n", "").contains(['\r', '\n']));
    }
}

#[test]
fn every_version_of_windows_has_answers() {
    for version in ["11", "11e", "11l", "11i", "10", "10e", "10l", "10i", "8", "8e"] {
        made(&[("VERSION", version)]);
    }
    for version in ["2012", "2016", "2019", "2022", "2025", "hv", "core11", "tiny11", "tiny10"] {
        made(&[("VERSION", version), ("EDITION", "core")]);
    }
    for version in ["probe", "https://example.com/x.iso", "x.iso"] {
        let input = parsed(&[("VERSION", version)]).unwrap();
        let error = Target::of_version(&input.settings.windows).unwrap_err();
        assert!(error.to_string().starts_with("VERSION="), "{error}");
    }
}

/// Whether the file writes a line that only `for` or the file's own variables complete.
fn completed(line: &str) -> Vec<String> {
    let steps = ["find-image", "partition", "apply-image", "boot", "copy"];
    match line {
        _ if line.contains("%STEP%") => steps.map(|it| line.replace("%STEP%", it)).to_vec(),
        _ => vec![line.replace("%ERRORLEVEL%", "-1")],
    }
}

/// All reports that the files of these settings can write.
fn reports(words: &[(&str, &str)]) -> Vec<String> {
    let (answers, _) = answers_of(words, &BIG);
    let files = files(&answers, Some(b"echo 1"), Secrets::Shown).unwrap();
    let texts = files.into_iter().map(|file| String::from_utf8(file.bytes).unwrap());
    let text = texts.collect::<String>().replace("&gt;", ">").replace("&amp;", "&");
    let mut all = Vec::new();
    for line in text.split(">COM1 echo ").skip(1) {
        let line = line.split("\r\n").next().unwrap();
        let end = line.find(['&', '|']).unwrap_or(line.len());
        for line in completed(&line[..end]) {
            if report::log_text(&line).is_some() {
                continue;
            }
            let read = report::read(&line).unwrap_or_else(|| panic!("{line}: no report"));
            all.push(format!("{read:?}"));
        }
    }
    all
}

#[test]
fn the_host_reads_every_report_of_every_script() {
    let common = ["Specialize", "SetupComplete", "LoggedOn", "InstallStarted", "InstallEnded(-1)"];
    let more = ["WindowsPe", "Ready", "LogBegins", "Failed(Setup)"];
    let own = ["Began(Partition)", "Failed(ApplyImage)", "Began(Copy)", "Applied"];
    for (name, words) in GOLDEN {
        let reports = reports(words);
        let has = |word: &str| reports.iter().any(|report| report == word);
        assert!(common.iter().chain(&more).all(|word| has(word)), "{name}: {reports:?}");
        let script = words.contains(&("INSTALLER", "script"));
        assert!(own.iter().all(|word| has(word) == script), "{name}: {reports:?}");
        // The golden file has the reports of its passes.
        let file = std::fs::read_to_string(golden(name)).unwrap();
        assert_eq!(file.contains("transom-report: windows-pe"), !script, "{name}");
        assert!(file.contains("transom-report: specialize"), "{name}");
    }
}

#[test]
fn the_serial_ports_of_the_pods_tests_are_those_of_the_scripts() {
    let setup = include_str!("../pod/reports/setup.txt");
    let script = include_str!("../pod/reports/script.txt");
    for (recorded, words) in [(setup, &[][..]), (script, &[("INSTALLER", "script")])] {
        let written = reports(words);
        let lines = recorded.lines().filter(|line| report::log_text(line).is_none());
        let read: Vec<_> = lines.filter_map(report::read).collect();
        assert!(read.len() > 4, "{read:?}");
        for report in read {
            let report = format!("{report:?}").replace("(3)", "(-1)");
            assert!(written.contains(&report), "{report}: {written:?}");
        }
    }
}

#[test]
fn commands_of_the_answer_file_are_short_enough() {
    for (name, _) in GOLDEN {
        let file = std::fs::read_to_string(golden(name)).unwrap();
        let paths = file.split("<Path>").skip(1).filter_map(|rest| rest.split("</Path>").next());
        // Windows Setup's limit.
        assert!(paths.into_iter().all(|path| path.len() <= 259), "{name}");
    }
}
