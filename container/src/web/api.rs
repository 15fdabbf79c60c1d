//! The API for programs: a few calls with JSON, behind the gate.

use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use host::keyvalue;
use screen::web::stage::{Button, Layout, text};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use vmm::control::{Client, Command, FileId, Force};

use super::WebState;
use super::images::{Image, Kind};
use crate::pod::{machine_client, stop, usb};

/// Maximum bytes of a text in one call: with escapes it must fit into a line of the control socket.
const MAX_TEXT: usize = 8 << 10;
const DOCUMENT: &str = include_str!("../../web/openapi.json");

type Shared = State<Arc<WebState>>;

pub(super) async fn document() -> Response {
    ([(CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}

pub(super) async fn state(State(web): Shared) -> Response {
    Json(web.state().await).into_response()
}

pub(super) async fn screenshot(State(web): Shared) -> Response {
    let control = web.runtime_folder.control();
    // Pictures are large, so only one is taken at a time.
    let picture = web.picture.clone().lock_owned().await;
    let taken = tokio::task::spawn_blocking(move || {
        let _picture = picture;
        Client::connect_timeout(&control, machine_client::QUICK)?.png()
    })
    .await;
    match taken.map_err(anyhow::Error::from).flatten() {
        Ok(png) => ([(CONTENT_TYPE, "image/png")], png).into_response(),
        Err(error) => refusal(&error),
    }
}

/// Errors are answered in JSON, too.
pub(super) struct JsonBody<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        match Json::from_request(request, state).await {
            Ok(Json(said)) => Ok(Self(said)),
            Err(wrong) => {
                let answer = json!({ "error": body_error(&wrong) });
                Err((wrong.status(), Json(answer)).into_response())
            }
        }
    }
}

/// The reason without the words of the parser's authors.
fn body_error(wrong: &JsonRejection) -> String {
    const DOCUMENT: &str = "/api/openapi.json describes this call";
    match wrong {
        JsonRejection::MissingJsonContentType(_) => {
            "the body must be JSON: send the header Content-Type: application/json".to_owned()
        }
        JsonRejection::JsonSyntaxError(_) => format!("the body is not JSON: {DOCUMENT}"),
        JsonRejection::JsonDataError(_) => {
            let reason = wrong.source().map_or_else(|| wrong.body_text(), ToString::to_string);
            format!("the body has a wrong or missing field: {reason}: {DOCUMENT}")
        }
        _ => wrong.body_text(),
    }
}

#[derive(Deserialize)]
pub(super) struct Power {
    action: Button,
}

pub(super) async fn power(State(web): Shared, JsonBody(power): JsonBody<Power>) -> Response {
    let asked = web.order(power.action).await;
    asked.map_or_else(|error| refusal(&error), |it| Json(it).into_response())
}

#[derive(Deserialize)]
pub(super) struct Text {
    text: String,
    /// Leave out characters that the keyboard lacks. Otherwise nothing is typed.
    #[serde(default)]
    skip: bool,
}

pub(super) async fn type_text(State(web): Shared, JsonBody(request): JsonBody<Text>) -> Response {
    let (text, lacks) = match typable(&web.equipment.keyboard, request) {
        Ok(both) => both,
        Err((status, answer)) => return (status, Json(answer)).into_response(),
    };
    let typed = text.chars().count();
    match machine_client::ask(&web.runtime_folder.control(), Command::Type { text }).await {
        Ok(_) => Json(json!({ "typed": typed, "skipped": lacks })).into_response(),
        Err(error) => refusal(&error),
    }
}

/// The part of a text that this keyboard can type, and the characters that it lacks; or the
/// refusal.
fn typable(keyboard: &Layout, request: Text) -> Result<(String, Vec<char>), (StatusCode, Value)> {
    let Text { mut text, skip } = request;
    if text.len() > MAX_TEXT {
        let length = text.len();
        let error = format!("a text of {length} bytes is too long: at most {MAX_TEXT} at once");
        return Err((StatusCode::PAYLOAD_TOO_LARGE, json!({ "error": error })));
    }
    let lacks = text::missing(keyboard, &text);
    if !lacks.is_empty() && !skip {
        let error = format!(
            "the guest's keyboard ({}) has no key for {}: nothing was typed; with \"skip\": true \
             they are left out",
            keyboard.name(),
            text::list_characters(&lacks)
        );
        let answer = json!({ "error": error, "characters": lacks });
        return Err((StatusCode::UNPROCESSABLE_ENTITY, answer));
    }
    text.retain(|character| !lacks.contains(&character));
    Ok((text, lacks))
}

#[derive(Deserialize)]
pub(super) struct Media {
    drive: String,
    /// Without a path, the drive is ejected.
    path: Option<PathBuf>,
    #[serde(default)]
    force: bool,
}

pub(super) async fn media(State(web): Shared, JsonBody(media): JsonBody<Media>) -> Response {
    let Some(path) = media.path else {
        let force = media.force.then_some(Force::Force);
        return ask(&web, Command::Eject { name: media.drive, force }).await;
    };
    with_image(&web, &path, |image, only| Command::Insert {
        name: media.drive,
        path: image.path.clone(),
        only: Some(only),
    })
    .await
}

/// Sends the machine a command with a file, if the file can be attached.
async fn with_image(
    web: &WebState,
    path: &Path,
    command: impl FnOnce(&Image, FileId) -> Command,
) -> Response {
    // The file stays open until the machine has answered, so that no other file can get its inode
    // number.
    let image = web.images.open(path).and_then(|image| Ok((image.id()?, image)));
    match image {
        Ok((only, image)) => {
            let command = command(&image, only);
            let answer = machine_client::ask(&web.runtime_folder.control(), command).await;
            answer.map_or_else(|error| refusal(&may_open(error)), |it| Json(it).into_response())
        }
        Err(error) => refusal(&error),
    }
}

/// Replaces the advice of `vmm` about its options: a pod has none, and its machine may open every
/// file of the volume that its user may open.
fn may_open(error: anyhow::Error) -> anyhow::Error {
    const OUT: &str = "the machine runs as another user, 10001 if the container runs as root: let \
                       that user read the file, and write it unless readonly is true";
    match format!("{error:#}").strip_suffix(jail::ONLY_FOLDERS) {
        Some(start) => anyhow::anyhow!("{start}{OUT}"),
        None => error,
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Usb {
    Attach {
        path: PathBuf,
        cdrom: Option<bool>,
        #[serde(default)]
        readonly: bool,
    },
    /// A device of the host.
    #[serde(rename = "attach_host")]
    AttachHost {
        device: String,
    },
    Detach {
        name: String,
    },
}

pub(super) async fn usb_devices() -> Response {
    answer(usb::ask(usb::Request::List).await)
}

pub(super) async fn usb(State(web): Shared, JsonBody(request): JsonBody<Usb>) -> Response {
    let (path, cdrom, readonly) = match request {
        Usb::Attach { path, cdrom, readonly } => (path, cdrom, readonly),
        Usb::AttachHost { device } => {
            return answer(usb::ask(usb::Request::Attach(device)).await);
        }
        Usb::Detach { name } if usb::is_host_device(&name) => {
            return answer(usb::ask(usb::Request::Detach(name)).await);
        }
        Usb::Detach { name } => return ask(&web, Command::Detach { name }).await,
    };
    with_image(&web, &path, |image, only| {
        let cd = image.kind == Kind::Cd;
        let (cdrom, readonly) = (cdrom.unwrap_or(cd), readonly || cd);
        let path = keyvalue::escaped(&image.path.display().to_string());
        let device = format!("usb-storage,path={path},readonly={readonly},cdrom={cdrom}");
        Command::Attach { device, only: Some(only) }
    })
    .await
}

impl WebState {
    /// Shutdown uses the power button and the guest's agent.
    pub(super) async fn order(&self, button: Button) -> anyhow::Result<Value> {
        match button {
            Button::Shutdown => stop::ask(&self.control(), &self.agent).await,
            _ => machine_client::ask(&self.runtime_folder.control(), Command::from(button)).await,
        }
    }
}

async fn ask(web: &WebState, command: Command) -> Response {
    answer(machine_client::ask(&web.runtime_folder.control(), command).await)
}

fn answer(result: anyhow::Result<Value>) -> Response {
    result.map_or_else(|error| refusal(&error), |it| Json(it).into_response())
}

fn refusal(error: &anyhow::Error) -> Response {
    (StatusCode::CONFLICT, Json(json!({ "error": format!("{error:#}") }))).into_response()
}

#[cfg(test)]
mod test {
    use super::*;

    fn of(keyboard: &str, text: &str, skip: bool) -> Result<(String, Vec<char>), (u16, Value)> {
        let keyboard = Layout::named(keyboard).unwrap();
        let typed = typable(&keyboard, Text { text: text.into(), skip });
        typed.map_err(|(status, answer)| (status.as_u16(), answer))
    }

    #[test]
    fn untypable_characters_are_listed_and_skipped_only_on_request() {
        let (status, answer) = of("us", "Gr\u{fc}\u{df}e, \u{20ac}\n", false).unwrap_err();
        assert_eq!((status, &answer["characters"]), (422, &json!(["ü", "ß", "€"])));
        let error = answer["error"].as_str().unwrap();
        for word in ["(us)", "`ü`, `ß`, `€`", "nothing was typed", "\"skip\": true"] {
            assert!(error.contains(word), "{error}");
        }
        let (text, lacks) = of("us", "Grüße, €\n", true).unwrap();
        assert_eq!((&*text, &lacks[..]), ("Gre, \n", &['ü', 'ß', '€'][..]));
        assert_eq!(of("de", "Grüße, €\n", false), Ok(("Grüße, €\n".into(), Vec::new())));
        assert_eq!(of("us", &"a".repeat(MAX_TEXT + 1), true).unwrap_err().0, 413);
    }

    #[test]
    fn a_file_that_the_machine_may_not_open_has_a_way_out_in_the_pod() {
        let said = format!("usb: /storage/a.img: permission denied: {}", jail::ONLY_FOLDERS);
        let said = format!("{:#}", may_open(anyhow::anyhow!(said)));
        assert!(said.starts_with("usb: /storage/a.img: permission denied: the machine runs as"));
        assert!(said.contains("readonly") && !said.contains("--jail"), "{said}");
        let other = may_open(anyhow::anyhow!("no such drive"));
        assert_eq!(format!("{other:#}"), "no such drive");
    }

    #[tokio::test]
    async fn invalid_calls_are_refused_in_json() {
        for (kind, body, status, reason) in [
            ("application/json", r#"{"action":"explode"}"#, 422, "unknown variant `explode`"),
            ("application/json", r#"{"action":"#, 400, "the body is not JSON: /api/openapi.json"),
            ("text/plain", r#"{"action":"off"}"#, 415, "Content-Type: application/json"),
        ] {
            let request = Request::post("/").header(CONTENT_TYPE, kind).body(body.into()).unwrap();
            let refused = JsonBody::<Power>::from_request(request, &()).await.err().unwrap();
            assert_eq!(refused.status().as_u16(), status);
            assert_eq!(refused.headers()[CONTENT_TYPE], "application/json");
            let said = axum::body::to_bytes(refused.into_body(), 4096).await.unwrap();
            let said: Value = serde_json::from_slice(&said).unwrap();
            let error = said["error"].as_str().unwrap();
            assert!(error.contains(reason) && !error.contains("Failed"), "{said}");
        }
    }

    #[test]
    fn the_document_is_json_and_has_every_call() {
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        for call in ["state", "screenshot", "power", "type", "media", "usb"] {
            let call = &document["paths"][format!("/api/v1/{call}")];
            // Statuses of the gate, and of calls with a body.
            let (method, more) = match &call["post"] {
                Value::Null => ("get", &[][..]),
                _ => ("post", &[400, 408, 413, 415, 422][..]),
            };
            for status in [200, 401, 403, 429].iter().chain(more) {
                assert!(
                    call[method]["responses"][status.to_string()].is_object(),
                    "{status} {call}"
                );
            }
        }
    }
}
