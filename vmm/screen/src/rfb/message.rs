//! Messages of clients after the handshake (RFC 6143 7.5, and the extensions of the community's
//! rfbproto).
//!
//! Threats: every byte is controlled by the client. Lengths are checked before we wait for the
//! data: a text longer than [`MAX_TEXT_BYTES`] is skipped, and the lengths of all other messages
//! are limited by their types.

use anyhow::bail;
use host::clipboard::MAX_TEXT_BYTES;

use super::format::PixelFormat;
use super::picture::Area;

/// A screen in `SetDesktopSize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    pub id: u32,
    pub area: Area,
    /// Reserved flags, which must be preserved.
    pub flags: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    PixelFormat(PixelFormat),
    Encodings(Vec<i32>),
    /// FramebufferUpdateRequest
    Request {
        incremental: bool,
        area: Area,
    },
    Key {
        down: bool,
        keysym: u32,
    },
    Pointer {
        /// Bits as in the protocol. From bit 7 on they are the buttons back and forward.
        buttons: u16,
        /// Like `y`: position, or movement.
        x: u16,
        y: u16,
    },
    /// ClientCutText in ISO 8859-1
    CutText(Vec<u8>),
    /// ClientCutText of the extended clipboard
    Clipboard(Vec<u8>),
    /// A text that is too long. This many bytes of it follow.
    TooLong(usize),
    Continuous {
        on: bool,
        area: Area,
    },
    Fence {
        /// Synchronization flags, and whether this is a request.
        flags: u32,
        /// At most 64 bytes.
        payload: Vec<u8>,
    },
    /// xvp
    Power {
        version: u8,
        code: u8,
    },
    /// SetDesktopSize
    Size {
        width: u16,
        height: u16,
        screens: Vec<Screen>,
    },
    /// QEMU Extended Key Event
    Code {
        down: bool,
        /// X11 keysym, or 0.
        keysym: u32,
        /// Scan code: the position on the keyboard.
        code: u32,
    },
    /// QEMU Audio
    Sound(SoundRequest),
    /// A message that we never offered and can skip.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoundRequest {
    Enable,
    Disable,
    Format {
        /// The protocol's number: of 8, 16 and 32 bits, unsigned and then signed.
        sample: u8,
        channels: u8,
        /// Frames per second.
        rate: u32,
    },
}

/// Parses the first message of `bytes`. Returns it with its length, or nothing if it is incomplete.
/// `more_buttons` is whether the client uses the extended pointer event.
/// After an error, the start of the next message is unknown.
pub fn parse(bytes: &[u8], more_buttons: bool) -> anyhow::Result<Option<(Message, usize)>> {
    let mut reader = Reader { bytes, at: 1 };
    let Some(kind) = bytes.first() else { return Ok(None) };
    let message = match kind {
        0 => match reader.skip(3).and_then(|()| reader.array()) {
            Some(format) => Some(Message::PixelFormat(PixelFormat::read(&format)?)),
            None => None,
        },
        2 => reader.encodings(),
        3 => reader.request(),
        4 => reader.key(),
        5 => reader.pointer(more_buttons),
        6 => reader.text()?,
        150 => reader.continuous(),
        248 => reader.fence()?,
        250 => reader.power(),
        251 => reader.size(),
        255 => reader.qemu()?,
        other => bail!("unknown message type {other}"),
    };
    Ok(message.map(|message| (message, reader.at)))
}

