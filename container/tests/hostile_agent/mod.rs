//! A guest whose agent sends any bytes.

use container::agent::guest::{Guest, Outcome};
use container::agent::protocol::{self, AnswerReader};

/// The number of the expected answer.
const ID: u64 = 7;
const LIMIT: usize = 4096;

/// Reads these bytes in pieces. The first byte of each piece is its length.
pub(crate) fn answer_with(bytes: &[u8]) {
    let (mut number, mut answer) = (AnswerReader::sync(ID), AnswerReader::answer(LIMIT));
    let mut over = false;
    let mut rest = bytes;
    while let Some((length, more)) = rest.split_first() {
        let piece;
        (piece, rest) = more.split_at(usize::from(*length).min(more.len()));
        let heard = number.take(piece).expect("other answers are ignored");
        if let Some(line) = heard {
            assert_eq!(protocol::returned(&line).expect("it is the answer"), ID);
        }
        if over {
            continue;
        }
        match answer.take(piece) {
            Ok(None) => {}
            Ok(Some(line)) => {
                over = true;
                assert!(line.len() <= LIMIT);
                read(&line);
            }
            Err(_) => over = true,
        }
    }
    read(bytes);
}

/// Parses an answer in all ways, and checks the limits.
fn read(answer: &[u8]) {
    let (refused, returned) = (protocol::refused(answer), protocol::returned(answer));
    if let Some(why) = refused {
        assert_eq!(returned, Err(why.clone()));
        assert!(why.chars().count() <= 400 && !why.contains(char::is_control));
    }
    if let Ok(value) = returned {
        let guest = Guest::new(Some(&value), Some(&value));
        assert!(guest.addresses.len() <= 32);
        assert!(!guest.system.is_some_and(|name| name.contains(char::is_control)));
    }
    if let Ok(Outcome::Ended(ended)) = Outcome::read(answer) {
        assert!(ended.output.len() + ended.errors.len() <= answer.len());
        assert!(ended.odd.is_none() || ended.status == u8::MAX);
    }
}
