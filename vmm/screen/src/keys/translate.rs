//! Translates a client's keys to keys of the guest.
//!
//! A client sends the symbols that it types, but the guest needs the keys that are down. If the
//! client holds the modifiers that the symbol needs on the guest's keyboard, the key alone is sent.
//! Otherwise other modifiers are pressed or released around it. For example, a Mac sends `@` with
//! Option, but a German guest expects AltGr. When a symbol is released, the key that it was
//! translated to when it was pressed goes up, whatever other keys are down by then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use host::input::{Key, Lights};

use super::layout::{Layout, Sequence, Stroke};
use super::symbol::{self, Symbol};

/// A key, and whether it is pressed (`true`) or released.
pub type Step = (Key, bool);

/// A client that holds more keys sends noise, which is ignored.
const MAX_HELD: usize = 32;
const SHIFT: [u16; 2] = [0x2a, 0x36];
const CONTROL: [u16; 2] = [0x1d, 0xe01d];
const ALT: u16 = 0x38;
/// The right Alt key, which is AltGr in layouts that have it.
const RIGHT_ALT: u16 = 0xe038;
const LOGO: [u16; 2] = [0xe05b, 0xe05c];
/// ISO_Level3_Shift and Mode_switch, which only select a symbol.
const LEVELS: [u32; 2] = [0xfe03, 0xff7e];
const HANGUL: u32 = 0xff31;
const HANJA: u32 = 0xff34;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A keysym of X.
    Symbol(u32),
    /// A physical key.
    Key(Key),
}

/// The keys that one client holds, and the state of the guest's keyboard.
pub struct KeyTranslator {
    layout: Arc<Layout>,
    /// The keys that the client holds, each with the guest's key that was pressed for it, if any.
    held: BTreeMap<Source, Option<Key>>,
    /// The keys that are down in the guest.
    down: BTreeSet<Key>,
    /// The held key for which the modifiers differ from those that the client holds.
    adjusted_for: Option<Source>,
    last: Option<Source>,
    steps: Vec<Step>,
}

#[derive(Clone, Copy)]
struct Mods {
    shift: bool,
    third: bool,
    control: bool,
    alt: bool,
    logo: bool,
}

impl KeyTranslator {
    pub fn new(layout: Arc<Layout>) -> Self {
        let (held, down, steps) = <_>::default();
        Self { layout, held, down, adjusted_for: None, last: None, steps }
    }

    /// Handles a key event of the client: press, repeated press, or release. Returns the steps for
    /// the guest, in order.
    pub fn key_event(&mut self, source: Source, down: bool, lights: Option<Lights>) -> Vec<Step> {
        if down {
            self.press(source, lights.unwrap_or_default());
        } else {
            self.release(source);
        }
        std::mem::take(&mut self.steps)
    }

    pub fn holds(&self, source: Source) -> bool {
        self.held.contains_key(&source)
    }

    /// Releases all keys, modifiers last.
    pub fn release_all(&mut self) -> Vec<Step> {
        (self.adjusted_for, self.last) = (None, None);
        self.held.clear();
        let (modifiers, keys): (Vec<Key>, Vec<Key>) =
            std::mem::take(&mut self.down).into_iter().partition(|key| is_modifier(*key));
        keys.into_iter().chain(modifiers).map(|key| (key, false)).collect()
    }

    fn press(&mut self, source: Source, lights: Lights) {
        if let Some(key) = self.held.get(&source).copied() {
            // Keyboards repeat. A modifier that was released for another key stays released.
            if let Some(key) = key.filter(|key| !is_modifier(*key)) {
                self.turn(key, true);
            }
            return;
        }
        if self.held.len() >= MAX_HELD {
            return;
        }
        let Some((sequence, key)) = self.choose(source, lights) else {
            self.held.insert(source, None);
            if let Source::Symbol(keysym) = source {
                tracing::debug!("the keyboard {} has no {keysym:#x}", self.layout.name());
            }
            return;
        };
        if is_modifier(key) {
            self.restore();
            self.held.insert(source, Some(key));
            if !self.down.contains(&key) {
                self.turn(key, true);
            }
            return;
        }
        let own = self.held_modifiers();
        if let Some(sequence) = sequence {
            if let Some(before) = sequence.before {
                let wanted = self.wanted(&before, lights);
                self.set_modifiers(&wanted);
                self.tap(before.key);
            }
            let wanted = self.wanted(&sequence.stroke, lights);
            self.set_modifiers(&wanted);
            self.adjusted_for = (wanted != own).then_some(source);
        } else {
            self.set_modifiers(&own);
            self.adjusted_for = None;
        }
        self.held.insert(source, Some(key));
        self.last = Some(source);
        self.turn(key, true);
    }

