//! Tests of `translate`.

use super::*;

#[test]
fn typable_characters_depend_on_the_layout() {
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
        let symbol = if character.is_ascii() { Source::Symbol(character.into()) } else { symbol };
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
fn only_the_key_is_sent_if_the_client_holds_its_modifiers() {
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
fn other_modifiers_are_set_around_the_key_and_restored() {
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
    assert_eq!(plain("us", &german), "+2a +3 -3 -2a", "AltGr of a German client is no key here");
    let slash = [('+', SHIFT_L), ('+', u32::from(b'/')), ('-', u32::from(b'/')), ('-', SHIFT_L)];
    assert_eq!(plain("us", &slash), "+2a -2a +35 -35 +2a -2a", "on German keyboards it has Shift");
    assert_eq!(plain("us", &[('+', u32::from(b'A')), ('-', u32::from(b'A'))]), "+2a +1e -1e -2a");
}

#[test]
fn a_pressed_key_is_released_under_other_modifiers() {
    let (small, large) = (u32::from(b'a'), u32::from(b'A'));
    let shifted = [('+', SHIFT_L), ('+', large), ('-', SHIFT_L), ('-', small)];
    assert_eq!(plain("us", &shifted), "+2a +1e -2a -1e");
    let elsewhere = [('+', LEVEL3), ('+', 0x40), ('-', LEVEL3), ('-', u32::from(b'q'))];
    assert_eq!(plain("us", &elsewhere), "+2a +3 -3 -2a", "@ came from Q, which is released");
    assert_eq!(plain("us", &[('+', small), ('+', 0x0100_d55c), ('-', 0x0100_d55c)]), "+1e");
    assert_eq!(plain("us", &[('+', small), ('+', small), ('-', small)]), "+1e +1e -1e");
}

#[test]
fn a_key_pressed_by_keysym_is_released_by_scancode_and_reverse() {
    let (symbol, key) = (Source::Symbol(0xff0d), Source::Key(Key::new(0x1c).unwrap()));
    for [down, up] in [[symbol, key], [key, symbol]] {
        let mut translator = KeyTranslator::new(Layout::named("us").unwrap());
        assert_eq!(translator.key_event(down, true, None).len(), 1);
        assert_eq!(translator.key_event(up, false, None).len(), 1, "{down:?} {up:?}");
        assert_eq!(translator.release_all(), []);
    }
}

#[test]
fn letters_keep_their_case_under_caps_lock() {
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
fn dead_keys_and_composed_letters_use_the_available_keys() {
    let tap = |symbol| [('+', symbol), ('-', symbol)];
    assert_eq!(plain("de", &tap(0xfe52)), "+29 -29", "dead_circumflex");
    assert_eq!(plain("de", &tap(0xea)), "+29 -29 +12 -12", "ê");
    assert_eq!(plain("de", &tap(u32::from(b'^'))), "+29 -29 +39 -39");
    assert_eq!(plain("us", &tap(0xfe52)), "+2a +7 -7 -2a", "^ instead of the dead key");
    assert_eq!(plain("us", &tap(0xea)), "", "nothing types it");
    assert_eq!(plain("ru", &tap(u32::from(b'w'))), "+11 -11", "the guest has a second layout");
}

#[test]
fn korean_and_japanese_keys_have_their_scancodes() {
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
fn the_keypad_works_with_and_without_num_lock() {
    let (seven, home) = (0xffb7, 0xff95);
    let off = |symbol| typed("fr", &[('+', symbol), ('-', symbol)], Lights::default()).join(" ");
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
fn no_key_sticks_for_any_client_input() {
    let characters = "aAzZqQ@/\\{}1!^~ê€ßя7한ㅂ";
    let mut symbols: Vec<u32> = characters.chars().map(|it| 0x0100_0000 + u32::from(it)).collect();
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
                let lights = Lights { caps: random(4) == 0, num: random(2) == 0, scroll: false };
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
