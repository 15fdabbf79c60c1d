//! Keyboard layouts: which symbol is on which key, for the languages of Windows.
//!
//! `tests/keyboards/xkb` makes the table from the keyboard data of X, with extra rows where the
//! layout of Windows differs. The table is read when a machine starts.
//!
//! Windows differs from X as follows. It has no AltGr on US, Chinese, Japanese and Korean
//! keyboards. Most other layouts have fewer symbols with AltGr, and the table omits the additional
//! ones of X. Rows with `!` are symbols that are on other keys, or that are dead keys in only one
//! of the two. Caps Lock shifts digits in Germany and France. The layouts of `ar`, `lv`, `th` and
//! `uk` are those of X, unchanged. The effect of Caps Lock on the upper row of Czech and Slovak
//! keyboards is not in the table.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, bail};
use host::input::Key;

use super::symbol::Symbol;
use host::keyvalue;

const TABLE: &str = include_str!("layouts.txt");
/// The key next to the left Shift, which many keyboards do not have.
const SPARE: u16 = 0x56;
const LAST_LEVEL: usize = 3;

/// A key, and the modifiers that its symbol needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stroke {
    pub key: Key,
    pub shift: bool,
    /// AltGr is down.
    pub third: bool,
    /// Caps Lock inverts Shift.
    pub locks: bool,
    pub letter: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// A dead key that is pressed and released first.
    pub before: Option<Stroke>,
    pub stroke: Stroke,
}

#[derive(Debug, Default)]
pub struct Layout {
    names: Vec<&'static str>,
    /// The names of the layout and its variant in X.
    x: (&'static str, &'static str),
    strokes: BTreeMap<Symbol, Vec<Stroke>>,
    /// Composed characters, each with the pairs of a dead key and a base character that make it.
    composed: BTreeMap<char, Vec<(Symbol, char)>>,
    /// The keys that an input method turns into these characters. Which modifiers are needed
    /// depends on the input method.
    second: BTreeMap<char, Key>,
    /// Keys on which Windows differs from X.
    foreign: Vec<Key>,
    pub third: bool,
}

impl Layout {
    pub fn named(name: &str) -> anyhow::Result<Arc<Self>> {
        let wanted = name.replace('_', "-");
        let mut blocks = TABLE.split("\nlayout ").skip(1);
        let block = blocks.find(|block| {
            let names = block.lines().next().unwrap_or_default();
            names.split(' ').any(|name| name.eq_ignore_ascii_case(&wanted))
        });
        match block {
            Some(block) => Ok(Arc::new(Self::read(block)?)),
            None => {
                let names: Vec<_> = Self::names().flatten().collect();
                let firsts: Vec<_> = Self::names().filter_map(|mut it| it.next()).collect();
                let near = keyvalue::nearest(&wanted, &names);
                let near = near.map_or(String::new(), |it| format!("did you mean {it}? "));
                bail!(
                    "there is no keyboard `{name}`: {near}write {}, or a culture like de-DE",
                    firsts.join(", ")
                )
            }
        }
    }

