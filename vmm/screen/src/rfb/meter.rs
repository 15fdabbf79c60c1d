//! Limits how fast one client is read.
//!
//! People type and point, and paste a long text now and then. The limit is above all of that. The
//! bytes of a client that floods us stay in the kernel's buffer, so the processors remain free for
//! others. Only reading is metered, below TLS and WebSockets, where each byte costs processor time.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Bytes per second: many times the traffic of a mouse with a thousand events per second.
const RATE: i64 = 256 << 10;
/// Bytes that a quiet client may send at once: enough for several texts of the maximum length.
const MAX_CREDIT: i64 = 4 << 20;
/// Bytes that a new client may send at once: enough for the handshake.
const FIRST_CREDIT: i64 = 64 << 10;
const SECOND: i64 = 1_000_000_000;
/// Minimum pause, so that the reader does not wake up for every byte.
const PAUSE: Duration = Duration::from_millis(20);

/// A stream whose reads are limited to `RATE`.
pub(crate) struct Meter<S> {
    line: S,
    /// Bytes that may be read. Negative if the last read exceeded the credit.
    credit: i64,
    since: Instant,
    rest: Option<Pin<Box<Sleep>>>,
}

impl<S> Meter<S> {
    pub(crate) fn new(line: S) -> Self {
        Self { line, credit: FIRST_CREDIT, since: Instant::now(), rest: None }
    }

    /// Adds the credit for the time since the last call.
    fn earn(&mut self, now: Instant) {
        let nanos = i64::try_from((now - self.since).as_nanos()).unwrap_or(i64::MAX);
        let earned = nanos.saturating_mul(RATE) / SECOND;
        self.credit = self.credit.saturating_add(earned).min(MAX_CREDIT);
        // Keep the time that is too short for a whole byte.
        let rest = nanos.saturating_mul(RATE) % SECOND / RATE;
        self.since = now - Duration::from_nanos(rest.unsigned_abs());
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Meter<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let me = &mut *self;
        loop {
            if let Some(rest) = &mut me.rest {
                ready!(rest.as_mut().poll(cx));
                me.rest = None;
            }
            me.earn(Instant::now());
            if me.credit > 0 {
                break;
            }
            let micros = u64::try_from(-me.credit * 1_000_000 / RATE).unwrap_or(0);
            me.rest = Some(Box::pin(sleep(Duration::from_micros(micros).max(PAUSE))));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut me.line).poll_read(cx, buf))?;
        me.credit -= i64::try_from(buf.filled().len() - before).unwrap_or(i64::MAX);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Meter<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.line).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod test {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn a_flood_is_read_slowly_and_completely() {
        const LENGTH: usize = 160 << 10;
        let (mut client, line) = duplex(4 << 10);
        let mut line = Meter::new(line);
        let start = Instant::now();
        let say = async {
            client.write_all(&[7; LENGTH]).await.unwrap();
            drop(client);
        };
        let hear = async {
            let mut all = Vec::new();
            line.read_to_end(&mut all).await.unwrap();
            assert_eq!(all, [7; LENGTH]);
        };
        tokio::join!(say, hear);
        let took = start.elapsed();
        assert!(took > Duration::from_millis(300), "{took:?}");
    }

    #[tokio::test]
    async fn input_at_typing_speed_is_not_delayed() {
        let (mut client, line) = duplex(64);
        let mut line = Meter::new(line);
        for at in 0..100 {
            client.write_all(&[at; 8]).await.unwrap();
            assert_eq!(line.read_u64().await.unwrap(), u64::from_be_bytes([at; 8]));
            assert!(line.rest.is_none());
        }
    }

    #[test]
    fn a_quiet_client_may_paste_a_long_text_at_once() {
        let mut meter = Meter::new(());
        let start = meter.since;
        for micros in 1..=2_000_000 {
            meter.earn(start + Duration::from_micros(micros));
        }
        let two_seconds = FIRST_CREDIT + 2 * RATE;
        let near = two_seconds * 999 / 1000..=two_seconds;
        assert!(near.contains(&meter.credit), "{}", meter.credit);
        meter.earn(start + Duration::from_secs(3600));
        assert_eq!(meter.credit, MAX_CREDIT);
    }
}
