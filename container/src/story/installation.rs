//! The progress of an installation of Windows, as the guest reports it.
//!
//! Threats: the guest reports in any order and as often as it likes. A stage is entered at most
//! once per attempt, Windows PE and the installed Windows report only their own stages, and nothing
//! here is text of the guest.

use serde::Serialize;

use crate::answer::report::{Report, Step};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    WindowsPe,
    FindImage,
    Partition,
    ApplyImage,
    Boot,
    Copy,
    /// The machine starts from its disk for the first time.
    Applied,
    Specialize,
    SetupComplete,
    LoggedOn,
    InstallBat,
    Ready,
}

/// All stages, their names, and the sentence for each.
pub const STAGES: [(Stage, &str, &str); 12] = [
    (Stage::WindowsPe, "windows-pe", "Windows Setup runs"),
    (Stage::FindImage, "find-image", "Looking for Windows on the medium"),
    (Stage::Partition, "partition", "Partitioning the disk"),
    (Stage::ApplyImage, "apply-image", "Copying Windows to the disk"),
    (Stage::Boot, "boot", "Making the disk bootable"),
    (Stage::Copy, "copy", "Copying drivers and files to the disk"),
    (Stage::Applied, "applied", "Windows is on its disk and starts from there"),
    (Stage::Specialize, "specialize", "Windows adapts itself to the machine"),
    (Stage::SetupComplete, "setup-complete", "Windows is set up and waits for the first logon"),
    (Stage::LoggedOn, "logged-on", "The first user is logged on"),
    (Stage::InstallBat, "install-bat", "install.bat runs"),
    (Stage::Ready, "ready", "Windows is ready"),
];

