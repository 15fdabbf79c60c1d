//! Slots for connections. An idle connection gives way to a new one, so a client that opens many
//! and sends nothing keeps no other client out. If all slots are busy, a few spare ones still
//! answer health checks.
//!
//! Threats: a client that opens many connections ([`ConnectionLimit`]). A slot is busy from the end
//! of a request until its answer is sent: neither a request that never ends nor an answer that
//! nobody reads keeps the slot.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::http::{Request, Response};
use hyper::body::{Body as Content, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::rfb::connection_limit::{self, BusyGuard, ConnectionLimit, Reading};
use crate::rfb::security::PeerNetwork;

/// Spare slots, in total and per address. They answer health checks only.
const SPARE: usize = 16;
const MAX_SPARE_EACH: usize = 4;

/// Marks requests on a spare slot.
#[derive(Clone, Copy)]
pub(super) struct Spare;

pub(super) struct Slots {
    all: ConnectionLimit,
    spare: ConnectionLimit,
}

pub(super) struct Slot {
    slot: Arc<connection_limit::Slot>,
    spare: bool,
}

impl Slots {
    /// Limits connections in total and per address.
    pub(super) fn new(max: usize, max_each: usize) -> Self {
        Self {
            all: ConnectionLimit::new(max, max_each),
            spare: ConnectionLimit::without_local_reserve(SPARE, MAX_SPARE_EACH),
        }
    }

    /// Takes a slot, which may evict a connection that waits for a request.
    pub(super) fn acquire(&self, network: PeerNetwork) -> Option<Slot> {
        let slot = self.all.acquire_evictable(network);
        let spare = slot.is_none();
        let slot = slot.or_else(|| self.spare.acquire(network))?;
        Some(Slot { slot: Arc::new(slot), spare })
    }
}

impl Slot {
    /// Waits until the slot is given to another connection.
    pub(super) async fn evicted(&self) {
        self.slot.evicted().await;
    }

    /// The connection's stream.
    pub(super) fn watch<S>(&self, line: S) -> Watched<S> {
        Watched { line, reading: self.slot.reading() }
    }

    /// Begins a request. Its slot becomes busy when the request is read to its end. Keep the second
    /// value until the answer is sent.
    pub(super) fn request<B>(&self, request: Request<B>) -> (Request<Body>, ActiveRequest)
    where
        B: Content<Data = Bytes, Error: Into<axum::BoxError>> + Send + Unpin + 'static,
    {
        let active = ActiveRequest::default();
        let (slot, mark) = (self.slot.clone(), active.clone());
        let mut request = request.map(|body| Body::new(RequestBody { body, slot, active: mark }));
        if request.body().is_end_stream() {
            active.0.get_or_init(|| self.slot.mark_busy());
        }
        if self.spare {
            request.extensions_mut().insert(Spare);
        }
        (request, active)
    }
}

/// A request in progress. It holds its slot busy from its end until it is dropped.
#[derive(Clone, Default)]
pub(super) struct ActiveRequest(Arc<OnceLock<BusyGuard>>);

impl ActiveRequest {
    /// Wraps the answer, so that the slot stays busy until it is sent.
    pub(super) fn until_sent(self, response: Response<Body>) -> Response<Body> {
        response.map(|body| Body::new(ResponseBody { body, _request: self }))
    }
}

/// A stream whose slot gives way if its client does not read.
pub(super) struct Watched<S> {
    line: S,
    reading: Reading,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.line).poll_write(cx, bytes);
        self.reading.note(written.is_ready());
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_shutdown(cx)
    }
}

/// The body of a request. It marks the slot busy at its end.
struct RequestBody<B> {
    body: B,
    slot: Arc<connection_limit::Slot>,
    active: ActiveRequest,
}

impl<B: Content + Unpin> Content for RequestBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let ends = match &frame {
            None => true,
            Some(frame) => frame.is_ok() && self.body.is_end_stream(),
        };
        if ends {
            self.active.0.get_or_init(|| self.slot.mark_busy());
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct ResponseBody {
    body: Body,
    _request: ActiveRequest,
}

impl Content for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod test {
    use std::thread::sleep;
    use std::time::Instant;

    use tokio::io::{AsyncReadExt as _, duplex};

    use super::*;
    use crate::rfb::connection_limit::STALLED;

    fn network(text: &str) -> PeerNetwork {
        PeerNetwork::of(text.parse().unwrap())
    }

    /// Whether the slot is not evicted.
    fn stays(slot: &Slot) -> bool {
        let lost = std::pin::pin!(slot.evicted());
        let mut context = Context::from_waker(std::task::Waker::noop());
        lost.poll(&mut context).is_pending()
    }

    fn plain(text: &'static str) -> Request<Body> {
        Request::new(if text.is_empty() { Body::empty() } else { Body::from(text) })
    }

    #[test]
    fn an_active_connection_stays_and_an_idle_one_is_evicted() {
        let slots = Slots::new(8, 3);
        let enter = |text: &str| slots.acquire(network(text)).unwrap();
        let mine: Vec<_> = (0..3).map(|_| enter("10.0.0.1")).collect();
        let (_, active) = mine[0].request(plain(""));
        // This one is not read to its end.
        let (begun, unasked) = mine[1].request(plain("more"));
        let (mut ended, third) = mine[2].request(plain("all"));
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(Pin::new(ended.body_mut()).poll_frame(&mut context).is_ready());
        let fourth = enter("10.0.0.1");
        assert_eq!(mine.iter().map(stays).collect::<Vec<_>>(), [true, false, true]);
        let (_, last) = fourth.request(plain(""));
        // All slots of this address are busy: it gets spare ones, for health checks only.
        let spares: Vec<_> = (0..MAX_SPARE_EACH).map(|_| enter("10.0.0.1")).collect();
        assert!(spares.iter().all(|it| it.spare) && !fourth.spare);
        assert!(slots.acquire(network("10.0.0.1")).is_none());
        assert!(!enter("10.0.0.2").spare, "another address");
        drop((begun, unasked, ended));
        assert!(stays(&mine[2]));
        let answer = third.until_sent(Response::new(Body::from("yes")));
        assert!(slots.acquire(network("10.0.0.1")).is_none(), "it is not sent yet");
        drop(answer);
        let next = enter("10.0.0.1");
        assert!(!next.spare && !stays(&mine[2]) && stays(&fourth) && stays(&mine[0]));
        drop((active, last));
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_its_answer_gives_way() {
        let slots = Slots::new(8, 1);
        let enter = || slots.acquire(network("10.0.0.1")).unwrap();
        let mine = enter();
        let (mut client, line) = duplex(8);
        let mut line = mine.watch(line);
        let (_, active) = mine.request(plain(""));
        let _answer = active.until_sent(Response::new(Body::from("all")));
        sleep(STALLED);
        assert!(enter().spare, "the answer takes long");
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut write = || Pin::new(&mut line).poll_write(&mut context, &[7; 8]).is_ready();
        assert!(write() && !write());
        sleep(STALLED);
        assert_eq!(client.read(&mut [0; 8]).await.unwrap(), 8);
        let since = Instant::now();
        assert!(write() && !write());
        sleep(STALLED / 2);
        assert!(!write() && (enter().spare || since.elapsed() >= STALLED));
        sleep(STALLED / 2);
        assert!(!enter().spare && !stays(&mine));
    }
}
