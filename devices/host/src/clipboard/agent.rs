//! The host's end of SPICE's agent protocol (spice-protocol's `vd_agent.h`), for plain texts.
//!
//! Bytes go in chunks: a port, a size, and a part of a message. A message is a header and a body.
//! Both sides announce their capabilities. The side that copies a text sends GRAB, and the other
//! side requests the text with REQUEST and gets it with CLIPBOARD. A text that the guest copies is
//! requested at once. There is no library for this side of the protocol.
//!
//! Threats: the guest controls every byte. A message that is longer than a text of
//! [`MAX_TEXT_BYTES`] is skipped without being stored. Messages to the guest are made when it reads
//! them: whatever it asks for is a flag or a counter ([`MAX_REPLIES`]) until then. It cannot flood
//! viewers: only requested texts reach them, and [`REQUESTS`] limits those.

use std::collections::VecDeque;
use std::mem::take;
use std::time::{Duration, Instant};

use super::MAX_TEXT_BYTES;

/// Ports of chunks. The guest's port makes no difference to us.
const CLIENT_PORT: u32 = 1;
const CHUNK_HEADER: usize = 8;
/// Bytes of a chunk that we send, as with QEMU. Windows' agent takes up to 2048.
const CHUNK: usize = 1024;

/// Protocol, type, an opaque number of 8 bytes, and the size of the body.
const MESSAGE_HEADER: usize = 20;
const PROTOCOL: u32 = 1;
/// The body of a message with a text has two numbers before it.
const MAX_BODY: usize = MAX_TEXT_BYTES + 8;

/// Types of messages.
const CLIPBOARD: u32 = 4;
const ANNOUNCE: u32 = 6;
const GRAB: u32 = 7;
const REQUEST: u32 = 8;
const MAX_CLIPBOARD: u32 = 14;

/// Capabilities, as bits of their first word.
const BY_DEMAND: u32 = 1 << 5;
/// A number before each clipboard message says which clipboard it is.
const SELECTION: u32 = 1 << 6;
const LINES_END_WITH_CRLF: u32 = 1 << 9;
const HAS_MAX_CLIPBOARD: u32 = 1 << 10;
const OURS: u32 = BY_DEMAND | SELECTION | HAS_MAX_CLIPBOARD;

/// The clipboard of Ctrl-C, unlike X11's selection.
const MAIN: u32 = 0;
const UTF8_TEXT: u32 = 1;
/// The number of texts that are requested from the guest in this time. People copy less often, and
/// each text makes all viewers busy.
const REQUESTS: (usize, Duration) = (16, Duration::from_secs(4));
/// Requests that are answered if the guest reads no reply in between.
const MAX_REPLIES: u8 = 16;

#[derive(Default)]
pub struct Agent {
    open: bool,
    received: Received,
    /// Those of the guest's agent.
    capabilities: u32,
    /// The text that a viewer copied last, as the guest expects it.
    offered: String,
    /// A text was requested from the guest, which has read the request, and has not arrived.
    requested: bool,
    /// When texts were requested lately.
    requests: VecDeque<Instant>,
    due: Due,
    /// The chunks of one message, and the bytes of it that were read already.
    out: Vec<u8>,
    sent: usize,
}

/// Messages that the guest has not read yet, in their order.
#[derive(Default)]
struct Due {
    /// Whether the guest must answer with its own.
    capabilities: Option<bool>,
    limit: bool,
    grab: bool,
    replies: u8,
    request: bool,
}

/// The incomplete parts of what the guest sent.
#[derive(Default)]
struct Received {
    chunk_header: Vec<u8>,
    /// Bytes that are left of the chunk.
    chunk: usize,
    header: Vec<u8>,
    /// None between messages.
    body: Option<Body>,
}

struct Body {
    kind: u32,
    bytes: Vec<u8>,
    left: usize,
    /// It is too long.
    skipped: bool,
}

