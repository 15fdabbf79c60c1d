//! The language of Windows' command interpreter, as far as scripts of an installation use it:
//! variables, quoting, redirections and operators of a line.

/// How a command follows the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    /// `&`, and the first command.
    Always,
    /// `&&`
    IfGood,
    /// `||`
    IfBad,
}

/// A command without its redirections, and the file that gets its output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Simple {
    pub(crate) text: String,
    /// The file, and whether the output is added to it.
    pub(crate) output: Option<(String, bool)>,
}

/// Replaces `%NAME%`, `%1`, `%~1`, `%*`, `%~dp0`, `%~f0` and `%%`. `arguments` begins with the
/// script.
pub(crate) fn expand(
    line: &str,
    variable: &dyn Fn(&str) -> Option<String>,
    arguments: &[String],
) -> String {
    let argument = |digit: char| {
        let number = digit.to_digit(10).and_then(|it| usize::try_from(it).ok());
        number.and_then(|it| arguments.get(it)).cloned().unwrap_or_default()
    };
    let mut made = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('%') {
        made.push_str(before);
        let mut next = after.chars();
        rest = after;
        match next.next() {
            Some('%') => made.push('%'),
            Some('*') => made.push_str(&arguments.get(1..).unwrap_or_default().join(" ")),
            Some(digit) if digit.is_ascii_digit() => made.push_str(&argument(digit)),
            Some('~') => {
                if let Some(after) = after.strip_prefix("~dp0") {
                    let script = argument('0');
                    let end = script.rfind('\\').map_or(0, |at| at + 1);
                    made.push_str(&script[..end]);
                    rest = after;
                } else if let Some(after) = after.strip_prefix("~f0") {
                    made.push_str(&argument('0'));
                    rest = after;
                } else {
                    made.push_str(argument(next.next().unwrap_or('0')).trim_matches('"'));
                    rest = next.as_str();
                }
                continue;
            }
            _ => {
                let Some((name, after)) = after.split_once('%') else { continue };
                made.push_str(&variable(name).unwrap_or_default());
                rest = after;
                continue;
            }
        }
        rest = next.as_str();
    }
    made + rest
}

/// Replaces `%NAME%` as outside of batch files, where names without a value stay as they are.
pub(crate) fn expand_known(line: &str, variable: &dyn Fn(&str) -> Option<String>) -> String {
    let mut made = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('%') {
        made.push_str(before);
        let known = after.split_once('%');
        let known = known.and_then(|(name, after)| Some((variable(name)?, after)));
        rest = match known {
            Some((value, after)) => {
                made.push_str(&value);
                after
            }
            None => {
                made.push('%');
                after
            }
        };
    }
    made + rest
}

/// The characters of a line, each with whether it is only a character: quoted, or after a caret.
fn scan(line: &str) -> Vec<(char, bool)> {
    let (mut quoted, mut escaped) = (false, false);
    let mut found = Vec::new();
    for it in line.chars() {
        if escaped {
            found.push((it, true));
            escaped = false;
        } else if it == '^' && !quoted {
            escaped = true;
        } else {
            quoted ^= it == '"';
            found.push((it, quoted || it == '"'));
        }
    }
    found
}

/// The commands of a line.
pub(crate) fn commands(line: &str) -> Vec<(Join, Simple)> {
    let scanned = scan(line);
    let mut found = vec![(Join::Always, Vec::new())];
    let mut at = 0;
    while let Some(&(it, literal)) = scanned.get(at) {
        let twice = scanned.get(at + 1) == Some(&(it, false));
        let before = at.checked_sub(1).and_then(|at| scanned.get(at));
        // `2>&1` has an ampersand of its own.
        let redirects = before.is_some_and(|it| *it == ('>', false));
        let join = match it {
            '&' if !literal && !redirects && twice => Some(Join::IfGood),
            '&' if !literal && !redirects => Some(Join::Always),
            '|' if !literal && twice => Some(Join::IfBad),
            _ => None,
        };
        match join {
            Some(join) => {
                at += if twice { 2 } else { 1 };
                found.push((join, Vec::new()));
            }
            None => {
                at += 1;
                if let Some((_, last)) = found.last_mut() {
                    last.push((it, literal));
                }
            }
        }
    }
    found.into_iter().map(|(join, scanned)| (join, redirections(&scanned))).collect()
}

