//! A guest that writes anything to its serial port, where the pod reads reports of an installation.

use std::sync::Arc;

use container::pod::console::{self, Console};
use container::pod::reports::Reports;
use container::story::installation::STAGES;
use container::story::{Phase, Story};

/// Lines of the log that one installation can cause: reports in a burst, each with the end of
/// Setup's log, up to the limits of both.
const MAX_LINES: u64 = 64 * 4 + 2000;

/// Reads the bytes as the output of the serial port. Returns the story.
pub(crate) fn read(bytes: &[u8]) -> Arc<Story> {
    let story = Story::new();
    story.enter(Phase::Running, "");
    let (mut console, mut reports) = (Console::default(), Reports::new(story.clone(), false));
    // The listener of the pod limits boot events.
    let mut events = 0;
    for line in console.take(bytes) {
        reports.take(&line);
        if let Some(event) = console::boot_event(&line)
            && events < 64
        {
            events += 1;
            reports.on_boot(&event);
        }
        check(&story);
    }
    let (lines, count) = story.lines(0);
    assert!(count <= MAX_LINES, "{count} lines");
    assert!(lines.iter().all(|line| line.text.chars().count() <= 400));
    assert!(lines.iter().all(|line| !line.text.contains(['\u{202e}', '\u{1b}', '\u{200b}'])));
    story
}

/// The scene has no text of the guest.
fn check(story: &Story) {
    let scene = story.scene().borrow().clone();
    let Some(now) = &scene.installation else { return };
    assert!(now.percent.is_none_or(|percent| percent <= 100));
    let known = STAGES.iter().any(|(.., sentence)| *sentence == scene.doing);
    assert!(known || scene.doing.contains("failed"), "{}", scene.doing);
}
