//! Access to the screen: the passwords for browsers and VNC viewers, and the socket that shows it.

use std::path::PathBuf;

use anyhow::Context as _;
use host::listen::Address;
use screen::rfb::listen;
use screen::web::viewers::Passwords;

use super::runtime_folder::RuntimeFolder;
use super::volume::Volume;
use crate::plan::Plan;
use crate::settings::value::Secret;
use crate::settings::{Compat, Settings};
use crate::source::Source;
use crate::story::log_layer;

/// Letters of generated passwords. None of them looks like another.
const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
const PASSWORD_LENGTH: usize = 16;
/// Ending of the file on the volume with the password: `windows.password`.
const PASSWORD_FILE: &str = "password";
/// VNC authentication uses only the first letters of a password. Since VNC has no TLS here, an
/// eavesdropper of one login can easily find them. So viewers have a password of their own, which
/// is not a part of the other one.
const VNC_LENGTH: usize = Passwords::VNC_BYTES;
const VNC_FILE: &str = "vnc";
/// Ending of the file with the made password of Windows' account.
const ACCOUNT_FILE: &str = "account";

/// Access to the screen.
#[derive(Debug)]
pub enum Guard {
    Open,
    Password {
        user: String,
        password: PathBuf,
        /// `None` without VNC.
        vnc: Option<PathBuf>,
    },
}

impl Guard {
    /// By default the screen asks for a password, except for the probe.
    pub fn of(
        plan: &Plan,
        volume: Option<&Volume>,
        runtime_folder: &RuntimeFolder,
    ) -> anyhow::Result<Self> {
        let settings = &plan.input.settings;
        let secret = settings.screen.pass.as_ref().map(|it| it.0.clone());
        let is_set = plan.input.names.contains("PASSWORD");
        let chosen = secret.clone().or_else(|| is_set.then(|| settings.account.password.0.clone()));
        let probe = plan.source == Source::Probe;
        let open = match settings.screen.protect {
            Some(true) => None,
            Some(false) => Some("PROTECT=N disables it"),
            // The reference image also asks if PASS is set.
            None if secret.is_some() => None,
            None if settings.pod.compat == Compat::Dockur => {
                Some("with COMPAT=dockur it asks only if PROTECT=Y or PASS is set")
            }
            None if chosen.is_none() && probe => {
                Some("with VERSION=probe it asks only if PASSWORD or PROTECT=Y is set")
            }
            None => None,
        };
        if let Some(why) = open {
            if !probe {
                tracing::warn!("the screen has no password: set PROTECT=Y to require one");
            }
            runtime_folder.write(runtime_folder.open(), why)?;
            return Ok(Self::Open);
        }
        // The probe has no volume of its own, but may keep a password on the configured one.
        let folder = &settings.storage.folder;
        let lent = match volume {
            None if probe && folder.is_dir() => Volume::open(settings, &plan.source).ok(),
            _ => None,
        };
        let volume = volume.or(lent.as_ref());
        let text = match chosen {
            Some(text) => text,
            None => kept_password(volume, PASSWORD_FILE, PASSWORD_LENGTH)?,
        };
        let vnc = settings.vnc().map(|_| {
            let text = kept_password(volume, VNC_FILE, VNC_LENGTH)?;
            runtime_folder.write(runtime_folder.vnc_password(), &text)
        });
        let password = runtime_folder.write(runtime_folder.password(), &text)?;
        Ok(Self::Password {
            user: settings.account.user.0.clone(),
            password,
            vnc: vnc.transpose()?,
        })
    }

