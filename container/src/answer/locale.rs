//! Languages, regions and keyboards, as answer files write them.

use super::Locale;
use super::xml::{Element, text};
use crate::settings::language::Keyboard;

/// The settings that the components for languages have in common.
pub(super) fn settings(locale: &Locale) -> Vec<Element> {
    vec![
        text("InputLocale", &locale.keyboard),
        text("SystemLocale", &locale.region),
        text("UILanguage", &locale.language),
        text("UserLocale", &locale.region),
    ]
}

/// The keyboard as an input locale: a culture, or a language and a layout. A layout without its
/// language has that in its low half.
pub(super) fn keyboard(keyboard: &Keyboard) -> String {
    match keyboard {
        Keyboard::Of(culture) => culture.0.clone(),
        Keyboard::Layout(layout) if layout.contains(':') => layout.clone(),
        Keyboard::Layout(layout) => {
            format!("{}:{layout}", layout.get(4..).unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::value::Value as _;

    #[test]
    fn layouts_have_their_language() {
        for (given, wanted) in [
            ("ko_kr", "ko-KR"),
            ("0412:00000412", "0412:00000412"),
            ("00000409", "0409:00000409"),
            ("00010407", "0407:00010407"),
        ] {
            assert_eq!(keyboard(&Keyboard::read(given).unwrap()), wanted);
        }
    }
}
