//! Serial ports of whole installations: the firmware's lines, the scripts', and DISM's.

use std::path::Path;

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::*;
use crate::agent::Agent;
use crate::plan::Plan;
use crate::pod::child::listen;
use crate::pod::guest_log::{GuestLog, LoggedLines};
use crate::pod::runtime_folder::RuntimeFolder;
use crate::settings::environment::Environment;
use crate::story::Phase;
use crate::web::{Health, WebState};

const SETUP: &str = include_str!("setup.txt");
/// The end of the firmware's line about the first start from the disk.
const DISK: &str = "starting Boot0004 \"Windows Boot Manager\" from \
                    HD(1,GPT,7B1C)/\\EFI\\Microsoft\\Boot\\bootmgfw.efi";
const SCRIPT: &str = include_str!("script.txt");

/// The state of the pod, whether the guest is ready with the reason, and the log, after these lines
/// of the serial port.
async fn after(lines: &str) -> (Value, (bool, String), Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let runtime_folder = RuntimeFolder::within(folder.path());
    let variables: Environment = [("VERSION".into(), "probe".into())].into_iter().collect();
    let plan = Plan::make(&variables, Path::new("/")).unwrap();
    let (story, agent) = (Story::new(), Arc::new(Agent::new(runtime_folder.agent())));
    let web = WebState::new(story.clone(), runtime_folder, &plan, Arc::default(), agent);
    story.enter(Phase::Running, "The medium starts");
    let (sender, _events) = mpsc::channel(64);
    let guest_log = GuestLog::new(story.clone(), LoggedLines::Lines);
    listen(lines.as_bytes(), guest_log, Reports::new(story.clone(), false), sender).await;
    let texts = story.lines(0).0.into_iter().map(|line| line.text).collect();
    (web.state().await, web.health(Health::Ready).await, texts)
}

/// The lines up to and including the first with this text.
fn until(lines: &str, last: &str) -> String {
    let end = lines.find(last).unwrap() + last.len();
    format!("{}\r\n", &lines[..end])
}

#[tokio::test]
async fn an_installation_by_setup_is_followed_until_windows_is_ready() {
    for (last, stage, doing) in [
        ("windows-pe", "windows-pe", "Windows Setup runs"),
        (DISK, "applied", "Windows is on its disk and starts from there"),
        ("specialize", "specialize", "Windows adapts itself to the machine"),
        ("setup-complete", "setup-complete", "Windows is set up and waits for the first logon"),
        ("logged-on", "logged-on", "The first user is logged on"),
        ("install-started", "install-bat", "install.bat runs"),
    ] {
        let (state, (ready, why), _) = after(&until(SETUP, last)).await;
        let pod = &state["pod"];
        assert_eq!(
            (&pod["installation"], &pod["doing"]),
            (&json!({ "stage": stage }), &json!(doing))
        );
        assert_eq!((ready, why), (false, format!("{doing}\n")));
    }
    let (state, ready, log) = after(SETUP).await;
    let done = json!({ "stage": "ready", "install_status": 3 });
    assert_eq!(state["pod"]["installation"], done);
    assert_eq!(ready, (true, "ok\n".to_owned()));
    let ended = "install.bat ended with status 3: with LOG=Y its output is in C:\\OEM\\install.log";
    assert!(log.iter().any(|line| line == ended), "{log:#?}");
    assert!(log.iter().all(|line| !line.contains("transom-report")), "{log:#?}");
}

#[tokio::test]
async fn the_image_has_percents_and_a_failure_shows_the_end_of_the_log() {
    let (state, ..) = after(&until(SCRIPT, "43.0%                            ]")).await;
    let pod = &state["pod"];
    let half = json!({ "stage": "apply-image", "percent": 43 });
    assert_eq!((&pod["installation"], &pod["thousandths"]), (&half, &json!(430)));
    let (state, (ready, why), log) = after(SCRIPT).await;
    let sentence = "The installation failed in the step apply-image: open the screen";
    assert_eq!(state["pod"]["installation"]["failed"], "apply-image");
    assert_eq!((ready, why), (false, format!("{sentence}\n")));
    let last = log.iter().rev().take(4).rev().map(String::as_str).collect::<Vec<_>>();
    let is = [
        sentence,
        "the last lines of the log of Windows Setup:",
        "  X:\\Windows\\Logs\\DISM\\dism.log:",
        "  2026-01-02 03:04:05, Error DISM DISM.EXE: There is not enough space <on> the disk. ?",
    ];
    assert_eq!(last, is);
    assert!(!log.iter().any(|line| line.contains('%')), "{log:#?}");
}

#[tokio::test]
async fn setup_that_starts_over_is_reported_with_its_log() {
    let start = until(SETUP, "windows-pe");
    let log = "transom-report: log-begins\ntransom-report: log 0x8007\n";
    let again = start.replace("transom-report: log-begins\n", log);
    let (state, (ready, _), log) = after(&format!("{start}{start}{again}")).await;
    assert_eq!((&state["pod"]["installation"]["stage"], ready), (&json!("windows-pe"), false));
    let over = log.iter().filter(|line| line.starts_with("Windows Setup starts over")).count();
    let told = log.iter().filter(|line| *line == "  0x8007").count();
    assert_eq!((over, told), (2, 1), "{log:#?}");
}

#[tokio::test]
async fn a_guest_that_reports_anything_has_a_short_log() {
    let lines = "transom-report: log x\nBdsDxe: starting Boot0001 \"DVD-ROM\" from Pci(0x1)\n\
                 transom-report: windows-pe\ntransom-report: failed setup\n[= 7.0% =]\n";
    let (_, _, log) = after(&lines.repeat(20_000)).await;
    let own = log.iter().filter(|line| !line.starts_with("guest: ")).count();
    assert!((10..600).contains(&own), "{own} lines");
}

#[tokio::test]
async fn without_reports_the_guest_is_ready_as_its_services_are() {
    let lines = "BdsDxe: starting Boot0004 \"Windows Boot Manager\" from HD(1,GPT)/x.efi\nhello\n";
    let (state, (ready, _), log) = after(lines).await;
    assert!(state["pod"].get("installation").is_none() && ready);
    assert!(log.contains(&"guest: hello".to_owned()), "{log:#?}");
}
