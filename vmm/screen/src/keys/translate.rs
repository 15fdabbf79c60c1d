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

/// The key that an event of the client is about.
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

/// The modifiers that are held at one moment.
#[derive(Clone, Copy)]
struct Mods {
    shift: bool,
    third: bool,
    control: bool,
    alt: bool,
    logo: bool,
}

impl KeyTranslator {
    /// Creates the state of a client that holds no keys.
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

    /// Whether the client holds this key.
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
        if !self.layout.has_third() && LEVELS.contains(&keysym) {
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

    /// The modifiers that the client holds.
    fn held_modifiers(&self) -> BTreeSet<Key> {
        self.held.values().flatten().copied().filter(|key| is_modifier(*key)).collect()
    }

    fn mods(&self, keys: &BTreeSet<Key>) -> Mods {
        let has = |code: u16| keys.iter().any(|key| key.code() == code);
        let any = |codes: [u16; 2]| codes.into_iter().any(has);
        let (control, right) = (any(CONTROL), has(RIGHT_ALT));
        let third = self.layout.has_third();
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
mod test {
    use super::*;

    #[test]
    fn characters_are_those_that_become_a_key() {
        let of = |name: &str| characters(&Layout::named(name).unwrap());
        let all = [("us", "aZ~ \"", "ä€한"), ("de", "äß€@ê^", "한ж"), ("ru", "жЯw", "ä한")];
        for (name, typed, lacks) in all {
            let found = of(name);
            assert!(typed.chars().all(|it| found.contains(it)), "{name}: {found}");
            assert!(!lacks.chars().any(|it| found.contains(it)), "{name}: {found}");
        }
        for character in of("de").chars() {
            let mut translator = KeyTranslator::new(Layout::named("de").unwrap());
            let symbol = Source::Symbol(0x0100_0000 | u32::from(character));
            let symbol =
                if character.is_ascii() { Source::Symbol(character.into()) } else { symbol };
            assert!(!translator.key_event(symbol, true, None).is_empty(), "{character}");
        }
    }

    const SHIFT_L: u32 = 0xffe1;
    const CONTROL_L: u32 = 0xffe3;
    const ALT_L: u32 = 0xffe9;
    const ALT_R: u32 = 0xffea;
    const LEVEL3: u32 = 0xfe03;

    /// The steps for a client's events on this keyboard. `+` marks pressed keys, `-` released
    /// ones.
    fn typed(keyboard: &str, events: &[(char, u32)], lights: Lights) -> Vec<String> {
        let mut translator = KeyTranslator::new(Layout::named(keyboard).unwrap());
        let feel = |(sign, symbol): &(char, u32)| {
            translator.key_event(Source::Symbol(*symbol), *sign == '+', Some(lights))
        };
        let steps: Vec<Step> = events.iter().flat_map(feel).collect();
        steps
            .iter()
            .map(|(key, down)| format!("{}{:x}", ["-", "+"][usize::from(*down)], key.code()))
            .collect()
    }

    fn plain(keyboard: &str, events: &[(char, u32)]) -> String {
        typed(keyboard, events, Lights { num: true, ..Lights::default() }).join(" ")
    }

    #[test]
    fn a_key_alone_is_sent_when_the_client_holds_what_the_symbol_needs() {
        let at = u32::from(b'@');
        assert_eq!(plain("us", &[('+', SHIFT_L), ('+', at), ('-', at)]), "+2a +3 -3");
        assert_eq!(plain("de", &[('+', LEVEL3), ('+', at), ('-', at)]), "+e038 +10 -10");
        let windows = [('+', CONTROL_L), ('+', ALT_L), ('+', at), ('-', at)];
        assert_eq!(
            plain("de", &windows),
            "+1d +38 +10 -10",
            "clients on Windows send Ctrl-Alt for AltGr"
        );
        let shortcut = [('+', CONTROL_L), ('+', SHIFT_L), ('+', u32::from(b't'))];
        assert_eq!(plain("de", &shortcut), "+1d +2a +14", "the case does not matter for shortcuts");
        assert_eq!(plain("fr", &[('+', CONTROL_L), ('+', u32::from(b'a'))]), "+1d +10");
    }

    #[test]
    fn other_modifiers_are_set_around_the_key_and_back() {
        let at = u32::from(b'@');
        let option = [('+', ALT_L), ('+', at), ('-', at)];
        assert_eq!(plain("de", &option), "+38 +e038 -38 +10 -10 -e038", "a Mac sends Option");
        let then = [&option[..], &[('-', ALT_L)]].concat();
        assert_eq!(plain("de", &then), "+38 +e038 -38 +10 -10 -e038", "this opens no menu");
        let then = [&option[..], &[('+', u32::from(b'f'))]].concat();
        assert_eq!(
            plain("de", &then),
            "+38 +e038 -38 +10 -10 -e038 +38 +21",
            "Alt is down again for the next key"
        );
        let german = [('+', LEVEL3), ('+', at), ('-', at), ('-', LEVEL3)];
        assert_eq!(
            plain("us", &german),
            "+2a +3 -3 -2a",
            "AltGr of a German client is no key here"
        );
        let slash =
            [('+', SHIFT_L), ('+', u32::from(b'/')), ('-', u32::from(b'/')), ('-', SHIFT_L)];
        assert_eq!(
            plain("us", &slash),
            "+2a -2a +35 -35 +2a -2a",
            "on German keyboards it has Shift"
        );
        assert_eq!(
            plain("us", &[('+', u32::from(b'A')), ('-', u32::from(b'A'))]),
            "+2a +1e -1e -2a"
        );
    }

    #[test]
    fn what_went_down_goes_up_whatever_is_held_by_then() {
        let (small, large) = (u32::from(b'a'), u32::from(b'A'));
        let shifted = [('+', SHIFT_L), ('+', large), ('-', SHIFT_L), ('-', small)];
        assert_eq!(plain("us", &shifted), "+2a +1e -2a -1e");
        let elsewhere = [('+', LEVEL3), ('+', 0x40), ('-', LEVEL3), ('-', u32::from(b'q'))];
        assert_eq!(plain("us", &elsewhere), "+2a +3 -3 -2a", "@ came from Q, which is released");
        assert_eq!(plain("us", &[('+', small), ('+', 0x0100_d55c), ('-', 0x0100_d55c)]), "+1e");
        assert_eq!(plain("us", &[('+', small), ('+', small), ('-', small)]), "+1e +1e -1e");
    }

    #[test]
    fn what_was_pressed_by_its_symbol_goes_up_with_its_place_and_the_other_way_round() {
        let (symbol, key) = (Source::Symbol(0xff0d), Source::Key(Key::new(0x1c).unwrap()));
        for [down, up] in [[symbol, key], [key, symbol]] {
            let mut translator = KeyTranslator::new(Layout::named("us").unwrap());
            assert_eq!(translator.key_event(down, true, None).len(), 1);
            assert_eq!(translator.key_event(up, false, None).len(), 1, "{down:?} {up:?}");
            assert_eq!(translator.release_all(), []);
        }
    }

    #[test]
    fn letters_are_as_the_client_has_them_whatever_caps_lock_is() {
        let caps = Lights { caps: true, ..Lights::default() };
        let typed = |keyboard: &str, symbol: char| {
            typed(keyboard, &[('+', u32::from(symbol)), ('-', u32::from(symbol))], caps).join(" ")
        };
        assert_eq!(typed("us", 'A'), "+1e -1e");
        assert_eq!(typed("us", 'a'), "+2a +1e -1e -2a");
        assert_eq!(typed("us", '1'), "+2 -2", "no letter");
        assert_eq!(typed("de", '1'), "+2a +2 -2 -2a", "German Windows shifts digits too");
        assert_eq!(typed("pl", '1'), "+2 -2");
    }

    #[test]
    fn dead_keys_and_composed_letters_are_typed_with_what_there_is() {
        let tap = |symbol| [('+', symbol), ('-', symbol)];
        assert_eq!(plain("de", &tap(0xfe52)), "+29 -29", "dead_circumflex");
        assert_eq!(plain("de", &tap(0xea)), "+29 -29 +12 -12", "ê");
        assert_eq!(plain("de", &tap(u32::from(b'^'))), "+29 -29 +39 -39");
        assert_eq!(plain("us", &tap(0xfe52)), "+2a +7 -7 -2a", "^ instead of the dead key");
        assert_eq!(plain("us", &tap(0xea)), "", "nothing types it");
        assert_eq!(plain("ru", &tap(u32::from(b'w'))), "+11 -11", "the guest has a second layout");
    }

    #[test]
    fn korean_and_japanese_keys_are_where_they_are() {
        let tap = |symbol| [('+', symbol), ('-', symbol)];
        for (keyboard, symbol, steps) in [
            ("ko", HANGUL, "+e038 -e038"),
            ("ko-KR", HANJA, "+e01d -e01d"),
            ("ko", ALT_R, "+e038 -e038"),
            ("ko", 0xffe4, "+e01d -e01d"),
            ("us", HANGUL, "+f2 -f2"),
            ("us", HANJA, "+f1 -f1"),
            ("ko", 0x0100_3142, "+10 -10"),
            ("ko", 0xeb2, "+10 -10"),
            ("ko", LEVEL3, ""),
            ("ja", 0xff23, "+79 -79"),
            ("ja", 0xff22, "+7b -7b"),
            ("ja", 0xff27, "+70 -70"),
            ("ja", 0xff2a, "+29 -29"),
            ("ja", 0x4b1, "+4 -4"),
            ("ja", u32::from(b'_'), "+2a +73 -73 -2a"),
        ] {
            assert_eq!(plain(keyboard, &tap(symbol)), steps, "{keyboard} {symbol:#x}");
        }
        let mut translator = KeyTranslator::new(Layout::named("ko").unwrap());
        let steps = translator.key_event(Source::Key(Key::HANGUL), true, None);
        assert_eq!(steps, [(Key::HANGUL, true)], "physical keys are sent as they are");
    }

    #[test]
    fn the_keypad_means_the_same_with_and_without_num_lock() {
        let (seven, home) = (0xffb7, 0xff95);
        let off =
            |symbol| typed("fr", &[('+', symbol), ('-', symbol)], Lights::default()).join(" ");
        let on = |symbol| plain("fr", &[('+', symbol), ('-', symbol)]);
        assert_eq!((on(seven), off(home)), ("+47 -47".into(), "+47 -47".into()));
        assert_eq!(on(home), "+e047 -e047", "the key beside the keypad");
        assert_eq!(off(seven), "+2a +8 -8 -2a", "the digit above the letters");
    }

    /// A guest that tracks which keys are down.
    #[derive(Default)]
    struct Guest(BTreeSet<Key>);

    impl Guest {
        fn see(&mut self, steps: Vec<Step>) {
            for (key, down) in steps {
                let new = if down { self.0.insert(key) } else { self.0.remove(&key) };
                assert!(new || down && !is_modifier(key), "{:x} {down}", key.code());
            }
        }
    }

    #[test]
    fn nothing_sticks_whatever_clients_do() {
        let characters = "aAzZqQ@/\\{}1!^~ê€ßя7한ㅂ";
        let mut symbols: Vec<u32> =
            characters.chars().map(|it| 0x0100_0000 + u32::from(it)).collect();
        symbols.extend([SHIFT_L, 0xffe2, CONTROL_L, 0xffe4, ALT_L, ALT_R, LEVEL3, 0xffeb, 0xff0d]);
        symbols.extend([0xfe52, 0xffb7, 0xff95, 0xffe5, HANGUL, 0x61, 0x41, 0x40, 0, u32::MAX]);
        let codes = [0x1e, 0x2a, 0x1d, 0x38, 0xe038, 0x10, 0xf2].map(|it| Key::new(it).unwrap());
        let mut sources: Vec<_> = symbols.into_iter().map(Source::Symbol).collect();
        sources.extend(codes.map(Source::Key));
        let mut state = 7_u64;
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % 1_000_003).unwrap() % below
        };
        for keyboard in ["us", "de", "fr", "ko", "ru", "tr", "ja", "nl"] {
            let layout = Layout::named(keyboard).unwrap();
            for _ in 0..300 {
                let (mut translator, mut guest) =
                    (KeyTranslator::new(layout.clone()), Guest::default());
                let mut held = BTreeSet::new();
                for _ in 0..random(60) {
                    let lights =
                        Lights { caps: random(4) == 0, num: random(2) == 0, scroll: false };
                    let source = sources[random(sources.len())];
                    let down = random(2) == 0;
                    guest.see(translator.key_event(source, down, Some(lights)));
                    if down {
                        held.insert(source)
                    } else {
                        held.remove(&source)
                    };
                }
                if random(2) == 0 {
                    guest.see(translator.release_all());
                } else {
                    let up = |source| guest.see(translator.key_event(source, false, None));
                    held.into_iter().for_each(up);
                }
                assert_eq!(guest.0, BTreeSet::new(), "{keyboard}");
            }
        }
    }
}