    /// The password of Windows' account: PASSWORD, or one that is made for the installation. It is
    /// kept, because an interrupted installation goes on with it. A page for everybody does not
    /// show it.
    pub fn account_password(
        &self,
        plan: &Plan,
        volume: Option<&Volume>,
        runtime_folder: &RuntimeFolder,
    ) -> anyhow::Result<Secret> {
        let account = &plan.input.settings.account;
        let Some(volume) = volume else { return Ok(account.password.clone()) };
        let kept = volume.read(ACCOUNT_FILE).filter(|text| !text.is_empty());
        if matches!(plan.source, Source::Disk(_)) {
            kept.map(|text| runtime_folder.write(runtime_folder.account_password(), &text))
                .transpose()?;
            return Ok(account.password.clone());
        }
        let makes = plan.unattended.as_ref().is_some_and(|it| it.makes_password(&plan.input));
        if !makes {
            // That of an earlier installation, which this one replaces.
            std::fs::remove_file(volume.file(ACCOUNT_FILE)).ok();
            return Ok(account.password.clone());
        }
        let text = match kept {
            Some(text) => text,
            None => {
                let text = keep(Some(volume), PASSWORD_FILE, PASSWORD_LENGTH)?;
                volume.write(ACCOUNT_FILE, &text)?;
                text
            }
        };
        runtime_folder.write(runtime_folder.account_password(), &text)?;
        let user = account.user.0.escape_debug();
        let line = format!("PASSWORD is not set: in Windows, {user} has the password {text}");
        match self {
            Self::Open => tracing::info!(target: log_layer::RECORDED, "{line}"),
            Self::Password { .. } => tracing::info!("{line}"),
        }
        Ok(Secret(text))
    }

    /// The made password of Windows' account, which pages show if they ask for a password.
    pub fn shown_password(&self, runtime_folder: &RuntimeFolder) -> Option<String> {
        match self {
            Self::Open => None,
            Self::Password { .. } => {
                std::fs::read_to_string(runtime_folder.account_password()).ok()
            }
        }
    }

    /// The socket on which the machine shows its screen. Only the pod connects to it, for browsers
    /// and VNC viewers.
    pub fn screen_socket(settings: &Settings, runtime_folder: &RuntimeFolder) -> listen::Config {
        listen::Config {
            address: Some(Address::Unix(runtime_folder.screen())),
            announced: true,
            name: Some(settings.title().to_owned()),
            ..listen::Config::default()
        }
    }
}

/// A kept password of the screen, with a line in the log.
fn kept_password(volume: Option<&Volume>, end: &str, length: usize) -> anyhow::Result<String> {
    let place = match volume {
        None => "not kept, since there is no volume".to_owned(),
        Some(volume) => format!("in {}", volume.file(end).display()),
    };
    let text = keep(volume, end, length)?;
    let whose = match end {
        PASSWORD_FILE => "PASSWORD is not set: the generated password of the screen",
        _ => "the generated password for VNC viewers",
    };
    tracing::info!("{whose} is {place} (`transom password` in the container prints it)");
    Ok(text)
}

/// The password that is kept on the volume, or a new one. Without a volume it is new each time.
fn keep(volume: Option<&Volume>, end: &str, length: usize) -> anyhow::Result<String> {
    if let Some(text) = volume.and_then(|it| it.read(end)).filter(|text| !text.is_empty()) {
        return Ok(text);
    }
    let text = random_password(length)?;
    volume.map_or(Ok(()), |volume| volume.write(end, &text))?;
    Ok(text)
}

