//! The grammar of QEMU's options: `word,key=value,switch`. A doubled comma `,,` is a literal one.

use crate::settings::value::quote;

/// Keys that give a device an address or a name. They need no note, as nothing is lost without
/// them.
const QUIET: &[&str] =
    &["id", "bus", "addr", "p2", "p3", "romfile", "netdev", "bootindex", "channel", "lun"];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The first word, if it has no `=`.
    pub first: String,
    /// Keys and their values. A switch has no value.
    pub rest: Vec<(String, Option<String>)>,
}

impl Options {
    /// Every text is valid.
    pub fn read(text: &str) -> Self {
        let mut options = Self::default();
        for (index, word) in words(text).into_iter().enumerate() {
            match word.split_once('=') {
                None if index == 0 => options.first = word,
                None if word.is_empty() => {}
                None => options.rest.push((word, None)),
                Some((key, value)) => options.rest.push((key.to_owned(), Some(value.to_owned()))),
            }
        }
        options
    }

    /// The value of a key. The last one wins, as in QEMU.
    pub fn get(&self, key: &str) -> Option<&str> {
        let found = self.rest.iter().rev().find(|(own, _)| own == key);
        found.and_then(|(_, value)| value.as_deref())
    }

    /// Whether a switch is on: `key` or `key=on`.
    pub fn on(&self, key: &str) -> bool {
        let found = self.rest.iter().rev().find(|(own, _)| own == key);
        found.is_some_and(|(_, value)| value.as_deref().is_none_or(|value| value == "on"))
    }

    /// Notes on keys that have no meaning here. Values are not shown, because they may be secret.
    pub fn without_meaning(&self) -> Vec<String> {
        let keys = self.rest.iter().map(|(key, _)| key.as_str());
        let keys = keys.filter(|key| !QUIET.contains(key));
        keys.map(|key| format!("its option {} has no effect", quote(key))).collect()
    }
}

/// Splits at single commas. A doubled comma becomes one.
fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        let doubled = letter == ',' && letters.next_if_eq(&',').is_some();
        match words.last_mut() {
            Some(word) if letter != ',' || doubled => word.push(letter),
            _ => words.push(String::new()),
        }
    }
    words
}

/// Splits a line into words as a shell does, by blanks, quotes and backslashes. Nothing is
/// expanded. A quote that is not closed is an error.
pub fn split(line: &str) -> anyhow::Result<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(open), close) if open == close => quote = None,
            (None, '"' | '\'') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, blank) if blank.is_whitespace() => words.extend(word.take()),
            (None | Some('"'), '\\') => {
                let next = letters.next();
                let word = word.get_or_insert_default();
                // Inside quotes a backslash stays, unless it escapes a special character.
                if quote.is_some() && !matches!(next, Some('"' | '\\' | '$' | '`')) {
                    word.push('\\');
                }
                word.extend(next.filter(|next| *next != '\n'));
            }
            (_, letter) => word.get_or_insert_default().push(letter),
        }
    }
    anyhow::ensure!(quote.is_none(), "a quote is not closed: add the closing one");
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn parses_a_list_of_options() {
        let options = Options::read("usb-host,vendorid=0x1,,2,switch,a=b=c,a=d,,,x=off");
        assert_eq!(options.first, "usb-host");
        assert_eq!(options.get("vendorid"), Some("0x1,2"));
        assert_eq!(options.get("a"), Some("d,"));
        assert!(options.on("switch") && !options.on("x") && !options.on("none"));
        assert_eq!(Options::read("type=1").first, "");
        assert_eq!(Options::read(""), Options::default());
        assert_eq!(words(",,,"), [",", ""]);
    }

    #[test]
    fn splits_a_command_line_like_a_shell() {
        let line = r#"-device  usb-host -name "a b"'c d' x\ y "q\"\n" '' tail"#;
        let words = ["-device", "usb-host", "-name", "a bc d", "x y", "q\"\\n", "", "tail"];
        assert_eq!(split(line).unwrap(), words);
        assert!(split("-name 'a b").is_err());
        assert_eq!(split(" \n").unwrap(), [""; 0]);
        assert_eq!(split("a\\").unwrap(), ["a"]);
    }

    #[test]
    fn notes_an_unsupported_option_without_its_value() {
        let notes = Options::read("secret,id=a,data=hush").without_meaning();
        assert_eq!(notes, ["its option data has no effect"]);
    }
}
