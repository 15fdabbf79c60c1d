//! Answer files of the user. In `custom.xml`, only settings that depend on the machine are changed.
//! A file that replaces a template of the reference image also gets the user's settings.
//!
//! All other text stays as it is, comments included.

use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail, ensure};

use super::parse::{self, MAX_LENGTH, Node};
use super::xml::{self, Content, Element, Secrets};
use super::{Answers, Membership, oobe, specialize};
use crate::files;
use crate::settings::value::quote;

/// How much of a user's answer file is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The number of the disk, and `UseConfigurationSet`.
    Finished,
    /// Language, account and screen as well.
    Template,
}

/// Finds the user's answer file below `root`. `volume` is the folder of the machine's files, `id`
/// that of the product. Empty files do not count.
///
/// # Errors
///
/// If a folder has its name.
pub fn find(root: &Path, volume: &Path, id: &str) -> anyhow::Result<Option<(PathBuf, Kind)>> {
    let assets = root.join("run/assets");
    let finished = [root, volume, &assets].map(|folder| folder.join("custom.xml"));
    // The reference image's names of templates are shorter than its names of products.
    let id = id.replace("-enterprise-ltsc", "-ltsc").replace("-enterprise-iot", "-iot");
    let retail = id.trim_end_matches("-eval");
    let templates = [id.as_str(), retail].map(|id| assets.join(format!("{id}.xml")));
    let finished = finished.into_iter().map(|path| (path, Kind::Finished));
    let templates = templates.into_iter().map(|path| (path, Kind::Template));
    let has_content = |path: &Path| path.metadata().is_ok_and(|it| it.is_dir() || it.len() > 0);
    let found = finished.chain(templates).find(|(path, _)| has_content(path));
    if let Some((path, _)) = found.as_ref().filter(|(path, _)| path.is_dir()) {
        bail!(
            "{} is a folder: container engines create one if the file to mount does not exist: \
             check the path of the mount",
            path.display()
        );
    }
    Ok(found)
}

/// Reads the user's answer file, and changes the settings that depend on the machine.
///
/// # Errors
///
/// If the file cannot be read, or is not an answer file.
pub fn load(
    path: &Path,
    kind: Kind,
    answers: &Answers,
    secrets: Secrets,
) -> anyhow::Result<String> {
    let bytes = bytes(path, MAX_LENGTH as u64);
    let changed = bytes.and_then(|bytes| adjust(&bytes, kind, answers, secrets));
    changed.with_context(|| path.display().to_string())
}

/// Changes the settings that depend on the machine in the bytes of an answer file.
///
/// # Errors
///
/// If they are not an answer file.
pub fn adjust(
    bytes: &[u8],
    kind: Kind,
    answers: &Answers,
    secrets: Secrets,
) -> anyhow::Result<String> {
    change(&decode(bytes)?, kind, answers, secrets)
}

/// The bytes of a file of the user, at most this many.
pub fn bytes(path: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = files::open(path, File::options().read(true))?;
    file.take(limit + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= limit, "it has more than {limit} bytes: shorten it");
    Ok(bytes)
}

