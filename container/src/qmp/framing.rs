//! Cuts a stream into JSON objects. QMP's clients need not end a request with a line feed, and
//! WinBoat does not. As QEMU does, it takes strings in apostrophes, which many scripts send.

use std::collections::VecDeque;
use std::mem::take;

use super::protocol::Failure;

/// Maximum bytes of a request.
pub(super) const MAX_REQUEST: usize = 64 << 10;

/// Bytes that have arrived, and the request that they begin.
#[derive(Default)]
pub(super) struct Framing {
    arrived: VecDeque<u8>,
    /// The request so far, with all strings in quotation marks.
    request: Vec<u8>,
    /// Braces that are open.
    depth: usize,
    /// The character that ends the open string.
    quote: Option<u8>,
    escaped: bool,
}

impl Framing {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.arrived.extend(bytes);
    }

    /// The next complete object. After an error the stream has no meaning.
    pub(super) fn take(&mut self) -> Option<Result<Vec<u8>, Failure>> {
        while let Some(byte) = self.arrived.pop_front() {
            if self.depth == 0 && byte.is_ascii_whitespace() {
                continue;
            }
            if self.depth == 0 && byte != b'{' {
                return Some(Err(Failure::generic("JSON parse error, expecting an object")));
            }
            self.scan(byte);
            if self.depth == 0 {
                return Some(Ok(take(&mut self.request)));
            }
            if self.request.len() > MAX_REQUEST {
                let text = format!("a request has more than {MAX_REQUEST} bytes");
                return Some(Err(Failure::generic(text)));
            }
        }
        None
    }

    /// Adds a byte to the request.
    fn scan(&mut self, mut byte: u8) {
        match (self.quote, byte) {
            (Some(_), b'\'') if take(&mut self.escaped) => {
                // JSON has no such escape.
                self.request.pop();
            }
            (Some(_), _) if take(&mut self.escaped) => {}
            (Some(_), b'\\') => self.escaped = true,
            (Some(quote), _) if byte == quote => (self.quote, byte) = (None, b'"'),
            (Some(_), b'"') => self.request.push(b'\\'),
            (Some(_), _) => {}
            (None, b'"' | b'\'') => (self.quote, byte) = (Some(byte), b'"'),
            (None, b'{') => self.depth += 1,
            (None, b'}') => self.depth -= 1,
            (None, _) => {}
        }
        self.request.push(byte);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn all(framing: &mut Framing) -> Vec<String> {
        let objects = std::iter::from_fn(|| framing.take());
        objects.map(|it| String::from_utf8(it.unwrap()).unwrap()).collect()
    }

    #[test]
    fn requests_need_no_line_feeds() {
        let parts = [r#"{"a": {}}"#, r#"{"b": "}\"{"}"#, r#"{"c":"\\"}"#];
        let mut framing = Framing::default();
        framing.push(format!(" \r\n{}{}\n{}\n", parts[0], parts[1], parts[2]).as_bytes());
        assert_eq!(all(&mut framing), parts);
        // Byte by byte.
        let mut found = Vec::new();
        for byte in parts.concat().into_bytes() {
            framing.push(&[byte]);
            found.extend(all(&mut framing));
        }
        assert_eq!(found, parts);
    }

    #[test]
    fn strings_in_apostrophes_become_json() {
        for (text, json) in [
            ("{'execute': 'stop'}", r#"{"execute": "stop"}"#),
            (r#"{'a"}': 1}"#, r#"{"a\"}": 1}"#),
            (r#"{'a\'b': "c\'d'"}"#, r#"{"a'b": "c'd'"}"#),
            (r#"{'a\"b\\': ''}"#, r#"{"a\"b\\": ""}"#),
        ] {
            let mut framing = Framing::default();
            framing.push(text.as_bytes());
            assert_eq!(all(&mut framing), [json]);
            assert!(serde_json::from_str::<serde_json::Value>(json).is_ok(), "{json}");
        }
    }

    #[test]
    fn anything_but_an_object_and_an_endless_request_are_errors() {
        for text in ["POST / HTTP/1.1\r\n", "[1]", "7", "}"] {
            let mut framing = Framing::default();
            framing.push(text.as_bytes());
            assert!(framing.take().unwrap().is_err(), "{text}");
        }
        let mut framing = Framing::default();
        framing.push(b"{\"a\":\"");
        framing.push(&[b'x'; MAX_REQUEST - 6]);
        assert!(framing.take().is_none());
        framing.push(b"x");
        assert!(framing.take().unwrap().is_err());
    }
}
