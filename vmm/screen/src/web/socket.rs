//! A WebSocket as the byte stream of one client (RFC 6455): the payloads of its binary frames, one
//! after another.
//!
//! Threats: a message is at most [`MAX_MESSAGE_BYTES`] long, and text is refused. A client that
//! sends nothing for [`MAX_SILENCE`], not even the pongs that browsers send by themselves, is
//! disconnected.

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

/// More than the longest text of a clipboard.
const MAX_MESSAGE_BYTES: usize = 2 << 20;
const MAX_FRAME_BYTES: usize = 64 << 10;
/// Proxies close idle connections, mostly after a minute.
const PING_INTERVAL: Duration = Duration::from_secs(25);
/// A client that is silent for longer is disconnected.
const MAX_SILENCE: Duration = Duration::from_secs(100);
/// The WebSocket subprotocol for plain bytes that VNC clients use.
const PROTOCOL: &str = "binary";
const CLOSE_REASON: &str = "The machine is off.";

/// Builds the response headers that accept a WebSocket.
pub(super) fn accept(headers: &HeaderMap) -> Result<HeaderMap, (StatusCode, &'static str)> {
    let has = |name, word: &str| {
        let values = headers.get_all(name).iter().filter_map(|it| it.to_str().ok());
        values.flat_map(|it| it.split(',')).any(|it| it.trim().eq_ignore_ascii_case(word))
    };
    if !has(header::CONNECTION, "upgrade") || !has(header::UPGRADE, "websocket") {
        return Err((StatusCode::UPGRADE_REQUIRED, "this address accepts WebSockets only"));
    }
    if !has(header::SEC_WEBSOCKET_VERSION, "13") {
        return Err((StatusCode::UPGRADE_REQUIRED, "only WebSocket version 13 is supported"));
    }
    let key = headers.get(header::SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes);
    let key = key.filter(|it| BASE64_STANDARD.decode(it).is_ok_and(|it| it.len() == 16));
    let Some(key) = key else {
        return Err((StatusCode::BAD_REQUEST, "Sec-WebSocket-Key must be 16 bytes in Base64"));
    };
    // RFC 6455 1.3
    let text = [key, b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"].concat();
    let answer = BASE64_STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, &text));
    let mut out = HeaderMap::new();
    out.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    out.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    let answer = HeaderValue::try_from(answer);
    let answer = answer.map_err(|_| (StatusCode::BAD_REQUEST, "Sec-WebSocket-Key is invalid"))?;
    out.insert(header::SEC_WEBSOCKET_ACCEPT, answer);
    if has(header::SEC_WEBSOCKET_PROTOCOL, PROTOCOL) {
        out.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(PROTOCOL));
    }
    Ok(out)
}

/// Closes all WebSockets before the process ends.
#[derive(Clone)]
pub struct Farewell(Arc<watch::Sender<bool>>);

impl Default for Farewell {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }
}

impl Farewell {
    /// Tells all clients that the machine is off, and waits until their connections are closed.
    pub async fn send(&self) {
        self.0.send_replace(true);
        self.0.closed().await;
    }

    /// Waits for [`Farewell::send`], which in turn waits until the result is dropped.
    fn wait(&self) -> FarewellReceived {
        let mut received = self.0.subscribe();
        Box::pin(async move {
            received.wait_for(|received| *received).await.ok();
            received
        })
    }
}

type FarewellReceived = Pin<Box<dyn Future<Output = watch::Receiver<bool>> + Send>>;

enum End {
    /// [`Farewell::send`] was not called yet.
    Pending(FarewellReceived),
    /// It was called, and waits until this receiver is dropped.
    Received { _proof: watch::Receiver<bool> },
}

pub(super) struct ByteStream {
    socket: WebSocketStream<TokioIo<Upgraded>>,
    unread: Bytes,
    ping: Interval,
    last_received: Instant,
    end: End,
}

impl ByteStream {
    pub(super) async fn new(upgraded: Upgraded, farewell: &Farewell) -> Self {
        let config = WebSocketConfig::default()
            .max_message_size(Some(MAX_MESSAGE_BYTES))
            .max_frame_size(Some(MAX_MESSAGE_BYTES))
            .read_buffer_size(16 << 10)
            .write_buffer_size(MAX_FRAME_BYTES)
            .max_write_buffer_size(4 * MAX_FRAME_BYTES);
        let io = TokioIo::new(upgraded);
        let socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await;
        let mut ping = interval(PING_INTERVAL);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let end = End::Pending(farewell.wait());
        Self { socket, unread: Bytes::new(), ping, last_received: Instant::now(), end }
    }

    /// Ready after the farewell, once the close frame with its reason is flushed.
    fn poll_farewell(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let End::Pending(farewell) = &mut self.end {
            let received = ready!(farewell.as_mut().poll(cx));
            self.end = End::Received { _proof: received };
            let reason = CloseFrame { code: CloseCode::Away, reason: CLOSE_REASON.into() };
            let mut socket = Pin::new(&mut self.socket);
            // A client that does not read sees only the end of the connection.
            if let Poll::Ready(ready) = socket.as_mut().poll_ready(cx) {
                ready.map_err(to_io_error)?;
                socket.start_send(Message::Close(Some(reason))).map_err(to_io_error)?;
            }
        }
        Pin::new(&mut self.socket).poll_flush(cx).map_err(to_io_error)
    }

    /// Sends pings. Fails if the client is silent for too long.
    fn poll_ping(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.ping.poll_tick(cx).is_ready() {
            if self.last_received.elapsed() > MAX_SILENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // A client with a full send buffer needs no ping.
            if let Poll::Ready(ready) = Pin::new(&mut self.socket).poll_ready(cx) {
                ready.map_err(to_io_error)?;
                let ping = Message::Ping(Bytes::new());
                Pin::new(&mut self.socket).start_send(ping).map_err(to_io_error)?;
                let _later = Pin::new(&mut self.socket).poll_flush(cx).map_err(to_io_error)?;
            }
        }
        Ok(())
    }
}

fn to_io_error(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        Error::ConnectionClosed | Error::AlreadyClosed => io::ErrorKind::BrokenPipe.into(),
        error => io::Error::new(io::ErrorKind::InvalidData, error),
    }
}

impl AsyncRead for ByteStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.poll_farewell(cx)?.is_ready() {
            return Poll::Ready(Ok(()));
        }
        self.poll_ping(cx)?;
        loop {
            if !self.unread.is_empty() {
                let count = self.unread.len().min(buf.remaining());
                buf.put_slice(&self.unread.split_to(count));
                return Poll::Ready(Ok(()));
            }
            let message = match ready!(Pin::new(&mut self.socket).poll_next(cx)) {
                Some(message) => message.map_err(to_io_error)?,
                None => return Poll::Ready(Ok(())),
            };
            self.last_received = Instant::now();
            match message {
                Message::Binary(bytes) => self.unread = bytes,
                Message::Close(_) => return Poll::Ready(Ok(())),
                Message::Text(_) => {
                    let error = "received a text frame: only binary frames are accepted";
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
                }
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }
}

impl AsyncWrite for ByteStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(Pin::new(&mut self.socket).poll_ready(cx)).map_err(to_io_error)?;
        let bytes = &bytes[..bytes.len().min(MAX_FRAME_BYTES)];
        let message = Message::Binary(Bytes::copy_from_slice(bytes));
        Pin::new(&mut self.socket).start_send(message).map_err(to_io_error)?;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx).map_err(to_io_error)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_close(cx).map_err(to_io_error)
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
    fn the_handshake_matches_the_specification() {
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