/// The text of a file in UTF-8, or in UTF-16 with a mark of its order.
fn decode(bytes: &[u8]) -> anyhow::Result<String> {
    let wide = |bytes: &[u8], unit: fn([u8; 2]) -> u16| {
        let units: Vec<u16> = bytes.chunks_exact(2).map(|pair| unit([pair[0], pair[1]])).collect();
        String::from_utf16(&units).ok().filter(|_| bytes.len().is_multiple_of(2))
    };
    let text = match bytes {
        [0xff, 0xfe, rest @ ..] => wide(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => wide(rest, u16::from_be_bytes),
        other => String::from_utf8(other.to_vec()).ok(),
    };
    let text = text.context("it is neither UTF-8 nor UTF-16: save it in UTF-8")?;
    let text = text.trim_start_matches('\u{feff}');
    // The result is UTF-8, so its declaration must be correct.
    let Some((declaration, rest)) = text.split_once("?>").filter(|_| text.starts_with("<?xml"))
    else {
        return Ok(text.to_owned());
    };
    let lower = declaration.to_ascii_lowercase();
    let Some(start) = lower.find("encoding") else { return Ok(text.to_owned()) };
    let end = declaration[start..].find(['"', '\'']).and_then(|open| {
        let quote = declaration[start + open..].chars().next()?;
        let close = declaration[start + open + 1..].find(quote)?;
        Some(start + open + close + 2)
    });
    let end = end.context("its XML declaration is not complete")?;
    Ok(format!("{}encoding=\"utf-8\"{}?>{rest}", &declaration[..start], &declaration[end..]))
}

/// Makes Setup use the drivers and files of the set-up disk.
const SET: &str = "UseConfigurationSet";

/// One change of a text: the bytes to replace, and their replacement.
type Change = (Range<usize>, String);

fn change(text: &str, kind: Kind, answers: &Answers, secrets: Secrets) -> anyhow::Result<String> {
    let nodes = parse::read(text).map_err(|error| anyhow!("{error:#}: correct it"))?;
    let root = nodes.first().context("it has no element")?;
    ensure!(
        root.local() == "unattend",
        "it is <{}>, not an answer file of Windows, which begins with <unattend>",
        root.name
    );
    let document = Document { nodes: &nodes };
    let mut changes = document.machine(answers)?;
    if kind == Kind::Template {
        changes.extend(document.settings(answers, secrets));
        changes.extend(document.membership(answers, secrets)?);
    }
    let changed = apply(text, changes);
    parse::read(&changed).context("the changed file")?;
    Ok(changed)
}

/// Applies changes. If two overlap, the one that starts first wins.
fn apply(text: &str, mut changes: Vec<Change>) -> String {
    changes.sort_by_key(|(range, _)| (range.start, range.end));
    let mut changed = String::with_capacity(text.len());
    let mut at = 0;
    for (range, replacement) in changes {
        if range.start < at {
            continue;
        }
        changed.push_str(text.get(at..range.start).unwrap_or_default());
        changed.push_str(&replacement);
        at = range.end;
    }
    changed.push_str(text.get(at..).unwrap_or_default());
    changed
}

struct Document<'a> {
    nodes: &'a [Node],
}

