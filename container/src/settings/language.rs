//! Languages of Windows, cultures, and keyboard layouts.

use anyhow::{Context, ensure};

use super::near;
use super::value::Value;

/// A language of Windows.
#[derive(Debug, PartialEq, Eq)]
pub struct Row {
    /// Accepted words. `xx-*` matches every culture of the language.
    words: &'static [&'static str],
    /// The code in file names.
    pub code: &'static str,
    /// Microsoft's name.
    pub name: &'static str,
    /// Language and country, as in `ko-KR`.
    pub culture: &'static str,
}

/// The first matching row wins, so exceptions stand before their language.
#[rustfmt::skip]
const ROWS: &[Row] = &[
    Row { words: &["ar", "ar-*", "arabic", "arab"],
        code: "ar", name: "Arabic", culture: "ar-SA" },
    Row { words: &["bg", "bg-*", "bulgarian", "bu"],
        code: "bg", name: "Bulgarian", culture: "bg-BG" },
    Row { words: &["cs", "cs-*", "cz", "cz-*", "czech", "cesky"],
        code: "cs", name: "Czech", culture: "cs-CZ" },
    Row { words: &["da", "da-*", "dk", "dk-*", "danish", "danske"],
        code: "da", name: "Danish", culture: "da-DK" },
    Row { words: &["de", "de-*", "german", "deutsch"],
        code: "de", name: "German", culture: "de-DE" },
    Row { words: &["el", "el-*", "gr", "gr-*", "greek"],
        code: "el", name: "Greek", culture: "el-GR" },
    Row { words: &["gb", "en-gb", "british"],
        code: "en-gb", name: "English International", culture: "en-GB" },
    Row { words: &["en", "en-*", "english"],
        code: "en", name: "English", culture: "en-US" },
    Row { words: &["mx", "es-mx"],
        code: "mx", name: "Spanish (Mexico)", culture: "es-MX" },
    Row { words: &["es", "es-*", "spanish", "espanol", "español"],
        code: "es", name: "Spanish", culture: "es-ES" },
    Row { words: &["et", "et-*", "estonian", "eesti"],
        code: "et", name: "Estonian", culture: "et-EE" },
    Row { words: &["fi", "fi-*", "finnish", "suomi"],
        code: "fi", name: "Finnish", culture: "fi-FI" },
    Row { words: &["ca", "fr-ca"],
        code: "ca", name: "French Canadian", culture: "fr-CA" },
    Row { words: &["fr", "fr-*", "french", "français", "francais"],
        code: "fr", name: "French", culture: "fr-FR" },
    Row { words: &["he", "he-*", "il", "il-*", "hebrew"],
        code: "he", name: "Hebrew", culture: "he-IL" },
    Row { words: &["hr", "hr-*", "cr", "cr-*", "croatian", "hrvatski"],
        code: "hr", name: "Croatian", culture: "hr-HR" },
    Row { words: &["hu", "hu-*", "hungarian", "magyar"],
        code: "hu", name: "Hungarian", culture: "hu-HU" },
    Row { words: &["it", "it-*", "italian", "italiano"],
        code: "it", name: "Italian", culture: "it-IT" },
    Row { words: &["ja", "ja-*", "jp", "jp-*", "japanese"],
        code: "ja", name: "Japanese", culture: "ja-JP" },
    Row { words: &["ko", "ko-*", "kr", "kr-*", "korean"],
        code: "ko", name: "Korean", culture: "ko-KR" },
    Row { words: &["lt", "lt-*", "lithuanian", "lietuvos"],
        code: "lt", name: "Lithuanian", culture: "lt-LT" },
    Row { words: &["lv", "lv-*", "latvian", "latvijas"],
        code: "lv", name: "Latvian", culture: "lv-LV" },
    Row { words: &["nb", "nb-*", "nn", "nn-*", "no", "no-*", "norwegian", "norsk"],
        code: "no", name: "Norwegian", culture: "nb-NO" },
    Row { words: &["nl", "nl-*", "dutch", "nederlands"],
        code: "nl", name: "Dutch", culture: "nl-NL" },
    Row { words: &["pl", "pl-*", "polish", "polski"],
        code: "pl", name: "Polish", culture: "pl-PL" },
    Row { words: &["br", "pt", "pt-br", "portuguese", "português", "portugues"],
        code: "pt", name: "Brazilian Portuguese", culture: "pt-BR" },
    Row { words: &["pt-*"],
        code: "pp", name: "Portuguese", culture: "pt-PT" },
    Row { words: &["ro", "ro-*", "romanian", "română", "romana"],
        code: "ro", name: "Romanian", culture: "ro-RO" },
    Row { words: &["ru", "ru-*", "russian", "ruski"],
        code: "ru", name: "Russian", culture: "ru-RU" },
    Row { words: &["sk", "sk-*", "slovak", "slovenský", "slovensky"],
        code: "sk", name: "Slovak", culture: "sk-SK" },
    Row { words: &["sl", "sl-*", "si", "si-*", "slovenian", "slovenski"],
        code: "sl", name: "Slovenian", culture: "sl-SI" },
    Row { words: &["sr", "sr-*", "serbian", "serbian latin"],
        code: "sr", name: "Serbian Latin", culture: "sr-Latn-RS" },
    Row { words: &["sv", "sv-*", "se", "se-*", "swedish", "svenska"],
        code: "sv", name: "Swedish", culture: "sv-SE" },
    Row { words: &["th", "th-*", "thai"],
        code: "th", name: "Thai", culture: "th-TH" },
    Row { words: &["tr", "tr-*", "turkish", "türk", "turk"],
        code: "tr", name: "Turkish", culture: "tr-TR" },
    Row { words: &["ua", "ua-*", "uk", "uk-*", "ukrainian"],
        code: "uk", name: "Ukrainian", culture: "uk-UA" },
    Row { words: &["hk", "zh-hk", "cn-hk"],
        code: "hk", name: "Chinese (Traditional)", culture: "zh-TW" },
    Row { words: &["tw", "zh-tw", "cn-tw"],
        code: "tw", name: "Chinese (Traditional)", culture: "zh-TW" },
    Row { words: &["zh", "zh-*", "cn", "cn-*", "chinese"],
        code: "cn", name: "Chinese (Simplified)", culture: "zh-CN" },
];

