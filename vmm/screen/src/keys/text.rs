//! Types a text for an operator: the key strokes of a layout, no faster than the guest fetches them
//! from its keyboard.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use host::input::{Hub, Key};

use super::layout::{Layout, Stroke};
use super::symbol::Symbol;

const RETURN: u16 = 0x1c;
const TAB: u16 = 0x0f;
const SHIFT: u16 = 0x2a;
const ALT_GR: u16 = 0xe038;

/// A guest that fetches no keys for this long is given up.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// The interval between checks of the guest, which is also the minimum time per character.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Further characters that cannot be typed are only counted in messages.
const MAX_NAMED: usize = 10;

/// The characters of a text that this layout cannot type, each once.
pub fn missing(layout: &Layout, text: &str) -> Vec<char> {
    let mut missing = Vec::new();
    for character in text.chars().filter(|it| !['\n', '\r', '\t'].contains(it)) {
        if !missing.contains(&character) && layout.sequences(Symbol::Char(character)).is_empty() {
            missing.push(character);
        }
    }
    missing
}

/// A list of characters for messages. A long list is cut off.
pub fn list_characters(characters: &[char]) -> String {
    let named: Vec<_> = characters.iter().take(MAX_NAMED).map(|it| format!("`{it}`")).collect();
    let more = match characters.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    named.join(", ") + &more
}

pub fn plan(layout: &Layout, text: &str) -> anyhow::Result<Vec<Stroke>> {
    let missing = missing(layout, text);
    if !missing.is_empty() {
        bail!(
            "the keyboard {} cannot type {}; nothing was typed: --keyboard selects another layout",
            layout.name(),
            list_characters(&missing)
        )
    }
    let text = text.replace("\r\n", "\n");
    let plain = |code| {
        let key = Key::new(code)?;
        Some(Stroke { key, shift: false, third: false, locks: false, letter: false })
    };
    let mut strokes = Vec::new();
    for character in text.chars() {
        match character {
            '\n' | '\r' => strokes.extend(plain(RETURN)),
            '\t' => strokes.extend(plain(TAB)),
            _ => {
                let sequence = layout.sequences(Symbol::Char(character)).into_iter().next();
                strokes.extend(
                    sequence.into_iter().flat_map(|it| it.before.into_iter().chain([it.stroke])),
                );
            }
        }
    }
    Ok(strokes)
}

/// Fails if the guest has no active keyboard, or stops fetching keys.
pub fn send(hub: &Hub, strokes: &[Stroke]) -> anyhow::Result<()> {
    for (done, stroke) in strokes.iter().enumerate() {
        wait(hub).with_context(|| format!("after {done} of {} keys", strokes.len()))?;
        let caps = hub.lights().is_some_and(|lights| lights.caps);
        let shift = stroke.shift != (stroke.locks && caps);
        let held = [(shift, SHIFT), (stroke.third, ALT_GR)];
        let held = held.into_iter().filter(|it| it.0).filter_map(|it| Key::new(it.1));
        let keys: Vec<_> = held.chain([stroke.key]).collect();
        let taken = keys.iter().filter(|key| hub.key(**key, true)).count();
        for key in keys.iter().rev() {
            hub.key(*key, false);
        }
        ensure!(
            taken == keys.len(),
            "the guest does not use a keyboard: {done} of {} keys were typed",
            strokes.len()
        );
    }
    wait(hub)
}

/// Waits until the guest has fetched all keys.
fn wait(hub: &Hub) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        sleep(POLL_INTERVAL);
        if hub.is_idle() {
            return Ok(());
        }
        ensure!(start.elapsed() < MAX_WAIT, "the guest has read no keys for {MAX_WAIT:?}");
    }
}

#[cfg(test)]
mod test {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use host::input::{Event, Lights, Sink};

    use super::*;

    /// A keyboard with a small buffer, which the guest polls now and then.
    #[derive(Default)]
    struct Slow {
        waiting: Mutex<VecDeque<(u16, bool)>>,
        fetched: Mutex<Vec<(u16, bool)>>,
        looks: Mutex<u32>,
        caps: bool,
    }

    impl Sink for Slow {
        fn take(&self, event: Event) -> bool {
            let Event::Key(key, down) = event else { return false };
            let mut waiting = self.waiting.lock().unwrap();
            assert!(waiting.len() < 8, "keys would be lost");
            waiting.push_back((key.code(), down));
            true
        }
        fn lights(&self) -> Option<Lights> {
            Some(Lights { caps: self.caps, ..Lights::default() })
        }
        fn is_idle(&self) -> bool {
            let mut looks = self.looks.lock().unwrap();
            *looks += 1;
            if looks.is_multiple_of(3) {
                self.fetched.lock().unwrap().extend(self.waiting.lock().unwrap().drain(..));
            }
            self.waiting.lock().unwrap().is_empty()
        }
    }

    fn typed(keyboard: &str, text: &str, caps: bool) -> Vec<(u16, bool)> {
        let (hub, slow) = (Hub::default(), Arc::new(Slow { caps, ..Slow::default() }));
        hub.register(slow.clone());
        let layout = Layout::named(keyboard).unwrap();
        send(&hub, &plan(&layout, text).unwrap()).unwrap();
        slow.fetched.lock().unwrap().clone()
    }

    #[test]
    fn a_text_is_typed_at_the_guests_speed() {
        let tap = |code| [(code, true), (code, false)];
        assert_eq!(typed("us", "a\r\n\tb", false), [0x1e, 0x1c, 0x0f, 0x30].map(tap).concat());
        assert_eq!(
            typed("de", "@", false),
            [(0xe038, true), (0x10, true), (0x10, false), (0xe038, false)]
        );
        assert_eq!(
            typed("de", "^", false),
            [0x29, 0x39].map(tap).concat(),
            "a dead key, and space"
        );
        assert_eq!(typed("de", "ê", false), [0x29, 0x12].map(tap).concat());
        assert_eq!(typed("us", "A", true), tap(0x1e), "Caps Lock replaces Shift");
        assert_eq!(
            typed("us", "a", true),
            [(0x2a, true), (0x1e, true), (0x1e, false), (0x2a, false)]
        );
    }

    #[test]
    fn untypable_characters_are_listed_before_typing() {
        let layout = Layout::named("ru").unwrap();
        let error = plan(&layout, "привет, world").unwrap_err().to_string();
        for word in ["the keyboard ru", "`w`, `o`, `r`, `l`, `d`;", "nothing was typed"] {
            assert!(error.contains(word), "{error}");
        }
        assert!(plan(&layout, "привет").is_ok());
    }

    #[test]
    fn a_guest_without_a_keyboard_is_an_error() {
        let strokes = plan(&Layout::named("us").unwrap(), "a").unwrap();
        let error = send(&Hub::default(), &strokes).unwrap_err().to_string();
        assert!(error.contains("not use a keyboard: 0 of 1"), "{error}");
    }
}