impl Document<'_> {
    /// Whether the ancestors of a node have these names, from the nearest on.
    fn is_below(&self, node: &Node, names: &[&str]) -> bool {
        let mut at = node.parent;
        names.iter().all(|name| {
            let Some(parent) = at.and_then(|index| self.nodes.get(index)) else { return false };
            at = parent.parent;
            parent.local() == *name
        })
    }

    /// Nodes of this name, below the others from the nearest on.
    fn all(&self, name: &str, parents: &[&str]) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(move |it| it.local() == name && self.is_below(it, parents))
    }

    /// The change that gives a node this text.
    fn set(node: &Node, value: &str) -> Change {
        let value = xml::escape(value);
        match node.is_closed() {
            true => (node.whole.clone(), format!("<{0}>{value}</{0}>", node.name)),
            false => (node.inner.clone(), value),
        }
    }

    /// The changes that the machine needs: the number of the disk, and the use of the set-up disk.
    fn machine(&self, answers: &Answers) -> anyhow::Result<Vec<Change>> {
        let is_setup = |(_, node): &(usize, &Node)| {
            let is_named = node.attribute("name") == Some("Microsoft-Windows-Setup");
            let parent = node.parent.and_then(|parent| self.nodes.get(parent));
            let pass = parent.and_then(|parent| parent.attribute("pass"));
            node.local() == "component" && is_named && pass == Some("windowsPE")
        };
        let mut setups = self.nodes.iter().enumerate().filter(is_setup);
        let (Some((index, setup)), None) = (setups.next(), setups.next()) else {
            bail!("its pass windowsPE must have one component Microsoft-Windows-Setup");
        };
        let mut changes = self.disk(setup, answers.machine.disk)?;
        let own = |name: &'static str| {
            let is_own = move |it: &&Node| it.parent == Some(index) && it.local() == name;
            self.nodes.iter().filter(is_own)
        };
        match own(SET).collect::<Vec<_>>()[..] {
            [] if setup.is_closed() => bail!("Microsoft-Windows-Setup has no settings"),
            [] => {
                let at = own("UserData").next().map_or(setup.inner.end, |it| it.whole.start);
                let prefix = setup.name.strip_suffix("component").unwrap_or_default();
                changes.push((at..at, format!("<{prefix}{SET}>true</{prefix}{SET}>")));
            }
            [there] => changes.push(Self::set(there, "true")),
            _ => bail!("{SET} is there several times: leave one"),
        }
        Ok(changes)
    }

    /// The number of the disk, unless the file uses several.
    fn disk(&self, setup: &Node, disk: u32) -> anyhow::Result<Vec<Change>> {
        let is_inside =
            |node: &&Node| setup.inner.contains(&node.whole.start) && node.local() == "DiskID";
        let places: Vec<&Node> = self.nodes.iter().filter(is_inside).collect();
        let mut numbers: Vec<&str> = places.iter().map(|node| node.text.trim()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        match numbers[..] {
            ["0" | "1"] => {
                let number = disk.to_string();
                Ok(places.into_iter().map(|node| Self::set(node, &number)).collect())
            }
            [one] => bail!("its DiskID is {}: give 0 or 1", quote(one)),
            _ => Ok(Vec::new()),
        }
    }

    /// The settings that the reference image puts into its templates.
    fn settings(&self, answers: &Answers, secrets: Secrets) -> Vec<Change> {
        let (locale, account) = (&answers.locale, &answers.account);
        let (width, height) = answers.screen;
        let (width, height) = (width.to_string(), height.to_string());
        let (user, full_name) = match &answers.membership {
            Membership::Domain { .. } => (account.short_name(), None),
            _ => (account.user.as_str(), Some(account.user.as_str())),
        };
        let texts: [(&str, &[&str], Option<&str>); 10] = [
            ("UILanguage", &[], Some(&locale.language)),
            ("SystemLocale", &[], Some(&locale.region)),
            ("UserLocale", &[], Some(&locale.region)),
            ("InputLocale", &[], Some(&locale.keyboard)),
            ("ComputerName", &["component"], answers.computer.as_deref()),
            ("FullName", &["UserData"], full_name),
            ("Name", &["LocalAccount"], full_name),
            ("Username", &["AutoLogon"], Some(user)),
            ("HorizontalResolution", &["Display"], Some(&width)),
            ("VerticalResolution", &["Display"], Some(&height)),
        ];
        let mut changes = Vec::new();
        for (name, parents, value) in texts {
            let Some(value) = value else { continue };
            changes.extend(self.all(name, parents).map(|node| Self::set(node, value)));
        }
        for element in ["Password", "AdministratorPassword"] {
            for place in self.nodes.iter().filter(|it| it.local() == element) {
                let is_join = self.is_below(place, &["Credentials"]);
                changes.extend((!is_join).then(|| password(place, answers, secrets)));
            }
        }
        let evaluation = answers.image.key.is_none();
        let keys = self.all("ProductKey", &["UserData"]).filter(|_| evaluation);
        let logons = self.all("AutoLogon", &["component"]).filter(|_| !account.autologin);
        changes.extend(keys.chain(logons).map(|node| (node.whole.clone(), String::new())));
        changes
    }
}

