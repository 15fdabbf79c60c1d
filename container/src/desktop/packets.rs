//! A read of the server's first packets never has parts of two.
//!
//! IronRDP's client in a browser reads the connection sequence (MS-RDPBCGR 1.3.1.1) and the session
//! by two readers, and loses what the first one has read too much. It reads a WebSocket message at
//! a time, and the gateway sends one for each read.
//!
//! Threats: the server sends these bytes. An unknown start of a packet ends the division.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

use super::info::{CREDSSP, Length, frame_length};

/// More packets than a connection sequence has: a server answers for each of up to 31 channels.
const DIVIDED: usize = 256;
/// Bytes that are read at a time.
const PIECE: usize = 16 << 10;
/// The longest header of a packet.
const MAX_HEAD: usize = 4;
/// The result of an early sign-in (MS-RDPBCGR 2.2.10.2), which has no header.
const EARLY_RESULT_BYTES: usize = 4;
/// The bits of a fast-path packet's first byte that are zero (MS-RDPBCGR 2.2.9.1.2).
const FAST_PATH_ZEROS: u8 = 0x3f;

/// Finds the ends of packets.
#[derive(Default)]
pub struct Divider {
    head: Vec<u8>,
    position: usize,
    packets: usize,
}

impl Divider {
    /// The number of these bytes until a packet ends, or all of them.
    pub fn next(&mut self, bytes: &[u8]) -> usize {
        if self.packets >= DIVIDED {
            return bytes.len();
        }
        for (at, byte) in bytes.iter().enumerate() {
            if self.head.len() < MAX_HEAD {
                self.head.push(*byte);
            }
            self.position += 1;
            match packet_length(&self.head) {
                Length::Known(length) if self.position < length => {}
                Length::Known(length) if length == self.position => {
                    (self.packets, self.position) = (self.packets + 1, 0);
                    self.head.clear();
                    return at + 1;
                }
                Length::Unknown => {}
                Length::Known(_) | Length::Invalid => {
                    self.packets = DIVIDED;
                    return bytes.len();
                }
            }
        }
        bytes.len()
    }
}

/// The length of a server's packet with its header.
fn packet_length(head: &[u8]) -> Length {
    match *head {
        [0, 0, ..] => Length::Known(EARLY_RESULT_BYTES),
        [first, ..] if first == CREDSSP || first & FAST_PATH_ZEROS != 0 => frame_length(head),
        [_, short @ ..=0x7f, ..] => Length::Known(short.into()),
        [_, high, low, ..] => Length::Known(u16::from_be_bytes([high & 0x7f, low]).into()),
        _ => Length::Unknown,
    }
}

/// The bytes of a server, divided.
pub(super) struct Divided<S> {
    stream: S,
    divider: Divider,
    /// The bytes that were read. Those from `passed` on were not passed on yet.
    read: Vec<u8>,
    passed: usize,
}

impl<S> Divided<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, divider: Divider::default(), read: Vec::new(), passed: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Divided<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.passed == this.read.len() {
            if this.divider.packets >= DIVIDED {
                return Pin::new(&mut this.stream).poll_read(cx, buf);
            }
            this.read.resize(PIECE, 0);
            let mut read = ReadBuf::new(&mut this.read);
            let polled = Pin::new(&mut this.stream).poll_read(cx, &mut read);
            let count = read.filled().len();
            this.read.truncate(count);
            this.passed = 0;
            ready!(polled)?;
        }
        let left = &this.read[this.passed..];
        let count = this.divider.next(&left[..left.len().min(buf.remaining())]);
        buf.put_slice(&left[..count]);
        this.passed += count;
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod test {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// One packet of each kind, in the order of a connection.
    fn packets() -> Vec<Vec<u8>> {
        let fast_path = [&[0x80, 0x81, 0x00][..], &[7; 253]].concat();
        vec![
            [&[CREDSSP, 2][..], &[1; 2]].concat(),
            [&[CREDSSP, 0x82, 0x01, 0x00][..], &[1; 256]].concat(),
            vec![0; 4],
            vec![3, 0, 0, 7, 1, 2, 3],
            vec![0, 5, 9, 9, 9],
            fast_path,
            vec![3, 0, 0, 4],
        ]
    }

    #[tokio::test]
    async fn each_read_has_one_packet() {
        let all = packets().concat();
        let mut divided = Divided::new(io::Cursor::new(all));
        let mut room = [0; 4096];
        for packet in packets() {
            let count = divided.read(&mut room).await.unwrap();
            assert_eq!(room[..count], packet);
        }
        assert_eq!(divided.read(&mut room).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn no_byte_is_lost_whatever_the_size_of_reads() {
        let unknown = [0xff; 5000];
        let all = [&packets().concat().repeat(60)[..], &unknown[..]].concat();
        for size in [1, 3, 64, 70_000] {
            let mut divided = Divided::new(io::Cursor::new(all.clone()));
            let (mut got, mut room) = (Vec::new(), vec![0; size]);
            while let Ok(count @ 1..) = divided.read(&mut room).await {
                got.extend_from_slice(&room[..count]);
            }
            assert!(got == all, "{size}");
        }
        // After an unknown start, and after many packets, bytes pass as they come.
        let mut divider = Divider::default();
        assert_eq!(divider.next(&unknown), unknown.len());
        assert_eq!(divider.next(&packets().concat()), packets().concat().len());
    }
}
