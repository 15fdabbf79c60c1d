//! Reads the environment, once.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, anyhow, ensure};

use super::variable::{Support, Variable};
use super::{Settings, list, near, value, version};
use crate::status::{self, Failure};

/// Characters that end a line, here or on Windows.
const LINE_END: [char; 2] = ['\r', '\n'];

pub type Environment = BTreeMap<OsString, OsString>;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedEnvironment {
    pub settings: Settings,
    /// Names of the known variables that are set.
    pub names: BTreeSet<&'static str>,
    /// Those of `names` that came from a file. Their content is never shown.
    pub files: BTreeSet<&'static str>,
    /// Warnings, one sentence each.
    pub warnings: Vec<String>,
}

/// Reads all variables of the list, and the files that `NAME_FILE` points to.
///
/// # Errors
///
/// If a variable is invalid. The error has the exit status of the first invalid variable, and one
/// sentence for each: its name, its value unless that is secret, the reason and the way out.
pub fn read(environment: &Environment) -> anyhow::Result<ParsedEnvironment> {
    let (input, mistakes) = read_all(environment);
    status::all(mistakes).map(|()| input)
}

/// Reads all variables, and returns every error. An invalid variable keeps its default.
pub fn read_all(environment: &Environment) -> (ParsedEnvironment, Vec<anyhow::Error>) {
    let mut input =
        ParsedEnvironment { settings: Settings::defaults(), ..ParsedEnvironment::default() };
    let mut mistakes = Vec::new();
    for variable in list::all() {
        mistakes.extend(take(variable, environment, &mut input).err());
    }
    if let Some(old) = input.settings.pod.timeout_old {
        input.settings.pod.timeout = old;
    }
    let unknown = environment.keys().filter_map(|name| suggestion(name.to_str()?));
    input.warnings.extend(unknown);
    (input, mistakes)
}

fn take(
    variable: &'static Variable,
    environment: &Environment,
    input: &mut ParsedEnvironment,
) -> anyhow::Result<()> {
    let fail = |sentence: String| Failure::new(variable.status, sentence);
    let Some((name, text)) =
        text_of(variable, environment).map_err(|it| fail(format!("{it:#}")))?
    else {
        return Ok(());
    };
    let kind = variable.kind();
    // The content of a file is never shown. A password keeps its quotes and blanks.
    let from_file = name != variable.name && name.ends_with("_FILE");
    let shown = |text: &str| match kind.shown && !from_file {
        true => format!("{name}={}", value::quote(&version::without_secrets(text))),
        false => name.clone(),
    };
    // A file of variables may have the line ends of Windows.
    let text = if kind.secret { text.trim_end_matches(LINE_END) } else { value::strip(&text) };
    if text.is_empty() {
        return Ok(());
    }
    // Kubernetes sets this variable itself where a service is called web or vnc.
    if name.ends_with("_PORT") && (text.starts_with("tcp://") || text.starts_with("udp://")) {
        let sentence = "has no effect, because Kubernetes sets it for a service of this name: \
                        rename the service, or set enableServiceLinks to false";
        input.warnings.push(format!("{name} {sentence}"));
        return Ok(());
    }
    input.names.insert(variable.name);
    if from_file {
        input.files.insert(variable.name);
    }
    let usual = is_usual(variable, text);
    match variable.support {
        Support::Ignored(_) if usual => return Ok(()),
        Support::Ignored(instead) => {
            input.warnings.push(format!("{name} has no effect: {instead}"));
            return Ok(());
        }
        Support::Full | Support::Translated => {}
    }
    let Some(slot) = &variable.slot else { return Ok(()) };
    if let Err(error) = (slot.store)(&mut input.settings, text) {
        if !kind.lenient {
            return Err(fail(format!("{}: {error:#}", shown(text))));
        }
        input.names.remove(variable.name);
        input.warnings.push(format!("{} has no effect: {error:#}", shown(text)));
        return Ok(());
    }
    if !usual {
        let notes = (slot.notes)(&input.settings).into_iter();
        input.warnings.extend(notes.map(|note| format!("{name}: {note}")));
    }
    Ok(())
}

/// Whether the text is the variable's default, in any spelling.
fn is_usual(variable: &Variable, text: &str) -> bool {
    let switch = value::switch(text);
    let off = variable.default.is_empty() && switch == Some(false);
    let same = switch.is_some() && switch == value::switch(variable.default);
    off || same || text.eq_ignore_ascii_case(variable.default)
}

