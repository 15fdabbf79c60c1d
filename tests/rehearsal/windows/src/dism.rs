//! `dism`: applies an image, adds drivers to it, and obeys the pass offlineServicing (Microsoft:
//! DISM command-line options).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};

use super::console::say;
use super::places::Places;
use super::registry::Registry;
use super::tools::Tools;
use super::{answers, drivers, edition};

/// Statuses of Windows: an unknown option, a path that does not exist, data that is not valid.
const UNKNOWN: i32 = 87;
const NO_PATH: i32 = 3;
const INVALID: i32 = 13;
const LOG: &str = "X:\\Windows\\Logs\\DISM\\dism.log";
/// Characters of a progress bar, and where its number is.
const BAR: usize = 58;
const NUMBER: usize = 26;

/// The value of the policy that the answer file sets in this pass.
pub(crate) const UAC: &str = "HKLM\\SOFTWARE\\Microsoft\\Windows\\CurrentVersion\\Policies\\System";

/// Options by their names in lower case, each once.
type Options<'a> = BTreeMap<String, &'a str>;

pub(crate) fn run(
    tools: &Tools,
    words: &[&str],
    places: &Places,
    show: &mut dyn FnMut(&str),
) -> anyhow::Result<i32> {
    show("Deployment Image Servicing and Management tool");
    show("Version: 10.0.26100.1");
    let outcome = options(words).and_then(|options| obey(tools, &options, places, show));
    let (status, reason) = match outcome {
        Ok(None) => {
            show("The operation completed successfully.");
            return Ok(0);
        }
        Ok(Some(error)) => error,
        Err(error) => (UNKNOWN, format!("{error:#}")),
    };
    note(places, &reason)?;
    show(&format!("Error: {status}"));
    show(&reason);
    Ok(status)
}

fn options<'a>(words: &[&'a str]) -> anyhow::Result<Options<'a>> {
    let mut found = Options::new();
    for word in words {
        let option = word.strip_prefix('/').with_context(|| format!("{word}: no option"))?;
        let (name, value) = option.split_once(':').unwrap_or((option, ""));
        let before = found.insert(name.to_ascii_lowercase(), value);
        ensure!(before.is_none(), "/{name} comes twice");
    }
    Ok(found)
}

/// Obeys the options, and returns the status and the reason of a failure.
fn obey(
    tools: &Tools,
    options: &Options<'_>,
    places: &Places,
    show: &mut dyn FnMut(&str),
) -> anyhow::Result<Option<(i32, String)>> {
    let names: Vec<_> = options.keys().map(String::as_str).collect();
    let value = |name: &str| options.get(name).copied().unwrap_or_default();
    match names.as_slice() {
        ["apply-image", "applydir", "imagefile", "index" | "name"]
        | ["apply-image", "applydir", "imagefile", "index" | "name", "swmfile"] => {
            apply(tools, options, places, show)
        }
        ["add-driver", "driver", "image", "recurse"] => {
            tools.volume(value("image"))?;
            let packages = drivers::packages(&places.file(value("driver")))?;
            if packages.is_empty() {
                return Ok(Some((NO_PATH, "The system cannot find the path specified.".into())));
            }
            drivers::store(&packages, &places.file(value("image")))?;
            Ok(None)
        }
        ["apply-unattend", "image"] => {
            tools.volume(value("image"))?;
            let file = places.file(value("apply-unattend"));
            service(&file, &places.file(value("image")))?;
            Ok(None)
        }
        other => bail!("the options {other:?} are unknown, or not rehearsed"),
    }
}

