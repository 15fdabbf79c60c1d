//! Negotiation of the login (SPNEGO, RFC 4178), whose only mechanism here is NTLM.

use crate::ntlm;
use crate::status::{Answer, Status};

const SPNEGO: &[u8] = &[0x06, 6, 0x2b, 6, 1, 5, 5, 2];
const NTLMSSP: &[u8] = &[0x06, 10, 0x2b, 6, 1, 4, 1, 0x82, 0x37, 2, 2, 10];
const HINT: &[u8] = b"not_defined_in_RFC4178@please_ignore";

/// States of a negotiation.
const COMPLETED: u8 = 0;
const INCOMPLETE: u8 = 1;
const REQUEST_MIC: u8 = 3;

/// A token of the client.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Token<'a> {
    /// The client's mechanisms as DER, which its MIC covers. Only in its first token.
    pub mechanisms: Option<&'a [u8]>,
    pub ntlm: Option<&'a [u8]>,
    pub mic: Option<&'a [u8]>,
    /// The client sends NTLM without SPNEGO.
    pub bare: bool,
}

/// The hint in the answer to NEGOTIATE.
pub fn offer() -> Vec<u8> {
    let mechanisms = der(0xa0, &der(0x30, NTLMSSP));
    let hint = der(0xa3, &der(0x30, &der(0xa0, &der(0x1b, HINT))));
    let init = der(0xa0, &der(0x30, &[mechanisms, hint].concat()));
    der(0x60, &[SPNEGO, &init].concat())
}

pub fn parse(token: &[u8]) -> Answer<Token<'_>> {
    if token.starts_with(ntlm::SIGNATURE) {
        return Ok(Token { ntlm: Some(token), bare: true, ..Token::default() });
    }
    read(token).ok_or(Status::INVALID_PARAMETER)
}

fn read(mut token: &[u8]) -> Option<Token<'_>> {
    let (tag, mut body) = take(&mut token)?;
    let first = tag == 0x60;
    if first {
        body = body.strip_prefix(SPNEGO)?;
        let (tag, inner) = take(&mut body)?;
        (tag == 0xa0).then_some(())?;
        body = inner;
    } else if tag != 0xa1 {
        return None;
    }
    let (0x30, mut fields) = take(&mut body)? else { return None };
    let mut result = Token::default();
    while !fields.is_empty() {
        let (tag, mut value) = take(&mut fields)?;
        match tag {
            0xa0 if first => result.mechanisms = Some(value),
            0xa2 => result.ntlm = Some(take(&mut value)?.1),
            0xa3 => result.mic = Some(take(&mut value)?.1),
            _ => (),
        }
    }
    // An optimistic token of another mechanism, such as Kerberos, is ignored.
    result.ntlm = result.ntlm.filter(|it| it.starts_with(ntlm::SIGNATURE));
    Some(result)
}

/// Asks a client that prefers another mechanism for NTLM.
pub fn choose_ntlm() -> Vec<u8> {
    response(REQUEST_MIC, true, &[])
}

pub fn challenge(ntlm: &[u8]) -> Vec<u8> {
    response(INCOMPLETE, true, &der(0xa2, &der(0x04, ntlm)))
}

pub fn completed(mic: Option<[u8; 16]>) -> Vec<u8> {
    let mic = mic.map(|it| der(0xa3, &der(0x04, &it))).unwrap_or_default();
    response(COMPLETED, false, &mic)
}

fn response(state: u8, mechanism: bool, rest: &[u8]) -> Vec<u8> {
    let mut fields = der(0xa0, &[0x0a, 1, state]);
    if mechanism {
        fields.extend(der(0xa1, NTLMSSP));
    }
    fields.extend(rest);
    der(0xa1, &der(0x30, &fields))
}

fn der(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).expect("tokens are short").to_be_bytes();
    let mut out = vec![tag];
    match length {
        [0, short @ ..=0x7f] => out.push(short),
        [0, short] => out.extend([0x81, short]),
        long => out.extend([0x82, long[0], long[1]]),
    }
    out.extend(content);
    out
}

/// Takes an element of at most 64 KiB off the front: its tag and content.
fn take<'a>(bytes: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (tag, length, rest) = match **bytes {
        [tag, 0x81, length, ref rest @ ..] => (tag, usize::from(length), rest),
        [tag, 0x82, high, low, ref rest @ ..] => {
            (tag, u16::from_be_bytes([high, low]).into(), rest)
        }
        [tag, length @ ..=0x7f, ref rest @ ..] => (tag, usize::from(length), rest),
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    Some((tag, content))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn first_and_later_tokens_are_read() {
        let list = der(0x30, NTLMSSP);
        let ntlm = [ntlm::SIGNATURE, &[0; 300]].concat();
        let fields = [der(0xa0, &list), der(0xa2, &der(4, &ntlm))].concat();
        let first = der(0x60, &[SPNEGO, &der(0xa0, &der(0x30, &fields))].concat());
        let token = parse(&first).unwrap();
        assert_eq!((token.mechanisms, token.ntlm), (Some(&list[..]), Some(&ntlm[..])));
        let fields = [der(0xa2, &der(4, &ntlm)), der(0xa3, &der(4, &[7; 16]))].concat();
        let later = der(0xa1, &der(0x30, &fields));
        let token = parse(&later).unwrap();
        assert_eq!((token.ntlm, token.mic), (Some(&ntlm[..]), Some(&[7; 16][..])));
        assert!(parse(&ntlm).unwrap().bare);
    }

    #[test]
    fn truncated_tokens_are_refused() {
        let whole = challenge(&[ntlm::SIGNATURE, &[0; 200]].concat());
        assert!(parse(&whole).is_ok());
        for length in 0..whole.len() {
            assert!(parse(&whole[..length]).is_err(), "{length}");
        }
    }
}
