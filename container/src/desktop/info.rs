//! The client's info packet (MS-RDPBCGR 2.2.1.11), whose flags the gateway changes on the way:
//! IronRDP's client in a browser cannot set them. Sound stays at the machine, whose sound card
//! takes it to the page, and a server without CredSSP signs the user in.
//!
//! Threats: the browser sends these bytes. They are neither kept nor trusted: an unknown start of a
//! frame ends the search.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

/// The first byte of a frame of CredSSP, and of a packet of RFC 1006.
pub(super) const CREDSSP: u8 = 0x30;
const PACKET: u8 = 3;
/// `SendDataRequest` of T.125 after an X.224 data header, and where both are in a packet.
const SEND: [u8; 4] = [2, 0xf0, 0x80, 0x64];
const SEND_AT: usize = 4;
/// Where the length of the data is. It takes two bytes if the highest bit is set.
const LENGTH_AT: usize = 13;
/// `SEC_INFO_PKT`, which is followed by a code page and the flags.
const INFO: [u8; 4] = [0x40, 0, 0, 0];
const CODE_PAGE_BYTES: usize = 4;
const FLAGS_BYTES: usize = 4;
const INFO_AUTOLOGON: u32 = 1 << 3;
const INFO_REMOTECONSOLEAUDIO: u32 = 1 << 13;
const INFO_NOAUDIOPLAYBACK: u32 = 1 << 19;
const SET: [u8; FLAGS_BYTES] = (INFO_AUTOLOGON | INFO_REMOTECONSOLEAUDIO).to_le_bytes();
const CLEAR: [u8; FLAGS_BYTES] = INFO_NOAUDIOPLAYBACK.to_le_bytes();
/// The end of `SEC_INFO_PKT` at most.
const MAX_HEAD: usize = LENGTH_AT + 2 + INFO.len();

/// Finds the info packet in the bytes of a client.
#[derive(Default)]
pub struct InfoFilter {
    /// The first bytes of the current frame.
    head: Vec<u8>,
    /// Bytes of the current frame so far.
    position: usize,
    /// Frames of CredSSP came before this one.
    credssp: bool,
    /// The client went on after CredSSP, in which the server proved that it knows the password.
    pub proven: bool,
    done: bool,
}

impl InfoFilter {
    /// Passes the next bytes on, which may end anywhere. Changes the flags if they are here.
    pub fn pass(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            if self.done {
                return;
            }
            self.pass_byte(byte);
        }
    }

    fn pass_byte(&mut self, byte: &mut u8) {
        if self.position == 0 {
            self.proven |= self.credssp && *byte == PACKET;
            self.credssp |= *byte == CREDSSP;
        }
        if self.head.len() < MAX_HEAD {
            self.head.push(*byte);
        }
        if let Some(at) = flags_at(&self.head)
            && let Some(number @ 0..FLAGS_BYTES) = self.position.checked_sub(at)
        {
            *byte = (*byte & !CLEAR[number]) | SET[number];
            self.done = number + 1 == FLAGS_BYTES;
        }
        self.position += 1;
        match frame_length(&self.head) {
            Length::Unknown => {}
            Length::Invalid => self.done = true,
            Length::Known(length) if length == self.position => {
                self.head.clear();
                self.position = 0;
            }
            Length::Known(length) => self.done |= length < self.position,
        }
    }
}

/// Where the flags are, if this is the start of an info packet.
fn flags_at(head: &[u8]) -> Option<usize> {
    let is_send = head.first() == Some(&PACKET) && head.get(SEND_AT..)?.starts_with(&SEND);
    let long = *head.get(LENGTH_AT)? & 0x80 != 0;
    let info_at = LENGTH_AT + if long { 2 } else { 1 };
    let is_info = is_send && head.get(info_at..)?.starts_with(&INFO);
    is_info.then_some(info_at + INFO.len() + CODE_PAGE_BYTES)
}

pub(super) enum Length {
    /// More bytes are needed.
    Unknown,
    Known(usize),
    Invalid,
}

/// The length of a frame with its header.
pub(super) fn frame_length(head: &[u8]) -> Length {
    match *head {
        [PACKET, _, high, low, ..] => Length::Known(u16::from_be_bytes([high, low]).into()),
        // The lengths of DER.
        [CREDSSP, short @ ..=0x7f, ..] => Length::Known(2 + usize::from(short)),
        [CREDSSP, 0x81, length, ..] => Length::Known(3 + usize::from(length)),
        [CREDSSP, 0x82, high, low, ..] => {
            Length::Known(4 + usize::from(u16::from_be_bytes([high, low])))
        }
        [] | [PACKET] | [PACKET, _] | [PACKET, _, _] => Length::Unknown,
        [CREDSSP] | [CREDSSP, 0x81] | [CREDSSP, 0x82] | [CREDSSP, 0x82, _] => Length::Unknown,
        _ => Length::Invalid,
    }
}

/// The bytes of a browser through an [`InfoFilter`].
pub(super) struct Filtered<S> {
    stream: S,
    filter: InfoFilter,
    on_proof: Option<Box<dyn FnOnce() + Send>>,
}

impl<S> Filtered<S> {
    /// `on_proof` is called when the client has the server's proof.
    pub(super) fn new(stream: S, on_proof: Box<dyn FnOnce() + Send>) -> Self {
        Self { stream, filter: InfoFilter::default(), on_proof: Some(on_proof) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Filtered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.filter.pass(&mut buf.filled_mut()[before..]);
        if self.filter.proven
            && let Some(on_proof) = self.on_proof.take()
        {
            on_proof();
        }
        Poll::Ready(Ok(()))
    }
}