/// With a capital letter, small ones and a digit, which Windows Server requires.
fn random_password(length: usize) -> anyhow::Result<String> {
    loop {
        let mut bytes = vec![0; length];
        let mut filled = 0;
        while filled < length {
            let flags = rustix::rand::GetRandomFlags::empty();
            filled +=
                rustix::rand::getrandom(&mut bytes[filled..], flags).context("random numbers")?;
        }
        let letter = |byte: &u8| char::from(LETTERS[usize::from(byte % 32)]);
        let text: String = bytes.iter().map(letter).collect();
        let (first, rest) = text.split_at(1);
        let has = |fits: fn(char) -> bool| rest.contains(fits);
        // A capital I looks like other letters.
        let has_capital = first.contains(|it: char| it.is_ascii_lowercase() && it != 'i');
        if has_capital && has(|it| it.is_ascii_digit()) && has(|it| it.is_ascii_lowercase()) {
            return Ok(first.to_ascii_uppercase() + rest);
        }
    }
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::answer::target::Target;
    use crate::plan::unattended::Unattended;
    use crate::settings::environment::read;
    use crate::settings::settle::Sizes;

    /// The passwords of the screen and of VNC viewers, or the reason for having none.
    fn guarded(words: &[(&str, &str)], probe: bool) -> Result<(String, Option<String>), String> {
        let folder = tempfile::tempdir().unwrap();
        guarded_in(folder.path(), words, probe)
    }

    fn guarded_in(
        folder: &std::path::Path,
        words: &[(&str, &str)],
        probe: bool,
    ) -> Result<(String, Option<String>), String> {
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let mut input = read(&words).unwrap();
        input.settings.storage.folder = folder.to_owned();
        let source = if probe { Source::Probe } else { Source::Medium("/custom.iso".into()) };
        let (sizes, warnings) = (Sizes::default(), Vec::new());
        let plan =
            Plan { input, sizes, source, next: None, media: None, unattended: None, warnings };
        let volume = (!probe).then(|| Volume::open(&plan.input.settings, &plan.source).unwrap());
        let runtime_folder = RuntimeFolder::within(folder);
        match Guard::of(&plan, volume.as_ref(), &runtime_folder).unwrap() {
            Guard::Open => Err(fs::read_to_string(runtime_folder.open()).unwrap()),
            Guard::Password { password, vnc, .. } => {
                let read = |path| fs::read_to_string(path).unwrap();
                Ok((read(password), vnc.map(read)))
            }
        }
    }

    fn asked(words: &[(&str, &str)], probe: bool) -> Option<String> {
        guarded(words, probe).ok().map(|it| it.0)
    }

    #[test]
    fn the_screen_needs_a_password_unless_configured() {
        let [dockur, pass, password] =
            [("COMPAT", "dockur"), ("PASS", "hush"), ("PASSWORD", "hushhush")];
        let [yes, no] = ["Y", "N"].map(|word| ("PROTECT", word));
        assert_eq!(asked(&[], false).map(|it| it.len()), Some(PASSWORD_LENGTH));
        assert!(guarded(&[], true).unwrap_err().contains("VERSION=probe"));
        for (words, is) in [
            (&[dockur][..], None),
            (&[dockur, password], None),
            (&[no], None),
            (&[no, pass], None),
            (&[password], Some("hushhush")),
            (&[pass], Some("hush")),
            (&[pass, password, dockur], Some("hush")),
            (&[dockur, yes, password], Some("hushhush")),
        ] {
            for probe in [false, true] {
                assert_eq!(asked(words, probe).as_deref(), is, "{words:?}");
            }
        }
        assert!(guarded(&[dockur], false).unwrap_err().contains("COMPAT=dockur"));
        assert!(guarded(&[no], false).unwrap_err().contains("PROTECT=N"));
    }

    #[test]
    fn a_missing_password_is_generated_and_stored() {
        for words in [&[("PROTECT", "Y")][..], &[("PROTECT", "Y"), ("COMPAT", "dockur")]] {
            for probe in [false, true] {
                let folder = tempfile::tempdir().unwrap();
                let first = guarded_in(folder.path(), words, probe).unwrap().0;
                assert_eq!((first.len(), &*first != "admin"), (PASSWORD_LENGTH, true), "{words:?}");
                assert_eq!(guarded_in(folder.path(), words, probe).unwrap().0, first);
                let file = fs::metadata(folder.path().join("windows.password")).unwrap();
                assert_eq!(file.permissions().mode() & 0o777, 0o600);
            }
        }
    }

    #[test]
    fn a_password_for_windows_is_made_once_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let runtime_folder = RuntimeFolder::within(folder.path());
        let of = |words: &[(&str, &str)], source: Source| {
            let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
            let mut input = read(&words).unwrap();
            input.settings.storage.folder = folder.path().to_owned();
            let target = Target::of_version(&input.settings.windows).unwrap();
            let missing = Vec::new();
            let unattended = Unattended {
                target,
                custom: None,
                bundle: None,
                bundle_url: None,
                missing,
                is_new: true,
            };
            let installs = matches!(source, Source::Medium(_)).then_some(unattended);
            let sizes = Sizes::default();
            let warnings = Vec::new();
            let plan = Plan {
                input,
                sizes,
                source,
                next: None,
                media: None,
                unattended: installs,
                warnings,
            };
            let volume = Volume::open(&plan.input.settings, &plan.source).unwrap();
            fs::remove_file(runtime_folder.account_password()).ok();
            let (user, password) = ("ada".into(), "/".into());
            let guard = Guard::Password { user, password, vnc: None };
            let made = guard.account_password(&plan, Some(&volume), &runtime_folder);
            // A page for everybody does not show it.
            assert_eq!(Guard::Open.shown_password(&runtime_folder), None);
            (made.unwrap().0, guard.shown_password(&runtime_folder))
        };
        let medium = || Source::Medium("/custom.iso".into());
        let (made, shown) = of(&[], medium());
        assert_eq!((made.len(), shown.as_ref()), (PASSWORD_LENGTH, Some(&made)));
        assert_eq!(of(&[], medium()).0, made);
        let file = fs::metadata(folder.path().join("windows.account")).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o600);
        // That of the screen, if it is a made one, too.
        let screen = fs::read_to_string(folder.path().join("windows.password")).unwrap();
        assert_eq!(screen, made);
        assert_eq!(of(&[], Source::Disk("/storage/data.img".into())).1, Some(made));
        assert_eq!(of(&[("PASSWORD", "hush")], medium()), ("hush".to_owned(), None));
        assert!(!folder.path().join("windows.account").exists());
        assert_eq!(of(&[("COMPAT", "dockur")], medium()), ("admin".to_owned(), None));
    }

    #[test]
    fn the_vnc_password_is_not_part_of_the_full_password() {
        let words = [("PASSWORD", "hushhush and more"), ("VNC_PORT", "5900")];
        let folder = tempfile::tempdir().unwrap();
        let (full, vnc) = guarded_in(folder.path(), &words, false).unwrap();
        let vnc = vnc.unwrap();
        assert_eq!(vnc.len(), VNC_LENGTH);
        assert!(!full.contains(&vnc) && !full.starts_with(&vnc[..4]), "{full} {vnc}");
        assert_eq!(guarded_in(folder.path(), &words, false).unwrap().1.as_deref(), Some(&*vnc));
        let file = fs::metadata(folder.path().join("windows.vnc")).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o600);
        // VNC is enabled only if configured.
        assert_eq!(guarded(&words[..1], false).unwrap().1, None);
        let wanted = |words: &[(&str, &str)]| {
            let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
            read(&words).unwrap().settings.vnc()
        };
        for (words, port) in [
            (&[][..], None),
            (&[("DISPLAY", "vnc")], Some(5900)),
            (&[("DISPLAY", "vnc"), ("VNC_PORT", "5901")], Some(5901)),
            (&[("VNC_PORT", "5902")], Some(5902)),
            (&[("COMPAT", "dockur")], Some(5900)),
            (&[("COMPAT", "dockur"), ("DISPLAY", "none")], None),
            (&[("VNC_PORT", "5900"), ("DISPLAY", "disabled")], None),
        ] {
            assert_eq!(wanted(words), port, "{words:?}");
        }
    }

    #[test]
    fn the_screen_socket_is_private_to_the_pod() {
        let words = [("APP".into(), "A, B=C".into())].into_iter().collect();
        let settings = read(&words).unwrap().settings;
        let door = Guard::screen_socket(&settings, &RuntimeFolder::within("/a,b".as_ref()));
        let words = "unix:/a,,b/screen.sock,announced,name=A,, B=C";
        assert_eq!(door, host::keyvalue::parse(words, Some("to")).unwrap());
    }

    #[test]
    fn generated_passwords_differ() {
        let [one, two] =
            [random_password(PASSWORD_LENGTH).unwrap(), random_password(PASSWORD_LENGTH).unwrap()];
        assert_ne!(one, two);
        assert_eq!(one.len(), PASSWORD_LENGTH);
        assert!(one.bytes().all(|it| LETTERS.contains(&it.to_ascii_lowercase())));
        assert!(one.starts_with(|it: char| it.is_ascii_uppercase()), "{one}");
        assert!(one.contains(|it: char| it.is_ascii_digit()), "{one}");
    }
}
