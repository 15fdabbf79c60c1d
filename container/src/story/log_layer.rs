//! Copies log events to the story, so that `transom logs` shows the same as the container's log.

use std::fmt::{self, Write as _};
use std::sync::{Arc, OnceLock};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use super::Story;

/// The target of events that the story already has.
pub const RECORDED: &str = "kept";

static STORY: OnceLock<Arc<Story>> = OnceLock::new();

/// Only the first call has an effect.
pub fn connect(story: &Arc<Story>) {
    STORY.get_or_init(|| story.clone());
}

/// A `tracing` layer that copies events to this story, or to the connected one.
#[derive(Default)]
pub struct StoryLayer(pub Option<Arc<Story>>);

impl<S: Subscriber> Layer<S> for StoryLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let about = event.metadata();
        let Some(story) = self.0.as_ref().or_else(|| STORY.get()) else { return };
        // Debug and trace events are only in the log.
        if about.target() != RECORDED && *about.level() <= Level::INFO {
            let mut words = Words::default();
            event.record(&mut words);
            story.record(*about.level(), &words.0);
        }
    }
}

/// The text of an event: its message, then its fields.
#[derive(Default)]
struct Words(String);

impl Visit for Words {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let words = &mut self.0;
        match field.name() {
            "message" => words.insert_str(0, &format!("{value:?}")),
            name => write!(words, " {name}={value:?}").expect("a string takes all"),
        }
    }
}

#[cfg(test)]
mod test {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn a_log_event_is_recorded_once() {
        let story = Story::new();
        let log = tracing_subscriber::registry().with(StoryLayer(Some(story.clone())));
        tracing::subscriber::with_default(log, || {
            tracing::warn!(size = 5, name = "x", "a disk");
            tracing::debug!("nothing for people");
            story.info("a step");
        });
        let said: Vec<_> = story.lines(0).0.into_iter().map(|it| (it.level, it.text)).collect();
        let is = [("WARN", "a disk size=5 name=x"), ("INFO", "a step")];
        assert_eq!(said, is.map(|(level, text)| (level.to_owned(), text.to_owned())));
    }
}
