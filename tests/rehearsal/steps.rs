//! The settings of a user, and the steps of an installation with them.

use std::time::Duration;

/// Long enough for firmware and Linux in a lab on a busy machine.
pub(crate) const BOOT: Duration = Duration::from_secs(400);
/// Setup's words when it goes no further.
pub(crate) const STOPPED: &str = "windows: stopped: ";

/// The settings of a user in Korea.
pub(crate) const SETTINGS: [(&str, &str); 6] = [
    ("VERSION", "11"),
    ("LANGUAGE", "Korean"),
    ("REGION", "ko-KR"),
    ("KEYBOARD", "ko-KR"),
    ("USERNAME", "ada"),
    ("PASSWORD", "a & \"b\" <한>"),
];
/// The user's script.
pub(crate) const INSTALL_BAT: &[u8] = b"@echo off\necho written by the user > %~dp0ran.txt\n\
    type %~dp0ran.txt\nexit /b 3\n";

/// The machine's words, in this order: Windows PE, specialize, and the first logon.
pub(crate) const STEPS: [&str; 22] = [
    "windows: Windows PE runs",
    "answers are in",
    "image 2 is installed: Windows 11 Pro",
    "image applied",
    "files copied from $OEM$",
    "firmware has the entry Windows Boot Manager",
    "Windows PE restarts the machine",
    "\"Windows Boot Manager\" from HD(",
    "Windows 11 Pro starts from",
    "transom-report: specialize",
    "time zone Korea Standard Time",
    "specialize restarts the machine",
    "\"Windows Boot Manager\" from HD(",
    "account \"ada\" in Administrators has the password a & \\\"b\\\" <\\u{d55c}>",
    "transom-report: setup-complete",
    "ada is logged on",
    "transom-report: logged-on",
    "transom-report: install-started",
    "> written by the user",
    "transom-report: install-ended 3",
    "transom-report: ready",
    "lines of scripts ran, 0 unknown",
];
/// Its words when the installed Windows starts again.
pub(crate) const AGAIN: [&str; 3] =
    ["\"Windows Boot Manager\" from HD(", "Windows 11 Pro starts from", "ada is logged on"];