/// Defaults to English.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Language(pub &'static Row);

impl Default for Language {
    fn default() -> Self {
        Self(find("en").unwrap_or(&ROWS[0]))
    }
}

/// Finds the row of a word. Case is ignored, and `_` equals `-`.
fn find(text: &str) -> Option<&'static Row> {
    let text = text.to_lowercase().replace('_', "-");
    ROWS.iter().find(|row| {
        row.words.iter().any(|word| match word.strip_suffix('*') {
            Some(start) => text.len() > start.len() && text.starts_with(start),
            None => text == *word,
        })
    })
}

impl Value for Language {
    const ACCEPTS: &'static str = "language or culture: Korean, ko, ko-KR";

    fn read(text: &str) -> anyhow::Result<Self> {
        find(text).map(Self).with_context(|| {
            let words: Vec<_> = ROWS.iter().flat_map(|row| row.words).copied().collect();
            match near::nearest(&text.to_lowercase(), &words) {
                Some(near) => format!("the language is unknown: did you mean {near}?"),
                None => "Windows is not available in this language: give a language like French, \
                         fr or fr-CA"
                    .into(),
            }
        })
    }
    fn show(&self) -> String {
        self.0.name.to_owned()
    }
}

/// The advice where a culture is expected: that of a language, if it is one that LANGUAGE takes.
fn advice(text: &str, plain: &str) -> String {
    find(text).map_or(plain.into(), |row| format!("did you mean {}?", row.culture))
}

/// A culture, as in `ko-KR` or `sr-Latn-RS`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Culture(pub String);

impl Value for Culture {
    const ACCEPTS: &'static str = "culture, like ko-KR";

