//! The status page, which is shown while there is no screen, and the events it shows.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, Path, Query, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use screen::web::stage::PeerNetwork;
use serde::Deserialize;
use serde_json::json;
use tokio::time::timeout;

use super::WebState;
use crate::settings::list;
use crate::settings::variable::Variable;
use crate::story::Scene;

/// Files of the page: name, type, contents.
const FILES: [(&str, &str, &str); 2] = [
    ("status.css", "text/css; charset=utf-8", include_str!("../../web/status.css")),
    ("status.js", "text/javascript; charset=utf-8", include_str!("../../web/status.js")),
];
const PAGE: &str = include_str!("../../web/status.html");
/// Interval of empty events: proxies close silent connections, most after a minute.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

type Shared = State<Arc<WebState>>;

/// Whether the page leads to the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Screen {
    None,
    /// The page reloads for the viewer when there is a screen.
    Next,
    /// The page stays, and has a link.
    Linked,
}

pub(super) fn page(web: &WebState, screen: Screen) -> Response {
    let scene = web.story.scene().borrow().clone();
    let word = |is: bool| if is { "yes" } else { "no" };
    let text = PAGE.replace("{SCREEN}", word(screen == Screen::Next));
    let text = text.replace("{LINK}", word(screen == Screen::Linked));
    let variables: Vec<_> = list::all().flat_map(Variable::names).collect();
    let text = text.replace("{VARIABLES}", &variables.join(" "));
    // These texts may contain marks, which are not replaced in them.
    let json = serde_json::to_string(&scene).unwrap_or_default();
    let doing = scene.failed.as_deref().unwrap_or(&scene.doing);
    let doing = if doing.is_empty() { "Starting…" } else { doing };
    let texts = [("{NAME}", &*web.name), ("{DOING}", doing), ("{SCENE}", &json)];
    let text = filled(&text, &texts);
    let head = [(CONTENT_TYPE, "text/html; charset=utf-8"), (CACHE_CONTROL, "no-store")];
    (head, text).into_response()
}

/// The progress of the pod and of an installation, beside the screen.
pub(super) async fn progress(State(web): Shared) -> Response {
    page(&web, if web.equipment.screen { Screen::Linked } else { Screen::None })
}

/// Replaces each mark with its escaped text.
fn filled(page: &str, texts: &[(&str, &str)]) -> String {
    let parts = page.split_inclusive('}').map(|part| {
        match texts.iter().find_map(|(mark, text)| Some((part.strip_suffix(mark)?, text))) {
            Some((before, text)) => format!("{before}{}", escaped(text)),
            None => part.to_owned(),
        }
    });
    parts.collect()
}

/// Escapes a text for HTML.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

pub(super) async fn file(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|(it, ..)| *it == name) {
        Some((_, kind, text)) => {
            ([(CONTENT_TYPE, *kind), (CACHE_CONTROL, "no-cache")], *text).into_response()
        }
        None => (StatusCode::NOT_FOUND, "There is no such file.\n").into_response(),
    }
}

/// Streams scenes (`text/event-stream`), the current one first.
pub(super) async fn events(
    State(web): Shared,
    Extension(network): Extension<PeerNetwork>,
) -> Response {
    let Some(place) = web.listeners.acquire_evictable(network) else { return full() };
    let mut scenes = web.story.scene();
    scenes.mark_changed();
    // The place becomes free when the stream is dropped.
    let events = stream::unfold((scenes, place), |(mut scenes, place)| async move {
        let changed = tokio::select! {
            changed = timeout(KEEP_ALIVE, scenes.changed()) => changed,
            () = place.evicted() => return None,
        };
        let text = match changed {
            Ok(Ok(())) => event(&scenes.borrow_and_update()),
            Ok(Err(_)) => return None,
            Err(_) => ":\n\n".to_owned(),
        };
        Some((Ok::<_, Infallible>(text), (scenes, place)))
    });
    let buffering = HeaderName::from_static("x-accel-buffering");
    let head = [(CONTENT_TYPE, "text/event-stream"), (buffering, "no")];
    (head, Body::from_stream(events)).into_response()
}

/// The answer when there are too many clients. They may try again.
pub(super) fn full() -> Response {
    let again = [(RETRY_AFTER, "10")];
    (StatusCode::SERVICE_UNAVAILABLE, again, "Too many clients are connected.\n").into_response()
}

fn event(scene: &Scene) -> String {
    let text = serde_json::to_string(scene).unwrap_or_default();
    format!("data: {text}\n\n")
}

/// The query of `/log`: return lines after this number.
#[derive(Deserialize)]
pub(super) struct LogQuery {
    #[serde(default)]
    after: u64,
}

/// The lines need a login, since they contain more than the status page.
pub(super) async fn log(
    State(web): Shared,
    Query(LogQuery { after }): Query<LogQuery>,
) -> Response {
    let (lines, count) = web.story.lines(after);
    let lines: Vec<_> = lines.into_iter().map(|line| line.text).collect();
    Json(json!({ "lines": lines, "count": count })).into_response()
}

/// The made account of Windows, which needs a login too.
pub(super) async fn account(State(web): Shared) -> Response {
    match web.account.get() {
        Some(account) => Json(account).into_response(),
        None => (StatusCode::NOT_FOUND, "No password was made.\n").into_response(),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_mark_in_a_text_is_not_replaced() {
        let texts = [("{A}", "<{B}>"), ("{B}", "{A}\"")];
        assert_eq!(filled("{A} {B}, {C} }", &texts), "&lt;{B}&gt; {A}&quot;, {C} }");
    }
}