/// Takes `>FILE`, `>>FILE`, `2>FILE` and `2>&1` out of a command.
fn redirections(scanned: &[(char, bool)]) -> Simple {
    let mut simple = Simple::default();
    let mut at = 0;
    while let Some(&(it, literal)) = scanned.get(at) {
        at += 1;
        if it != '>' || literal {
            simple.text.push(it);
            continue;
        }
        let adds = scanned.get(at) == Some(&('>', false));
        at += usize::from(adds);
        while scanned.get(at) == Some(&(' ', false)) {
            at += 1;
        }
        let rest = &scanned[at..];
        let end =
            rest.iter().position(|(it, literal)| *it == ' ' && !literal).unwrap_or(rest.len());
        let file: String = rest[..end].iter().map(|(it, _)| *it).collect();
        at += end;
        // A digit right before it, with nothing or a space before that, is a stream.
        let mut end = simple.text.chars().rev();
        let stream = end.next().filter(char::is_ascii_digit);
        let stream = stream.filter(|_| end.next().is_none_or(char::is_whitespace));
        if stream.is_some() {
            simple.text.pop();
        }
        if stream.is_none_or(|it| it == '1') {
            simple.output = Some((file.trim_matches('"').to_owned(), adds));
        }
    }
    simple
}

/// The commands of `%d in (A B) do COMMAND`, one for each word in the parentheses.
pub(crate) fn for_each(text: &str) -> Option<Vec<String>> {
    let (variable, rest) = first(text);
    let is_variable = variable.starts_with('%') && variable.chars().count() == 2;
    let (list, body) = rest.trim_start().strip_prefix("in (")?.split_once(") do ")?;
    is_variable.then(|| list.split_whitespace().map(|it| body.replace(&variable, it)).collect())
}

/// The words of a command, without their quotation marks.
pub(crate) fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quoted, mut is_word) = (String::new(), false, false);
    for it in text.chars() {
        match it {
            '"' => (quoted, is_word) = (!quoted, true),
            ' ' | '\t' if !quoted => {
                if is_word {
                    words.push(std::mem::take(&mut word));
                }
                is_word = false;
            }
            other => {
                word.push(other);
                is_word = true;
            }
        }
    }
    words.extend(is_word.then_some(word));
    words
}

/// The first word of a command, which may be quoted, and the text after it.
pub(crate) fn first(text: &str) -> (String, &str) {
    let text = text.trim_start();
    if let Some((name, rest)) = text.strip_prefix('"').and_then(|rest| rest.split_once('"')) {
        return (name.to_owned(), rest.trim_start());
    }
    let end = text.find(|it: char| it.is_whitespace()).unwrap_or(text.len());
    (text[..end].to_owned(), text[end..].strip_prefix([' ', '\t']).unwrap_or_default())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn variables_and_arguments_are_replaced() {
        let arguments = ["C:\\a\\b.cmd", "\"x y\"", "z"].map(str::to_owned);
        let variable = |name: &str| (name == "One").then(|| "1".to_owned());
        let of = |line| expand(line, &variable, &arguments);
        assert_eq!(of("%One%%Two%3 100%% %1 %~1 %2 %3."), "13 100% \"x y\" x y z .");
        assert_eq!(of("cd %~dp0 %*"), "cd C:\\a\\ \"x y\" z");
        assert_eq!(of("50%"), "50");
    }

    #[test]
    fn lines_are_split_as_windows_does() {
        let of = |line| {
            let simple = |(join, simple): (Join, Simple)| (join, simple.text, simple.output);
            commands(line).into_iter().map(simple).collect::<Vec<_>>()
        };
        let file = |name: &str, adds| Some((name.to_owned(), adds));
        assert_eq!(of(">COM1 echo a b"), [(Join::Always, " echo a b".into(), file("COM1", false))]);
        let both = of("one \"a & b\" 2>nul && two ^& x >> \"f g\" 2>&1 || three");
        assert_eq!(both[0], (Join::Always, "one \"a & b\"  ".into(), None));
        assert_eq!(both[1], (Join::IfGood, " two & x   ".into(), file("f g", true)));
        assert_eq!(both[2], (Join::IfBad, " three".into(), None));
        assert_eq!(of("echo done>\"x\"")[0], (Join::Always, "echo done".into(), file("x", false)));
        assert_eq!(words("a \"b c\"d \"\""), ["a", "b cd", ""]);
        assert_eq!(first("\"a b\" c"), ("a b".into(), "c"));
        assert_eq!(first("echo  x"), ("echo".into(), " x"));
    }
}
