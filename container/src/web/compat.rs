//! Pages that the reference image serves besides the viewer, for tools written for it.
//!
//! `/status` is a WebSocket with a message of text for each change: `s: HTML` is the current step,
//! `c: vnc` means that the screen can be connected, and `e: HTML` is the error, which ends it. Like
//! `/msg.html` it needs no login.
//!
//! `/vnc.html` is the viewer there, with its options in the address. Here it leads to the viewer.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Redirect, Response};
use screen::web::line_socket::{self, LineSocket};
use screen::web::stage::PeerNetwork;

use super::WebState;
use super::page::{escaped, full};
use crate::story::{Phase, Scene};

type Shared = State<Arc<WebState>>;

/// The current message, for tools that poll it. They take a missing page as the sign that there is
/// a screen.
pub(super) async fn message(State(web): Shared) -> Response {
    let scene = web.story.scene().borrow().clone();
    if shows(&scene) {
        return (StatusCode::NOT_FOUND, "There is no such page.\n").into_response();
    }
    let text = format!("{}\n", text(&scene));
    ([(CONTENT_TYPE, "text/html; charset=utf-8")], text).into_response()
}

/// Whether the screen can be connected.
fn shows(scene: &Scene) -> bool {
    matches!(scene.phase, Phase::Booting | Phase::Running | Phase::Asleep) && scene.failed.is_none()
}

/// The current step as HTML, with its progress: `Downloading Windows 11 (12.3%)…`. Tools read the
/// number in parentheses.
fn text(scene: &Scene) -> String {
    let doing = escaped(scene.failed.as_ref().unwrap_or(&scene.doing));
    let Some(part) = scene.thousandths else { return doing };
    let (what, end) = match doing.strip_suffix('…') {
        Some(what) => (what, "…"),
        None => (&*doing, ""),
    };
    format!("{what} ({}.{}%){end}", part / 10, part % 10)
}

/// Bookmarks and programs have the address of the reference image's viewer. Its options are not
/// passed on, because a password may be among them. The address is relative: a proxy may serve the
/// pod below a path.
pub(super) async fn viewer() -> Redirect {
    Redirect::temporary("./")
}

/// Streams messages, the current one first.
pub(super) async fn status(
    State(web): Shared,
    Extension(network): Extension<PeerNetwork>,
    request: Request,
) -> Response {
    let Some(place) = web.listeners.acquire_evictable(network) else { return full() };
    line_socket::open(request, |mut socket| async move {
        tokio::select! {
            () = send_changes(&web, &mut socket) => {}
            () = place.evicted() => {}
        }
        socket.close().await;
    })
}

/// Sends messages until the pod fails or the client leaves.
async fn send_changes(web: &WebState, socket: &mut LineSocket) {
    let mut scenes = web.story.scene();
    loop {
        let scene = scenes.borrow_and_update().clone();
        let line = line(&scene, web.equipment.screen);
        if socket.send_line(&line).await.is_err() || scene.failed.is_some() {
            return;
        }
        // Most changes of the scene do not change the message.
        let other = |scene: &Scene| self::line(scene, web.equipment.screen) != line;
        tokio::select! {
            changed = scenes.wait_for(other) => if changed.is_err() { return },
            () = socket.disconnected() => return,
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

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_scene_becomes_a_status_line_of_the_reference_image() {
        let scene = |phase, thousandths, failed: Option<&str>| Scene {
            phase,
            doing: "Copying <a>…".into(),
            thousandths,
            failed: failed.map(str::to_owned),
            ..Scene::default()
        };
        for (scene, seen, is) in [
            (scene(Phase::Preparing, None, None), true, "s: Copying &lt;a&gt;…"),
            (scene(Phase::Preparing, Some(123), None), true, "s: Copying &lt;a&gt; (12.3%)…"),
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
