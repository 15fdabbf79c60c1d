//! Text that is copied on one side and pasted on the other.
//!
//! Texts of clients go to the agent in the guest ([`host::clipboard`]), and texts that the guest
//! copies are offered to all clients. Clients with the extended clipboard (rfbproto) use
//! UTF-8, and texts are sent to them on request. Other clients get ISO 8859-1.
//!
//! Threats: compressed texts of clients may be bombs. Decompression stops at [`MAX_TEXT_BYTES`].

use std::io::{Read as _, Write as _};
use std::sync::OnceLock;

use anyhow::{Context, bail, ensure};
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use host::clipboard::MAX_TEXT_BYTES;

/// The only format that we support.
const TEXT: u32 = 1 << 0;
const CAPS: u32 = 1 << 24;
const REQUEST: u32 = 1 << 25;
const PEEK: u32 = 1 << 26;
const NOTIFY: u32 = 1 << 27;
const PROVIDE: u32 = 1 << 28;

/// A message of the extended clipboard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClipboardMessage {
    Caps {
        /// The client answers requests.
        request: bool,
        notify: bool,
    },
    /// The client requests our text.
    Request,
    /// The client asks whether we have a text.
    Peek,
    /// Whether the client has a text.
    Notify(bool),
    Provide(String),
    /// A message about formats that we do not support.
    Other,
}

/// A text that the guest copied. Its encoded forms are made once and shared by all clients, which
/// may request them as often as they like.
pub struct Text {
    text: String,
    latin: OnceLock<Vec<u8>>,
    packed: OnceLock<Vec<u8>>,
}

impl Text {
    pub fn new(text: &str) -> Self {
        Self { text: text.to_owned(), latin: OnceLock::new(), packed: OnceLock::new() }
    }

    pub fn latin(&self, out: &mut Vec<u8>) {
        out.extend(made(&self.latin, |out| latin(&self.text, out)));
    }

    pub fn provide(&self, out: &mut Vec<u8>) {
        out.extend(made(&self.packed, |out| provide(&self.text, out)));
    }

    /// Appends the reply to a request while the guest has not copied anything.
    pub fn nothing(out: &mut Vec<u8>) {
        static NOTHING: OnceLock<Vec<u8>> = OnceLock::new();
        out.extend(made(&NOTHING, |out| provide("", out)));
    }
}

fn made(cache: &OnceLock<Vec<u8>>, make: impl FnOnce(&mut Vec<u8>)) -> &[u8] {
    cache.get_or_init(|| {
        let mut out = Vec::new();
        make(&mut out);
        out
    })
}

/// Whether an extended message contains a text, which takes time to decompress.
pub fn is_text(bytes: &[u8]) -> bool {
    let flags = bytes.first_chunk().map_or(0, |flags| u32::from_be_bytes(*flags));
    flags & CAPS == 0 && flags & PROVIDE != 0
}

pub fn read(bytes: &[u8]) -> anyhow::Result<ClipboardMessage> {
    let (flags, rest) = bytes.split_first_chunk().context("a clipboard message without flags")?;
    let flags = u32::from_be_bytes(*flags);
    if flags & CAPS != 0 {
        return Ok(ClipboardMessage::Caps {
            request: flags & REQUEST != 0,
            notify: flags & NOTIFY != 0,
        });
    }
    let text = flags & TEXT != 0;
    Ok(match flags & (REQUEST | PEEK | NOTIFY | PROVIDE) {
        REQUEST if text => ClipboardMessage::Request,
        PEEK => ClipboardMessage::Peek,
        NOTIFY => ClipboardMessage::Notify(text),
        // Text is the first of all formats.
        PROVIDE if text => ClipboardMessage::Provide(unpack(rest)?),
        REQUEST | PROVIDE => ClipboardMessage::Other,
        _ => bail!("a clipboard message with invalid flags {flags:#x}"),
    })
}

fn unpack(packed: &[u8]) -> anyhow::Result<String> {
    let mut unpacked = ZlibDecoder::new(packed);
    let mut length = [0; 4];
    unpacked.read_exact(&mut length).context("the length of a clipboard text")?;
    let length = u32::from_be_bytes(length) as usize;
    ensure!(
        length <= MAX_TEXT_BYTES,
        "a clipboard text of {length} bytes: at most {MAX_TEXT_BYTES}"
    );
    let mut text = Vec::new();
    unpacked.take(length as u64).read_to_end(&mut text).context("a clipboard text")?;
    ensure!(
        text.len() == length,
        "a clipboard text of {} bytes: {length} were announced",
        text.len()
    );
    let text = String::from_utf8(text).context("a clipboard text")?;
    Ok(text.trim_end_matches('\0').replace("\r\n", "\n"))
}