    /// The names of all layouts. The first name of each is its main one.
    pub fn names() -> impl Iterator<Item = impl Iterator<Item = &'static str>> {
        let blocks = TABLE.split("\nlayout ").skip(1);
        blocks.map(|block| block.lines().next().unwrap_or_default().split(' '))
    }

    /// The main name.
    pub fn name(&self) -> &'static str {
        self.names.first().copied().unwrap_or_default()
    }

    /// The sequences that type a symbol, the simplest first.
    pub fn sequences(&self, symbol: Symbol) -> Vec<Sequence> {
        let plain = |stroke: &Stroke| Sequence { before: None, stroke: *stroke };
        let mut sequences: Vec<_> =
            self.strokes.get(&symbol).into_iter().flatten().map(plain).collect();
        if let (Symbol::Char(character), true) = (symbol, sequences.is_empty()) {
            for (dead, base) in self.composed.get(&character).into_iter().flatten() {
                let first = |symbol| self.strokes.get(&symbol).and_then(|it| it.first()).copied();
                if let (Some(before), Some(stroke)) = (first(*dead), first(Symbol::Char(*base))) {
                    sequences.push(Sequence { before: Some(before), stroke });
                }
            }
        }
        sequences
    }

    /// The characters that can be typed: directly, with dead keys, or with an input method.
    pub fn characters(&self) -> impl Iterator<Item = char> {
        let typed = self.strokes.keys().filter_map(|symbol| match symbol {
            Symbol::Char(character) => Some(*character),
            Symbol::Dead(_) => None,
        });
        typed.chain(self.composed.keys().copied()).chain(self.second.keys().copied())
    }

    /// The key that an input method turns into this character.
    pub fn second(&self, character: char) -> Option<Key> {
        self.second.get(&character).copied()
    }

    fn read(block: &'static str) -> anyhow::Result<Self> {
        let mut lines = block.lines().filter(|line| !line.is_empty());
        let names = lines.next().unwrap_or_default().split(' ').collect();
        let mut layout = Self { names, ..Self::default() };
        let mut locks = Vec::new();
        for line in lines {
            let mut words = line.split(' ');
            match words.next().unwrap_or_default() {
                "x" => {
                    let mut word = || words.next().unwrap_or_default();
                    layout.x = (word(), word());
                }
                "lock" => locks = words.map(key).collect::<Result<_, _>>()?,
                "second" => {
                    let key = key(words.next().unwrap_or_default())?;
                    let symbol = words.next().unwrap_or_default().parse()?;
                    if let Symbol::Char(character) = symbol {
                        layout.second.insert(character, key);
                    }
                }
                "!" => {
                    let word = words.next().unwrap_or_default();
                    layout.foreign.push(key(word)?);
                    layout.row(word, words)?;
                }
                word if word.starts_with("dead_") => {
                    let dead: Symbol = word.parse()?;
                    for pair in words {
                        let mut pair = pair.chars().map(|it| if it == '␣' { ' ' } else { it });
                        let (base, made) = (pair.next(), pair.next());
                        let (base, made) = base.zip(made).with_context(|| line.to_owned())?;
                        layout.composed.entry(made).or_default().push((dead, base));
                    }
                }
                word => layout.row(word, words)?,
            }
        }
        layout.finish(&locks);
        Ok(layout)
    }

    /// Adds a key with its symbols by level.
    fn row<'a>(&mut self, code: &str, words: impl Iterator<Item = &'a str>) -> anyhow::Result<()> {
        let key = key(code)?;
        let read = |word: &str| (word != "none").then(|| word.parse()).transpose();
        let mut row: Vec<Option<Symbol>> = words.map(read).collect::<Result<_, _>>()?;
        row.resize(LAST_LEVEL + 1, None);
        for (level, symbol) in row.iter().enumerate() {
            let Some(symbol) = symbol else { continue };
            let letters = matches!((row[level & 2], row[level | 1]),
                (Some(Symbol::Char(small)), Some(Symbol::Char(large)))
                    if small != large && small.to_uppercase().eq([large]));
            let turkish = [Some(Symbol::Char('i')), Some(Symbol::Char('ı'))].contains(&row[0]);
            let (shift, third) = (level & 1 != 0, level & 2 != 0);
            let letter = letters || turkish && !third;
            let stroke = Stroke { key, shift, third, locks: letter, letter };
            self.strokes.entry(*symbol).or_default().push(stroke);
            self.third |= third;
        }
        Ok(())
    }

    fn finish(&mut self, locks: &[Key]) {
        for strokes in self.strokes.values_mut() {
            for stroke in &mut *strokes {
                stroke.locks |= !stroke.third && locks.contains(&stroke.key);
            }
            strokes.sort_by_key(|it| (it.third, it.shift, it.key.code() == SPARE, it.key));
        }
    }
}

fn key(word: &str) -> anyhow::Result<Key> {
    let code = u16::from_str_radix(word, 16).ok().and_then(Key::new);
    code.with_context(|| format!("`{word}` is not a key"))
}

/// The name of an existing layout, as configured.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Default for Name {
    fn default() -> Self {
        Self("us".to_owned())
    }
}

impl Name {
    /// Never fails: the tests read all layouts of the table.
    pub fn layout(&self) -> anyhow::Result<Arc<Layout>> {
        Layout::named(&self.0)
    }
}

