//! The routes and their answers. The router can be nested below any path.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::rejection::ExtensionRejection;
use axum::extract::{Extension, FromRequestParts, Path, Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, LOCATION, ORIGIN, RETRY_AFTER, SET_COOKIE,
    UPGRADE,
};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state, map_response};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::files::VIEWER;
use super::gate::{Admitted, Client, Gate, Refusal, Rules};
use super::line_socket;
use super::slots::Spare;
use super::socket::{ByteStream, Farewell};
use super::sound;
use super::stage::{Button, ExtraRoutes, ServeFn, Stage, Viewer};
use crate::keys::translate;
use crate::rfb::MAX_CLIENTS;
use crate::rfb::connection_limit::ConnectionLimit;
use crate::rfb::failure_log::FailureLog;
use crate::rfb::security::Access;

const MAX_FORM_BYTES: usize = 4096;
const MAX_BODY_BYTES: usize = 64 << 10;
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

const MAX_VIEWERS_PER_ADDRESS: usize = 16;

/// Sent with every answer. Scripts and styles come from our files only, foreign pages cannot embed
/// ours, and browsers do not guess content types. noVNC draws cursors and pictures as `data:`.
const HEADERS: [(HeaderName, &str); 6] = [
    (
        HeaderName::from_static("content-security-policy"),
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; \
         connect-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; \
         frame-ancestors 'self'",
    ),
    (HeaderName::from_static("x-content-type-options"), "nosniff"),
    (HeaderName::from_static("x-frame-options"), "SAMEORIGIN"),
    // Same-origin requests keep the referrer, so that forms send their origin.
    (HeaderName::from_static("referrer-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// State shared between all routes.
struct Web {
    gate: Gate,
    failure_log: FailureLog,
    /// Connected viewers, and those about to connect.
    viewers: ConnectionLimit,
    stage: Arc<dyn Stage>,
    farewell: Farewell,
}

type Shared = State<Arc<Web>>;

impl Web {
    fn admit(&self, client: &Client, headers: &HeaderMap) -> Result<Admitted, Refusal> {
        self.gate.admit(client, headers, self.stage.login_limiter())
    }
}

impl FromRequestParts<Arc<Web>> for Client {
    type Rejection = ExtensionRejection;

    async fn from_request_parts(
        parts: &mut Parts,
        web: &Arc<Web>,
    ) -> Result<Self, ExtensionRejection> {
        let Extension(connection) = Extension::from_request_parts(parts, web).await?;
        Ok(web.gate.client(connection, &parts.headers))
    }
}

pub fn router(
    stage: Arc<dyn Stage>,
    rules: Rules,
    farewell: Farewell,
    extra: ExtraRoutes,
) -> Router {
    let (gate, failure_log) = (Gate::new(rules), FailureLog::default());
    let viewers = ConnectionLimit::new(MAX_CLIENTS, MAX_VIEWERS_PER_ADDRESS);
    let web = Arc::new(Web { gate, failure_log, viewers, stage, farewell });
    let guard = from_fn_with_state(web.clone(), guard);
    let check_host = from_fn_with_state(web.clone(), check_host);
    let open = extra.open.layer(from_fn_with_state(web.clone(), pass_network));
    let machine = Router::new()
        .route("/machine", get(machine))
        .route("/machine/{button}", post(press))
        .route_layer(guard.clone())
        .with_state(web.clone());
    // `route_layer` panics on a router without routes.
    let inside = extra.inside;
    let inside = if inside.has_routes() { inside.route_layer(guard) } else { inside };
    let screen = stage_socket(&web.stage);
    let sockets = std::iter::once(("/websockify", screen)).chain(extra.sockets);
    let sockets = sockets.fold(Router::new(), |router, (path, serve)| {
        let socket = move |web: Shared, client: Client, request: Request| {
            byte_socket(web, client, request, serve.clone())
        };
        router.route(path, get(socket))
    });
    Router::new()
        .route("/", get(page))
        .route("/login", get(login_page).post(log_in))
        .route("/logout", post(log_out))
        .route("/session", get(session))
        .route("/audio", get(audio))
        .route("/files/{*path}", get(file))
        .merge(sockets)
        .with_state(web)
        .merge(machine)
        .merge(open)
        .merge(inside)
        .fallback(|| async { (StatusCode::NOT_FOUND, "There is no such page.\n") })
        .layer(check_host)
        .merge(extra.health)
        .layer(map_response(add_headers))
}

/// The health check of `vmm` itself.
pub fn health() -> ExtraRoutes {
    let health = Router::new().route("/healthz", get(|| async { "ok\n" }));
    ExtraRoutes { health, ..ExtraRoutes::default() }
}

/// Refuses host names that a stranger could own, and everything on spare slots, which are for
/// health checks.
async fn check_host(State(web): Shared, client: Client, request: Request, next: Next) -> Response {
    if request.extensions().get::<Spare>().is_some() {
        return too_many("Too many connections.\n");
    }
    match web.gate.check_host(&client) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refuse(&refusal),
    }
}

/// Passes on the network of a client, which need not be authenticated. Refuses WebSockets of
/// foreign pages: unlike other answers, browsers would let them read those. Programs that are not
/// pages send no origin.
async fn pass_network(
    State(web): Shared,
    client: Client,
    mut request: Request,
    next: Next,
) -> Response {
    let headers = request.headers();
    if headers.contains_key(UPGRADE)
        && headers.contains_key(ORIGIN)
        && let Err(refusal) = web.gate.same_origin(&client, headers)
    {
        return refuse(&refusal);
    }
    request.extensions_mut().insert(client.network);
    next.run(request).await
}

/// An error is the status of the answer.
async fn read_body(body: Body, max: usize) -> Result<Bytes, StatusCode> {
    match timeout(BODY_TIMEOUT, to_bytes(body, max)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(_)) => Err(StatusCode::PAYLOAD_TOO_LARGE),
        Err(_) => Err(StatusCode::REQUEST_TIMEOUT),
    }
}

/// Admits authenticated clients, after their whole body is read. Changes are accepted from our own
/// pages only.
async fn guard(State(web): Shared, client: Client, request: Request, next: Next) -> Response {
    let origin = match request.method().is_safe() {
        true => Ok(()),
        false => web.gate.may_act(&client, request.headers()),
    };
    let admitted = origin.and_then(|()| web.admit(&client, request.headers()));
    match admitted {
        Ok(admitted) if admitted.access == Access::Full || request.method().is_safe() => {
            let (mut parts, body) = request.into_parts();
            parts.extensions.insert(admitted.access);
            match read_body(body, MAX_BODY_BYTES).await {
                Ok(bytes) => next.run(Request::from_parts(parts, bytes.into())).await,
                Err(status) => status.into_response(),
            }
        }
        Ok(_) => {
            (StatusCode::FORBIDDEN, "View-only access: changes are refused.\n").into_response()
        }
        Err(refusal) => refuse(&refusal),
    }
}

async fn add_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        // A page may need a policy of its own.
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The answer to a refused request, as plain text for programs and people.
fn refuse(refusal: &Refusal) -> Response {
    let sentence = format!("{}\n", refusal.sentence());
    let mut response = (refusal.status(), sentence).into_response();
    set_retry_after(refusal, &mut response);
    response
}

fn set_retry_after(refusal: &Refusal, response: &mut Response) {
    if let Refusal::RetryAfter(seconds) = refusal {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(*seconds));
    }
}

