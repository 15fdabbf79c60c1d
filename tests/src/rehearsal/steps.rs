//! The settings of a user, and the steps of an installation with them.

use std::time::Duration;

/// Long enough for firmware and Linux in a lab on a busy machine.
pub const BOOT: Duration = Duration::from_secs(400);
/// Setup's words when it goes no further.
pub const STOPPED: &str = "windows: stopped: ";

/// An installation: its medium, its settings, and the image and the time zone that they choose.
pub struct Setup {
    pub medium: &'static str,
    pub settings: &'static [(&'static str, &'static str)],
    /// The name of what is downloaded, and whether its checksum is known.
    pub title: &'static str,
    pub has_checksum: bool,
    pub image: (u32, &'static str),
    pub zone: &'static str,
    /// Whether a pod has Secure Boot and a TPM.
    pub secure: bool,
}

/// Windows for a user in Korea.
pub const CLIENT: Setup = Setup {
    medium: "client",
    settings: &[
        ("VERSION", "11"),
        ("LANGUAGE", "Korean"),
        ("REGION", "ko-KR"),
        ("KEYBOARD", "ko-KR"),
        ("USERNAME", "ada"),
        ("PASSWORD", PASSWORD),
    ],
    title: "Windows 11",
    has_checksum: true,
    image: (2, "Windows 11 Pro"),
    zone: "Korea Standard Time",
    secure: true,
};
/// A server without a desktop, for evaluation.
pub const SERVER: Setup = Setup {
    medium: "server",
    settings: &[
        ("VERSION", "2025"),
        ("EDITION", "core"),
        ("TZ", "Europe/Berlin"),
        ("USERNAME", "ada"),
        ("PASSWORD", PASSWORD),
    ],
    title: "Windows Server 2025",
    has_checksum: false,
    image: (1, "Windows Server 2025 Standard Evaluation"),
    zone: "W. Europe Standard Time",
    secure: false,
};
pub const PASSWORD: &str = "a & \"b\" <한>";

/// The user's script.
pub const INSTALL_BAT: &[u8] = b"@echo off\necho written by the user > %~dp0ran.txt\n\
    type %~dp0ran.txt\nexit /b 3\n";

/// Reports of the guest, and their sentences in the pod's log.
const REPORTS: [(&str, &str); 6] = [
    ("transom-report: specialize", "Windows adapts itself to the machine"),
    ("transom-report: setup-complete", "Windows is set up and waits for the first logon"),
    ("transom-report: logged-on", "The first user is logged on"),
    ("transom-report: install-started", "install.bat runs"),
    ("transom-report: install-ended 3", "install.bat ended with status 3"),
    ("transom-report: ready", "Windows is ready"),
];

/// The words in the pod's log in place of these at the serial port.
pub fn in_the_log(words: &str) -> &str {
    REPORTS.iter().find(|(report, _)| *report == words).map_or(words, |(_, sentence)| sentence)
}

/// Whether the pod learns of this step.
pub fn is_told(words: &str) -> bool {
    REPORTS.iter().any(|(report, _)| *report == words)
}

impl Setup {
    /// The machine's words, in this order: Windows PE, specialize, and the first logon.
    pub fn steps(&self) -> Vec<String> {
        let (index, name) = self.image;
        let steps = [
            "windows: Windows PE runs",
            "answers are in",
            &format!("image {index} is installed: {name}\n"),
            "image applied",
            "files copied from $OEM$",
            "firmware has the entry Windows Boot Manager",
            "Windows PE restarts the machine",
            "\"Windows Boot Manager\" from HD(",
            &format!("{name} starts from"),
            "transom-report: specialize",
            &format!("time zone {}\n", self.zone),
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
        steps.map(str::to_owned).into()
    }

    /// Its words when the installed Windows starts again.
    pub fn again(&self) -> Vec<String> {
        let name = self.image.1;
        let steps = ["\"Windows Boot Manager\" from HD(", &format!("{name} starts from")];
        let mut steps: Vec<_> = steps.map(str::to_owned).into();
        steps.push("ada is logged on".into());
        steps
    }
}