impl Document<'_> {
    /// The join of a domain or a workgroup, and the domain's account in place of a local one.
    fn membership(&self, answers: &Answers, secrets: Secrets) -> anyhow::Result<Vec<Change>> {
        let Some(join) = specialize::join(answers) else { return Ok(Vec::new()) };
        let join = xml::fragment(join, secrets);
        let is_join = |node: &&Node| node.attribute("name") == Some(specialize::JOIN);
        let is_pass = |node: &&Node| node.attribute("pass") == Some("specialize");
        let place = match self.nodes.iter().find(is_join) {
            Some(there) => there.whole.clone(),
            None => {
                let pass = self.nodes.iter().find(is_pass).filter(|node| !node.is_closed());
                let pass = pass.context("it has no pass specialize, which joins networks")?;
                pass.inner.end..pass.inner.end
            }
        };
        let mut changes = vec![(place, join)];
        if matches!(answers.membership, Membership::Domain { .. }) {
            let own = xml::fragment(oobe::own_accounts(answers), secrets);
            let locals = self.all("LocalAccounts", &["UserAccounts"]);
            changes.extend(locals.map(|node| (node.whole.clone(), own.clone())));
            if answers.account.autologin {
                let logon = xml::fragment(oobe::logon(answers), secrets);
                let logons = self.all("AutoLogon", &["component"]);
                changes.extend(logons.map(|node| (node.whole.clone(), logon.clone())));
            }
        }
        Ok(changes)
    }
}

/// The change of a password, as ours are written.
fn password(place: &Node, answers: &Answers, secrets: Secrets) -> Change {
    let made = oobe::password(place.local(), &answers.account);
    let prefix = place.name.strip_suffix(place.local()).unwrap_or_default();
    let part = |it: &Element| {
        let text = match &it.content {
            Content::Secret(text) => secrets.of(text),
            _ => it.text().unwrap_or_default(),
        };
        format!("<{prefix}{0}>{1}</{prefix}{0}>", it.name, xml::escape(text))
    };
    let inner: String = made.children().iter().map(part).collect();
    match place.is_closed() {
        true => (place.whole.clone(), format!("<{0}>{inner}</{0}>", place.name)),
        false => (place.inner.clone(), inner),
    }
}

#[cfg(test)]
mod test {
    use super::super::from_settings;
    use super::super::target::Target;
    use super::*;
    use crate::settings::environment;
    use crate::settings::settle::Sizes;

    fn answers(words: &[(&str, &str)]) -> Answers {
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let settings = environment::read(&words).unwrap().settings;
        let target = Target::of_version(&settings.windows).unwrap();
        let bus = settings.disk.controller.value;
        let machine = from_settings::machine(&settings, &Sizes::default(), bus);
        from_settings::answers(&settings, &target, machine).0
    }

    fn changed(text: &str, kind: Kind, words: &[(&str, &str)]) -> String {
        change(text, kind, &answers(words), Secrets::Shown).unwrap()
    }

    const FILE: &str = "<?xml version=\"1.0\"?>\n<unattend><settings pass=\"windowsPE\">\n\
        <component name=\"Microsoft-Windows-Setup\"><!-- mine -->\n\
        <DiskConfiguration><Disk><DiskID> 0 </DiskID></Disk></DiskConfiguration>\n\
        <ImageInstall><OSImage><InstallTo><DiskID>0</DiskID></InstallTo></OSImage></ImageInstall>\n\
        <UserData><FullName>Docker</FullName><ProductKey><Key>x</Key></ProductKey></UserData>\n\
        </component></settings></unattend>\n";

    #[test]
    fn a_finished_file_gets_only_what_the_machine_needs() {
        let made = changed(FILE, Kind::Finished, &[("USERNAME", "bill")]);
        let wanted = FILE
            .replace("<DiskID> 0 <", "<DiskID>1<")
            .replace("<DiskID>0<", "<DiskID>1<")
            .replace("<UserData>", "<UseConfigurationSet>true</UseConfigurationSet><UserData>");
        assert_eq!(made, wanted);
        // A second change changes nothing.
        assert_eq!(changed(&made, Kind::Finished, &[]), made);
        let nvme = changed(&made, Kind::Finished, &[("DISK_TYPE", "nvme")]);
        assert_eq!(nvme, made.replace("<DiskID>1<", "<DiskID>0<"));
    }

