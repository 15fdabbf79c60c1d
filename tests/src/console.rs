//! The serial console of a running program: waits for words in its output, and types.

use std::io::{Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::patience::Patience;

/// Characters of the console's end that an error shows.
const TAIL: usize = 3000;

#[derive(Default)]
struct Output {
    text: String,
    ended: bool,
}

type Shared = Arc<(Mutex<Output>, Condvar)>;

pub struct Console {
    output: Shared,
    keys: Box<dyn Write + Send>,
    /// Output before this position was already matched.
    at: usize,
}

impl Console {
    /// Starts a thread that reads `output`; `keys` is the input to type into.
    pub fn new(mut output: impl Read + Send + 'static, keys: impl Write + Send + 'static) -> Self {
        let shared = Shared::default();
        let (read, mut plain, mut bytes) = (shared.clone(), Plain::default(), [0; 4096]);
        thread::spawn(move || {
            loop {
                let count = output.read(&mut bytes).unwrap_or(0);
                let mut text = read.0.lock().expect("no reader panics");
                let letters = bytes[..count].iter().filter_map(|&byte| plain.letter(byte));
                text.text.extend(letters);
                text.ended = count == 0;
                read.1.notify_all();
                if count == 0 {
                    return;
                }
            }
        });
        Self { output: shared, keys: Box::new(keys), at: 0 }
    }

    /// Waits for these words, and returns the output before them. The error shows the end of the
    /// output.
    pub fn expect(&mut self, words: &str, within: Duration) -> anyhow::Result<String> {
        self.expect_any(&[words], within).map(|(_, before)| before)
    }

    /// Waits for the first of several words. Returns its index, and the output before it. The error
    /// shows the end of the output.
    pub fn expect_any(
        &mut self,
        words: &[&str],
        within: Duration,
    ) -> anyhow::Result<(usize, String)> {
        let mut patience = Patience::new(within);
        let mut output = self.output.0.lock().expect("no reader panics");
        loop {
            let new = &output.text[self.at..];
            let found = words.iter().enumerate().filter_map(|(i, it)| Some((new.find(it)?, i)));
            if let Some((place, which)) = found.min() {
                let before = new[..place].to_owned();
                self.at += place + words[which].len();
                return Ok((which, before));
            }
            let next = patience.until_next_look();
            if output.ended || next.is_zero() {
                let why = if output.ended { "the program ended" } else { "timeout" };
                bail!("no {words:?} within {within:?}: {why}\n{}", tail(&output.text));
            }
            output = self.output.1.wait_timeout(output, next).expect("no reader panics").0;
        }
    }

    pub fn send(&mut self, line: &str) -> anyhow::Result<()> {
        self.type_keys(&format!("{line}\r"))
    }

    pub fn type_keys(&mut self, keys: &str) -> anyhow::Result<()> {
        let typed = self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush());
        typed.with_context(|| format!("typing {keys:?}"))
    }

    /// Ignores all output up to now.
    pub fn forget(&mut self) {
        self.at = self.output.0.lock().expect("no reader panics").text.len();
    }

    pub fn text(&self) -> String {
        self.output.0.lock().expect("no reader panics").text.clone()
    }

    pub fn tail(&self) -> String {
        tail(&self.text())
    }
}

fn tail(text: &str) -> String {
    let from = text.char_indices().rev().nth(TAIL).map_or(0, |(at, _)| at);
    format!("--- the end of the console's output:\n{}\n---", text[from..].trim_end())
}

/// Removes a terminal's escape sequences (ECMA-48) and carriage returns.
#[derive(Default)]
enum Plain {
    #[default]
    Text,
    Escape,
    /// Parameters, up to the letter that ends the sequence.
    Sequence,
}

impl Plain {
    fn letter(&mut self, byte: u8) -> Option<char> {
        match (&self, byte) {
            (_, 0x1b) => *self = Self::Escape,
            (Self::Escape, b'[') => *self = Self::Sequence,
            (Self::Escape, _) | (Self::Sequence, 0x40..=0x7e) => *self = Self::Text,
            (Self::Text, b'\n' | b'\t' | 0x20..=0x7e | 0x80..) => return Some(byte.into()),
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[test]
    fn escape_sequences_are_skipped() {
        let bytes: &[u8] = b"\x1b[2J\x1b[01;01HSh\x1b[1mell\x1b=> \r\nFS0:";
        let mut console = Console::new(bytes, Vec::new());
        assert_eq!(console.expect("Shell> ", SOON).unwrap(), "");
        assert_eq!(console.expect("FS0", SOON).unwrap(), "\n");
    }

    #[test]
    fn consumed_output_is_not_found_again() {
        let mut console = Console::new(&b"one two one"[..], Vec::new());
        assert_eq!(console.expect_any(&["one", "two"], SOON).unwrap(), (0, String::new()));
        assert_eq!(console.expect_any(&["one", "two"], SOON).unwrap(), (1, " ".into()));
        console.expect("one", SOON).unwrap();
        let error = console.expect("one", SOON).unwrap_err().to_string();
        assert!(error.contains("the program ended") && error.contains("one two one"), "{error}");
    }
}