fn apply(
    tools: &Tools,
    options: &Options<'_>,
    places: &Places,
    show: &mut dyn FnMut(&str),
) -> anyhow::Result<Option<(i32, String)>> {
    let value = |name: &str| options.get(name).copied();
    let to = value("applydir").unwrap_or_default();
    ensure!(tools.volume(to)?.system == "NTFS", "{to} is not NTFS");
    let file = value("imagefile").unwrap_or_default();
    ensure!(value("swmfile").is_none(), "split images are not rehearsed");
    let images = edition::listed(&places.file(file))?;
    let chosen = |image: &&edition::Edition| match value("index") {
        Some(index) => image.index == index,
        None => value("name") == Some(image.name.as_str()),
    };
    let Some(image) = images.iter().find(chosen) else {
        return Ok(Some((UNKNOWN, "The specified image could not be found.".into())));
    };
    say!("image {} is installed: {}", image.index, image.name);
    show("Applying image");
    let mut last = None;
    let complaint = image.apply(&places.file(to), &mut |percent| {
        if last.replace(percent) != Some(percent) {
            show(&bar(percent));
        }
    })?;
    if let Some(complaint) = complaint {
        for line in complaint.lines() {
            note(places, line)?;
        }
        return Ok(Some((INVALID, "The data is invalid.".into())));
    }
    say!("image applied");
    Ok(None)
}

/// A progress bar with its number in the middle.
fn bar(percent: u32) -> String {
    let filled = usize::try_from(percent).unwrap_or(0) * BAR / 100;
    let number = format!("{percent}.0%");
    let cell = |at: usize| if at < filled { '=' } else { ' ' };
    let mut made: Vec<char> = (0..BAR).map(cell).collect();
    made.splice(NUMBER..NUMBER + number.len(), number.chars());
    format!("[{}]", made.into_iter().collect::<String>())
}

/// Adds a line to the log.
fn note(places: &Places, line: &str) -> anyhow::Result<()> {
    let path = places.file(LOG);
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    Ok(places.write(LOG, true, &format!("2026-01-02 03:04:05, Error  DISM  {line}\r\n"))?)
}

/// The pass offlineServicing.
fn service(file: &Path, windows: &Path) -> anyhow::Result<()> {
    let answers = answers::read(file)?;
    let control = answers.value("offlineServicing", "Microsoft-Windows-LUA-Settings", "EnableLUA");
    let Some(control) = control else { bail!("the answer file has no pass offlineServicing") };
    let mut registry = Registry::read(windows)?;
    registry.set(UAC, "EnableLUA", if control == "true" { "1" } else { "0" });
    say!("user account control: {control}");
    registry.write(windows)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn unknown_options_end_with_their_status() {
        let folder = tempfile::tempdir().unwrap();
        let mut places = Places::new(folder.path());
        places.assign('X', folder.path()).unwrap();
        let tried = |line: &str| {
            let mut said = Vec::new();
            let words: Vec<_> = line.split(' ').collect();
            let show = &mut |text: &str| said.push(text.to_owned());
            let status = run(&Tools::default(), &words, &places, show).unwrap();
            (status, said.join("\n"))
        };
        for (line, why) in [
            ("/Apply-Image /ImageFile:C:\\a /Index:1", "unknown, or not"),
            ("/Apply-Image /ImageFile:C:\\a /Index:1 /ApplyDir:W:\\ /Fast", "unknown, or not"),
            ("/Apply-Image /ImageFile:C:\\a /Index:1 /ApplyDir:W:\\", "no such volume"),
            ("/Apply-Image /Apply-Image", "comes twice"),
            ("Apply-Image", "no option"),
            ("/Image:W:\\ /Add-Driver /Driver:C:\\x", "unknown, or not"),
        ] {
            let (status, said) = tried(line);
            assert!(status == UNKNOWN && said.contains(why), "{line}: {status}: {said}");
            assert!(said.contains("Error: 87"), "{said}");
        }
        let log = fs::read_to_string(folder.path().join("Windows/Logs/DISM/dism.log")).unwrap();
        assert_eq!(log.lines().count(), 6, "{log}");
    }

    #[test]
    fn the_bar_has_its_number_in_the_middle() {
        let line = "[==========================100.0%==========================]";
        assert_eq!(bar(100), line);
        assert_eq!(bar(2), "[=                         2.0%                            ]");
    }
}