    fn release(&mut self, source: Source) {
        let source = if self.holds(source) {
            source
        } else {
            // If Shift changed meanwhile, the client may send the other symbol of the same key, the
            // physical key, or a symbol that is on another key of the guest's keyboard. The key
            // must not hang in these cases.
            let typed = matches!(source, Source::Symbol(it) if !is_named(it));
            match self.find_held(source).or(self.last.filter(|_| typed)) {
                Some(other) => other,
                None => return,
            }
        };
        let Some(Some(key)) = self.held.remove(&source) else { return };
        if self.last == Some(source) {
            self.last = None;
        }
        if !self.held.values().any(|other| *other == Some(key)) && self.down.contains(&key) {
            self.turn(key, false);
        }
        if self.adjusted_for == Some(source)
            || self.adjusted_for.is_some_and(|source| !self.held.contains_key(&source))
        {
            self.restore();
        }
    }

    /// The held key that becomes the same key of the guest as this one.
    fn find_held(&self, source: Source) -> Option<Source> {
        let (_, key) = self.choose(source, Lights::default())?;
        self.held.iter().find(|it| *it.1 == Some(key)).map(|it| *it.0)
    }

    /// The guest's key for a source. The sequence is `None` if the modifiers do not matter.
    fn choose(&self, source: Source, lights: Lights) -> Option<(Option<Sequence>, Key)> {
        let keysym = match source {
            Source::Key(key) => return Some((None, key)),
            Source::Symbol(keysym) => keysym,
        };
        if let Some(pad) = symbol::keypad_key(keysym) {
            let typed = pad.typed.map(Symbol::Char);
            return match (typed, pad.twin) {
                (Some(digit), _) if !lights.num => {
                    self.best(digit, lights).map(|sequence| (Some(sequence), sequence.stroke.key))
                }
                (None, Some(twin)) if lights.num => Some((None, twin)),
                _ => Some((None, pad.key)),
            };
        }
        if !self.layout.third && LEVELS.contains(&keysym) {
            // It only selected the client's symbol. The guest's keyboard has no such key.
            return None;
        }
        let korean = |code| (self.layout.name() == "ko").then(|| Key::new(code)).flatten();
        let asian = match keysym {
            HANGUL => korean(RIGHT_ALT),
            HANJA => korean(CONTROL[1]),
            _ => None,
        };
        if let Some(key) = asian.or_else(|| symbol::fixed_key(keysym)) {
            return Some((None, key));
        }
        let wanted = Symbol::of(keysym)?;
        let alone = || wanted.alone().and_then(|symbol| self.best(symbol, lights));
        if let Some(sequence) = self.best(wanted, lights).or_else(alone) {
            return Some((Some(sequence), sequence.stroke.key));
        }
        let Symbol::Char(character) = wanted else { return None };
        let second = self.layout.second(character);
        second.or_else(|| us_key(character)).map(|key| (None, key))
    }

    /// The sequence that needs no change of modifiers, or else the simplest one.
    fn best(&self, symbol: Symbol, lights: Lights) -> Option<Sequence> {
        let own = self.held_modifiers();
        let sequences = self.layout.sequences(symbol);
        let fits = |sequence: &&Sequence| {
            sequence.before.is_none() && self.wanted(&sequence.stroke, lights) == own
        };
        sequences.iter().find(fits).or_else(|| sequences.first()).copied()
    }

    fn held_modifiers(&self) -> BTreeSet<Key> {
        self.held.values().flatten().copied().filter(|key| is_modifier(*key)).collect()
    }

    fn mods(&self, keys: &BTreeSet<Key>) -> Mods {
        let has = |code: u16| keys.iter().any(|key| key.code() == code);
        let any = |codes: [u16; 2]| codes.into_iter().any(has);
        let (control, right) = (any(CONTROL), has(RIGHT_ALT));
        let third = self.layout.third;
        Mods {
            shift: any(SHIFT),
            // Windows, and clients that run there, treat Ctrl-Alt as AltGr.
            third: third && (right || control && has(ALT)),
            control,
            alt: has(ALT) || right && !third,
            logo: any(LOGO),
        }
    }