/// Reads numbers from the front. Methods return nothing if there are too few bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let array = self.bytes.get(self.at..self.at.checked_add(N)?)?;
        self.at += N;
        array.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_be_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn skip(&mut self, count: usize) -> Option<()> {
        self.take(count).map(|_| ())
    }

    fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        let bytes = self.bytes.get(self.at..self.at.checked_add(count)?)?;
        self.at += count;
        Some(bytes.to_vec())
    }

    fn area(&mut self) -> Option<Area> {
        let (x, y) = (self.u16()?, self.u16()?);
        Some(Area { x, y, width: self.u16()?, height: self.u16()? })
    }

    fn encodings(&mut self) -> Option<Message> {
        self.skip(1)?;
        let count = usize::from(self.u16()?);
        let bytes = self.take(4 * count)?;
        let number = |four: &[u8]| four.try_into().map_or(0, i32::from_be_bytes);
        Some(Message::Encodings(bytes.chunks_exact(4).map(number).collect()))
    }

    fn request(&mut self) -> Option<Message> {
        Some(Message::Request { incremental: self.u8()? != 0, area: self.area()? })
    }

    fn key(&mut self) -> Option<Message> {
        let down = self.u8()? != 0;
        self.skip(2)?;
        Some(Message::Key { down, keysym: self.u32()? })
    }

    fn pointer(&mut self, more_buttons: bool) -> Option<Message> {
        let mut buttons = u16::from(self.u8()?);
        let (x, y) = (self.u16()?, self.u16()?);
        if more_buttons && buttons & 0x80 != 0 {
            buttons = buttons & 0x7f | u16::from(self.u8()?) << 7;
        }
        Some(Message::Pointer { buttons, x, y })
    }

    fn text(&mut self) -> anyhow::Result<Option<Message>> {
        let Some(length) = self.skip(3).and_then(|()| self.u32()) else { return Ok(None) };
        let signed = length.cast_signed();
        let length = signed.unsigned_abs() as usize;
        if signed < 0 && length < 4 {
            bail!("a clipboard message of {length} bytes: at least 4");
        }
        if length > MAX_TEXT_BYTES {
            return Ok(Some(Message::TooLong(length)));
        }
        let kind = if signed < 0 { Message::Clipboard } else { Message::CutText };
        Ok(self.take(length).map(kind))
    }

    fn continuous(&mut self) -> Option<Message> {
        Some(Message::Continuous { on: self.u8()? != 0, area: self.area()? })
    }

    fn fence(&mut self) -> anyhow::Result<Option<Message>> {
        let head = self.skip(3).and_then(|()| Some((self.u32()?, self.u8()?)));
        let Some((flags, length)) = head else { return Ok(None) };
        if length > 64 {
            bail!("a fence with {length} bytes: at most 64");
        }
        Ok(self.take(length.into()).map(|payload| Message::Fence { flags, payload }))
    }

    fn power(&mut self) -> Option<Message> {
        self.skip(1)?;
        Some(Message::Power { version: self.u8()?, code: self.u8()? })
    }

    fn size(&mut self) -> Option<Message> {
        self.skip(1)?;
        let (width, height, count) = (self.u16()?, self.u16()?, self.u8()?);
        self.skip(1)?;
        let mut screens = Vec::new();
        for _ in 0..count {
            let (id, area) = (self.u32()?, self.area()?);
            screens.push(Screen { id, area, flags: self.u32()? });
        }
        Some(Message::Size { width, height, screens })
    }

    /// QEMU Client Message: key events, and sound.
    fn qemu(&mut self) -> anyhow::Result<Option<Message>> {
        let Some(kind) = self.u8() else { return Ok(None) };
        Ok(match kind {
            0 => self.code(),
            1 => self.sound(),
            other => bail!("unknown QEMU message type {other}"),
        })
    }

    fn code(&mut self) -> Option<Message> {
        let down = self.u16()? != 0;
        Some(Message::Code { down, keysym: self.u32()?, code: self.u32()? })
    }

    fn sound(&mut self) -> Option<Message> {
        Some(match self.u16()? {
            0 => Message::Sound(SoundRequest::Enable),
            1 => Message::Sound(SoundRequest::Disable),
            2 => {
                let (sample, channels, rate) = (self.u8()?, self.u8()?, self.u32()?);
                Message::Sound(SoundRequest::Format { sample, channels, rate })
            }
            _ => Message::Other,
        })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn read(bytes: &[u8]) -> Message {
        for short in 0..bytes.len() {
            assert_eq!(parse(&bytes[..short], false).unwrap(), None, "{short} bytes are too few");
        }
        let longer = [bytes, &[9; 3]].concat();
        let (message, used) = parse(&longer, false).unwrap().unwrap();
        assert_eq!(used, bytes.len());
        message
    }

    #[test]
    fn a_message_is_read_only_when_complete() {
        let format = [&[0, 0, 0, 0][..], &PixelFormat::OURS.write()].concat();
        assert_eq!(read(&format), Message::PixelFormat(PixelFormat::OURS));
        assert_eq!(
            read(&[2, 0, 0, 2, 0, 0, 0, 7, 255, 255, 255, 33]),
            Message::Encodings(vec![7, -223])
        );
        let area = Area { x: 1, y: 2, width: 3, height: 0x404 };
        assert_eq!(
            read(&[3, 1, 0, 1, 0, 2, 0, 3, 4, 4]),
            Message::Request { incremental: true, area }
        );
        assert_eq!(
            read(&[4, 1, 0, 0, 0, 0, 0xff, 0x0d]),
            Message::Key { down: true, keysym: 0xff0d }
        );
        assert_eq!(read(&[5, 0x81, 0, 5, 1, 0]), Message::Pointer { buttons: 0x81, x: 5, y: 256 });
        assert_eq!(read(b"\x06\0\0\0\0\0\0\x02hi"), Message::CutText(b"hi".to_vec()));
        assert_eq!(
            read(&[6, 0, 0, 0, 255, 255, 255, 252, 2, 0, 0, 1]),
            Message::Clipboard(vec![2, 0, 0, 1])
        );
        assert_eq!(read(&[150, 1, 0, 1, 0, 2, 0, 3, 4, 4]), Message::Continuous { on: true, area });
        assert_eq!(
            read(&[248, 0, 0, 0, 128, 0, 0, 1, 2, 8, 9]),
            Message::Fence { flags: 0x8000_0001, payload: vec![8, 9] }
        );
        assert_eq!(read(&[250, 0, 1, 4]), Message::Power { version: 1, code: 4 });
        let screen = Screen { id: 7, area, flags: 9 };
        assert_eq!(
            read(&[251, 0, 4, 0, 3, 0, 1, 0, 0, 0, 0, 7, 0, 1, 0, 2, 0, 3, 4, 4, 0, 0, 0, 9]),
            Message::Size { width: 1024, height: 768, screens: vec![screen] }
        );
        assert_eq!(
            read(&[255, 0, 0, 1, 0, 0, 0, 0x61, 0, 0, 0, 0x1e]),
            Message::Code { down: true, keysym: 0x61, code: 0x1e }
        );
        let format = SoundRequest::Format { sample: 3, channels: 2, rate: 48_000 };
        assert_eq!(read(&[255, 1, 0, 2, 3, 2, 0, 0, 0xbb, 0x80]), Message::Sound(format));
        assert_eq!(read(&[255, 1, 0, 0]), Message::Sound(SoundRequest::Enable));
        assert_eq!(read(&[255, 1, 0, 1]), Message::Sound(SoundRequest::Disable));
        assert_eq!(read(&[255, 1, 0, 3]), Message::Other);
    }

    #[test]
    fn extended_buttons_are_read_if_the_client_supports_them() {
        let more = [5, 0x82, 0, 5, 0, 6, 1];
        assert_eq!(parse(&more[..6], true).unwrap(), None);
        let pointer = Message::Pointer { buttons: 0x82, x: 5, y: 6 };
        assert_eq!(parse(&more, true).unwrap(), Some((pointer, 7)));
        let plain = Message::Pointer { buttons: 0x02, x: 5, y: 6 };
        assert_eq!(parse(&[5, 2, 0, 5, 0, 6], true).unwrap(), Some((plain, 6)));
    }

    #[test]
    fn refuses_invalid_messages_and_skips_oversized_ones() {
        let mut format = [&[0, 0, 0, 0][..], &PixelFormat::OURS.write()].concat();
        format[4] = 24;
        for bad in [
            &format[..],
            &[1],
            &[99],
            &[255, 9],
            &[248, 0, 0, 0, 0, 0, 0, 0, 65],
            &[6, 0, 0, 0, 255, 255, 255, 255],
        ] {
            assert!(parse(bad, false).is_err(), "{bad:?}");
        }
        for length in [0x0010_0001_u32, 0x7fff_ffff, 0x8000_0000, 0xffe0_0000] {
            let bytes = [&[6, 0, 0, 0][..], &length.to_be_bytes()].concat();
            let skip = length.cast_signed().unsigned_abs() as usize;
            assert_eq!(parse(&bytes, false).unwrap(), Some((Message::TooLong(skip), 8)));
        }
    }
}
