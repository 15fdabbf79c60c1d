//! Text that is copied on one side and pasted on the other.
//!
//! The guest's side is an agent's: it takes what clients offer ([`Clipboard`]), and what the guest
//! copies is given to all clients. Clients that know the extended clipboard (rfbproto) speak UTF-8
//! and are asked before anything is sent; others have ISO 8859-1.
//!
//! Threats: what a client packs is unpacked up to [`LONGEST_TEXT`] and no further.

use std::io::{Read as _, Write as _};
use std::sync::OnceLock;

use anyhow::{Context, bail, ensure};
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;

use super::message::LONGEST_TEXT;

/// The guest's side.
pub trait Clipboard: Send + Sync {
    /// A client copied this.
    fn copied(&self, text: &str);
}

/// The one format that we carry.
const TEXT: u32 = 1 << 0;
const CAPS: u32 = 1 << 24;
const REQUEST: u32 = 1 << 25;
const PEEK: u32 = 1 << 26;
const NOTIFY: u32 = 1 << 27;
const PROVIDE: u32 = 1 << 28;

/// What a client says of its clipboard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Say {
    /// What it can: whether it may be asked for text, and told of it.
    Caps {
        /// It answers requests.
        request: bool,
        /// It wants to be told.
        notify: bool,
    },
    /// It wants ours.
    Request,
    /// It wants to know whether we have something.
    Peek,
    /// It has some text, or none.
    Notify(bool),
    /// Its text.
    Provide(String),
    /// Formats that we do not carry.
    Other,
}

/// A text of the guest. What clients can ask for as often as they like is made once for all.
pub struct Text {
    text: String,
    latin: OnceLock<Vec<u8>>,
    packed: OnceLock<Vec<u8>>,
}

impl Text {
    /// What the guest copied.
    pub fn new(text: &str) -> Self {
        Self { text: text.to_owned(), latin: OnceLock::new(), packed: OnceLock::new() }
    }

    /// See [`latin`].
    pub fn latin(&self, out: &mut Vec<u8>) {
        out.extend(made(&self.latin, |out| latin(&self.text, out)));
    }

    /// See [`provide`].
    pub fn provide(&self, out: &mut Vec<u8>) {
        out.extend(made(&self.packed, |out| provide(&self.text, out)));
    }

    /// The text of a guest that copied none.
    pub fn nothing(out: &mut Vec<u8>) {
        static NOTHING: OnceLock<Vec<u8>> = OnceLock::new();
        out.extend(made(&NOTHING, |out| provide("", out)));
    }
}

fn made(place: &OnceLock<Vec<u8>>, make: impl FnOnce(&mut Vec<u8>)) -> &[u8] {
    place.get_or_init(|| {
        let mut out = Vec::new();
        make(&mut out);
        out
    })
}

/// Whether an extended message carries a text, which takes time to unpack.
pub fn is_text(bytes: &[u8]) -> bool {
    let flags = bytes.first_chunk().map_or(0, |flags| u32::from_be_bytes(*flags));
    flags & CAPS == 0 && flags & PROVIDE != 0
}

/// Reads an extended message.
///
/// # Errors
///
/// When it is none, or its text is too long.
pub fn read(bytes: &[u8]) -> anyhow::Result<Say> {
    let (flags, rest) = bytes.split_first_chunk().context("a clipboard message without flags")?;
    let flags = u32::from_be_bytes(*flags);
    if flags & CAPS != 0 {
        return Ok(Say::Caps { request: flags & REQUEST != 0, notify: flags & NOTIFY != 0 });
    }
    let text = flags & TEXT != 0;
    Ok(match flags & (REQUEST | PEEK | NOTIFY | PROVIDE) {
        REQUEST if text => Say::Request,
        PEEK => Say::Peek,
        NOTIFY => Say::Notify(text),
        // Text is the first of all formats.
        PROVIDE if text => Say::Provide(unpack(rest)?),
        REQUEST | PROVIDE => Say::Other,
        _ => bail!("a clipboard message with the flags {flags:#x}"),
    })
}

fn unpack(packed: &[u8]) -> anyhow::Result<String> {
    let mut unpacked = ZlibDecoder::new(packed);
    let mut length = [0; 4];
    unpacked.read_exact(&mut length).context("a clipboard's length")?;
    let length = u32::from_be_bytes(length) as usize;
    ensure!(length <= LONGEST_TEXT, "a clipboard of {length} bytes, where we take {LONGEST_TEXT}");
    let mut text = Vec::new();
    unpacked.take(length as u64).read_to_end(&mut text).context("a clipboard's text")?;
    ensure!(text.len() == length, "a clipboard of {} bytes that said {length}", text.len());
    let text = String::from_utf8(text).context("a clipboard's text")?;
    Ok(text.trim_end_matches('\0').replace("\r\n", "\n"))
}

/// A text in ISO 8859-1, with line ends as they are here.
pub fn from_latin(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect::<String>().replace("\r\n", "\n")
}

/// ServerCutText as RFC 6143 has it; what ISO 8859-1 has not is a question mark.
pub fn latin(text: &str, out: &mut Vec<u8>) {
    let letter = |letter: char| u8::try_from(u32::from(letter)).unwrap_or(b'?');
    let bytes: Vec<u8> = text.chars().map(letter).collect();
    out.extend([3, 0, 0, 0]);
    out.extend(u32::try_from(bytes.len()).unwrap_or(0).to_be_bytes());
    out.extend(bytes);
}

/// What we can: text, after it was asked for.
pub fn caps(out: &mut Vec<u8>) {
    message(TEXT | CAPS | REQUEST | PEEK | NOTIFY | PROVIDE, &0_u32.to_be_bytes(), out);
}

/// Asks for the client's text.
pub fn request(out: &mut Vec<u8>) {
    message(TEXT | REQUEST, &[], out);
}

/// Says that there is text, or none.
pub fn notify(text: bool, out: &mut Vec<u8>) {
    message(NOTIFY | if text { TEXT } else { 0 }, &[], out);
}

/// Gives the text.
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

    /// What follows the header of our own messages, which is of the same form as a client's.
    fn body(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out);
        let length = i32::from_be_bytes(out[4..8].try_into().unwrap());
        assert_eq!(usize::try_from(-length).unwrap(), out.len() - 8);
        out.split_off(8)
    }

    #[test]
    fn what_is_written_reads_back() {
        let say = |write: fn(&mut Vec<u8>)| read(&body(write)).unwrap();
        assert_eq!(say(caps), Say::Caps { request: true, notify: true });
        assert_eq!(say(request), Say::Request);
        assert_eq!(say(|out| notify(true, out)), Say::Notify(true));
        assert_eq!(say(|out| notify(false, out)), Say::Notify(false));
        let text = "zwei\nZeilen, ä€😀";
        assert_eq!(read(&body(|out| provide(text, out))).unwrap(), Say::Provide(text.into()));
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
        assert_eq!(first, Say::Provide("000".into()), "the rest is not looked at");
        assert!(read(&bomb(9, 3)).is_err(), "too short");
        for bad in [&[][..], &[1, 2, 3], &[0, 0, 0, 0], &[6, 0, 0, 1], &[16, 0, 0, 1, 9, 9, 9]] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        assert_eq!(read(&[16, 0, 0, 2, 9]).unwrap(), Say::Other);
    }

    #[test]
    fn old_clients_have_latin_letters() {
        assert_eq!(from_latin(b"\xe4\r\nb"), "ä\nb");
        let mut out = Vec::new();
        latin("ä€", &mut out);
        assert_eq!(out, [3, 0, 0, 0, 0, 0, 0, 2, 0xe4, b'?']);
    }
}