impl Agent {
    /// Closing the port forgets the agent and everything that was on its way, but not the limit.
    pub fn set_open(&mut self, open: bool) {
        if self.open == open {
            return;
        }
        let requests = take(&mut self.requests);
        *self = Self { open, requests, ..Self::default() };
        self.due.capabilities = open.then_some(true);
    }

    pub fn takes_texts(&self) -> bool {
        self.capabilities & BY_DEMAND != 0
    }

    /// Announces a text of a viewer to the guest.
    pub fn offer(&mut self, text: &str) {
        if !self.takes_texts() || text.len() > MAX_TEXT_BYTES {
            return;
        }
        let crlf = self.capabilities & LINES_END_WITH_CRLF != 0;
        self.offered = if crlf { text.replace('\n', "\r\n") } else { text.to_owned() };
        self.requested = false;
        self.due.grab = true;
        self.due.request = false;
    }

    pub fn has_bytes(&self) -> bool {
        let Due { capabilities, limit, grab, replies, request } = self.due;
        let due = capabilities.is_some() || limit || grab || replies > 0 || request;
        self.open && (due || self.sent < self.out.len())
    }

    /// Fills `buffer` with what there is for the guest, and returns the number of bytes.
    pub fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut count = 0;
        while count < buffer.len() && self.has_bytes() {
            if self.sent == self.out.len() {
                (self.out, self.sent) = (self.next_message(), 0);
            }
            let rest = &self.out[self.sent..];
            let part = rest.len().min(buffer.len() - count);
            buffer[count..count + part].copy_from_slice(&rest[..part]);
            (count, self.sent) = (count + part, self.sent + part);
        }
        if self.sent == self.out.len() {
            (self.out, self.sent) = (Vec::new(), 0);
        }
        count
    }

    fn next_message(&mut self) -> Vec<u8> {
        let due = &mut self.due;
        if let Some(request) = due.capabilities.take() {
            return message(ANNOUNCE, &[&u32::from(request).to_le_bytes(), &OURS.to_le_bytes()]);
        }
        let selection = MAIN.to_le_bytes();
        let selection = &selection[..if self.capabilities & SELECTION == 0 { 0 } else { 4 }];
        let text = UTF8_TEXT.to_le_bytes();
        if take(&mut due.limit) {
            let limit = u32::try_from(MAX_TEXT_BYTES).expect("a constant").to_le_bytes();
            message(MAX_CLIPBOARD, &[&limit])
        } else if take(&mut due.grab) {
            message(GRAB, &[selection, &text])
        } else if due.replies > 0 {
            due.replies -= 1;
            message(CLIPBOARD, &[selection, &text, self.offered.as_bytes()])
        } else {
            due.request = false;
            self.requested = true;
            message(REQUEST, &[selection, &text])
        }
    }

    /// Counts a request, unless there were too many.
    fn may_request(&mut self) -> bool {
        let now = Instant::now();
        while self.requests.pop_front_if(|it| now.duration_since(*it) > REQUESTS.1).is_some() {}
        let may = self.requests.len() < REQUESTS.0;
        if may {
            self.requests.push_back(now);
        }
        may
    }

    /// Takes bytes of the guest. Returns the texts that it copied.
    pub fn write(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut texts = Vec::new();
        let mut rest = bytes;
        while let Some((kind, body)) = self.received.next(&mut rest) {
            texts.extend(self.handle(kind, &body));
        }
        texts
    }

    fn handle(&mut self, kind: u32, body: &[u8]) -> Option<String> {
        if kind == ANNOUNCE {
            let (request, body) = number(body)?;
            (self.capabilities, _) = number(body)?;
            self.due.limit = self.capabilities & HAS_MAX_CLIPBOARD != 0;
            if request != 0 {
                self.due.capabilities = Some(false);
            }
            return None;
        }
        if !self.takes_texts() {
            return None;
        }
        let (selection, body) =
            if self.capabilities & SELECTION == 0 { (MAIN, body) } else { number(body)? };
        // Only the first byte is defined.
        if selection & 0xff != MAIN {
            return None;
        }
        match kind {
            GRAB => {
                let text = body.chunks_exact(4).any(|it| it == UTF8_TEXT.to_le_bytes());
                (self.due.request, self.requested) = (text && self.may_request(), false);
                // Its own text has replaced the viewer's.
                (self.due.grab, self.offered) = (false, String::new());
                None
            }
            REQUEST => {
                let (wanted, _) = number(body)?;
                if wanted == UTF8_TEXT {
                    self.due.replies = MAX_REPLIES.min(self.due.replies + 1);
                }
                None
            }
            CLIPBOARD => {
                let (kind, text) = number(body)?;
                // Without our request, the guest could make viewers busy.
                let wanted = kind == UTF8_TEXT && take(&mut self.requested);
                wanted.then(|| clean(text))
            }
            _ => None,
        }
    }
}

