//! Passwords of the screen and of Windows' account, and the logs that show them.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use tracing_subscriber::layer::SubscriberExt as _;

use super::*;
use crate::answer::target::Target;
use crate::plan::unattended::Unattended;
use crate::settings::environment::read;
use crate::settings::settle::Sizes;
use crate::state::{Found, Next, Step, Why};
use crate::story::Story;
use crate::story::log_layer::StoryLayer;

/// The passwords of the screen and of VNC viewers, or the reason for having none.
fn guarded(words: &[(&str, &str)], probe: bool) -> Result<(String, Option<String>), String> {
    let folder = tempfile::tempdir().unwrap();
    guarded_in(folder.path(), words, probe)
}

fn guarded_in(
    folder: &Path,
    words: &[(&str, &str)],
    probe: bool,
) -> Result<(String, Option<String>), String> {
    let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
    let mut input = read(&words).unwrap();
    input.settings.storage.folder = folder.to_owned();
    let source = if probe { Source::Probe } else { Source::Medium("/custom.iso".into()) };
    let (sizes, warnings) = (Sizes::default(), Vec::new());
    let plan = Plan {
        input,
        sizes,
        goes_on: None,
        source,
        next: None,
        media: None,
        unattended: None,
        warnings,
    };
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

/// A plan with a volume in a folder.
fn plan(folder: &Path, words: &[(&str, &str)], step: Step) -> Plan {
    let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
    let mut input = read(&words).unwrap();
    input.settings.storage.folder = folder.to_owned();
    let unattended = Unattended {
        target: Target::of_version(&input.settings.windows).unwrap(),
        custom: None,
        bundle: None,
        remote: None,
        missing: Vec::new(),
        share: false,
        is_new: true,
    };
    let unattended = (!step.keeps()).then_some(unattended);
    let source = Source::Medium("/custom.iso".into());
    let next = Some(Next { found: Found::look(folder, "windows", None), step, base: None });
    let (sizes, warnings) = (Sizes::default(), Vec::new());
    Plan { input, sizes, goes_on: None, source, next, media: None, unattended, warnings }
}

#[test]
fn the_log_of_an_open_page_lacks_the_password() {
    let folder = tempfile::tempdir().unwrap();
    let runtime_folder = RuntimeFolder::within(folder.path());
    let plan = plan(folder.path(), &[], Step::Install);
    let volume = Volume::open(&plan.input.settings, &plan.source).unwrap();
    let closed = Guard::Password { user: "me".into(), password: "/none".into(), vnc: None };
    for (guard, on_page) in [(Guard::Open, false), (closed, true)] {
        let (story, log) = (Story::new(), folder.path().join("log"));
        let file = Arc::new(File::create(&log).unwrap());
        let layers = tracing_subscriber::registry()
            .with(StoryLayer(Some(story.clone())))
            .with(tracing_subscriber::fmt::layer().with_writer(file));
        let made = tracing::subscriber::with_default(layers, || {
            guard.account_password(&plan, &volume, &runtime_folder).unwrap().0
        });
        let log = fs::read_to_string(log).unwrap();
        assert!(log.contains(&made), "the container's log: {log}");
        let page = story.lines(0).0.into_iter().map(|it| it.text).collect::<Vec<_>>();
        assert_eq!(page.iter().any(|line| line.contains(&made)), on_page, "{page:?}");
    }
}

#[test]
fn a_password_for_windows_is_made_once_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let runtime_folder = RuntimeFolder::within(folder.path());
    let of = |words: &[(&str, &str)], step: Step| {
        let plan = plan(folder.path(), words, step);
        let volume = Volume::open(&plan.input.settings, &plan.source).unwrap();
        fs::remove_file(runtime_folder.account_password()).ok();
        let (user, password) = ("ada".into(), "/".into());
        let guard = Guard::Password { user, password, vnc: None };
        let made = guard.account_password(&plan, &volume, &runtime_folder);
        // A page for everybody does not show it.
        assert_eq!(Guard::Open.shown_password(&runtime_folder), None);
        (made.unwrap().0, guard.shown_password(&runtime_folder))
    };
    let (made, shown) = of(&[], Step::Install);
    assert_eq!((made.len(), shown.as_ref()), (PASSWORD_LENGTH, Some(&made)));
    assert_eq!(of(&[], Step::InstallAgain).0, made);
    let file = fs::metadata(folder.path().join("windows.account")).unwrap();
    assert_eq!(file.permissions().mode() & 0o777, 0o600);
    // That of the screen, if it is a made one, too.
    let screen = fs::read_to_string(folder.path().join("windows.password")).unwrap();
    assert_eq!(screen, made);
    // An installed Windows keeps its password.
    let hush = [("PASSWORD", "hush")];
    for step in [Step::Boot(Why::Booted), Step::Boot(Why::Bootable), Step::ByHand] {
        for words in [&[][..], &hush, &[("COMPAT", "dockur")]] {
            assert_eq!(of(words, step.clone()).1.as_ref(), Some(&made), "{step:?}");
        }
    }
    // A new installation has the new one.
    assert_eq!(of(&hush, Step::InstallAgain), ("hush".to_owned(), None));
    assert!(!folder.path().join("windows.account").exists());
    assert_eq!(of(&[("COMPAT", "dockur")], Step::Install), ("admin".to_owned(), None));
}

#[test]
fn other_files_and_texts_are_no_kept_passwords() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let storage = place("storage");
    fs::create_dir(&storage).unwrap();
    fs::write(place("token"), "hushhushhushhush").unwrap();
    let words = [("STORAGE", storage.to_str().unwrap())];
    let words = words.into_iter().map(|(name, text)| (name.into(), text.into())).collect();
    let settings = read(&words).unwrap().settings;
    let volume = Volume::open(&settings, &Source::Medium("/custom.iso".into())).unwrap();
    let file = volume.file(PASSWORD_FILE);
    std::os::unix::fs::symlink(place("token"), &file).unwrap();
    let made = keep(Some(&volume), PASSWORD_FILE, PASSWORD_LENGTH).unwrap();
    assert_eq!(keep(Some(&volume), PASSWORD_FILE, PASSWORD_LENGTH).unwrap(), made);
    assert_eq!(fs::read_to_string(place("token")).unwrap(), "hushhushhushhush");
    for text in ["a\u{1b}[2Jb", "a\nb", &"x".repeat(200), " "] {
        fs::write(&file, text).unwrap();
        let made = keep(Some(&volume), PASSWORD_FILE, PASSWORD_LENGTH).unwrap();
        assert_eq!(made.len(), PASSWORD_LENGTH, "{text:?}");
    }
    fs::write(&file, "the user's own\n").unwrap();
    let own = keep(Some(&volume), PASSWORD_FILE, PASSWORD_LENGTH).unwrap();
    assert_eq!(own, "the user's own");
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
