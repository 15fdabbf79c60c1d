//! Names: from the client's paths to the host's names and back, and wildcards.
//!
//! Names that Windows cannot have are shown with characters of Unicode's private use area, as
//! macOS and Linux' cifs (`mapposix`) do it. Names that are not UTF-8 are hidden.
//!
//! Threats: `..`, separators, NUL and streams in a name of the client.

use std::borrow::Cow;

use crate::status::{Answer, Status};

/// The longest path in UTF-16 units, as Windows has it.
const MAX_PATH: usize = 32_760;
/// The deepest path.
const MAX_DEPTH: usize = 128;
/// Characters that no name of Windows has. U+F020 stands for the first of them.
const RESERVED: [char; 8] = ['"', '*', ':', '<', '>', '?', '\\', '|'];
const MAPPED: u32 = 0xf020;
const MAPPED_SPACE: char = '\u{f028}';
const MAPPED_DOT: char = '\u{f029}';

/// The host's names of a path of the client. The folder itself has none.
pub fn parse(path: &str) -> Answer<Vec<String>> {
    if path.starts_with('\\') {
        return Err(Status::INVALID_PARAMETER);
    }
    if path.len() > MAX_PATH * 3 {
        return Err(Status::OBJECT_NAME_INVALID);
    }
    // The unnamed stream is the file.
    let path = path.strip_suffix("::$DATA").unwrap_or(path);
    let path = path.strip_suffix('\\').unwrap_or(path);
    if path.is_empty() {
        return Ok(Vec::new());
    }
    let names: Vec<_> = path.split('\\').map(to_host).collect::<Answer<_>>()?;
    if names.len() > MAX_DEPTH { Err(Status::OBJECT_NAME_INVALID) } else { Ok(names) }
}

fn to_host(name: &str) -> Answer<String> {
    let refused = |it: char| it < ' ' || it == '/' || RESERVED.contains(&it);
    if name == "." || name == ".." {
        return Err(Status::OBJECT_PATH_SYNTAX_BAD);
    }
    if name.is_empty() || name.contains(refused) {
        return Err(Status::OBJECT_NAME_INVALID);
    }
    let host: String = name.chars().map(unmap).collect();
    // Mapped characters must not make what a plain name cannot be.
    if host.len() > 255 || host == "." || host == ".." || host.contains(['/', '\0']) {
        return Err(Status::OBJECT_NAME_INVALID);
    }
    Ok(host)
}

fn unmap(it: char) -> char {
    match it {
        '\u{f001}'..='\u{f01f}' => char::from_u32(u32::from(it) - 0xf000).unwrap_or(it),
        '\u{f020}'..='\u{f027}' => {
            usize::try_from(u32::from(it) - MAPPED).map_or(it, |at| RESERVED[at])
        }
        MAPPED_SPACE => ' ',
        MAPPED_DOT => '.',
        _ => it,
    }
}

/// The client's name of a file of the host.
pub fn to_client(name: &str) -> Cow<'_, str> {
    let strange = |it: char| it < ' ' || RESERVED.contains(&it);
    if !name.contains(strange) && !name.ends_with([' ', '.']) {
        return Cow::Borrowed(name);
    }
    let map = |it: char| {
        let reserved = RESERVED.iter().position(|other| *other == it);
        let code = match (reserved.map(u32::try_from), it) {
            (Some(Ok(at)), _) => MAPPED + at,
            (_, '\0'..' ') => 0xf000 + u32::from(it),
            _ => u32::from(it),
        };
        char::from_u32(code).unwrap_or(it)
    };
    let mut mapped: String = name.chars().map(map).collect();
    match mapped.pop() {
        Some(' ') => mapped.push(MAPPED_SPACE),
        Some('.') => mapped.push(MAPPED_DOT),
        last => mapped.extend(last),
    }
    Cow::Owned(mapped)
}

/// Upper case as Windows compares names: letter by letter.
pub fn fold(letter: char) -> char {
    let mut upper = letter.to_uppercase();
    match (upper.next(), upper.next()) {
        (Some(upper), None) => upper,
        _ => letter,
    }
}

pub fn same(a: &str, b: &str) -> bool {
    a.chars().map(fold).eq(b.chars().map(fold))
}

