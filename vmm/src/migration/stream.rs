//! The messages of a migration: a line that names the format, then messages with a header of 24
//! bytes, little endian: kind, CRC-32 of the rest of the message, part of memory, length, offset.

use std::io::{ErrorKind, Read, Write};

use anyhow::{Context, bail, ensure};
use host::ram::PAGE;

/// The first line of both ends. Another version of the messages needs another number.
const FORMAT: &[u8; 20] = b"transom migration 1\n";
const HEADER: usize = 24;
/// The most bytes of pages in one message.
pub const MAX_PAGES: usize = 1 << 20;
/// Limits for a description of the machine, and for an answer.
const MAX_DESCRIPTION: u64 = 256 << 20;
const MAX_ANSWER: u64 = 64 << 10;

#[derive(Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// The first one: what the machine is, before its memory is sent.
    Hello(&'a [u8]),
    Pages {
        place: Place,
        bytes: &'a [u8],
    },
    /// Pages of zeros.
    Zeros {
        place: Place,
        length: u64,
    },
    /// Asks for an answer, which shows that all before has arrived.
    Sync,
    /// The last one: the state of processors and devices.
    State(&'a [u8]),
    /// The machine ends here, and runs there.
    Go,
    Answer(&'a [u8]),
}

/// A place in a part of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub part: u32,
    pub offset: u64,
}

impl Message<'_> {
    /// Kind, place, length of what is described, and the bytes that follow.
    fn fields(&self) -> (u32, Place, u64, &[u8]) {
        let nowhere = Place { part: 0, offset: 0 };
        let (kind, place, bytes) = match *self {
            Self::Hello(bytes) => (1, nowhere, bytes),
            Self::Pages { place, bytes } => (2, place, bytes),
            Self::Zeros { place, length } => return (3, place, length, &[]),
            Self::Sync => (4, nowhere, &[][..]),
            Self::State(bytes) => (5, nowhere, bytes),
            Self::Go => (6, nowhere, &[][..]),
            Self::Answer(bytes) => (7, nowhere, bytes),
        };
        (kind, place, bytes.len() as u64, bytes)
    }
}

pub struct Writer<W>(W);

impl<W: Write> Writer<W> {
    pub fn new(mut to: W) -> anyhow::Result<Self> {
        to.write_all(FORMAT).context("the other end")?;
        Ok(Self(to))
    }

    pub fn send(&mut self, message: &Message<'_>) -> anyhow::Result<()> {
        let (kind, place, length, bytes) = message.fields();
        let mut rest = [0; HEADER - 8];
        rest[..4].copy_from_slice(&place.part.to_le_bytes());
        rest[4..8].copy_from_slice(&u32::try_from(length)?.to_le_bytes());
        rest[8..].copy_from_slice(&place.offset.to_le_bytes());
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&checksum(&rest, bytes).to_le_bytes());
        header[8..].copy_from_slice(&rest);
        let sent = self.0.write_all(&header).and_then(|()| self.0.write_all(bytes));
        sent.context("the other end")
    }
}

fn checksum(rest: &[u8], bytes: &[u8]) -> u32 {
    let mut crc32 = crc32fast::Hasher::new();
    crc32.update(rest);
    crc32.update(bytes);
    crc32.finalize()
}

pub struct Reader<R> {
    from: R,
    begun: bool,
    /// The bytes of the last message.
    bytes: Vec<u8>,
}

impl<R: Read> Reader<R> {
    pub fn new(from: R) -> Self {
        Self { from, begun: false, bytes: Vec::new() }
    }

    fn begin(&mut self) -> anyhow::Result<()> {
        let mut line = [0; FORMAT.len()];
        self.from.read_exact(&mut line).map_err(explain)?;
        ensure!(
            line == *FORMAT,
            "the other end does not speak this version's format of migrations (1): use the same \
             version of vmm at both ends"
        );
        self.begun = true;
        Ok(())
    }

    /// Waits for the next message.
    pub fn receive(&mut self) -> anyhow::Result<Message<'_>> {
        if !self.begun {
            self.begin()?;
        }
        let mut header = [0; HEADER];
        self.from.read_exact(&mut header).map_err(explain)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let (kind, crc32, part, length) = (word(0), word(4), word(8), u64::from(word(12)));
        let offset = u64::from(word(16)) | u64::from(word(20)) << 32;
        let (limit, unit) = match kind {
            1 | 5 => (MAX_DESCRIPTION, 1),
            2 => (MAX_PAGES as u64, PAGE as u64),
            3 => (u64::MAX, PAGE as u64),
            7 => (MAX_ANSWER, 1),
            _ => (0, 1),
        };
        ensure!(
            length <= limit && length.is_multiple_of(unit) && offset.is_multiple_of(unit),
            "a message of kind {kind} has {length} bytes for offset {offset}: the stream is damaged"
        );
        let follows = if kind == 3 { 0 } else { length };
        // The buffer grows with what arrives, not with what is announced.
        self.bytes.clear();
        let read = (&mut self.from).take(follows).read_to_end(&mut self.bytes);
        let read = read.map_err(explain)? as u64;
        ensure!(read == follows, GONE);
        ensure!(
            checksum(&header[8..], &self.bytes) == crc32,
            "a message has a wrong checksum: the stream is damaged"
        );
        let (bytes, place) = (&self.bytes[..], Place { part, offset });
        Ok(match kind {
            1 => Message::Hello(bytes),
            2 => Message::Pages { place, bytes },
            3 => Message::Zeros { place, length },
            4 => Message::Sync,
            5 => Message::State(bytes),
            6 => Message::Go,
            7 => Message::Answer(bytes),
            _ => bail!("a message has the unknown kind {kind}: the stream is damaged"),
        })
    }
}

const GONE: &str = "the connection to the other end is cut";

fn explain(error: std::io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::UnexpectedEof => anyhow::anyhow!(GONE),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => anyhow::anyhow!("the other end is silent"),
        _ => anyhow::Error::new(error).context("the other end"),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent_and_damage_is_found() {
        let (place, page) = (Place { part: 3, offset: 5 << 32 }, [7; 2 * PAGE]);
        let sent = [
            Message::Hello(b"hello"),
            Message::Pages { place, bytes: &page },
            Message::Zeros { place, length: 1 << 31 },
            Message::Sync,
            Message::State(b"{}"),
            Message::Answer(b"yes"),
            Message::Go,
        ];
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes).unwrap();
        sent.iter().for_each(|message| writer.send(message).unwrap());
        let read = |bytes: &[u8]| -> anyhow::Result<()> {
            let mut reader = Reader::new(bytes);
            for message in &sent {
                assert_eq!(reader.receive()?, *message);
            }
            Ok(())
        };
        read(&bytes).unwrap();
        // A changed bit anywhere, but for a kind that becomes another one of the same form.
        for at in (0..bytes.len()).filter(|at| at % 7 == 0 || *at < 100) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x80;
            assert!(read(&damaged).is_err(), "{at}");
            assert!(read(&bytes[..at]).is_err(), "cut at {at}");
        }
        let mut odd = Vec::new();
        let odd_place = Message::Pages { place: Place { part: 0, offset: 8 }, bytes: &page };
        Writer::new(&mut odd).unwrap().send(&odd_place).unwrap();
        Reader::new(&odd[..]).receive().unwrap_err();
    }
}