impl Received {
    /// Takes bytes until a message is complete. Returns its type and body.
    fn next(&mut self, bytes: &mut &[u8]) -> Option<(u32, Vec<u8>)> {
        loop {
            if self.chunk == 0 {
                let [_port, size] = numbers(&gather(&mut self.chunk_header, CHUNK_HEADER, bytes)?);
                self.chunk = size as usize;
                continue;
            }
            let mut part = &bytes[..self.chunk.min(bytes.len())];
            let before = part.len();
            let done = self.next_of_chunk(&mut part);
            let used = before - part.len();
            *bytes = &bytes[used..];
            self.chunk -= used;
            if done.is_some() {
                return done;
            }
            if bytes.is_empty() {
                return None;
            }
        }
    }

    fn next_of_chunk(&mut self, bytes: &mut &[u8]) -> Option<(u32, Vec<u8>)> {
        let body = match &mut self.body {
            Some(body) => body,
            None => {
                let header = gather(&mut self.header, MESSAGE_HEADER, bytes)?;
                let [_protocol, kind, _, _, size] = numbers(&header);
                let left = size as usize;
                let skipped = left > MAX_BODY;
                self.body.insert(Body { kind, bytes: Vec::new(), left, skipped })
            }
        };
        let (part, rest) = bytes.split_at(body.left.min(bytes.len()));
        *bytes = rest;
        body.left -= part.len();
        if !body.skipped {
            body.bytes.extend(part);
        }
        self.body
            .take_if(|body| body.left == 0)
            .filter(|it| !it.skipped)
            .map(|it| (it.kind, it.bytes))
    }
}

/// Moves bytes to `place` until it has `size`. Returns them, and empties `place`, when it has.
fn gather(place: &mut Vec<u8>, size: usize, bytes: &mut &[u8]) -> Option<Vec<u8>> {
    let (part, rest) = bytes.split_at(bytes.len().min(size - place.len()));
    place.extend(part);
    *bytes = rest;
    (place.len() == size).then(|| take(place))
}

fn numbers<const N: usize>(bytes: &[u8]) -> [u32; N] {
    std::array::from_fn(|at| number(&bytes[4 * at..]).map_or(0, |it| it.0))
}

fn number(bytes: &[u8]) -> Option<(u32, &[u8])> {
    bytes.split_first_chunk().map(|(number, rest)| (u32::from_le_bytes(*number), rest))
}

/// A text of the guest with our line ends. Agents for Windows send the zero at its end.
fn clean(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.trim_end_matches('\0').replace("\r\n", "\n")
}

/// A message in chunks.
fn message(kind: u32, body: &[&[u8]]) -> Vec<u8> {
    let body = body.concat();
    let size = u32::try_from(body.len()).expect("a text is limited").to_le_bytes();
    let header = [PROTOCOL.to_le_bytes(), kind.to_le_bytes(), [0; 4], [0; 4], size].concat();
    let mut out = Vec::new();
    for chunk in [header, body].concat().chunks(CHUNK) {
        out.extend(CLIENT_PORT.to_le_bytes());
        out.extend(u32::try_from(chunk.len()).expect("a small number").to_le_bytes());
        out.extend(chunk);
    }
    out
}

#[cfg(test)]
mod test;
