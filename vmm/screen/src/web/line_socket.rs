//! A WebSocket that sends lines of text or binary messages to a client (RFC 6455).
//!
//! Threats: an incoming message is at most [`MAX_MESSAGE_BYTES`] long, and is discarded. Queued
//! answers, such as pongs, take at most [`MAX_QUEUED_BYTES`]. A client that does not read for a
//! while, or does not answer, is disconnected.

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use futures_util::{SinkExt as _, StreamExt as _};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use super::socket;
use crate::rfb::Wire;

/// From the answer until the connection is a WebSocket.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(10);
/// Clients have little to send.
const MAX_MESSAGE_BYTES: usize = 4096;
const MAX_QUEUED_BYTES: usize = 4 * MAX_MESSAGE_BYTES;
/// Proxies close idle connections, mostly after a minute.
const PING_INTERVAL: Duration = Duration::from_secs(25);
/// A client that is silent for longer is disconnected.
const MAX_SILENCE: Duration = Duration::from_secs(100);
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

pub struct LineSocket {
    socket: WebSocketStream<Wire>,
    ping_timer: Interval,
    last_received: Instant,
}

/// Accepts a WebSocket: returns the answer, and the connection after it.
/// An error is the answer to an invalid request.
#[expect(clippy::result_large_err, reason = "returned once per connection")]
pub(super) fn upgrade(request: &mut Request) -> Result<(Response, OnUpgrade), Response> {
    let answer = socket::accept(request.headers())
        .map_err(|(status, sentence)| (status, format!("{sentence}\n")).into_response())?;
    let upgrade = request.extensions_mut().remove::<OnUpgrade>().ok_or_else(|| {
        (StatusCode::UPGRADE_REQUIRED, "A WebSocket needs HTTP/1.1.\n").into_response()
    })?;
    let mut response = (StatusCode::SWITCHING_PROTOCOLS, Body::empty()).into_response();
    response.headers_mut().extend(answer);
    Ok((response, upgrade))
}

pub(super) async fn upgraded(upgrade: OnUpgrade) -> io::Result<Upgraded> {
    timeout(UPGRADE_TIMEOUT, upgrade).await?.map_err(io::Error::other)
}

/// Answers a request for a WebSocket, and runs `serve` on the connection in a task.
pub fn open<F>(
    mut request: Request,
    serve: impl FnOnce(LineSocket) -> F + Send + 'static,
) -> Response
where
    F: Future<Output = ()> + Send,
{
    let (response, upgrade) = match upgrade(&mut request) {
        Ok(both) => both,
        Err(response) => return response,
    };
    tokio::spawn(async move {
        // A client that disconnected needs no answer.
        let Ok(upgraded) = upgraded(upgrade).await else { return };
        serve(LineSocket::new(Box::new(TokioIo::new(upgraded))).await).await;
    });
    response
}

impl LineSocket {
    async fn new(wire: Wire) -> Self {
        let config = WebSocketConfig::default()
            .max_message_size(Some(MAX_MESSAGE_BYTES))
            .max_frame_size(Some(MAX_MESSAGE_BYTES))
            .read_buffer_size(MAX_MESSAGE_BYTES)
            .write_buffer_size(MAX_MESSAGE_BYTES)
            .max_write_buffer_size(MAX_QUEUED_BYTES);
        let socket = WebSocketStream::from_raw_socket(wire, Role::Server, Some(config)).await;
        let mut ping_timer = interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        ping_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { socket, ping_timer, last_received: Instant::now() }
    }

    /// Fails when the client does not take the line in time.
    pub async fn send_line(&mut self, line: &str) -> io::Result<()> {
        let line = Message::Text(line.into());
        timeout(SEND_TIMEOUT, self.socket.send(line)).await?.map_err(io::Error::other)
    }

    /// Fails when the client does not take the bytes in time.
    pub(super) async fn send_bytes(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        let message = Message::Binary(bytes.into());
        timeout(SEND_TIMEOUT, self.socket.send(message)).await?.map_err(io::Error::other)
    }

    /// Waits until the client has disconnected. Cancel-safe: can be called again in a `select!`
    /// loop.
    pub async fn disconnected(&mut self) {
        loop {
            tokio::select! {
                message = self.socket.next() => match message {
                    Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                    Some(Ok(_)) => self.last_received = Instant::now(),
                },
                _ = self.ping_timer.tick() => {
                    let ping = self.socket.send(Message::Ping(Bytes::new()));
                    let sent = timeout(SEND_TIMEOUT, ping).await.is_ok_and(|sent| sent.is_ok());
                    if !sent || self.last_received.elapsed() > MAX_SILENCE {
                        return;
                    }
                }
            }
        }
    }

    pub async fn close(mut self) {
        // The client may be gone already.
        timeout(SEND_TIMEOUT, self.socket.close(None)).await.ok();
    }
}

#[cfg(test)]
mod test {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::time::interval;

    use super::*;

    /// The capacity of the connection itself.
    const PIPE: usize = 1024;
    /// The maximum payload of a ping.
    const PING: u8 = 125;
    const MOMENT: Duration = Duration::from_millis(20);

    async fn connected() -> (LineSocket, DuplexStream) {
        let (ours, theirs) = duplex(PIPE);
        (LineSocket::new(Box::new(ours)).await, theirs)
    }

    #[tokio::test]
    async fn unread_answers_do_not_accumulate() {
        let (mut socket, mut them) = connected().await;
        // RFC 6455 5.2, with a mask of zeros.
        let ping = [&[0x89, 0x80 | PING, 0, 0, 0, 0][..], &[1; PING as usize]].concat();
        let pings = ping.repeat(4 * MAX_QUEUED_BYTES / ping.len());
        tokio::select! {
            () = socket.disconnected() => panic!("the client is still connected"),
            sent = them.write_all(&pings) => sent.unwrap(),
        }
        let mut answers = Vec::new();
        let take = async {
            while let Ok(taken) = timeout(MOMENT, them.read_buf(&mut answers)).await {
                taken.unwrap();
            }
        };
        tokio::select! {
            () = socket.disconnected() => panic!("the client is still connected"),
            () = take => {}
        }
        assert!(answers.starts_with(&[0x8a, PING, 1]), "{:?}", answers.first_chunk::<3>());
        // Some were read before others were written.
        assert!(
            answers.len() <= 2 * MAX_QUEUED_BYTES,
            "{} of {} bytes",
            answers.len(),
            pings.len()
        );
    }

    #[tokio::test]
    async fn a_busy_client_is_pinged_too() {
        let (mut socket, mut them) = connected().await;
        socket.ping_timer = interval(3 * MOMENT);
        socket.ping_timer.tick().await;
        for _ in 0..5 {
            assert!(timeout(MOMENT, socket.disconnected()).await.is_err());
        }
        let mut ping = [0; 2];
        timeout(SEND_TIMEOUT, them.read_exact(&mut ping)).await.unwrap().unwrap();
        assert_eq!(ping, [0x89, 0]);
        socket.last_received = Instant::now().checked_sub(2 * MAX_SILENCE).unwrap();
        timeout(SEND_TIMEOUT, socket.disconnected())
            .await
            .expect("a silent client is disconnected");
    }
}
