//! What programs may do: a few calls in JSON, behind the gate.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use serde_json::json;
use vmm::control::{Client, Command, Force};

use super::Front;
use crate::pod::{asked, stop};

/// The description of all calls, for programs that make clients of it.
const DOCUMENT: &str = include_str!("../../web/openapi.json");

type Shared = State<Arc<Front>>;

/// The description.
pub(super) async fn document() -> Response {
    ([(CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}

/// How the pod is, and how its machine is.
pub(super) async fn state(State(front): Shared) -> Response {
    Json(front.state().await).into_response()
}

/// What the screen shows, as a PNG file.
pub(super) async fn screenshot(State(front): Shared) -> Response {
    let control = front.room.control();
    // A picture is large: one at a time.
    let picture = front.picture.clone().lock_owned().await;
    let taken = tokio::task::spawn_blocking(move || {
        let _picture = picture;
        Client::connect_within(&control, asked::SOON)?.png()
    })
    .await;
    match taken.map_err(anyhow::Error::from).flatten() {
        Ok(png) => ([(CONTENT_TYPE, "image/png")], png).into_response(),
        Err(error) => refusal(&error),
    }
}

/// What is to become of the machine.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Action {
    Shutdown,
    Reset,
    Pause,
    Resume,
    Off,
}

#[derive(Deserialize)]
pub(super) struct Power {
    action: Action,
}

/// Power.
pub(super) async fn power(State(front): Shared, Json(power): Json<Power>) -> Response {
    let command = match power.action {
        Action::Shutdown => {
            let asked = stop::ask(&front.control(), &front.agent).await;
            return asked.map_or_else(|error| refusal(&error), |it| Json(it).into_response());
        }
        Action::Reset => Command::Reset,
        Action::Pause => Command::Pause,
        Action::Resume => Command::Resume,
        Action::Off => Command::Quit,
    };
    ask(&front, command).await
}

/// What is to become of a drive.
#[derive(Deserialize)]
pub(super) struct Media {
    drive: String,
    /// The medium that is put in; without one, what is in is taken out.
    path: Option<PathBuf>,
    #[serde(default)]
    force: bool,
}

/// Media.
pub(super) async fn media(State(front): Shared, Json(media): Json<Media>) -> Response {
    let command = match media.path.map(|path| front.lent(&path)).transpose() {
        Ok(Some(path)) => Command::Insert { name: media.drive, path },
        Ok(None) => {
            let force = media.force.then_some(Force::Force);
            Command::Eject { name: media.drive, force }
        }
        Err(error) => return refusal(&error),
    };
    ask(&front, command).await
}

/// A stick or a CD-ROM drive that is plugged in, or something that is pulled out.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Usb {
    Attach {
        path: PathBuf,
        #[serde(default)]
        cdrom: bool,
        #[serde(default)]
        readonly: bool,
    },
    Detach {
        name: String,
    },
}

/// USB.
pub(super) async fn usb(State(front): Shared, Json(usb): Json<Usb>) -> Response {
    let command = match usb {
        Usb::Attach { path, cdrom, readonly } => match front.lent(&path) {
            Ok(path) => {
                let path = path.display().to_string().replace(',', ",,");
                let words = format!("usb-storage,path={path},readonly={readonly},cdrom={cdrom}");
                Command::Attach { device: words }
            }
            Err(error) => return refusal(&error),
        },
        Usb::Detach { name } => Command::Detach { name },
    };
    ask(&front, command).await
}

impl Front {
    /// A file that those who may see the screen may have in the machine: one on the volume.
    fn lent(&self, path: &Path) -> anyhow::Result<PathBuf> {
        let whole = path.canonicalize().with_context(|| path.display().to_string())?;
        let own = self.volume.canonicalize().is_ok_and(|volume| whole.starts_with(volume));
        ensure!(own, "{}: only files on the volume can be lent to the machine", path.display());
        Ok(whole)
    }
}

async fn ask(front: &Front, command: Command) -> Response {
    match asked::ask(&front.room.control(), command).await {
        Ok(answer) => Json(answer).into_response(),
        Err(error) => refusal(&error),
    }
}

fn refusal(error: &anyhow::Error) -> Response {
    (StatusCode::CONFLICT, Json(json!({ "error": format!("{error:#}") }))).into_response()
}
