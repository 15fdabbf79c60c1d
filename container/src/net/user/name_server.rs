//! The gateway's name server for TCP connections of the guest: messages with length prefixes (RFC
//! 1035, 4.2.2). It is connected without a socket.
//!
//! Threats: the guest sends any bytes, or does not read. Questions are handled one at a time. The
//! next one is accepted when the guest has read the answer.

use std::cell::{Cell, RefCell};
use std::io;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::tcp::buffer::Buffer;
use crate::net::dns::Transport;
use crate::net::relay::Relay;

/// The maximum time without a question, and for reading an answer (RFC 7766, 6.2.3).
const IDLE: Duration = Duration::from_secs(30);
/// Bytes of a length prefix.
const LENGTH: usize = 2;
/// The maximum size of a question in bytes. A name has at most 255 of them.
pub const MAX_QUESTION: usize = 4096;

/// Both ends: the connection writes questions and reads answers, which [`NameServer::serve`]
/// writes.
#[derive(Debug, Default)]
pub struct NameServer {
    question: RefCell<Vec<u8>>,
    answer: RefCell<Buffer>,
    /// The guest has ended its side.
    ended: Cell<bool>,
    /// No more answers follow.
    closed: Cell<bool>,
    /// Wakes the connection.
    answered: Notify,
    /// Wakes the server.
    asked: Notify,
}

impl NameServer {
    fn missing(&self) -> usize {
        let question = self.question.borrow();
        let length = question.first_chunk().map_or(0, |length| u16::from_be_bytes(*length).into());
        (LENGTH + length).saturating_sub(question.len())
    }

    /// Writes bytes of a question.
    ///
    /// # Errors
    ///
    /// `WouldBlock` while a question waits for its answer. `BrokenPipe` after the end, or if the
    /// question is too long.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let missing = self.missing();
        if self.closed.get() || missing > MAX_QUESTION {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if missing == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let taken = missing.min(bytes.len());
        self.question.borrow_mut().extend(&bytes[..taken]);
        self.asked.notify_waiters();
        Ok(taken)
    }

    /// Appends bytes of an answer to `buffer`, within its capacity. Returns 0 at the end.
    ///
    /// # Errors
    ///
    /// `WouldBlock` while there is no answer.
    pub fn try_read_buf(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        let mut answer = self.answer.borrow_mut();
        if answer.is_empty() {
            let end = io::ErrorKind::WouldBlock.into();
            return if self.closed.get() { Ok(0) } else { Err(end) };
        }
        let count = answer.len().min(buffer.capacity() - buffer.len());
        buffer.extend(&answer.bytes()[..count]);
        answer.take(count);
        self.asked.notify_waiters();
        Ok(count)
    }

    /// Waits until [`NameServer::try_read_buf`] does not block.
    pub async fn readable(&self) {
        while self.answer.borrow().is_empty() && !self.closed.get() {
            self.answered.notified().await;
        }
    }

    /// Waits until [`NameServer::try_write`] does not block.
    pub async fn writable(&self) {
        while self.missing() == 0 && !self.closed.get() {
            self.answered.notified().await;
        }
    }

    /// Ends the guest's side.
    pub fn shutdown(&self) {
        self.ended.set(true);
        self.asked.notify_waiters();
    }

    pub async fn serve(&self, relay: &Relay) {
        while let Ok(Some(question)) = timeout(IDLE, self.question()).await {
            let Some(answer) = relay.answer(&question, Transport::Tcp).await else { break };
            let Ok(length) = u16::try_from(answer.len()) else { break };
            {
                let mut buffer = self.answer.borrow_mut();
                buffer.push(&length.to_be_bytes());
                buffer.push(&answer);
            }
            self.answered.notify_waiters();
            if timeout(IDLE, self.taken()).await.is_err() {
                break;
            }
            self.answer.borrow_mut().release();
            self.question.borrow_mut().clear();
            self.answered.notify_waiters();
        }
        self.closed.set(true);
        self.answered.notify_waiters();
    }

    /// Waits for a complete question. Nothing after the end.
    async fn question(&self) -> Option<Vec<u8>> {
        while self.missing() > 0 {
            if self.ended.get() {
                return None;
            }
            self.asked.notified().await;
        }
        Some(self.question.borrow()[LENGTH..].to_vec())
    }

    /// Waits until the answer has been read.
    async fn taken(&self) {
        while !self.answer.borrow().is_empty() {
            self.asked.notified().await;
        }
    }
}

#[cfg(test)]
mod test {
    use std::net::Ipv4Addr;
    use std::path::Path;

    use super::*;
    use crate::net::dns::LocalNames;

    fn relay() -> Relay {
        let gateway = Ipv4Addr::new(10, 0, 2, 2);
        let guest = Ipv4Addr::new(10, 0, 2, 15);
        let local = LocalNames { gateway, guest, default_gateway: None, host: "guest".into() };
        Relay::new(local, Path::new("/nowhere"))
    }

    /// A question for the address of `host.lan`, with its length prefix.
    fn question() -> Vec<u8> {
        let head = [0, 26, 7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        [&head[..], b"\x04host\x03lan\0", &[0, 1, 0, 1]].concat()
    }

    async fn ask(names: &NameServer) -> Vec<u8> {
        let mut rest = &question()[..];
        while !rest.is_empty() {
            names.writable().await;
            let count = names.try_write(&rest[..rest.len().min(5)]).unwrap();
            rest = &rest[count..];
        }
        assert_eq!(names.try_write(&[0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let mut answer = Vec::with_capacity(7);
        while answer.len() < LENGTH
            || answer.len() < LENGTH + usize::from(u16::from_be_bytes([answer[0], answer[1]]))
        {
            names.readable().await;
            answer.reserve_exact(7);
            names.try_read_buf(&mut answer).unwrap();
        }
        answer
    }

    #[tokio::test]
    async fn consecutive_queries_are_answered_until_the_connection_ends() {
        let (names, relay) = (NameServer::default(), relay());
        let asked = async {
            for _ in 0..3 {
                let answer = ask(&names).await;
                assert_eq!(answer[2..4], [7, 7]);
                assert!(answer.ends_with(&[10, 0, 2, 2]), "{answer:?}");
            }
            names.shutdown();
            names.readable().await;
            assert_eq!(names.try_read_buf(&mut Vec::with_capacity(1)).unwrap(), 0);
        };
        tokio::join!(asked, names.serve(&relay));
    }

    #[test]
    fn an_oversized_query_is_not_buffered() {
        let names = NameServer::default();
        assert_eq!(names.try_write(&[0xff; 70_000]).unwrap(), 2);
        assert!(names.try_write(&[0xff; 70_000]).is_err());
        assert_eq!(names.question.borrow().len(), 2);
    }
}
