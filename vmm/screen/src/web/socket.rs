//! A WebSocket as the line of one client (RFC 6455): frames that are binary, one after another,
//! are its bytes.
//!
//! Threats: a frame is at most [`LONGEST`] bytes, and text is refused. Who says nothing at all for
//! a while, not even the answers that browsers give by themselves, is gone.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::{Sink as _, Stream as _};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};

/// What a client may say at once: more than the longest text of a clipboard.
const LONGEST: usize = 2 << 20;
/// What goes into one frame.
const FRAME: usize = 64 << 10;
/// Often enough for proxies, which close what is silent, mostly after a minute.
const BEAT: Duration = Duration::from_secs(25);
/// After so long without an answer nobody is there.
const SILENCE: Duration = Duration::from_secs(100);
/// The name for plain bytes that clients of the kind know.
const PROTOCOL: &str = "binary";
/// Why there is nothing more to see.
const OFF: &str = "The machine is off.";

/// The headers that accept a WebSocket.
///
/// # Errors
///
/// What is wrong with the request.
pub(super) fn accept(headers: &HeaderMap) -> Result<HeaderMap, (StatusCode, &'static str)> {
    let has = |name, word: &str| {
        let values = headers.get_all(name).iter().filter_map(|it| it.to_str().ok());
        values.flat_map(|it| it.split(',')).any(|it| it.trim().eq_ignore_ascii_case(word))
    };
    if !has(header::CONNECTION, "upgrade") || !has(header::UPGRADE, "websocket") {
        return Err((StatusCode::UPGRADE_REQUIRED, "this is for WebSockets only"));
    }
    if !has(header::SEC_WEBSOCKET_VERSION, "13") {
        return Err((StatusCode::UPGRADE_REQUIRED, "only version 13 of WebSockets is known"));
    }
    let key = headers.get(header::SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes);
    let key = key.filter(|it| BASE64_STANDARD.decode(it).is_ok_and(|it| it.len() == 16));
    let Some(key) = key else {
        return Err((StatusCode::BAD_REQUEST, "a Sec-WebSocket-Key of 16 bytes is missing"));
    };
    // RFC 6455 1.3
    let text = [key, b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"].concat();
    let answer = BASE64_STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, &text));
    let mut out = HeaderMap::new();
    out.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    out.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    let answer = HeaderValue::try_from(answer);
    let answer = answer.map_err(|_| (StatusCode::BAD_REQUEST, "Sec-WebSocket-Key"))?;
    out.insert(header::SEC_WEBSOCKET_ACCEPT, answer);
    if has(header::SEC_WEBSOCKET_PROTOCOL, PROTOCOL) {
        out.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(PROTOCOL));
    }
    Ok(out)
}

/// What is said to all before nobody is here any more.
#[derive(Clone)]
pub struct Farewell(Arc<watch::Sender<bool>>);

impl Default for Farewell {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }
}

impl Farewell {
    /// Says it, and waits until all have heard it.
    pub async fn say(&self) {
        self.0.send_replace(true);
        self.0.closed().await;
    }

    /// Ready when it is said. It is waited for whoever keeps what comes of this.
    fn heard(&self) -> Heard {
        let mut said = self.0.subscribe();
        Box::pin(async move {
            said.wait_for(|said| *said).await.ok();
            said
        })
    }
}

type Heard = Pin<Box<dyn Future<Output = watch::Receiver<bool>> + Send>>;

/// See [`Farewell`].
enum End {
    /// It may be said yet.
    Awaited(Heard),
    /// It was, and this is the proof that we are still here.
    Here { _proof: watch::Receiver<bool> },
}

/// The line.
pub(super) struct Line {
    socket: WebSocketStream<TokioIo<Upgraded>>,
    /// What came and was not read yet.
    rest: Bytes,
    beat: Interval,
    heard: Instant,
    end: End,
}