/// Whether a name matches a pattern ([MS-FSA] 2.1.4.4), in time proportional to both lengths.
pub fn matches(pattern: &str, name: &str) -> bool {
    if pattern == "*" {
        return true;
    }
    let pattern: Vec<_> = pattern.chars().map(fold).collect();
    let name: Vec<_> = name.chars().map(fold).collect();
    let last_dot = name.iter().rposition(|it| *it == '.');
    // Places in the pattern that the name so far can reach.
    let mut reached = vec![false; pattern.len() + 1];
    reached[0] = true;
    for at in 0..=name.len() {
        let letter = name.get(at).copied();
        let mut next = vec![false; pattern.len() + 1];
        for place in 0..pattern.len() {
            if !reached[place] {
                continue;
            }
            let (stay, skip, step) =
                choices(pattern[place], letter, last_dot.is_some_and(|it| it <= at));
            reached[place + 1] |= skip;
            next[place] |= stay;
            next[place + 1] |= step;
        }
        if letter.is_none() {
            break;
        }
        reached = next;
    }
    reached[pattern.len()]
}

/// Whether a wildcard takes the letter and stays, takes nothing, or takes the letter and ends.
/// `late` is set at the name's last dot and after it.
fn choices(wildcard: char, letter: Option<char>, late: bool) -> (bool, bool, bool) {
    let some = letter.is_some();
    match wildcard {
        '*' => (some, true, false),
        // Takes all before the last dot. After it, as much as it can.
        '<' => (some && (letter != Some('.') || !late), true, some && letter != Some('.')),
        '?' => (false, false, some),
        '>' => (false, !some || letter == Some('.'), some && letter != Some('.')),
        '"' => (false, !some, letter == Some('.')),
        other => (false, false, letter == Some(other)),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn nothing_leads_out() {
        for path in ["..", r"a\..", r"..\a", "a/b", "../a", r"\a", r"a\.\b", "a\0", r"a\\b", "a:b"]
        {
            assert!(parse(path).is_err(), "{path:?}");
        }
        // Mapped characters, too: a dot alone, and two.
        for path in ["\u{f029}", ".\u{f029}", "\u{f029}\u{f029}"] {
            assert_eq!(parse(path), Err(Status::OBJECT_NAME_INVALID), "{path:?}");
        }
        assert_eq!(parse(&["a"; 129].join("\\")), Err(Status::OBJECT_NAME_INVALID));
        assert_eq!(parse(&"a".repeat(256)), Err(Status::OBJECT_NAME_INVALID));
    }

    #[test]
    fn names_that_windows_cannot_have_are_mapped_and_back() {
        for name in ["a:b", "a\\b", "what?", "tab\t", "ends. ", "dots..", "\"*<>|"] {
            let shown = to_client(name);
            assert_ne!(shown, name);
            assert!(!shown.contains(RESERVED) && !shown.ends_with([' ', '.']), "{shown:?}");
            assert_eq!(parse(&shown), Ok(vec![name.to_owned()]), "{name:?}");
        }
        assert!(matches!(to_client("Grüße 🦀.txt"), Cow::Borrowed(_)));
    }

    #[test]
    fn paths_are_split() {
        assert_eq!(parse(""), Ok(vec![]));
        assert_eq!(parse(r"a\b c\"), Ok(vec!["a".to_owned(), "b c".to_owned()]));
        assert_eq!(parse("a::$DATA"), Ok(vec!["a".to_owned()]));
    }

    #[test]
    fn wildcards() {
        for (pattern, name, expected) in [
            ("*", "anything.txt", true),
            ("*.txt", "A.TXT", true),
            ("*.txt", "a.txt.bak", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("a>", "a", true),
            ("a>>.b", "ax.b", true),
            ("<.txt", "a.b.txt", true),
            ("<", "ab", true),
            ("<", "a.b", false),
            ("a\"", "a", true),
            ("a\"b", "a.b", true),
            ("ä*", "Ängste", true),
            ("", "a", false),
            ("a*b*c*d", "aXbXcXd", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
        assert!(!matches(&"*a".repeat(120), &"a".repeat(119)));
    }
}