    fn read(text: &str) -> anyhow::Result<Self> {
        let text = text.replace('_', "-");
        let mut parts = text.split('-');
        let letters = |part: &str| part.bytes().all(|byte| byte.is_ascii_alphabetic());
        let first = parts.next().is_some_and(|part| (2..=3).contains(&part.len()) && letters(part));
        let plain = |part: &str| part.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let rest = parts.all(|part| (2..=8).contains(&part.len()) && plain(part));
        let fits = first && rest && text.len() <= 35;
        ensure!(fits, "{}", advice(&text, "give a culture of language and country, like ko-KR"));
        Ok(Self(cased(&text)))
    }
    fn show(&self) -> String {
        self.0.clone()
    }
}

/// Applies the case of BCP 47: language lower, script capitalized, country upper.
fn cased(text: &str) -> String {
    let case = |(index, part): (usize, &str)| match (index, part.len()) {
        (0, _) => part.to_ascii_lowercase(),
        (_, 2) => part.to_ascii_uppercase(),
        (_, 4) if part.is_ascii() => {
            part[..1].to_ascii_uppercase() + &part[1..].to_ascii_lowercase()
        }
        _ => part.to_owned(),
    };
    text.split('-').enumerate().map(case).collect::<Vec<_>>().join("-")
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keyboard {
    /// The default layout of a culture.
    Of(Culture),
    /// A layout number as Windows writes it: `0409:00000409`, or `00000409` alone.
    Layout(String),
}

impl Value for Keyboard {
    const ACCEPTS: &'static str = "culture, or layout like 0409:00000409";

    fn read(text: &str) -> anyhow::Result<Self> {
        let hex = |part: &str, length| {
            part.len() == length && part.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let layout = match text.split_once(':') {
            Some((language, layout)) => hex(language, 4) && hex(layout, 8),
            None => hex(text, 8),
        };
        if layout {
            return Ok(Self::Layout(text.to_ascii_lowercase()));
        }
        let culture = Culture::read(text).ok().map(Self::Of);
        let plain = "give a culture, like ko-KR, or a layout, like 0409:00000409";
        culture.with_context(|| advice(text, plain))
    }
    fn show(&self) -> String {
        match self {
            Self::Of(culture) => culture.show(),
            Self::Layout(layout) => layout.clone(),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn accepts_all_names_of_a_language() {
        for (text, culture) in [
            ("Korean", "ko-KR"),
            ("ko_KR", "ko-KR"),
            ("kr", "ko-KR"),
            ("en-GB", "en-GB"),
            ("en-AU", "en-US"),
            ("fr-CA", "fr-CA"),
            ("ca", "fr-CA"),
            ("fr-BE", "fr-FR"),
            ("pt-BR", "pt-BR"),
            ("pt", "pt-BR"),
            ("pt-PT", "pt-PT"),
            ("zh-HK", "zh-TW"),
            ("ZH-cn", "zh-CN"),
            ("Español", "es-ES"),
            ("es-MX", "es-MX"),
            ("Serbian Latin", "sr-Latn-RS"),
        ] {
            let language = Language::read(text).map(|it| it.0.culture).ok();
            assert_eq!(language, Some(culture), "{text}");
        }
        assert_eq!(Language::default().0.culture, "en-US");
    }

    #[test]
    fn every_name_finds_its_own_row() {
        for row in ROWS {
            for word in row.words {
                let text = word.replace('*', "xx");
                assert_eq!(find(&text).map(|it| it.name), Some(row.name), "{text}");
            }
            assert!(Culture::read(row.culture).is_ok(), "{}", row.culture);
        }
        assert_eq!(ROWS.len(), 39);
    }

    #[test]
    fn refuses_unknown_languages() {
        for text in ["klingon", "-", "e", "xx-XX", "en-", "english "] {
            assert!(Language::read(text).is_err(), "{text}");
        }
        for text in ["ko-", "k", "ko-KR-", "0409", "ko KR", "ko-KR;x", "é", "zé-日本"] {
            assert!(Culture::read(text).is_err(), "{text}");
            assert!(Keyboard::read(text).is_err(), "{text}");
        }
        assert_eq!(Culture::read("sr_latn_rs").unwrap().0, "sr-Latn-RS");
        assert!(matches!(Keyboard::read("0409:00000409"), Ok(Keyboard::Layout(_))));
    }
}
