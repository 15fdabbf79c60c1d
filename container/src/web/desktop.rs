//! The page with the guest's remote desktop, and the answers to its questions. The pages and the
//! client are in `container/web/desktop`; the gateway is `crate::desktop`.

use std::sync::Arc;

use axum::extract::{Extension, Path, State};
use axum::http::header::CONTENT_SECURITY_POLICY;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use screen::web::files::Folder;
use screen::web::stage::{Access, ExtraRoutes, ServeFn};
use serde::Deserialize;
use serde_json::json;

use super::WebState;

const FILES: Folder = include!(concat!(env!("OUT_DIR"), "/web/files.rs"));
/// The client is WebAssembly inside of a script. The rest is as for other pages.
const POLICY: &str = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; \
                      img-src 'self' data: blob:; connect-src 'self' data:; form-action 'self'; \
                      base-uri 'none'; frame-ancestors 'self'";

type Shared = State<Arc<WebState>>;

/// Adds the routes of the desktop.
pub(super) fn add(mut routes: ExtraRoutes, web: &Arc<WebState>) -> ExtraRoutes {
    let open =
        Router::new().route("/desktop", get(page)).route("/desktop/files/{*path}", get(file));
    let inside = Router::new()
        .route("/desktop/session", get(session))
        .route("/desktop/trust", post(trust))
        .with_state(web.clone());
    routes.open = routes.open.merge(open);
    routes.inside = routes.inside.merge(inside);
    let gateway = web.desktop.clone();
    let serve: ServeFn = Arc::new(move |viewer| Box::pin(gateway.clone().serve(viewer)));
    routes.sockets.push(("/desktop/socket", serve));
    routes
}

/// The page has no secrets. It asks for the session, which needs a login.
async fn page() -> Response {
    let mut response = FILES.page(StatusCode::OK, "desktop.html", &[]);
    let policy = HeaderValue::from_static(POLICY);
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    response
}

async fn file(Path(path): Path<String>, headers: HeaderMap) -> Response {
    FILES.file(&path, &headers)
}

/// Facts for the page. Only clients that may use the keyboard get the password of the account.
async fn session(State(web): Shared, Extension(access): Extension<Access>) -> Response {
    let why = web.desktop.check().await.err();
    let login = web.desktop.login().filter(|_| access == Access::Full);
    let login = login.map(|(user, password)| json!({ "user": user, "password": password }));
    Json(json!({
        "name": web.name,
        "access": if access == Access::Full { "full" } else { "view" },
        "why": why,
        "login": login,
        "connected": web.desktop.connected(),
        "certificate": web.desktop.changed(),
        "sound": web.equipment.sound,
        "console": web.equipment.screen,
    }))
    .into_response()
}

#[derive(Deserialize)]
struct Trust {
    fingerprint: String,
}

async fn trust(State(web): Shared, Json(trust): Json<Trust>) -> Response {
    match web.desktop.trust(&trust.fingerprint) {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => (StatusCode::CONFLICT, format!("{error:#}\n")).into_response(),
    }
}