/// The answer when a limit is reached. The client may retry.
fn too_many(sentence: &'static str) -> Response {
    let again = [(RETRY_AFTER, "10")];
    (StatusCode::SERVICE_UNAVAILABLE, again, sentence).into_response()
}

/// A redirect. The target is relative, so it works below any path.
fn redirect(target: &'static str) -> Response {
    (StatusCode::SEE_OTHER, [(LOCATION, target)]).into_response()
}

async fn page(State(web): Shared, client: Client, headers: HeaderMap) -> Response {
    if let Some(page) = web.stage.replacement_page() {
        return page;
    }
    match web.admit(&client, &headers) {
        Ok(_) => VIEWER.page(StatusCode::OK, "index.html", &[]),
        Err(Refusal::Unknown) => redirect("login"),
        Err(refusal) => refuse(&refusal),
    }
}

async fn login_page(State(web): Shared, client: Client, headers: HeaderMap) -> Response {
    match web.admit(&client, &headers) {
        Ok(_) => redirect("./"),
        Err(Refusal::Unknown) => form(&web, StatusCode::OK, "", b""),
        Err(refusal) => refuse(&refusal),
    }
}

fn form(web: &Web, status: StatusCode, message: &str, user: &[u8]) -> Response {
    let named = web.gate.needs_user();
    let name = if named { "named" } else { "unnamed" };
    let user = String::from_utf8_lossy(user);
    let (first, second) = match named && user.is_empty() {
        true => ("autofocus", ""),
        false => ("", "autofocus"),
    };
    let hint = web.stage.about().login;
    let fill = [("{NAMED}", name), ("{SAID}", message), ("{HINT}", hint)];
    let focus = [("{FOCUS_NAME}", first), ("{FOCUS_PASSWORD}", second)];
    // The user's input is filled in last, so placeholders in it are not replaced.
    let fill: Vec<_> = fill.into_iter().chain(focus).chain([("{USER}", &*user)]).collect();
    let fill = &fill[..];
    VIEWER.page(status, "login.html", fill)
}

