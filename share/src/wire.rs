//! Bytes of messages: little-endian numbers and UTF-16. Reads check their bounds.

use crate::status::{Answer, Status};

/// Reads from a message of the client.
pub trait Get {
    fn span(&self, at: usize, length: usize) -> Answer<&[u8]>;
    fn u8_at(&self, at: usize) -> Answer<u8>;
    fn u16_at(&self, at: usize) -> Answer<u16>;
    fn u32_at(&self, at: usize) -> Answer<u32>;
    fn u64_at(&self, at: usize) -> Answer<u64>;
}

impl Get for [u8] {
    fn span(&self, at: usize, length: usize) -> Answer<&[u8]> {
        let end = at.checked_add(length).ok_or(Status::INVALID_PARAMETER)?;
        self.get(at..end).ok_or(Status::INVALID_PARAMETER)
    }

    fn u8_at(&self, at: usize) -> Answer<u8> {
        self.get(at).copied().ok_or(Status::INVALID_PARAMETER)
    }

    fn u16_at(&self, at: usize) -> Answer<u16> {
        let bytes = self.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map(|it| u16::from_le_bytes(*it)).ok_or(Status::INVALID_PARAMETER)
    }

    fn u32_at(&self, at: usize) -> Answer<u32> {
        let bytes = self.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map(|it| u32::from_le_bytes(*it)).ok_or(Status::INVALID_PARAMETER)
    }

    fn u64_at(&self, at: usize) -> Answer<u64> {
        let bytes = self.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map(|it| u64::from_le_bytes(*it)).ok_or(Status::INVALID_PARAMETER)
    }
}

/// Writes to a message.
pub trait Put {
    fn put(&mut self, bytes: &[u8]) -> &mut Self;
    fn put16(&mut self, value: u16) -> &mut Self;
    fn put32(&mut self, value: u32) -> &mut Self;
    fn put64(&mut self, value: u64) -> &mut Self;
    /// Appends zeros up to a multiple of `to` bytes.
    fn pad(&mut self, to: usize) -> &mut Self;
    /// Overwrites four bytes that exist.
    fn set32(&mut self, at: usize, value: u32);
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.extend_from_slice(bytes);
        self
    }

    fn put16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    fn put32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    fn put64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    fn pad(&mut self, to: usize) -> &mut Self {
        self.resize(self.len().next_multiple_of(to), 0);
        self
    }

    fn set32(&mut self, at: usize, value: u32) {
        self[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
}

/// A length of a message, which is limited far below 4 GiB.
pub fn size32(length: usize) -> u32 {
    u32::try_from(length).expect("messages are limited to a few MiB")
}

/// A length within the head of a message.
pub fn size16(length: usize) -> u16 {
    u16::try_from(length).expect("heads and names are shorter than 64 KiB")
}

/// A number of the client as an index. Too large ones fail the next bounds check.
pub fn index(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

pub fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// Decodes UTF-16. Unpaired surrogates have no UTF-8 and are refused.
pub fn text(bytes: &[u8]) -> Answer<String> {
    let (units, []) = bytes.as_chunks::<2>() else { return Err(Status::INVALID_PARAMETER) };
    let units = units.iter().map(|it| u16::from_le_bytes(*it));
    char::decode_utf16(units).collect::<Result<_, _>>().map_err(|_| Status::OBJECT_NAME_INVALID)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reads_beyond_the_end_are_refused() {
        let bytes = [1, 2, 3, 4, 5];
        assert_eq!(bytes.u32_at(1), Ok(0x0504_0302));
        assert_eq!(bytes.u32_at(2), Err(Status::INVALID_PARAMETER));
        assert_eq!(bytes.u64_at(usize::MAX), Err(Status::INVALID_PARAMETER));
        assert_eq!(bytes.span(1, usize::MAX), Err(Status::INVALID_PARAMETER));
    }

    #[test]
    fn text_is_utf16_with_pairs_of_surrogates() {
        assert_eq!(text(&utf16("Grüße 🦀")), Ok("Grüße 🦀".to_owned()));
        assert_eq!(text(&[0x00, 0xd8]), Err(Status::OBJECT_NAME_INVALID));
        assert_eq!(text(&[0x41]), Err(Status::INVALID_PARAMETER));
    }
}