    #[test]
    fn several_disks_stay_and_a_strange_one_is_refused() {
        let several = FILE.replace("<DiskID> 0 <", "<DiskID>1<");
        assert!(changed(&several, Kind::Finished, &[]).contains("<InstallTo><DiskID>0<"));
        let strange =
            FILE.replace("<DiskID> 0 <", "<DiskID>7<").replace("<DiskID>0<", "<DiskID>7<");
        let twice =
            FILE.replace("<UserData>", "<UseConfigurationSet/><UseConfigurationSet/><UserData>");
        let other = FILE.replace("windowsPE", "specialize");
        for (text, reason) in
            [(strange, "give 0 or 1"), (twice, "several times"), (other, "must have one component")]
        {
            let made = change(&text, Kind::Finished, &answers(&[]), Secrets::Shown);
            let error = format!("{:#}", made.unwrap_err());
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_template_gets_the_settings() {
        let template = FILE.replace(
            "</settings>",
            "</settings><settings><component><UserAccounts><LocalAccounts><LocalAccount>\
             <Name>Docker</Name><Password><Value/></Password></LocalAccount></LocalAccounts>\
             <AdministratorPassword/></UserAccounts><AutoLogon><Username>Docker</Username>\
             </AutoLogon><UILanguage>en-US</UILanguage><ComputerName>*</ComputerName>\
             <Display><HorizontalResolution>1</HorizontalResolution></Display></component>\
             </settings>",
        );
        let words = [
            ("USERNAME", "b & c"),
            ("PASSWORD", "admin"),
            ("LANGUAGE", "ko"),
            ("HOST", "box"),
            ("VERSION", "11e"),
        ];
        let made = changed(&template, Kind::Template, &words);
        for part in [
            "<FullName>b &amp; c</FullName></UserData>",
            "<Name>b &amp; c</Name><Password><Value>YQBkAG0AaQBuAFAAYQBzAHMAdwBvAHIAZAA=</Value>\
             <PlainText>false</PlainText></Password>",
            "<AdministratorPassword><Value>YQBkAG0AaQBuAEEA",
            "<Username>b &amp; c</Username>",
            "<UILanguage>ko-KR</UILanguage><ComputerName>box</ComputerName>",
            "<HorizontalResolution>1280</HorizontalResolution>",
        ] {
            assert!(made.contains(part), "{part}: {made}");
        }
        assert!(!made.contains("ProductKey"), "evaluation media have no key: {made}");
        let off = changed(&template, Kind::Template, &[("AUTOLOGIN", "N")]);
        assert!(!off.contains("AutoLogon") && off.contains("<Key>x</Key>"));
        let masked = change(&template, Kind::Template, &answers(&words), Secrets::Masked).unwrap();
        assert!(masked.contains("<Value>***</Value>") && !masked.contains("YQBkAG0AaQBu"));
    }

    #[test]
    fn a_template_joins_what_the_settings_say() {
        let template = FILE.replace(
            "</settings>",
            "</settings><settings pass=\"specialize\"></settings><settings><component>\
             <UserAccounts><LocalAccounts/><AdministratorPassword/></UserAccounts>\
             <AutoLogon/></component></settings>",
        );
        let office = changed(&template, Kind::Template, &[("WORKGROUP", "OFFICE")]);
        assert!(office.contains("<JoinWorkgroup>OFFICE</JoinWorkgroup>"), "{office}");
        let words = [("DOMAIN", "corp.example.com"), ("USERNAME", "me"), ("PASSWORD", "secret")];
        let domain = changed(&template, Kind::Template, &words);
        for part in ["<JoinDomain>corp.example.com<", "<DomainAccounts ", "<Username>me<"] {
            assert!(domain.contains(part), "{part}: {domain}");
        }
        assert!(!domain.contains("<LocalAccounts"));
        let error = change(FILE, Kind::Template, &answers(&words), Secrets::Shown).unwrap_err();
        assert!(error.to_string().contains("no pass specialize"), "{error}");
    }

    #[test]
    fn other_encodings_become_utf_8() {
        let text =
            "<?xml version=\"1.0\" encoding='utf-16' standalone=\"yes\"?><unattend>é</unattend>";
        let wanted = text.replace("'utf-16'", "\"utf-8\"");
        let marked = format!("\u{feff}{text}");
        let little: Vec<u8> = marked.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let big: Vec<u8> = marked.encode_utf16().flat_map(u16::to_be_bytes).collect();
        for bytes in [little.as_slice(), &big, marked.as_bytes()] {
            assert_eq!(decode(bytes).unwrap(), wanted);
        }
        assert!(decode(b"\xe9").is_err() && decode(&little[..little.len() - 1]).is_err());
        assert!(decode(b"<?xml encoding=\"x?><a/>").is_err());
    }

    #[test]
    fn other_files_are_refused_with_their_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("custom.xml");
        for (text, reason) in [("<a/>", "not an answer file"), ("<unattend>", "not closed")] {
            std::fs::write(&path, text).unwrap();
            let made = load(&path, Kind::Finished, &answers(&[]), Secrets::Shown);
            let error = format!("{:#}", made.unwrap_err());
            assert!(error.contains("custom.xml: ") && error.contains(reason), "{error}");
        }
        std::fs::write(&path, vec![b' '; MAX_LENGTH + 1]).unwrap();
        load(&path, Kind::Finished, &answers(&[]), Secrets::Shown).unwrap_err();
    }

    #[test]
    fn the_users_files_are_found_in_the_references_order() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let volume = root.join("storage");
        std::fs::create_dir_all(root.join("run/assets")).unwrap();
        std::fs::create_dir(&volume).unwrap();
        let found = || find(root, &volume, "win11x64-enterprise-eval").unwrap();
        assert_eq!(found(), None);
        for (name, kind) in [
            ("run/assets/win11x64-enterprise.xml", Kind::Template),
            ("run/assets/win11x64-enterprise-eval.xml", Kind::Template),
            ("run/assets/custom.xml", Kind::Finished),
            ("storage/custom.xml", Kind::Finished),
            ("custom.xml", Kind::Finished),
        ] {
            let (path, before) = (root.join(name), found());
            std::fs::write(&path, "").unwrap();
            assert_eq!(found(), before, "{name} is empty");
            std::fs::write(&path, "x").unwrap();
            assert_eq!(found(), Some((path, kind)));
        }
        std::fs::remove_file(root.join("custom.xml")).unwrap();
        std::fs::create_dir(root.join("custom.xml")).unwrap();
        let error = find(root, &volume, "win11x64").unwrap_err().to_string();
        assert!(error.contains("is a folder"), "{error}");
    }

    #[test]
    fn templates_have_the_references_names() {
        let folder = tempfile::tempdir().unwrap();
        let assets = folder.path().join("run/assets");
        std::fs::create_dir_all(&assets).unwrap();
        for (id, name) in [
            ("win11x64-enterprise-ltsc-eval", "win11x64-ltsc.xml"),
            ("win10x64-enterprise-iot-eval", "win10x64-iot.xml"),
            ("win10x64-enterprise-eval", "win10x64-enterprise.xml"),
            ("win2025-eval", "win2025.xml"),
            ("win2019-hv", "win2019-hv.xml"),
        ] {
            std::fs::write(assets.join(name), "x").unwrap();
            let found = find(folder.path(), Path::new("/none"), id).unwrap();
            assert_eq!(found, Some((assets.join(name), Kind::Template)), "{id}");
        }
    }
}
