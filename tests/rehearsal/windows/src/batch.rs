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

/// Replaces `%NAME%`, `%NAME:~1,-2%`, `%1`, `%~1`, `%*`, `%~d0`, `%~dp0`, `%~f0` and `%%`.
/// `arguments` begins with the script.
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
                let (part, after) = script_part(after, &argument('0'));
                rest = after;
                match part {
                    Some(part) => made.push_str(&part),
                    None => {
                        next = rest.chars();
                        made.push_str(argument(next.next().unwrap_or('0')).trim_matches('"'));
                        rest = next.as_str();
                    }
                }
                continue;
            }
            _ => {
                let Some((name, after)) = after.split_once('%') else { continue };
                made.push_str(&value(name, variable));
                rest = after;
                continue;
            }
        }
        rest = next.as_str();
    }
    made + rest
}

/// The part of the script's path that `~d0`, `~dp0` or `~f0` at the start of the text names, and
/// the text after that. Without one of these, the text after the tilde.
fn script_part<'a>(text: &'a str, script: &str) -> (Option<String>, &'a str) {
    let folder = script.rfind('\\').map_or(0, |at| at + 1);
    let drive = script.find(':').map_or(0, |at| at + 1);
    for (word, end) in [("~dp0", folder), ("~d0", drive), ("~f0", script.len())] {
        if let Some(rest) = text.strip_prefix(word) {
            return (Some(script[..end].to_owned()), rest);
        }
    }
    (None, &text[1..])
}