/// The text of a variable, and the name under which it was set. An empty variable counts as unset.
fn text_of(
    variable: &Variable,
    environment: &Environment,
) -> anyhow::Result<Option<(String, String)>> {
    let get = |name: &str| environment.get(OsStr::new(name)).filter(|text| !text.is_empty());
    for name in variable.names() {
        let file_name = format!("{name}_FILE");
        let file = get(&file_name).filter(|_| variable.kind().file);
        let text = get(name);
        ensure!(
            text.is_none() || file.is_none(),
            "{name} and {file_name} are both set: leave one of them out"
        );
        if let Some(path) = file {
            let text = secret_of(Path::new(path));
            let text = text.with_context(|| format!("{file_name}={}", path.display()))?;
            return Ok(Some((file_name, text)));
        }
        if let Some(text) = text {
            let text = text.to_str().with_context(|| {
                format!("{name}: the value is not UTF-8: correct it, or leave it out")
            })?;
            return Ok(Some((name.to_owned(), text.to_owned())));
        }
    }
    Ok(None)
}

/// Reads a secret from a file, without line ends behind it.
fn secret_of(path: &Path) -> anyhow::Result<String> {
    // Secrets are short. A longer file is not one.
    const MAX_LENGTH: u64 = 4096;
    let unreadable = |error| anyhow!("{error}: mount the secret there");
    let file = File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.take(MAX_LENGTH + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    let fits = bytes.len() as u64 <= MAX_LENGTH;
    ensure!(fits, "the file has more than {MAX_LENGTH} bytes: is it the secret?");
    // The error itself would show the bytes.
    let text = String::from_utf8(bytes).ok().context("the file is not text: write it in UTF-8")?;
    let text = text.trim_end_matches(LINE_END);
    ensure!(!text.is_empty(), "the file is empty: write the secret into it");
    Ok(text.to_owned())
}

/// A suggestion for an unknown name that resembles a variable of the list. Names that Kubernetes
/// sets for its services, and those of shells and images, get none.
fn suggestion(name: &str) -> Option<String> {
    const OTHERS: &[&str] = &[
        "PATH",
        "HOME",
        "HOSTNAME",
        "TERM",
        "USER",
        "SHELL",
        "LANG",
        "LOGNAME",
        "MAIL",
        "PAGER",
        "EDITOR",
        "VISUAL",
        "SHLVL",
        "COLUMNS",
        "LINES",
        "HOSTTYPE",
        "LANGUAGES",
    ];
    // Names that other programs use for these variables, or that users type by habit.
    const ELSEWHERE: &[(&str, &str)] = &[
        ("RAM", "RAM_SIZE"),
        ("MEMORY", "RAM_SIZE"),
        ("CPU", "CPU_CORES"),
        ("CPUS", "CPU_CORES"),
        ("CORES", "CPU_CORES"),
        ("DISK", "DISK_SIZE"),
    ];
    if list::find(name).is_some() {
        return None;
    }
    let capitals = name.to_ascii_uppercase();
    if capitals != name && list::find(&capitals).is_some() {
        return Some(format!("{name} has no effect: write it in capitals, {capitals}"));
    }
    if let Some((_, own)) = ELSEWHERE.iter().find(|(other, _)| *other == name) {
        return Some(format!("{name} has no effect: did you mean {own}?"));
    }
    let ours = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    let service = name.contains("_SERVICE_") || name.contains("_PORT_") || name.ends_with("_PORT");
    let foreign = OTHERS.contains(&name) || name.starts_with("LC_") || service;
    // WEB_POTR is a misspelling, but FOO_PORT belongs to a service that is called foo.
    if foreign || !name.bytes().all(ours) {
        return None;
    }
    let plain = name.strip_suffix("_FILE").unwrap_or(name);
    if let Some(variable) = list::find(plain) {
        let strange = name != plain && !variable.kind().file;
        return strange.then(|| format!("{name} has no effect: set {plain} itself"));
    }
    let known: Vec<&str> = list::all().flat_map(Variable::names).collect();
    let near = near::nearest(name, &known)?;
    Some(format!("{name} is unknown: did you mean {near}?"))
}

#[cfg(test)]
mod test {
    use super::super::host::Host;
    use super::super::settle::settle;
    use super::*;
    use crate::status::Status;

    fn environment(words: &[(&str, &str)]) -> Environment {
        words.iter().map(|(name, text)| (name.into(), text.into())).collect()
    }

    fn parse(words: &[(&str, &str)]) -> ParsedEnvironment {
        read(&environment(words)).unwrap()
    }

    fn refusal(words: &[(&str, &str)]) -> (Status, String) {
        let error = read(&environment(words)).unwrap_err();
        (Status::of(&error), format!("{error:#}"))
    }

    #[test]
    fn an_empty_environment_gives_the_defaults() {
        let nothing = parse(&[]);
        assert_eq!(nothing.settings, Settings::defaults());
        assert_eq!(nothing.warnings, [""; 0]);
        assert_eq!(parse(&[("RAM_SIZE", ""), ("DISPLAY", " \"\" ")]), nothing);
    }

    #[test]
    fn a_default_value_gives_no_warning() {
        for variable in list::all().filter(|variable| !variable.default.is_empty()) {
            let input = parse(&[(variable.name, variable.default)]);
            assert_eq!(input.warnings, [""; 0], "{}", variable.name);
            assert_eq!(input.settings, Settings::defaults(), "{}", variable.name);
        }
    }

    #[test]
    fn quotes_and_blanks_around_a_value_are_removed() {
        let quoted = parse(&[("CPU_CORES", " \"3\" "), ("RAM_SIZE", "'6G'")]);
        assert_eq!(quoted.settings, parse(&[("CPU_CORES", "3"), ("RAM_SIZE", "6G")]).settings);
        for (text, password) in [(" \"x\" ", " \"x\" "), (" x \r\n", " x ")] {
            assert_eq!(parse(&[("PASSWORD", text)]).settings.account.password.0, password);
        }
    }

    #[test]
    fn an_alias_sets_its_variable_and_the_name_takes_precedence() {
        let alias = parse(&[("VM_NET_IP", "10.0.0.9")]);
        assert_eq!(alias.settings, parse(&[("IP", "10.0.0.9")]).settings);
        assert!(alias.names.contains("IP"));
        let both = parse(&[("VM_NET_IP", "10.0.0.9"), ("IP", "10.0.0.8")]);
        assert_eq!(both.settings.network.address, Some([10, 0, 0, 8].into()));
    }

    #[test]
    fn secrets_are_read_from_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let file = path.to_str().unwrap();
        let contents = [("a b\n", "a b"), ("a\r\n", "a"), ("a\n\n", "a"), ("a\nb", "")];
        for (content, password) in contents {
            std::fs::write(&path, content).unwrap();
            let read = read(&environment(&[("PASSWORD_FILE", file)]));
            match password {
                "" => assert!(read.is_err(), "a line feed in the middle is a control character"),
                _ => assert_eq!(read.unwrap().settings.account.password.0, password),
            }
        }
        std::fs::write(&path, "me\n").unwrap();
        assert_eq!(parse(&[("USERNAME_FILE", file)]).settings.account.user.0, "me");
        let (_, both) = refusal(&[("PASSWORD_FILE", file), ("PASSWORD", "x")]);
        assert!(both.contains("both set"), "{both}");
        for content in ["", "\n", &"x".repeat(5000)] {
            std::fs::write(&path, content).unwrap();
            refusal(&[("PASS_FILE", file)]);
        }
        std::fs::write(&path, b"hush\xff").unwrap();
        assert!(!refusal(&[("KEY_FILE", file)]).1.contains("hush"));
        std::fs::remove_file(&path).unwrap();
        assert!(refusal(&[("KEY_FILE", file)]).1.contains("mount the secret there"));
    }

    #[test]
    fn no_secret_is_ever_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let file = path.to_str().unwrap();
        for variable in list::all().filter(|variable| variable.kind().file) {
            let fits =
                if variable.name == "KEY" { "HUSHH-11111-11111-11111-11111" } else { "hushh" };
            for text in [fits, "hushh\u{7}", "HUSHH/\u{7}"] {
                std::fs::write(&path, text).unwrap();
                let file_name = format!("{}_FILE", variable.name);
                for words in [[(variable.name, text)], [(&*file_name, file)]] {
                    // A user name in the environment itself is not a secret.
                    if words[0].0 == "USERNAME" {
                        continue;
                    }
                    let shown = match read(&environment(&words)) {
                        Ok(input) => format!("{input:?} {:?}", settle(&input, &Host::default())),
                        Err(error) => format!("{error:#} {error:?}"),
                    };
                    let shown = shown.to_lowercase();
                    assert!(!shown.contains("hushh"), "{}: {shown}", words[0].0);
                }
            }
        }
    }

    #[test]
    fn errors_do_not_show_secrets() {
        let (_, link) = refusal(&[("VERSION", "https://me:hush@example.com/a b?sig=hush")]);
        assert!(link.starts_with("VERSION=https://***@example.com/a b?***: "), "{link}");
        let words = "-fw_cfg name=opt/x,string=hush -object secret,data=hush -snapshot";
        let (_, options) = refusal(&[("ARGUMENTS", words)]);
        assert!(options.starts_with("ARGUMENTS: -snapshot is refused"), "{options}");
        assert!(!format!("{link}{options}").contains("hush"));
    }

    #[test]
    fn typos_get_a_hint_and_unrelated_names_do_not() {
        let slips = [("RAM_SIEZ", "RAM_SIZE"), ("DISKSIZE", "DISK_SIZE"), ("PASWORD_FILE", "")];
        for (name, near) in slips {
            let warnings = parse(&[(name, "1")]).warnings;
            let asked = warnings.first().is_some_and(|it| it.contains("did you mean"));
            assert!(near.is_empty() || asked && warnings[0].contains(near), "{warnings:?}");
        }
        for name in [
            "KUBERNETES_SERVICE_HOST",
            "KUBERNETES_PORT_443_TCP_PROTO",
            "WEBS_PORT",
            "HOSTNAME",
            "LANG",
            "http_proxy",
            "ram_siez",
            "PS1",
            "IPS",
        ] {
            assert_eq!(parse(&[(name, "x")]).warnings, [""; 0], "{name}");
        }
        assert!(parse(&[("RAM_SIZE_FILE", "/x")]).warnings[0].contains("set RAM_SIZE itself"));
        assert!(parse(&[("RAM", "4G")]).warnings[0].contains("did you mean RAM_SIZE?"));
        assert!(parse(&[("password", "x")]).warnings[0].contains("in capitals, PASSWORD"));
    }

    #[test]
    fn kubernetes_service_links_are_ignored_with_a_warning() {
        let linked = parse(&[("WEB_PORT", "tcp://10.0.0.1:80"), ("VNC_PORT", "udp://10.0.0.2:1")]);
        assert_eq!(linked.settings, Settings::defaults());
        assert_eq!(linked.warnings.len(), 2);
        assert!(linked.warnings.iter().all(|it| it.contains("enableServiceLinks")));
    }

    #[test]
    fn values_that_are_not_utf8_are_refused_where_used() {
        use std::os::unix::ffi::OsStringExt as _;
        let bytes = OsString::from_vec(vec![0xff]);
        let version = [("VERSION".into(), bytes.clone())].into();
        assert_eq!(Status::of(&read(&version).unwrap_err()), Status::Version);
        let words = [("ELSEWHERE".into(), bytes.clone()), (bytes.clone(), bytes)].into();
        assert_eq!(read(&words).unwrap().warnings, [""; 0]);
    }

    #[test]
    fn all_errors_are_reported_at_once() {
        let words = [("RAM_SIZE", "abc"), ("CPU_CORES", "x"), ("LANGUAGE", "Klingon")];
        let error = read(&environment(&words)).unwrap_err();
        assert_eq!(Status::of(&error), Status::Language);
        let sentences = status::sentences(&error);
        let starts = ["LANGUAGE=Klingon: ", "CPU_CORES=x: ", "RAM_SIZE=abc: "];
        assert_eq!(sentences.len(), starts.len(), "{sentences:?}");
        assert!(sentences.iter().zip(starts).all(|(it, start)| it.starts_with(start)));
        let (input, _) = read_all(&environment(&[&words[..], &[("WEB_PORT", "80")]].concat()));
        assert_eq!(input.settings.screen.web_port.0, 80);
    }

    #[test]
    fn an_error_names_variable_value_reason_and_remedy() {
        for (name, text, status, out) in [
            ("CPU_CORES", "many", Status::Processors, "give a whole number"),
            ("RAM_SIZE", "8X", Status::Memory, "give a size"),
            ("DISK_SIZE", "-1", Status::Disk, "give a size"),
            ("NETWORK", "cloud", Status::Network, "give nat"),
            ("MAC", "02:11", Status::Address, "give a MAC address"),
            ("MASK", "255.0.255.0", Status::Address, "give a mask"),
            ("BOOT_MODE", "windows_legacy", Status::Boot, "give one of"),
            ("LANGUAGE", "klingon", Status::Language, "give a language"),
            ("LANGUAGE", "germna", Status::Language, "did you mean german?"),
            ("VERSION", "13", Status::Version, "give a version"),
            ("TAP", "a b", Status::Network, "give the name of an interface"),
            ("UUID", "1", Status::Usage, "give a UUID"),
        ] {
            let (own, sentence) = refusal(&[(name, text)]);
            assert_eq!(own, status, "{sentence}");
            assert!(sentence.starts_with(&format!("{name}={text}: ")), "{sentence}");
            assert!(sentence.contains(out), "{sentence}");
        }
    }
}
