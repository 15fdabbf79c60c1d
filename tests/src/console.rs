//! The serial console of a running program: wait for words in its output, and type.

use std::io::{Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// So much of the end is shown when something did not come.
const TAIL: usize = 3000;

/// What came, as plain text, and whether more can come.
#[derive(Default)]
struct Heard {
    text: String,
    over: bool,
}

type Shared = Arc<(Mutex<Heard>, Condvar)>;

/// A console: what was read up to now, and the keyboard.
pub struct Console {
    heard: Shared,
    keys: Box<dyn Write + Send>,
    /// What was looked at already.
    at: usize,
}

impl Console {
    /// A console of this output and this input.
    pub fn new(mut output: impl Read + Send + 'static, keys: impl Write + Send + 'static) -> Self {
        let heard = Shared::default();
        let (shared, mut plain, mut bytes) = (heard.clone(), Plain::default(), [0; 4096]);
        thread::spawn(move || {
            loop {
                let count = output.read(&mut bytes).unwrap_or(0);
                let mut heard = shared.0.lock().expect("no reader panics");
                let text = bytes[..count].iter().filter_map(|&byte| plain.letter(byte));
                heard.text.extend(text);
                heard.over = count == 0;
                shared.1.notify_all();
                if count == 0 {
                    return;
                }
            }
        });
        Self { heard, keys: Box::new(keys), at: 0 }
    }

    /// Waits for these words. The answer is what came before them.
    ///
    /// # Errors
    ///
    /// When they do not come in time, with the last that came.
    pub fn expect(&mut self, words: &str, within: Duration) -> anyhow::Result<String> {
        self.expect_any(&[words], within).map(|(_, before)| before)
    }

    /// Waits for the first of several words. The answer is which came, and what was before.
    ///
    /// # Errors
    ///
    /// When none comes in time, with the last that came.
    pub fn expect_any(
        &mut self,
        words: &[&str],
        within: Duration,
    ) -> anyhow::Result<(usize, String)> {
        let end = Instant::now() + within;
        let mut heard = self.heard.0.lock().expect("no reader panics");
        loop {
            let new = &heard.text[self.at..];
            let found = words.iter().enumerate().filter_map(|(i, it)| Some((new.find(it)?, i)));
            if let Some((place, which)) = found.min() {
                let before = new[..place].to_owned();
                self.at += place + words[which].len();
                return Ok((which, before));
            }
            let left = end.saturating_duration_since(Instant::now());
            if heard.over || left.is_zero() {
                let why = if heard.over { "the program ended" } else { "time is over" };
                bail!("no {words:?} within {within:?}: {why}\n{}", tail(&heard.text));
            }
            heard = self.heard.1.wait_timeout(heard, left).expect("no reader panics").0;
        }
    }

    /// Types a line.
    ///
    /// # Errors
    ///
    /// When nobody reads it.
    pub fn send(&mut self, line: &str) -> anyhow::Result<()> {
        self.type_keys(&format!("{line}\r"))
    }

    /// Types these keys.
    ///
    /// # Errors
    ///
    /// When nobody reads them.
    pub fn type_keys(&mut self, keys: &str) -> anyhow::Result<()> {
        let typed = self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush());
        typed.with_context(|| format!("typing {keys:?}"))
    }

    /// Looks only at what comes from now on.
    pub fn forget(&mut self) {
        self.at = self.heard.0.lock().expect("no reader panics").text.len();
    }

    /// All that came.
    pub fn text(&self) -> String {
        self.heard.0.lock().expect("no reader panics").text.clone()
    }

    /// The last that came, to be shown.
    pub fn tail(&self) -> String {
        tail(&self.text())
    }
}

fn tail(text: &str) -> String {
    let from = text.char_indices().rev().nth(TAIL).map_or(0, |(at, _)| at);
    format!("--- the last of the console:\n{}\n---", text[from..].trim_end())
}

/// Takes the escape sequences of a terminal out (ECMA-48), and carriage returns.
#[derive(Default)]
enum Plain {
    #[default]
    Text,
    Escape,
    /// Parameters, up to the letter that ends them.
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
    fn escape_sequences_are_not_words() {
        let bytes: &[u8] = b"\x1b[2J\x1b[01;01HSh\x1b[1mell\x1b=> \r\nFS0:";
        let mut console = Console::new(bytes, Vec::new());
        assert_eq!(console.expect("Shell> ", SOON).unwrap(), "");
        assert_eq!(console.expect("FS0", SOON).unwrap(), "\n");
    }

    #[test]
    fn what_was_looked_at_is_not_found_again() {
        let mut console = Console::new(&b"one two one"[..], Vec::new());
        assert_eq!(console.expect_any(&["one", "two"], SOON).unwrap(), (0, String::new()));
        assert_eq!(console.expect_any(&["one", "two"], SOON).unwrap(), (1, " ".into()));
        console.expect("one", SOON).unwrap();
        let error = console.expect("one", SOON).unwrap_err().to_string();
        assert!(error.contains("the program ended") && error.contains("one two one"), "{error}");
    }
}