impl Stage {
    pub fn sentence(self) -> &'static str {
        STAGES.iter().find(|(stage, ..)| *stage == self).map_or("", |(.., sentence)| sentence)
    }

    /// The stage of a report, if it has one.
    fn of(report: Report) -> Option<Self> {
        Some(match report {
            Report::WindowsPe => Self::WindowsPe,
            Report::Began(step) => Self::of_step(step)?,
            Report::Applied => Self::Applied,
            Report::Specialize => Self::Specialize,
            Report::SetupComplete => Self::SetupComplete,
            Report::LoggedOn => Self::LoggedOn,
            Report::InstallStarted => Self::InstallBat,
            Report::Ready => Self::Ready,
            Report::Failed(_) | Report::InstallEnded(_) | Report::LogBegins => return None,
        })
    }

    fn of_step(step: Step) -> Option<Self> {
        Some(match step {
            Step::Setup => return None,
            Step::FindImage => Self::FindImage,
            Step::Partition => Self::Partition,
            Step::ApplyImage => Self::ApplyImage,
            Step::Boot => Self::Boot,
            Step::Copy => Self::Copy,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Installation {
    pub stage: Stage,
    /// How much of the image is on the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<u8>,
    /// The exit status of the user's `install.bat`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub install_status: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<Step>,
    /// The machine has started anew since the last report.
    #[serde(skip)]
    pub restarted: bool,
}

impl Installation {
    fn new(stage: Stage) -> Self {
        Self { stage, percent: None, install_status: None, failed: None, restarted: false }
    }

    /// The installation after this report, or `None` if the report changes nothing. `from_disk`:
    /// the machine has started from its disk.
    pub fn after(now: Option<&Self>, report: Report, from_disk: bool) -> Option<Self> {
        let stage = Stage::of(report);
        if stage.is_some_and(|stage| (stage > Stage::Applied) != from_disk) {
            return None;
        }
        match (stage, now) {
            (Some(stage), None) => Some(Self::new(stage)),
            (Some(Stage::WindowsPe), Some(now)) if now.restarted => {
                Some(Self::new(Stage::WindowsPe))
            }
            (Some(stage), Some(now)) if stage > now.stage => {
                Some(Self { install_status: now.install_status, ..Self::new(stage) })
            }
            (None, now) => Self::with_outcome(now?, report),
            _ => None,
        }
    }

    fn with_outcome(now: &Self, report: Report) -> Option<Self> {
        match report {
            Report::Failed(step) if now.failed.is_none() && now.stage != Stage::Ready => {
                Some(Self { failed: Some(step), ..now.clone() })
            }
            Report::InstallEnded(status)
                if now.stage == Stage::InstallBat && now.install_status.is_none() =>
            {
                Some(Self { install_status: Some(status), ..now.clone() })
            }
            _ => None,
        }
    }

    /// The installation after the firmware started something.
    pub fn after_start(&self, from_disk: bool) -> Self {
        match from_disk && self.stage < Stage::Applied {
            true => Self::new(Stage::Applied),
            false => Self { restarted: true, ..self.clone() },
        }
    }

    /// The installation after DISM's progress bar, if that shows more than before.
    pub fn at(&self, percent: u8) -> Option<Self> {
        let more = self.stage == Stage::ApplyImage && self.percent.is_none_or(|it| it < percent);
        more.then(|| Self { percent: Some(percent), ..self.clone() })
    }

    /// Whether the guest is ready for use. `None`: only the guest's services can show that.
    /// `logon`: the first user is logged on automatically, and the last steps follow that.
    pub fn is_ready(&self, logon: bool) -> Option<bool> {
        match self.stage {
            _ if self.failed.is_some() => Some(false),
            // Scripts of the user may restart Windows, and then no further report comes.
            Stage::LoggedOn | Stage::InstallBat | Stage::Ready if self.restarted => None,
            Stage::SetupComplete if !logon => None,
            stage => Some(stage == Stage::Ready),
        }
    }

    /// The current step for people.
    pub fn sentence(&self) -> String {
        match (self.failed, self.percent) {
            (Some(Step::Setup), _) => "Windows Setup failed: open the screen".to_owned(),
            (Some(step), _) => {
                format!("The installation failed in the step {}: open the screen", step.word())
            }
            _ => self.stage.sentence().to_owned(),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// The installation after these reports from Windows PE, a start from the disk, and these from
    /// there.
    fn after(pe: &[Report], disk: &[Report]) -> Option<Installation> {
        let mut now = None;
        for report in pe {
            now = Installation::after(now.as_ref(), *report, false).or(now);
        }
        if !disk.is_empty() {
            now = now.map(|it: Installation| it.after_start(true));
        }
        for report in disk {
            now = Installation::after(now.as_ref(), *report, true).or(now);
        }
        now
    }

    #[test]
    fn names_are_those_of_the_json() {
        for (stage, name, _) in STAGES {
            assert_eq!(serde_json::to_value(stage).unwrap(), name);
        }
        assert!(STAGES.is_sorted_by_key(|(stage, ..)| *stage));
    }

    #[test]
    fn stages_only_advance_and_each_system_reports_its_own() {
        use Report::*;
        let stage = |pe: &[_], disk: &[_]| after(pe, disk).map(|it| it.stage);
        assert_eq!(stage(&[WindowsPe, Ready, Specialize], &[]), Some(Stage::WindowsPe));
        assert_eq!(stage(&[Ready], &[]), None);
        assert_eq!(stage(&[Began(Step::Copy), Began(Step::Boot)], &[]), Some(Stage::Copy));
        let disk = [Specialize, WindowsPe, Applied, Began(Step::Copy)];
        assert_eq!(stage(&[WindowsPe], &disk), Some(Stage::Specialize));
        assert_eq!(stage(&[], &[Ready, LoggedOn]), Some(Stage::Ready));
        assert_eq!(stage(&[], &[Failed(Step::Setup), InstallEnded(1)]), None);
    }

    #[test]
    fn an_attempt_starts_over_only_after_a_restart() {
        let first = after(&[Report::WindowsPe, Report::Began(Step::Partition)], &[]).unwrap();
        assert_eq!(Installation::after(Some(&first), Report::WindowsPe, false), None);
        let restarted = first.after_start(false);
        let second = Installation::after(Some(&restarted), Report::WindowsPe, false).unwrap();
        assert_eq!((second.stage, second.restarted), (Stage::WindowsPe, false));
    }

    #[test]
    fn percents_belong_to_the_image_and_grow() {
        let begun = after(&[Report::Began(Step::ApplyImage)], &[]).unwrap();
        let half = begun.at(50).unwrap();
        assert_eq!((half.percent, half.at(50), half.at(49)), (Some(50), None, None));
        let next = Installation::after(Some(&half), Report::Began(Step::Boot), false).unwrap();
        assert_eq!((next.percent, next.at(60)), (None, None));
    }

    #[test]
    fn only_windows_last_report_means_ready() {
        use Report::*;
        let done = [Specialize, SetupComplete, LoggedOn, InstallStarted, InstallEnded(3), Ready];
        let ready =
            |count: usize, logon| after(&[WindowsPe], &done[..count]).unwrap().is_ready(logon);
        assert_eq!(
            [1, 2, 3, 4, 5, 6].map(|count| ready(count, true)),
            [Some(false), Some(false), Some(false), Some(false), Some(false), Some(true)]
        );
        // Without a logon nothing follows that stage.
        assert_eq!(ready(2, false), None);
        let is_ready = |count: usize| {
            let now = after(&[WindowsPe], &done[..count]).unwrap();
            now.after_start(true).is_ready(true)
        };
        assert_eq!([2, 4, 6].map(is_ready), [Some(false), None, None]);
        let all = after(&[WindowsPe], &done).unwrap();
        assert_eq!((all.install_status, all.stage), (Some(3), Stage::Ready));
        let failed = after(&[WindowsPe], &[Specialize, Failed(Step::Setup)]).unwrap();
        assert_eq!((failed.failed, failed.is_ready(true)), (Some(Step::Setup), Some(false)));
        // Setup continues after all.
        let on = Installation::after(Some(&failed), SetupComplete, true).unwrap();
        assert_eq!(on.failed, None);
    }
}
