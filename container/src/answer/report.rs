//! Lines that the guest's scripts write to the first serial port, by which the host follows the
//! installation.

/// Start of every report.
const START: &str = "transom-report: ";
/// The serial port, as the command interpreter names it.
pub(super) const PORT: &str = "COM1";

/// A step of the installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The script in Windows PE runs.
    WindowsPe,
    /// The script in Windows PE failed in a step.
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
}

/// Steps of the script in Windows PE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    FindImage,
    Partition,
    ApplyImage,
    Boot,
    Copy,
}

const STEPS: [(&str, Step); 5] = [
    ("find-image", Step::FindImage),
    ("partition", Step::Partition),
    ("apply-image", Step::ApplyImage),
    ("boot", Step::Boot),
    ("copy", Step::Copy),
];

const WORDS: [(&str, Report); 7] = [
    ("windows-pe", Report::WindowsPe),
    ("applied", Report::Applied),
    ("specialize", Report::Specialize),
    ("setup-complete", Report::SetupComplete),
    ("logged-on", Report::LoggedOn),
    ("install-started", Report::InstallStarted),
    ("ready", Report::Ready),
];

impl Step {
    pub(super) fn word(self) -> &'static str {
        STEPS.iter().find(|(_, step)| *step == self).map_or("", |(word, _)| word)
    }
}

/// The line of a report.
pub fn line(report: Report) -> String {
    let text = match report {
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
    match word {
        "failed" => {
            let step = STEPS.iter().find(|(name, _)| *name == value);
            step.map(|(_, step)| Report::Failed(*step))
        }
        "install-ended" => value.parse().ok().map(Report::InstallEnded),
        _ => None,
    }
}

/// The line of a batch file that reports. The redirection is first, so that no digit is before it.
pub(super) fn batch(text: &str) -> String {
    format!(">{PORT} echo {START}{text}")
}

pub(super) fn batch_line(report: Report) -> String {
    format!(">{PORT} echo {}", line(report))
}

/// The command that reports, for places that are no batch file.
pub(super) fn command(report: Report) -> String {
    format!("cmd.exe /c {}", batch_line(report))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reports_of_scripts_are_read() {
        let simple = WORDS.iter().map(|(_, report)| *report);
        let failed = STEPS.iter().map(|(_, step)| Report::Failed(*step));
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
            "transom-report: install-ended 99999999999",
            "transom-report: install-ended ",
            "transom-report: ready now",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
