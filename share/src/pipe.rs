//! The pipe `srvsvc`: remote procedure calls that list the shares ([MS-SRVS], [MS-RPCE]).
//!
//! Threats: the client sends any bytes. A call has at most 8 KiB and one fragment; an answer is
//! written at once and read in parts.

use crate::server::Config;
use crate::status::{Answer, Status};
use crate::wire::{Get, Put, index, size16, size32, text, utf16};

/// The maximum size of a call in bytes.
const MAX_CALL: usize = 8 << 10;
/// The size of a fragment that both sides allow.
const FRAGMENT: u16 = 4280;
const HEADER: usize = 16;

/// Types of messages ([MS-RPCE] 2.2.2).
const REQUEST: u8 = 0;
const RESPONSE: u8 = 2;
const FAULT: u8 = 3;
const BIND: u8 = 11;
const BIND_ACK: u8 = 12;
const ALTER: u8 = 14;
const ALTER_ACK: u8 = 15;

/// The transfer syntax NDR, version 2.
const NDR: [u8; 20] = [
    0x04, 0x5d, 0x88, 0x8a, 0xeb, 0x1c, 0xc9, 0x11, 0x9f, 0xe8, 0x08, 0x00, 0x2b, 0x10, 0x48, 0x60,
    2, 0, 0, 0,
];
const NO_SUCH_CALL: u32 = 0x1c01_0002;
const BAD_STUB: u32 = 0x6f7;

/// Calls ([MS-SRVS] 3.1.4).
const SHARE_ENUM: u16 = 15;
const SHARE_INFO: u16 = 16;
const SERVER_INFO: u16 = 21;

/// Errors of Windows.
const INVALID_LEVEL: u32 = 124;
const NO_SUCH_SHARE: u32 = 2310;

const DISK: u32 = 0;
const HIDDEN_PIPES: u32 = 0x8000_0003;

#[derive(Default)]
pub struct Pipe {
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Pipe {
    pub fn open(name: &str) -> Answer<Self> {
        let name = name.trim_start_matches('\\');
        if name.eq_ignore_ascii_case("srvsvc") {
            Ok(Self::default())
        } else {
            Err(Status::OBJECT_NAME_NOT_FOUND)
        }
    }

    /// Takes bytes of calls and makes those that are complete.
    pub fn write(&mut self, bytes: &[u8], config: &Config) -> Answer<()> {
        if self.input.len() + bytes.len() > MAX_CALL || self.output.len() > MAX_CALL {
            return Err(Status::INVALID_PIPE_STATE);
        }
        self.input.put(bytes);
        while self.input.len() >= HEADER {
            let length = usize::from(self.input.u16_at(8)?);
            if length < HEADER || self.input[0] != 5 {
                return Err(Status::INVALID_PIPE_STATE);
            }
            if self.input.len() < length {
                break;
            }
            // One write has room for many calls.
            if self.output.len() > MAX_CALL {
                return Err(Status::INVALID_PIPE_STATE);
            }
            let call: Vec<u8> = self.input.drain(..length).collect();
            self.output.extend(answer(&call, config)?);
        }
        Ok(())
    }

    /// Takes at most `limit` bytes of answers.
    pub fn read(&mut self, limit: usize) -> Answer<(Status, Vec<u8>)> {
        if self.output.is_empty() {
            return Err(Status::PIPE_EMPTY);
        }
        let rest = self.output.split_off(limit.min(self.output.len()));
        let part = std::mem::replace(&mut self.output, rest);
        let status = if self.output.is_empty() { Status::SUCCESS } else { Status::BUFFER_OVERFLOW };
        Ok((status, part))
    }
}

fn answer(call: &[u8], config: &Config) -> Answer<Vec<u8>> {
    let id = call.u32_at(12)?;
    let message = |kind: u8, body: &[u8]| {
        let mut out = vec![5, 0, kind, 3, 0x10, 0, 0, 0];
        out.put16(size16(HEADER + body.len())).put16(0).put32(id).put(body);
        out
    };
    match call.u8_at(2)? {
        BIND => Ok(message(BIND_ACK, &bind(call)?)),
        ALTER => Ok(message(ALTER_ACK, &bind(call)?)),
        REQUEST => {
            let mut body = Vec::new();
            let (context, number) = (call.u16_at(20)?, call.u16_at(22)?);
            let stub = call.get(24..).ok_or(Status::INVALID_PIPE_STATE)?;
            let result = invoke(number, &mut Stub { bytes: stub, at: 0 }, config);
            let (kind, stub) = match result {
                Ok(Some(stub)) => (RESPONSE, stub),
                Ok(None) => (FAULT, NO_SUCH_CALL.to_le_bytes().to_vec()),
                Err(_) => (FAULT, BAD_STUB.to_le_bytes().to_vec()),
            };
            body.put32(size32(stub.len())).put16(context).put16(0).put(&stub);
            Ok(message(kind, &body))
        }
        _ => Err(Status::INVALID_PIPE_STATE),
    }
}

/// Accepts NDR for each context.
fn bind(call: &[u8]) -> Answer<Vec<u8>> {
    let count = call.u8_at(24)?.min(8);
    let mut results = vec![count, 0, 0, 0];
    let mut at = 28;
    for _ in 0..count {
        let syntaxes = usize::from(call.u8_at(at + 2)?);
        let list = call.span(at + 24, 20 * syntaxes)?;
        at += 24 + 20 * syntaxes;
        if list.as_chunks::<20>().0.contains(&NDR) {
            results.put32(0).put(&NDR);
        } else {
            // Rejected by the provider: the transfer syntaxes are not supported.
            results.put16(2).put16(2).put(&[0; 20]);
        }
    }
    let mut body = Vec::new();
    let name = b"\\PIPE\\srvsvc\0";
    body.put16(FRAGMENT).put16(FRAGMENT).put32(1).put16(size16(name.len())).put(name);
    body.pad(4).put(&results);
    Ok(body)
}

/// Arguments of a call in NDR.
struct Stub<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Stub<'_> {
    fn u32(&mut self) -> Answer<u32> {
        let value = self.bytes.u32_at(self.at)?;
        self.at += 4;
        Ok(value)
    }