impl FromStr for Name {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        Layout::named(text).map(|layout| Self(layout.name().to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

host::as_text!(Name);

#[cfg(test)]
mod test {
    use std::collections::BTreeSet;
    use std::io::Write as _;
    use std::path::Path;
    use std::process::{Command, Output, Stdio};

    use super::*;
    use crate::keys::translate::{KeyTranslator, Source};

    /// The languages of Windows: a short name and the culture.
    const LANGUAGES: [(&str, &str); 39] = [
        ("ar", "ar-SA"),
        ("bg", "bg-BG"),
        ("cs", "cs-CZ"),
        ("da", "da-DK"),
        ("de", "de-DE"),
        ("el", "el-GR"),
        ("en-gb", "en-GB"),
        ("en", "en-US"),
        ("es-mx", "es-MX"),
        ("es", "es-ES"),
        ("et", "et-EE"),
        ("fi", "fi-FI"),
        ("fr-ca", "fr-CA"),
        ("fr", "fr-FR"),
        ("he", "he-IL"),
        ("hr", "hr-HR"),
        ("hu", "hu-HU"),
        ("it", "it-IT"),
        ("ja", "ja-JP"),
        ("ko", "ko-KR"),
        ("lt", "lt-LT"),
        ("lv", "lv-LV"),
        ("nn", "nb-NO"),
        ("nl", "nl-NL"),
        ("pl", "pl-PL"),
        ("pt-br", "pt-BR"),
        ("pt", "pt-PT"),
        ("ro", "ro-RO"),
        ("ru", "ru-RU"),
        ("sk", "sk-SK"),
        ("sl", "sl-SI"),
        ("sr", "sr-Latn-RS"),
        ("sv", "sv-SE"),
        ("th", "th-TH"),
        ("tr", "tr-TR"),
        ("uk", "uk-UA"),
        ("zh-hk", "zh-TW"),
        ("zh-tw", "zh-TW"),
        ("zh", "zh-CN"),
    ];

    fn all() -> Vec<Arc<Layout>> {
        Layout::names().map(|mut it| Layout::named(it.next().unwrap()).unwrap()).collect()
    }

    fn number(symbol: Symbol) -> u32 {
        match symbol {
            Symbol::Char(character) => 0x0100_0000 + u32::from(character),
            Symbol::Dead(number) => number,
        }
    }

    #[test]
    fn every_language_finds_its_keyboard_by_every_name() {
        for (short, culture) in LANGUAGES {
            let layout = Layout::named(culture).unwrap();
            assert_eq!(Layout::named(short).unwrap().name(), layout.name(), "{short}");
            assert!(layout.strokes.len() > 90, "{culture}");
            assert!(layout.strokes.contains_key(&Symbol::Char(' ')), "{culture}");
        }
        assert_eq!(Layout::named("SR_latn-rs").unwrap().name(), "sr");
        let mut names = BTreeSet::new();
        for name in Layout::names().flatten() {
            assert!(names.insert(name.to_lowercase()), "{name} names two keyboards");
        }
        for (wrong, near) in
            [("germn", "`germn`: write us, gb"), ("de-DD", "de-DE"), ("", "us, gb, ar")]
        {
            let error = Layout::named(wrong).unwrap_err().to_string();
            assert!(error.contains(near) && error.contains(&format!("`{wrong}`")), "{error}");
        }
    }

    #[test]
    fn latin_keyboards_type_all_of_ascii() {
        let others = ["ar", "bg", "el", "he", "ru", "th", "uk"];
        for layout in all().into_iter().filter(|it| !others.contains(&it.name())) {
            let lacks = |it: &char| layout.sequences(Symbol::Char(*it)).is_empty();
            let missing: String = (' '..='~').filter(lacks).collect();
            // Italian keyboards really lack these two.
            let known = if layout.name() == "it" { "`~" } else { "" };
            assert_eq!(missing, known, "{}", layout.name());
        }
    }

    #[test]
    fn modifiers_and_dead_keys_match_real_keyboards() {
        for (keyboard, character, code, shift, third) in [
            ("de", 'z', 0x15, false, false),
            ("de", '@', 0x10, false, true),
            ("fr", 'a', 0x10, false, false),
            ("fr", '1', 0x02, true, false),
            ("gb", '"', 0x03, true, false),
            ("es-mx", '@', 0x10, false, true),
            ("tr", 'i', 0x28, false, false),
            ("tr", 'ı', 0x17, false, false),
            ("pl", 'Ą', 0x1e, true, true),
            ("ru", 'ё', 0x29, false, false),
            ("lt", '1', 0x02, false, true),
            ("pt-br", '/', 0x73, false, false),
            ("he", 'א', 0x14, false, false),
            ("th", 'ก', 0x20, false, false),
        ] {
            let sequences = Layout::named(keyboard).unwrap().sequences(Symbol::Char(character));
            let stroke = sequences.first().unwrap().stroke;
            let found = (stroke.key.code(), stroke.shift, stroke.third);
            assert_eq!(found, (code, shift, third), "{keyboard} {character}");
        }
        let sequences = Layout::named("fr").unwrap().sequences(Symbol::Char('ñ'));
        let before = sequences[0].before.unwrap();
        assert_eq!(
            (before.key.code(), before.third, sequences[0].stroke.key.code()),
            (0x03, true, 0x31)
        );
    }

    /// Prints a sentence for the person who runs the tests.
    fn report(sentence: &str) {
        writeln!(std::io::stderr(), "keyboards: {sentence}").ok();
    }

    /// Runs the library of X. `None` where it is not installed.
    fn xkb(verb: &str, input: &str) -> Option<Output> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/keyboards/xkb");
        let mut command = Command::new(script);
        command.arg(verb).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the script can be started");
        let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_owned());
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().ok();
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(why.contains("libxkbcommon") || why.contains("python3"), "{why}");
            let test = std::thread::current().name().unwrap_or_default().to_owned();
            let reason = format!("python3, libxkbcommon0 and xkb-data are needed: {why}");
            skip::not_run(&test, &reason);
            return None;
        }
        Some(output)
    }