async fn log_in(State(web): Shared, client: Client, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let headers = &parts.headers;
    if let Err(refusal) = web.gate.same_origin(&client, headers) {
        return refuse(&refusal);
    }
    if !web.gate.needs_password() {
        return redirect("./");
    }
    let text = match read_body(body, MAX_FORM_BYTES).await {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(status) => return status.into_response(),
    };
    let (user, password) = (field(&text, "user"), field(&text, "password"));
    match web.gate.log_in(&client, &user, &password, web.stage.login_limiter()) {
        Ok(cookie) => with_cookie(redirect("./"), &cookie),
        Err(refusal) => {
            // The message does not tell which of the two is wrong.
            let message = match refusal {
                Refusal::Wrong if web.gate.needs_user() => {
                    "The name or the password is wrong.".into()
                }
                _ => refusal.sentence(),
            };
            let mut response = form(&web, refusal.status(), &message, &user);
            set_retry_after(&refusal, &mut response);
            response
        }
    }
}

fn field(text: &str, name: &str) -> Vec<u8> {
    let mut pairs = text.split('&').filter_map(|it| it.split_once('='));
    let value = pairs.find(|(key, _)| *key == name).map_or("", |it| it.1);
    percent_decode_str(&value.replace('+', " ")).collect()
}

fn with_cookie(mut response: Response, cookie: &str) -> Response {
    match HeaderValue::from_str(cookie) {
        Ok(value) => {
            response.headers_mut().insert(SET_COOKIE, value);
            response
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn log_out(State(web): Shared, client: Client, headers: HeaderMap) -> Response {
    if let Err(refusal) = web.gate.same_origin(&client, &headers) {
        return refuse(&refusal);
    }
    let cookie = web.gate.log_out(&client, &headers);
    with_cookie(redirect("login"), &cookie)
}

/// The settings that the page reads before it connects.
async fn session(State(web): Shared, client: Client, headers: HeaderMap) -> Response {
    match web.admit(&client, &headers) {
        Ok(admitted) => {
            let access = if admitted.access == Access::Full { "full" } else { "view" };
            let about = web.stage.about();
            let answer = json!({
                "access": access,
                "logout": admitted.session.is_some(),
                "keyboard": about.keyboard.name(),
                "characters": translate::characters(&about.keyboard),
                "sound": about.sound,
                "resizes": about.resizes,
                "again": about.restart_hint,
                "progress": about.progress,
                "desktop": about.desktop,
                "usb": about.usb,
            });
            let answer = as_json(&answer);
            match web.gate.proof(&client) {
                Some(cookie) => with_cookie(answer, &cookie),
                None => answer,
            }
        }
        Err(refusal) => refuse(&refusal),
    }
}

fn as_json(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn machine(State(web): Shared) -> Response {
    pressed(web, None).await
}

async fn press(State(web): Shared, Path(button): Path<String>) -> Response {
    match serde_json::from_value::<Button>(Value::String(button)) {
        Ok(button) => pressed(web, Some(button)).await,
        Err(_) => (StatusCode::NOT_FOUND, "There is no such button.\n").into_response(),
    }
}

async fn pressed(web: Arc<Web>, button: Option<Button>) -> Response {
    match web.stage.clone().control(button).await {
        Ok(answer) => as_json(&answer),
        Err(error) => (StatusCode::CONFLICT, format!("{error:#}\n")).into_response(),
    }
}

async fn file(Path(path): Path<String>, headers: HeaderMap) -> Response {
    VIEWER.file(&path, &headers)
}

/// Admits a viewer whose origin was checked. An error is the answer.
#[expect(clippy::result_large_err, reason = "returned once per connection")]
fn admit_viewer(
    web: &Web,
    client: &Client,
    headers: &HeaderMap,
    origin: Result<(), Refusal>,
) -> Result<Admitted, Response> {
    origin.and_then(|()| web.admit(client, headers)).map_err(|refusal| {
        let line = format!("web: {} was refused: {}", client.peer, refusal.sentence());
        web.failure_log.log(client.network, &line);
        refuse(&refusal)
    })
}

/// Sends sound to a viewer, which counts as another one. Programs that are not pages send no
/// origin.
async fn audio(State(web): Shared, client: Client, request: Request) -> Response {
    let headers = request.headers();
    let origin = match headers.contains_key(ORIGIN) {
        true => web.gate.same_origin(&client, headers),
        false => Ok(()),
    };
    let admitted = match admit_viewer(&web, &client, headers, origin) {
        Ok(admitted) => admitted,
        Err(response) => return response,
    };
    if !web.stage.about().sound {
        return (StatusCode::NOT_FOUND, "The machine has no sound card.\n").into_response();
    }
    let Some(slot) = web.viewers.acquire(client.network) else {
        return too_many("Too many viewers are connected.\n");
    };
    line_socket::open(request, |socket| async move {
        let _slot = slot;
        let serve = sound::serve(web.stage.clone(), &client.peer, socket);
        match admitted.session {
            Some(session) => tokio::select! {
                () = serve => {}
                () = session.ended() => {}
            },
            None => serve.await,
        }
    })
}

/// The screen as the server of a WebSocket.
fn stage_socket(stage: &Arc<dyn Stage>) -> ServeFn {
    let stage = stage.clone();
    Arc::new(move |viewer| stage.clone().serve(viewer))
}

async fn byte_socket(
    State(web): Shared,
    client: Client,
    mut request: Request,
    serve: ServeFn,
) -> Response {
    let headers = request.headers();
    let origin = web.gate.same_origin(&client, headers);
    let admitted = match admit_viewer(&web, &client, headers, origin) {
        Ok(admitted) => admitted,
        Err(response) => return response,
    };
    // The number of viewers is limited before anything is allocated for the screen.
    let Some(slot) = web.viewers.acquire(client.network) else {
        return too_many("Too many viewers are connected.\n");
    };
    let (response, upgrade) = match line_socket::upgrade(&mut request) {
        Ok(both) => both,
        Err(response) => return response,
    };
    tokio::spawn(async move {
        let _slot = slot;
        let Client { peer, network, .. } = client;
        let upgraded = match line_socket::upgraded(upgrade).await {
            Ok(upgraded) => upgraded,
            Err(error) => {
                let line = format!("web: {peer} did not open the WebSocket: {error}");
                return web.failure_log.log(network, &line);
            }
        };
        let stream = Box::new(ByteStream::new(upgraded, &web.farewell).await);
        let view_only = admitted.access == Access::View;
        let serve = serve(Viewer { stream, peer: peer.clone(), view_only });
        match admitted.session {
            Some(session) => tokio::select! {
                () = serve => {}
                () = session.ended() => tracing::info!("web: {peer} logged out"),
            },
            None => serve.await,
        }
    });
    response
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn form_fields_are_decoded() {
        let text = "user=J%C3%BCrgen+K&password=a%26b%3D%2B%25&password=no";
        assert_eq!(field(text, "user"), "Jürgen K".as_bytes());
        assert_eq!(field(text, "password"), b"a&b=+%");
        assert_eq!(field(text, "other"), b"");
        assert_eq!(field("password=%zz", "password"), b"%zz");
    }
}
