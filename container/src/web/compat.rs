//! What the reference image serves at its web port besides the viewer, for tools that know it.
//!
//! `/status` is a WebSocket that tells lines, each a message of text: `s: HTML` is what is done
//! now, `c: vnc` that there is a screen to connect to, and `e: HTML` what went wrong, which is the
//! last. Like `/msg.html` it tells everybody.
//!
//! `/audio` would be a WebSocket with sound. There is no sound card, so that it is refused, as the
//! reference image does without `AUDIO=Y`: a viewer that asks for it stays silent.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use screen::web::stage::Door;
use screen::web::talk::{self, Talk};

use super::Front;
use super::page::{escaped, full};
use crate::story::{Phase, Scene};

type Shared = State<Arc<Front>>;

/// The present message, for tools that ask again and again. They take its absence for the sign
/// that there is a screen.
pub(super) async fn message(State(front): Shared) -> Response {
    let scene = front.story.scene().borrow().clone();
    if shows(&scene) {
        return (StatusCode::NOT_FOUND, "There is no such page.\n").into_response();
    }
    let text = format!("{}\n", text(&scene));
    ([(CONTENT_TYPE, "text/html; charset=utf-8")], text).into_response()
}

/// Whether there is a screen.
fn shows(scene: &Scene) -> bool {
    matches!(scene.phase, Phase::Booting | Phase::Running) && scene.failed.is_none()
}

/// What is done now, with how much of it.
fn text(scene: &Scene) -> String {
    let doing = escaped(scene.failed.as_ref().unwrap_or(&scene.doing));
    match scene.thousandths {
        Some(part) => format!("{doing} ({}.{}%)", part / 10, part % 10),
        None => doing,
    }
}

/// Messages as they come, the present one first.
pub(super) async fn status(
    State(front): Shared,
    Extension(door): Extension<Door>,
    request: Request,
) -> Response {
    let Some(place) = front.listeners.enter(door) else { return full() };
    talk::open(request, |mut talk| async move {
        tell(&front, &mut talk).await;
        talk.close().await;
        drop(place);
    })
}

/// Tells until there is no more to tell, or nobody to hear it.
async fn tell(front: &Front, talk: &mut Talk) {
    let mut scenes = front.story.scene();
    loop {
        let scene = scenes.borrow_and_update().clone();
        let line = line(&scene, front.seen);
        if talk.say(&line).await.is_err() || scene.failed.is_some() {
            return;
        }
        // Most of what changes is nothing that is told here.
        let other = |scene: &Scene| self::line(scene, front.seen) != line;
        tokio::select! {
            changed = scenes.wait_for(other) => if changed.is_err() { return },
            () = talk.left() => return,
        }
    }
}

fn line(scene: &Scene, seen: bool) -> String {
    match &scene.failed {
        Some(why) => format!("e: {}", escaped(why)),
        None if seen && shows(scene) => "c: vnc".into(),
        None => format!("s: {}", text(scene)),
    }
}

/// There is no sound.
pub(super) async fn audio() -> Response {
    (StatusCode::NOT_FOUND, "The machine has no sound card.\n").into_response()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_scene_is_a_line_of_the_reference_image() {
        let scene = |phase, thousandths, failed: Option<&str>| Scene {
            phase,
            doing: "Copying <a>…".into(),
            thousandths,
            failed: failed.map(str::to_owned),
            ..Scene::default()
        };
        for (scene, seen, is) in [
            (scene(Phase::Preparing, None, None), true, "s: Copying &lt;a&gt;…"),
            (scene(Phase::Preparing, Some(123), None), true, "s: Copying &lt;a&gt;… (12.3%)"),
            (scene(Phase::Booting, None, None), true, "c: vnc"),
            (scene(Phase::Running, None, None), true, "c: vnc"),
            (scene(Phase::Running, None, None), false, "s: Copying &lt;a&gt;…"),
            (scene(Phase::Stopping, None, None), true, "s: Copying &lt;a&gt;…"),
            (
                scene(Phase::Running, None, Some("no disk & no more")),
                true,
                "e: no disk &amp; no more",
            ),
        ] {
            assert_eq!(line(&scene, seen), is);
        }
    }
}