impl Line {
    /// On a connection that has been upgraded.
    pub(super) async fn new(upgraded: Upgraded, farewell: &Farewell) -> Self {
        let config = WebSocketConfig::default()
            .max_message_size(Some(LONGEST))
            .max_frame_size(Some(LONGEST))
            .read_buffer_size(16 << 10)
            .write_buffer_size(FRAME)
            .max_write_buffer_size(4 * FRAME);
        let io = TokioIo::new(upgraded);
        let socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
        let mut beat = interval(BEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let end = End::Awaited(farewell.heard());
        Self { socket, rest: Bytes::new(), beat, heard: Instant::now(), end }
    }

    /// Ready when all that is left is to close: the browser is told why.
    fn part(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let End::Awaited(heard) = &mut self.end {
            let said = ready!(heard.as_mut().poll(cx));
            self.end = End::Here { _proof: said };
            let reason = CloseFrame { code: CloseCode::Away, reason: OFF.into() };
            let mut socket = Pin::new(&mut self.socket);
            // Who does not read learns it from the line's end.
            if let Poll::Ready(ready) = socket.as_mut().poll_ready(cx) {
                ready.map_err(wrong)?;
                socket.start_send(Message::Close(Some(reason))).map_err(wrong)?;
            }
        }
        Pin::new(&mut self.socket).poll_flush(cx).map_err(wrong)
    }

    /// Asks now and then whether anybody is there.
    fn beat(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.beat.poll_tick(cx).is_ready() {
            if self.heard.elapsed() > SILENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // Who has much to read anyway needs no question.
            if let Poll::Ready(ready) = Pin::new(&mut self.socket).poll_ready(cx) {
                ready.map_err(wrong)?;
                let ping = Message::Ping(Bytes::new());
                Pin::new(&mut self.socket).start_send(ping).map_err(wrong)?;
                let _later = Pin::new(&mut self.socket).poll_flush(cx).map_err(wrong)?;
            }
        }
        Ok(())
    }
}

/// What went wrong, for those who know streams.
fn wrong(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        Error::ConnectionClosed | Error::AlreadyClosed => io::ErrorKind::BrokenPipe.into(),
        error => io::Error::new(io::ErrorKind::InvalidData, error),
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.part(cx)?.is_ready() {
            return Poll::Ready(Ok(()));
        }
        self.beat(cx)?;
        loop {
            if !self.rest.is_empty() {
                let count = self.rest.len().min(buf.remaining());
                buf.put_slice(&self.rest.split_to(count));
                return Poll::Ready(Ok(()));
            }
            let message = match ready!(Pin::new(&mut self.socket).poll_next(cx)) {
                Some(message) => message.map_err(wrong)?,
                None => return Poll::Ready(Ok(())),
            };
            self.heard = Instant::now();
            match message {
                Message::Binary(bytes) => self.rest = bytes,
                Message::Close(_) => return Poll::Ready(Ok(())),
                Message::Text(_) => {
                    let error = "text came where bytes belong";
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
                }
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(Pin::new(&mut self.socket).poll_ready(cx)).map_err(wrong)?;
        let bytes = &bytes[..bytes.len().min(FRAME)];
        let message = Message::Binary(Bytes::copy_from_slice(bytes));
        Pin::new(&mut self.socket).start_send(message).map_err(wrong)?;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx).map_err(wrong)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_close(cx).map_err(wrong)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (name.parse().unwrap(), HeaderValue::from_static(value))
        };
        list.iter().map(pair).collect()
    }

    #[test]
    fn the_answer_is_that_of_the_specification() {
        let mut list = vec![
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "WebSocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("sec-websocket-protocol", "chat, binary"),
        ];
        let answer = accept(&headers(&list)).unwrap();
        assert_eq!(answer["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert_eq!(answer["sec-websocket-protocol"], "binary");
        list[4].1 = "chat";
        assert!(!accept(&headers(&list)).unwrap().contains_key("sec-websocket-protocol"));
        for (at, other) in [(0, "close"), (1, "h2c"), (2, "8"), (3, "dGhlIHNhbXBsZQ==")] {
            let mut list = list.clone();
            list[at].1 = other;
            assert!(accept(&headers(&list)).is_err(), "{other}");
        }
    }
}