    /// The modifiers for a stroke, given those that the client holds.
    fn wanted(&self, stroke: &Stroke, lights: Lights) -> BTreeSet<Key> {
        let mut wanted = self.held_modifiers();
        let mods = self.mods(&wanted);
        let shift = stroke.shift != (stroke.locks && lights.caps);
        let mut set = |codes: &[u16], down: bool| {
            if !down {
                wanted.retain(|key| !codes.contains(&key.code()));
            } else if !wanted.iter().any(|key| codes.contains(&key.code())) {
                wanted.extend(codes.first().and_then(|code| Key::new(*code)));
            }
        };
        let command = mods.control || mods.alt || mods.logo;
        match (stroke.third, mods.third) {
            (true, false) => {
                // Option selected this symbol.
                set(&[ALT], false);
                set(&[RIGHT_ALT], true);
            }
            (false, true) => {
                let chosen = LEVELS.iter().any(|it| self.held.contains_key(&Source::Symbol(*it)));
                if !chosen || mods.control {
                    // A shortcut: Ctrl-Alt-x, or Alt-x with the right Alt.
                    return wanted;
                }
                set(&[RIGHT_ALT], false);
            }
            (true, true) => {}
            (false, false) if command && (stroke.letter || mods.shift == shift) => return wanted,
            (false, false) if mods.alt && !mods.control && shift => {
                set(&[ALT, RIGHT_ALT], false);
            }
            (false, false) => {}
        }
        set(&SHIFT, shift);
        wanted
    }

    /// Makes exactly these modifiers be down. New ones are pressed before others are released,
    /// because an Alt key that goes up alone opens a menu.
    fn set_modifiers(&mut self, wanted: &BTreeSet<Key>) {
        let modifiers = self.down.iter().copied().filter(|key| is_modifier(*key));
        let down: BTreeSet<Key> = modifiers.collect();
        wanted.difference(&down).for_each(|key| self.turn(*key, true));
        down.difference(wanted).for_each(|key| self.turn(*key, false));
    }

    /// Restores the modifiers that the client holds. Alt and the logo keys are not pressed before
    /// the next key, because they would open a menu when released.
    fn restore(&mut self) {
        self.adjusted_for = None;
        let mut wanted = self.held_modifiers();
        wanted.retain(|key| {
            let alone = [ALT, RIGHT_ALT].contains(&key.code()) || LOGO.contains(&key.code());
            self.down.contains(key) || !alone
        });
        self.set_modifiers(&wanted);
    }

    fn tap(&mut self, key: Key) {
        if self.down.contains(&key) {
            self.turn(key, false);
        }
        self.steps.extend([(key, true), (key, false)]);
    }

    fn turn(&mut self, key: Key, down: bool) {
        if down {
            self.down.insert(key);
        } else {
            self.down.remove(&key);
        }
        self.steps.push((key, down));
    }
}

fn is_modifier(key: Key) -> bool {
    let code = key.code();
    let all = [SHIFT, CONTROL, [ALT, RIGHT_ALT], LOGO];
    all.iter().any(|codes| codes.contains(&code))
}

/// Whether the keysym names a key, rather than a symbol that another key might type.
fn is_named(keysym: u32) -> bool {
    Symbol::of(keysym).is_none()
}

/// The characters that viewers can type at this layout, in order.
pub fn characters(layout: &Arc<Layout>) -> String {
    let translator = KeyTranslator::new(layout.clone());
    let mut all: BTreeSet<char> = layout.characters().collect();
    all.extend(' '..='~');
    let typed = |it: &char| {
        let wanted = Symbol::Char(*it);
        let alone = || wanted.alone().and_then(|symbol| translator.best(symbol, Lights::default()));
        let plain = || translator.best(wanted, Lights::default());
        plain().or_else(alone).is_some() || layout.second(*it).or_else(|| us_key(*it)).is_some()
    };
    all.into_iter().filter(typed).collect()
}

/// The key that types this character on a US keyboard. A guest with two layouts, one of them
/// English, understands it.
fn us_key(character: char) -> Option<Key> {
    static US: std::sync::LazyLock<Option<Arc<Layout>>> =
        std::sync::LazyLock::new(|| Layout::named("us").ok());
    let sequences = US.as_ref()?.sequences(Symbol::Char(character));
    sequences.first().map(|sequence| sequence.stroke.key)
}

#[cfg(test)]
mod test;
