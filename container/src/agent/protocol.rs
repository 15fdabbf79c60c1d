//! Wire format of QEMU's guest agent: one JSON object per line, in both directions.
//!
//! The byte `0xff`, which is never part of UTF-8 text, discards everything before it. We send it
//! before the sync request, so that the agent drops an incomplete line of an earlier client. The
//! agent sends it before its answer to the sync request.

use std::mem;

use anyhow::ensure;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

const VOID: u8 = 0xff;
/// In bytes, of the answer to the sync request.
const MAX_SYNC: usize = 64;
/// In characters.
const MAX_ERROR: usize = 400;

/// Encodes the sync request (`guest-sync-delimited`) with this number.
pub fn sync(id: u64) -> Vec<u8> {
    let mut bytes = vec![VOID];
    bytes.extend(command("guest-sync-delimited", json!({ "id": id })));
    bytes
}

pub fn command(name: &str, arguments: Value) -> Vec<u8> {
    let question = match arguments {
        Value::Null => json!({ "execute": name }),
        arguments => json!({ "execute": name, "arguments": arguments }),
    };
    format!("{question}\n").into_bytes()
}

pub struct AnswerReader {
    /// Number of the expected sync answer; `None` accepts any answer.
    id: Option<u64>,
    /// Skips bytes until the next `0xff`.
    deaf: bool,
    line: Vec<u8>,
    limit: usize,
}

impl AnswerReader {
    pub fn sync(id: u64) -> Self {
        Self { id: Some(id), deaf: true, line: Vec::new(), limit: MAX_SYNC }
    }

    pub fn answer(limit: usize) -> Self {
        Self { id: None, deaf: false, line: Vec::new(), limit }
    }

    /// Consumes received bytes. Returns the answer once it is complete; bytes after it are ignored.
    pub fn take(&mut self, bytes: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        match self.id {
            Some(id) => Ok(bytes.iter().find_map(|byte| self.number(*byte, id))),
            None => self.whole(bytes),
        }
    }

    /// Looks for the sync answer with this number and ignores everything else, however long.
    fn number(&mut self, byte: u8, id: u64) -> Option<Vec<u8>> {
        if byte == VOID {
            (self.deaf, self.line) = (false, Vec::new());
        } else if byte == b'\n' && !self.deaf {
            self.deaf = true;
            let line = mem::take(&mut self.line);
            let number = returned(&line).ok().and_then(|it| it.as_u64());
            return (number == Some(id)).then_some(line);
        } else if !self.deaf {
            self.line.push(byte);
            self.deaf = self.line.len() > self.limit;
        }
        None
    }

    fn whole(&mut self, bytes: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let more = &bytes[..end.unwrap_or(bytes.len())];
        let length = self.line.len() + more.len();
        ensure!(length <= self.limit, "its answer is longer than {} bytes", self.limit);
        self.line.extend(more);
        if end.is_none() {
            return Ok(None);
        }
        let line = mem::take(&mut self.line);
        let answer: Result<Answer<IgnoredAny>, _> = serde_json::from_slice(&line);
        let answer = answer.is_ok_and(|it| it.value.is_some() != it.error.is_some());
        ensure!(answer, "its answer is invalid");
        Ok(Some(line))
    }
}

#[derive(Deserialize)]
#[serde(bound = "T: Deserialize<'de>")]
struct Answer<T> {
    #[serde(rename = "return")]
    value: Option<T>,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    desc: String,
}

/// The agent's error message, if the answer is an error.
pub fn refused(answer: &[u8]) -> Option<String> {
    let answer: Answer<IgnoredAny> = serde_json::from_slice(answer).ok()?;
    answer.error.map(|error| plain(&error.desc, MAX_ERROR))
}

/// The error is the agent's message, or says that the answer is invalid.
pub fn returned(answer: &[u8]) -> Result<Value, String> {
    match serde_json::from_slice(answer) {
        Ok(Answer { error: Some(error), .. }) => Err(plain(&error.desc, MAX_ERROR)),
        Ok(Answer { value: Some(value), .. }) => Ok(value),
        _ => Err("its answer is invalid".into()),
    }
}

/// Makes text from the guest safe to show: at most `limit` characters, and no control characters
/// that could move a terminal's cursor.
pub fn plain(text: &str, limit: usize) -> String {
    let letters = text.chars().map(|it| if it.is_whitespace() { ' ' } else { it });
    letters.filter(|it| !it.is_control()).take(limit).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    fn heard(reader: &mut AnswerReader, bytes: &[u8]) -> Option<String> {
        let heard = reader.take(bytes).unwrap();
        heard.map(|line| String::from_utf8(line).unwrap())
    }

    #[test]
    fn a_command_is_one_line_of_json() {
        let text = b"\xff{\"arguments\":{\"id\":7},\"execute\":\"guest-sync-delimited\"}\n";
        assert_eq!(sync(7), text);
        assert_eq!(command("guest-ping", Value::Null), b"{\"execute\":\"guest-ping\"}\n");
    }

    #[test]
    fn a_stale_answer_is_skipped() {
        let mut reader = AnswerReader::sync(7);
        let stale = [
            &b"{\"return\": 7}\n"[..],
            b"\xff{\"return\": 8}\n{\"return\": 7}\n",
            b"\xff{\"return\": 7",
            b"\xff\xff\n\xff{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n",
            b"\xff{\"return\": 7, \"x\": \"",
            &[b'x'; 100_000],
            b"\"}\n",
        ];
        for bytes in stale {
            assert_eq!(heard(&mut reader, bytes), None, "{}", bytes.escape_ascii());
            assert!(reader.line.len() <= MAX_SYNC + 1);
        }
        assert_eq!(heard(&mut reader, b"\xff{\"ret"), None);
        assert_eq!(heard(&mut reader, b"urn\": 7}\nmore").as_deref(), Some("{\"return\": 7}"));
    }

    #[test]
    fn an_answer_is_complete_and_limited_in_size() {
        let mut reader = AnswerReader::answer(20);
        assert_eq!(heard(&mut reader, b"{\"return\""), None);
        assert_eq!(heard(&mut reader, b": {}}\n{").as_deref(), Some("{\"return\": {}}"));
        let mut reader = AnswerReader::answer(20);
        reader.take(&[b' '; 20]).unwrap();
        let error = reader.take(b" ").unwrap_err();
        assert!(error.to_string().contains("longer than 20 bytes"), "{error}");
        for wrong in
            [&b"\n"[..], b"{}\n", b"\xff{\"return\":1}\n", b"{\"return\":1,\"error\":1}\n", b"7\n"]
        {
            assert!(AnswerReader::answer(99).take(wrong).is_err(), "{}", wrong.escape_ascii());
        }
    }

    #[test]
    fn a_refusal_is_shown_without_control_characters() {
        let no =
            b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"not\\n\\u001b[2Jhere\"}}";
        assert_eq!(refused(no).as_deref(), Some("not [2Jhere"));
        assert_eq!(returned(no), Err("not [2Jhere".into()));
        assert_eq!(returned(b"{\"return\": [1]}"), Ok(json!([1])));
        assert_eq!(refused(b"{\"return\": {}}"), None);
    }
}
