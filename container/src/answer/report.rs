//! Lines that the guest's scripts write to the first serial port, by which the host follows the
//! installation.
//!
//! Threats: anything in the guest can write such lines. Only those of the tables here are read; a
//! report has no text of the guest, except lines of Setup's log.

use serde::Serialize;

/// Start of every report.
const START: &str = "transom-report: ";
/// Start of a line of Setup's log, after [`START`].
const LOG: &str = "log ";
/// The serial port, as the command interpreter names it.
pub(super) const PORT: &str = "COM1";

/// A step of the installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The script in Windows PE runs.
    WindowsPe,
    /// The script in Windows PE begins a step.
    Began(Step),
    /// A step failed.
    Failed(Step),
    /// Windows is on its disk, and the machine starts it next.
    Applied,
    /// Windows adapts itself to the machine.
    Specialize,
    /// Windows is set up, and nobody has logged on yet.
    SetupComplete,
    LoggedOn,
    /// The user's `install.bat` runs.
    InstallStarted,
    /// The user's `install.bat` ended with this status.
    InstallEnded(i32),
    /// All steps are done.
    Ready,
    /// Lines of Setup's log follow.
    LogBegins,
}

/// Steps that can fail: Windows Setup as a whole, and those of the script in Windows PE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    Setup,
    FindImage,
    Partition,
    ApplyImage,
    Boot,
    Copy,
}

const STEPS: [(&str, Step); 6] = [
    ("setup", Step::Setup),
    ("find-image", Step::FindImage),
    ("partition", Step::Partition),
    ("apply-image", Step::ApplyImage),
    ("boot", Step::Boot),
    ("copy", Step::Copy),
];

const WORDS: [(&str, Report); 8] = [
    ("windows-pe", Report::WindowsPe),
    ("applied", Report::Applied),
    ("specialize", Report::Specialize),
    ("setup-complete", Report::SetupComplete),
    ("logged-on", Report::LoggedOn),
    ("install-started", Report::InstallStarted),
    ("ready", Report::Ready),
    ("log-begins", Report::LogBegins),
];

impl Step {
    pub fn word(self) -> &'static str {
        STEPS.iter().find(|(_, step)| *step == self).map_or("", |(word, _)| word)
    }
}

/// The line of a report.
pub fn line(report: Report) -> String {
    let text = match report {
        Report::Began(step) => format!("began {}", step.word()),
        Report::Failed(step) => format!("failed {}", step.word()),
        Report::InstallEnded(status) => format!("install-ended {status}"),
        simple => {
            let found = WORDS.iter().find(|(_, report)| *report == simple);
            found.map_or(String::new(), |(word, _)| (*word).to_owned())
        }
    };
    format!("{START}{text}")
}

/// Parses a line from the serial port. Lines that are not reports return nothing.
pub fn read(line: &str) -> Option<Report> {
    let text = line.trim().strip_prefix(START)?;
    if let Some((_, report)) = WORDS.iter().find(|(word, _)| *word == text) {
        return Some(*report);
    }
    let (word, value) = text.split_once(' ')?;
    let step = || STEPS.iter().find(|(name, _)| *name == value).map(|(_, step)| *step);
    match word {
        "began" => step().map(Report::Began),
        "failed" => step().map(Report::Failed),
        "install-ended" => value.parse().ok().map(Report::InstallEnded),
        _ => None,
    }
}

/// The text of a line of Setup's log.
pub fn log_text(line: &str) -> Option<&str> {
    line.trim().strip_prefix(START)?.strip_prefix(LOG)
}

/// Parses a progress bar of DISM, such as `[=====      17.0%      ]`, and returns whole percents.
pub fn percent(line: &str) -> Option<u8> {
    let bar = line.trim().strip_prefix('[')?.strip_suffix(']')?;
    let number = bar.trim_matches(['=', ' ']).strip_suffix('%')?;
    // The decimal separator depends on the language.
    let whole = number.split(['.', ',']).next()?.trim_end();
    whole.parse().ok().filter(|percent| *percent <= 100)
}

/// The line of a batch file that reports. The redirection is first, so that no digit is before it.
pub(super) fn batch(text: &str) -> String {
    format!(">{PORT} echo {START}{text}")
}

pub(super) fn batch_line(report: Report) -> String {
    format!(">{PORT} echo {}", line(report))
}

/// The line of a batch file that passes on a line of Setup's log, which is in a variable of `for`.
pub(super) fn batch_log(variable: &str) -> String {
    batch(&format!("{LOG}{variable}"))
}

/// The command that reports, for places that are no batch file. It succeeds without a serial port,
/// too, because Setup fails with its commands.
pub(super) fn command(report: Report) -> String {
    format!("cmd.exe /c {}& exit 0", batch_line(report))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reports_of_scripts_are_read() {
        let simple = WORDS.iter().map(|(_, report)| *report);
        let steps = STEPS.iter().map(|(_, step)| *step);
        let failed = steps.flat_map(|step| [Report::Began(step), Report::Failed(step)]);
        let ended = [0, 1, i32::MIN].map(Report::InstallEnded);
        for report in simple.chain(failed).chain(ended) {
            assert_eq!(read(&format!("{}\r\n", line(report))), Some(report));
        }
        assert_eq!(batch_line(Report::Ready), ">COM1 echo transom-report: ready");
    }

    #[test]
    fn other_lines_are_no_reports() {
        for text in [
            "",
            "ready",
            "transom-report: ",
            "transom-report: failed",
            "transom-report: failed lunch",
            "transom-report: began",
            "transom-report: log ready",
            "transom-report: install-ended 99999999999",
            "transom-report: install-ended ",
            "transom-report: ready now",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn progress_bars_of_dism_are_read() {
        for (line, is) in [
            ("[=                           2.0%                           ]", Some(2)),
            ("[===========================59.8%===                        ]", Some(59)),
            ("[==========================100.0%==========================]\r", Some(100)),
            ("[==========================17,3 %==                         ]", Some(17)),
            ("[== 101.0% ==]", None),
            ("[== -1.0% ==]", None),
            ("[====]", None),
            ("50%", None),
            ("[]", None),
        ] {
            assert_eq!(percent(line), is, "{line}");
        }
    }

    #[test]
    fn lines_of_the_log_keep_their_text() {
        assert_eq!(log_text("transom-report: log Error [x] & <y> \r"), Some("Error [x] & <y>"));
        assert_eq!(log_text("log x"), None);
        assert_eq!(log_text("transom-report: logged-on"), None);
    }
}