    /// A string with its lengths, and a final NUL.
    fn string(&mut self) -> Answer<String> {
        let (_, _, length) = (self.u32()?, self.u32()?, self.u32()?);
        let bytes = index(length).checked_mul(2).ok_or(Status::INVALID_PARAMETER)?;
        let value = text(self.bytes.span(self.at, bytes)?)?;
        self.at = (self.at + bytes).next_multiple_of(4);
        Ok(value.trim_end_matches('\0').to_owned())
    }

    fn optional_string(&mut self) -> Answer<()> {
        if self.u32()? != 0 {
            self.string()?;
        }
        Ok(())
    }
}

fn put_string(out: &mut Vec<u8>, value: &str) {
    let value = utf16(&format!("{value}\0"));
    let length = size32(value.len() / 2);
    out.put32(length).put32(0).put32(length).put(&value).pad(4);
}

/// The results of a call. None if there is no such call.
fn invoke(number: u16, stub: &mut Stub<'_>, config: &Config) -> Answer<Option<Vec<u8>>> {
    let mut shares: Vec<_> = config.shares.iter().map(|it| (&it.name[..], DISK)).collect();
    shares.push(("IPC$", HIDDEN_PIPES));
    stub.optional_string()?;
    Ok(match number {
        SHARE_ENUM => {
            let level = stub.u32()?;
            Some(share_enum(level, &shares))
        }
        SHARE_INFO => {
            let name = stub.string()?;
            let level = stub.u32()?;
            let share = shares.into_iter().find(|(it, _)| it.eq_ignore_ascii_case(&name));
            Some(share_info(level, share))
        }
        SERVER_INFO => Some(server_info(stub.u32()?, &config.host)),
        _ => None,
    })
}

fn share_enum(level: u32, shares: &[(&str, u32)]) -> Vec<u8> {
    let mut out = Vec::new();
    let count = size32(shares.len());
    out.put32(level).put32(level);
    if level > 1 {
        out.put32(0).put32(0).put32(0);
        out.put32(INVALID_LEVEL);
        return out;
    }
    out.put32(0x2_0000).put32(count).put32(0x2_0004).put32(count);
    for (place, (_, kind)) in (0x2_0008_u32..).step_by(8).zip(shares) {
        out.put32(place);
        if level == 1 {
            out.put32(*kind).put32(place + 4);
        }
    }
    for (name, _) in shares {
        put_string(&mut out, name);
        if level == 1 {
            put_string(&mut out, "");
        }
    }
    // All of them, no handle to go on with, success.
    out.put32(count).put32(0).put32(0);
    out
}

fn share_info(level: u32, share: Option<(&str, u32)>) -> Vec<u8> {
    let mut out = Vec::new();
    out.put32(level);
    match (level, share) {
        (_, None) => {
            out.put32(0).put32(NO_SUCH_SHARE);
        }
        (1, Some((name, kind))) => {
            out.put32(0x2_0000).put32(0x2_0004).put32(kind).put32(0x2_0008);
            put_string(&mut out, name);
            put_string(&mut out, "");
            out.put32(0);
        }
        // Flags: no offline copies.
        (1005, Some(_)) => {
            out.put32(0x2_0000).put32(0x30).put32(0);
        }
        _ => {
            out.put32(0).put32(INVALID_LEVEL);
        }
    }
    out
}

fn server_info(level: u32, host: &str) -> Vec<u8> {
    let mut out = Vec::new();
    out.put32(level);
    if level != 101 {
        out.put32(0).put32(INVALID_LEVEL);
        return out;
    }
    // Platform NT, version 6.1, type workstation and server.
    out.put32(0x2_0000).put32(500).put32(0x2_0004).put32(6).put32(1).put32(3).put32(0x2_0008);
    put_string(&mut out, host);
    put_string(&mut out, "");
    out.put32(0);
    out
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn answers_to_a_write_are_limited() {
        let account = crate::Account::new("User", "password");
        let config = Config { host: "HOST".to_owned(), account, shares: Vec::new() };
        // NetShareEnum, with level 1.
        let mut call = vec![5, 0, 0, 3, 0x10, 0, 0, 0, 32, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0];
        call.extend([15, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        let mut pipe = Pipe::default();
        assert!(pipe.write(&call, &config).is_ok() && !pipe.output.is_empty());
        assert_eq!(pipe.write(&call.repeat(255), &config), Err(Status::INVALID_PIPE_STATE));
        assert!(pipe.output.len() < 2 * MAX_CALL, "{}", pipe.output.len());
    }
}