/// The value of a variable, or a part of it: `NAME:~FIRST` or `NAME:~FIRST,COUNT`. Negative numbers
/// count from the end.
fn value(name: &str, variable: &dyn Fn(&str) -> Option<String>) -> String {
    let Some((name, part)) = name.split_once(":~") else {
        return variable(name).unwrap_or_default();
    };
    let letters: Vec<char> = variable(name).unwrap_or_default().chars().collect();
    let place = |text: &str, from: usize| {
        let number: i64 = text.parse().unwrap_or(0);
        let base = if number < 0 { letters.len() } else { from };
        let at = i64::try_from(base).unwrap_or(0).saturating_add(number);
        usize::try_from(at).unwrap_or(0).min(letters.len())
    };
    let (first, count) = part.split_once(',').unwrap_or((part, ""));
    let first = place(first, 0);
    let end = if count.is_empty() { letters.len() } else { place(count, first) };
    letters.get(first..end).unwrap_or_default().iter().collect()
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

/// A loop: its variable, the items before they are looked up, and the command for each.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Loop {
    pub(crate) variable: char,
    pub(crate) items: Items,
    pub(crate) body: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Items {
    /// `%d in (A B)`
    Words(Vec<String>),
    /// `/r FOLDER %d in (*.EXTENSION)`: the files below a folder.
    Files { folder: String, extension: String },
    /// `/f "usebackq skip=1 delims=" %d in ("FILE")`: the lines of a file.
    Lines { file: String, skip: usize },
}

/// The loop after the word `for`. `None`: it is not rehearsed.
pub(crate) fn read_loop(text: &str) -> Option<Loop> {
    let (switch, rest) = first(text);
    let (option, rest) = match switch.to_ascii_lowercase().as_str() {
        "/r" | "/f" => first(rest),
        _ => (String::new(), text),
    };
    let (variable, rest) = first(rest);
    let (list, body) = rest.trim_start().strip_prefix("in (")?.split_once(") do ")?;
    let list_words = words(list);
    let items = match switch.to_ascii_lowercase().as_str() {
        "/r" => Items::Files {
            folder: option,
            extension: list.strip_prefix("*.").filter(|it| !it.contains(' '))?.to_owned(),
        },
        "/f" => {
            let [file] = list_words.as_slice() else { return None };
            Items::Lines { file: file.clone(), skip: skipped(&option)? }
        }
        _ => Items::Words(list_words),
    };
    let mut name = variable.chars();
    let (Some('%'), Some(variable), None) = (name.next(), name.next(), name.next()) else {
        return None;
    };
    Some(Loop { variable, items, body: body.to_owned() })
}

/// The number of lines that the options of `for /f` leave out. Only whole lines of files with
/// quoted names are rehearsed.
fn skipped(options: &str) -> Option<usize> {
    let words: Vec<_> = options.split_whitespace().collect();
    match words.as_slice() {
        ["usebackq", "delims="] => Some(0),
        // Windows refuses 0.
        ["usebackq", skip, "delims="] => {
            skip.strip_prefix("skip=")?.parse().ok().filter(|it| *it > 0)
        }
        _ => None,
    }
}

/// The lines of a batch file, with the lines of a block in parentheses as one.
pub(crate) fn statements(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut depth = 0_usize;
    for line in text.lines().map(str::trim) {
        let is_block = depth > 0 || line.starts_with('(');
        match found.last_mut().filter(|_| depth > 0) {
            Some(last) => {
                last.push('\n');
                last.push_str(line);
            }
            None => found.push(line.to_owned()),
        }
        if is_block {
            let plain = scan(line).into_iter().filter(|(_, literal)| !literal);
            for (it, _) in plain {
                match it {
                    '(' => depth += 1,
                    ')' => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
        }
    }
    found
}

/// The commands of a block in parentheses, and the redirection behind it.
pub(crate) fn block(statement: &str) -> Option<(Vec<&str>, &str)> {
    let (inner, after) = statement.strip_prefix('(')?.rsplit_once(')')?;
    Some((inner.lines().map(str::trim).filter(|line| !line.is_empty()).collect(), after))
}

/// The result of `set /a`: a variable, and sums of numbers and variables.
pub(crate) fn arithmetic(
    text: &str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Option<(String, i64)> {
    let (name, sum) = text.split_once('=')?;
    let adds = name.strip_suffix('+');
    let name = adds.unwrap_or(name).trim();
    let number = |word: &str| {
        let word = word.trim();
        let value = || variable(word).unwrap_or_else(|| "0".into());
        word.parse::<i64>().ok().or_else(|| value().parse().ok())
    };
    let mut total = if adds.is_some() { number(name)? } else { 0 };
    for plus in sum.split('+') {
        let mut minus = plus.split('-');
        total = total.checked_add(number(minus.next()?)?)?;
        for part in minus {
            total = total.checked_sub(number(part)?)?;
        }
    }
    Some((name.to_owned(), total))
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
        assert_eq!(of("%~d0\\ %~f0"), "C:\\ C:\\a\\b.cmd");
        let variable = |name: &str| (name == "F").then(|| "D:\\x.swm".to_owned());
        let of = |line| expand(line, &variable, &arguments);
        assert_eq!(of("%F:~-4% %F:~0,-4% %F:~1,1% %F:~9%."), ".swm D:\\x : .");
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

    #[test]
    fn loops_name_words_files_or_lines() {
        let items = |text: &str| read_loop(text).map(|it| (it.variable, it.items, it.body));
        let words = Items::Words(vec!["a".into(), "b".into()]);
        assert_eq!(items("%d in (a b) do echo %d"), Some(('d', words, "echo %d".into())));
        let files = Items::Files { folder: "X:\\a b".into(), extension: "inf".into() };
        assert_eq!(items("/r \"X:\\a b\" %i in (*.inf) do x"), Some(('i', files, "x".into())));
        let lines = |skip| Items::Lines { file: "C:\\a b".into(), skip };
        let of = |options: &str| items(&format!("/f \"{options}\" %l in (\"C:\\a b\") do x"));
        assert_eq!(of("usebackq delims="), Some(('l', lines(0), "x".into())));
        assert_eq!(of("usebackq skip=3 delims="), Some(('l', lines(3), "x".into())));
        assert_eq!([of("usebackq skip=0 delims="), of("tokens=3")], [None, None]);
        assert_eq!(items("%dd in (a) do x"), None);
    }

    #[test]
    fn blocks_are_one_statement() {
        let text = "a\r\n(\r\n  echo 1\r\n  echo \")\"\r\n) > X:\\f\r\nb (c\r\nd\r\n";
        let statements = statements(text);
        assert_eq!(statements.len(), 4, "{statements:?}");
        let (lines, after) = block(&statements[1]).unwrap();
        assert_eq!((lines, after), (vec!["echo 1", "echo \")\""], " > X:\\f"));
    }

    #[test]
    fn sums_are_those_of_variables_and_numbers() {
        let variable = |name: &str| (name == "COUNT").then(|| "12".to_owned());
        let of = |text| arithmetic(text, &variable);
        assert_eq!(of("COUNT+=1"), Some(("COUNT".into(), 13)));
        assert_eq!(of("FIRST=COUNT-20"), Some(("FIRST".into(), -8)));
        assert_eq!(of("FIRST=NONE+2-1"), Some(("FIRST".into(), 1)));
        assert_eq!(of("FIRST"), None);
    }
}