/// Converts a text from ISO 8859-1, and its line ends to `\n`.
pub fn from_latin(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect::<String>().replace("\r\n", "\n")
}

/// Appends `ServerCutText` of RFC 6143. Characters outside ISO 8859-1 become question marks.
pub fn latin(text: &str, out: &mut Vec<u8>) {
    let letter = |letter: char| u8::try_from(u32::from(letter)).unwrap_or(b'?');
    let bytes: Vec<u8> = text.chars().map(letter).collect();
    out.extend([3, 0, 0, 0]);
    out.extend(u32::try_from(bytes.len()).unwrap_or(0).to_be_bytes());
    out.extend(bytes);
}

/// Appends our features: text, on request.
pub fn caps(out: &mut Vec<u8>) {
    message(TEXT | CAPS | REQUEST | PEEK | NOTIFY | PROVIDE, &0_u32.to_be_bytes(), out);
}

pub fn request(out: &mut Vec<u8>) {
    message(TEXT | REQUEST, &[], out);
}

pub fn notify(text: bool, out: &mut Vec<u8>) {
    message(NOTIFY | if text { TEXT } else { 0 }, &[], out);
}

pub fn provide(text: &str, out: &mut Vec<u8>) {
    let text = format!("{}\0", text.replace('\n', "\r\n"));
    let length = u32::try_from(text.len()).unwrap_or(0).to_be_bytes();
    let mut packed = ZlibEncoder::new(Vec::new(), Compression::fast());
    let written = packed.write_all(&length).and_then(|()| packed.write_all(text.as_bytes()));
    let packed = written.and_then(|()| packed.finish()).expect("memory takes all");
    message(TEXT | PROVIDE, &packed, out);
}

fn message(flags: u32, rest: &[u8], out: &mut Vec<u8>) {
    let length = i32::try_from(4 + rest.len()).unwrap_or(i32::MAX);
    out.extend([3, 0, 0, 0]);
    out.extend((-length).to_be_bytes());
    out.extend(flags.to_be_bytes());
    out.extend(rest);
}

#[cfg(test)]
mod test {
    use super::*;

    /// The body of one of our messages, which has the same format as a client's.
    fn body(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out);
        let length = i32::from_be_bytes(out[4..8].try_into().unwrap());
        assert_eq!(usize::try_from(-length).unwrap(), out.len() - 8);
        out.split_off(8)
    }

    #[test]
    fn written_messages_read_back() {
        let say = |write: fn(&mut Vec<u8>)| read(&body(write)).unwrap();
        assert_eq!(say(caps), ClipboardMessage::Caps { request: true, notify: true });
        assert_eq!(say(request), ClipboardMessage::Request);
        assert_eq!(say(|out| notify(true, out)), ClipboardMessage::Notify(true));
        assert_eq!(say(|out| notify(false, out)), ClipboardMessage::Notify(false));
        let text = "zwei\nZeilen, ä€😀";
        assert_eq!(
            read(&body(|out| provide(text, out))).unwrap(),
            ClipboardMessage::Provide(text.into())
        );
    }

    #[test]
    fn refuses_bombs_and_noise() {
        let bomb = |length: u32, zeros: usize| {
            let mut packed = ZlibEncoder::new(Vec::new(), Compression::best());
            packed.write_all(&length.to_be_bytes()).unwrap();
            packed.write_all(&vec![b'0'; zeros]).unwrap();
            [&(TEXT | PROVIDE).to_be_bytes()[..], &packed.finish().unwrap()].concat()
        };
        assert!(read(&bomb(u32::MAX, 8 << 20)).is_err());
        let first = read(&bomb(3, 8 << 20)).unwrap();
        assert_eq!(first, ClipboardMessage::Provide("000".into()), "the rest is ignored");
        assert!(read(&bomb(9, 3)).is_err(), "too short");
        for bad in [&[][..], &[1, 2, 3], &[0, 0, 0, 0], &[6, 0, 0, 1], &[16, 0, 0, 1, 9, 9, 9]] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        assert_eq!(read(&[16, 0, 0, 2, 9]).unwrap(), ClipboardMessage::Other);
    }

    #[test]
    fn old_clients_have_latin_letters() {
        assert_eq!(from_latin(b"\xe4\r\nb"), "ä\nb");
        let mut out = Vec::new();
        latin("ä€", &mut out);
        assert_eq!(out, [3, 0, 0, 0, 0, 0, 0, 2, 0xe4, b'?']);
    }
}