    #[test]
    fn sent_keys_produce_the_same_symbols_in_x() {
        let (mut lines, mut foreign) = (String::new(), 0);
        for layout in all() {
            let (x, variant) = layout.x;
            for (symbol, strokes) in &layout.strokes {
                let shown = match symbol {
                    Symbol::Char(character) => format!("U+{:04X}", u32::from(*character)),
                    Symbol::Dead(_) => symbol.to_string(),
                };
                let mut translator = KeyTranslator::new(layout.clone());
                let steps = translator.key_event(Source::Symbol(number(*symbol)), true, None);
                let sent: Vec<_> = steps.iter().filter(|it| it.1).map(|it| it.0.code()).collect();
                let sequences = strokes.iter().map(|stroke| {
                    let held = [(stroke.shift, 0x2a), (stroke.third, 0xe038)];
                    let held = held.into_iter().filter(|it| it.0).map(|it| it.1);
                    held.chain([stroke.key.code()]).collect::<Vec<u16>>()
                });
                let sequences: Vec<_> = sequences.collect();
                assert_eq!(sent, sequences[0], "{} {shown}", layout.name());
                for (stroke, sequence) in strokes.iter().zip(sequences) {
                    if layout.foreign.contains(&stroke.key) {
                        foreign += 1;
                        continue;
                    }
                    let codes: Vec<_> = sequence.iter().map(|code| format!("{code:x}")).collect();
                    lines += &format!("{x} {variant} {shown} {}\n", codes.join("+"));
                }
            }
        }
        let count = lines.lines().count();
        assert!(count > 3900 && foreign < 400, "{count} symbols of X, {foreign} of Windows alone");
        if let Some(output) = xkb("judge", &lines) {
            let wrong = String::from_utf8(output.stdout).unwrap();
            assert_eq!(wrong, "", "of {count}");
            report(&format!("{count} symbols are X's, {foreign} are Windows' alone"));
        }
    }

    #[test]
    fn every_legacy_keysym_matches_x() {
        let Some(output) = xkb("symbols", "") else { return };
        assert_eq!(String::from_utf8(output.stdout).unwrap(), include_str!("symbols.txt"));
    }
}
