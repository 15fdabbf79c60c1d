//! A WebSocket on which lines of text are told to whoever listens (RFC 6455).
//!
//! Threats: a message of theirs is at most [`LONGEST`] bytes, and thrown away. Who takes nothing
//! for a while, or does not answer, is gone.

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use futures_util::{SinkExt as _, StreamExt as _};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use super::socket;

/// From the answer to the WebSocket.
const UPGRADE: Duration = Duration::from_secs(10);
/// Listeners have little to say.
const LONGEST: usize = 4096;
/// Proxies close what is silent, mostly after a minute.
const BEAT: Duration = Duration::from_secs(25);
/// After so long without an answer nobody is there.
const SILENCE: Duration = Duration::from_secs(100);
/// A line is taken within.
const TAKE: Duration = Duration::from_secs(10);

/// Somebody who listens.
pub struct Talk(WebSocketStream<TokioIo<Upgraded>>);

/// A request that may become a WebSocket, and the connection that does.
///
/// # Errors
///
/// The answer to one that may not.
#[expect(clippy::result_large_err, reason = "the answer is what is given back, once")]
pub(super) fn upgrade(request: &mut Request) -> Result<(Response, OnUpgrade), Response> {
    let answer = socket::accept(request.headers())
        .map_err(|(status, sentence)| (status, format!("{sentence}\n")).into_response())?;
    let upgrade = request
        .extensions_mut()
        .remove::<OnUpgrade>()
        .ok_or_else(|| (StatusCode::UPGRADE_REQUIRED, "This needs HTTP/1.1.\n").into_response())?;
    let mut response = (StatusCode::SWITCHING_PROTOCOLS, Body::empty()).into_response();
    response.headers_mut().extend(answer);
    Ok((response, upgrade))
}

/// Waits for the connection.
///
/// # Errors
///
/// When whoever asked does not come.
pub(super) async fn upgraded(upgrade: OnUpgrade) -> io::Result<Upgraded> {
    timeout(UPGRADE, upgrade).await?.map_err(io::Error::other)
}

/// Answers a request for a WebSocket, and talks there.
pub fn open<F>(mut request: Request, talk: impl FnOnce(Talk) -> F + Send + 'static) -> Response
where
    F: Future<Output = ()> + Send,
{
    let (response, upgrade) = match upgrade(&mut request) {
        Ok(both) => both,
        Err(response) => return response,
    };
    tokio::spawn(async move {
        // Who does not come has nothing to hear.
        let Ok(upgraded) = upgraded(upgrade).await else { return };
        let config = WebSocketConfig::default()
            .max_message_size(Some(LONGEST))
            .max_frame_size(Some(LONGEST))
            .read_buffer_size(LONGEST);
        let io = TokioIo::new(upgraded);
        let socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
        talk(Talk(socket)).await;
    });
    response
}

impl Talk {
    /// Says a line.
    ///
    /// # Errors
    ///
    /// When nobody takes it.
    pub async fn say(&mut self, line: &str) -> io::Result<()> {
        let line = Message::Text(line.into());
        timeout(TAKE, self.0.send(line)).await?.map_err(io::Error::other)
    }

    /// Waits until they have left.
    pub async fn left(&mut self) {
        let mut beat = interval_at(Instant::now() + BEAT, BEAT);
        let mut heard = Instant::now();
        loop {
            tokio::select! {
                message = self.0.next() => match message {
                    Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                    Some(Ok(_)) => heard = Instant::now(),
                },
                _ = beat.tick() => {
                    let ping = self.0.send(Message::Ping(Bytes::new()));
                    let sent = timeout(TAKE, ping).await.is_ok_and(|sent| sent.is_ok());
                    if !sent || heard.elapsed() > SILENCE {
                        return;
                    }
                }
            }
        }
    }

    /// Takes leave.
    pub async fn close(mut self) {
        // Who is gone already needs none.
        timeout(TAKE, self.0.close(None)).await.ok();
    }
}
