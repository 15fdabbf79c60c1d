//! Windows' command interpreter: runs commands and batch files on the drive of Windows.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use super::batch::{self, Items, Join, Simple};
use super::console::say;
use super::drives::Drive;
use super::places::Places;
use super::registry::Registry;
use super::tools::Tools;
use super::{files, programs};

/// The status of a command that does not exist.
const NOT_FOUND: i32 = 9009;
/// Files that call one another, at most.
const MAX_DEPTH: u32 = 16;

pub(crate) struct Shell {
    places: Places,
    pub(crate) registry: Registry,
    /// The programs that only Windows PE has.
    tools: Option<Tools>,
    variables: BTreeMap<String, String>,
    /// The variables of loops.
    bound: BTreeMap<char, String>,
    /// The file that gets the output of commands without a redirection of their own.
    sink: Option<String>,
    status: i32,
    depth: u32,
    /// Commands that ran, and those that are not rehearsed.
    counts: (u32, u32),
}

/// The step that follows a command in a batch file.
enum Next {
    Line,
    Label(String),
    End,
}

impl Shell {
    /// `drive` is the place of C:.
    pub(crate) fn new(drive: &Path, registry: Registry) -> Self {
        let variables = [
            ("SYSTEMROOT", "C:\\Windows"),
            ("WINDIR", "C:\\Windows"),
            ("SYSTEMDRIVE", "C:"),
            ("PUBLIC", "C:\\Users\\Public"),
            ("TEMP", "C:\\Windows\\Temp"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Self {
            places: Places::new(drive),
            registry,
            tools: None,
            variables,
            bound: BTreeMap::new(),
            sink: None,
            status: 0,
            depth: 0,
            counts: (0, 0),
        }
    }

    /// In Windows PE, whose own drive is X:. The others have the letters from C: on.
    pub(crate) fn in_windows_pe(own: &Path, others: &[Drive], tools: Tools) -> Self {
        let mut shell = Self::new(own, Registry::default());
        shell.places = Places::in_windows_pe(own, others);
        shell.tools = Some(tools);
        for value in shell.variables.values_mut() {
            *value = value.replacen("C:", "X:", 1);
        }
        shell
    }

    /// The programs of Windows PE, when its commands have run.
    pub(crate) fn into_tools(self) -> (Registry, Tools) {
        (self.registry, self.tools.unwrap_or_default())
    }

    pub(crate) fn lines(&self) -> u32 {
        self.counts.0
    }

    pub(crate) fn unknown(&self) -> u32 {
        self.counts.1
    }

    /// Runs commands in their order, as Setup does: each must succeed.
    pub(crate) fn run_all(&mut self, commands: &[String]) -> anyhow::Result<()> {
        for command in commands {
            let status = self.run(command);
            anyhow::ensure!(status == 0, "{command}: ended with {status}");
        }
        Ok(())
    }

    /// Starts a program as Windows does, without a command interpreter, and returns its status.
    pub(crate) fn run(&mut self, line: &str) -> i32 {
        let variables = &self.variables;
        let variable = |name: &str| variables.get(&name.to_ascii_uppercase()).cloned();
        let text = batch::expand_known(line, &variable);
        self.simple(&Simple { text, output: None }, &[]);
        self.status
    }

    fn file(&self, path: &str) -> PathBuf {
        self.places.file(path)
    }

    /// Runs a batch file, or from a label in it.
    fn batch(&mut self, path: &str, label: Option<&str>, arguments: &[String]) {
        let text = match files::text(&self.file(path)) {
            Ok(text) if self.depth < MAX_DEPTH => text,
            _ => return self.missing(path),
        };
        let lines = batch::statements(&text);
        let find = |label: &str| {
            let is = |line: &String| line.strip_prefix(':').is_some_and(|it| it.trim() == label);
            lines.iter().position(is)
        };
        let mut at = match label.map(find) {
            None => 0,
            Some(Some(at)) => at,
            Some(None) => return self.missing(path),
        };
        let before = self.variables.clone();
        let bound = std::mem::take(&mut self.bound);
        self.depth += 1;
        while let Some(line) = lines.get(at) {
            at += 1;
            match self.line(line, arguments) {
                Next::Line => {}
                Next::End => break,
                Next::Label(label) => match find(&label) {
                    Some(found) => at = found,
                    None => {
                        self.missing(&label);
                        break;
                    }
                },
            }
        }
        self.depth -= 1;
        self.bound = bound;
        let scoped = lines.iter().any(|line| line.to_ascii_lowercase().starts_with("setlocal"));
        if scoped && label.is_none() {
            self.variables = before;
        }
    }

    fn missing(&mut self, what: &str) {
        say!("'{what}' is not recognized as an internal or external command");
        self.counts.1 += 1;
        self.status = NOT_FOUND;
    }

    fn line(&mut self, line: &str, arguments: &[String]) -> Next {
        let line = line.trim().trim_start_matches('@').trim_start();
        if line.is_empty() || line.starts_with(':') {
            return Next::Line;
        }
        let status = self.status;
        let variables = &self.variables;
        let variable = |name: &str| match name.eq_ignore_ascii_case("ERRORLEVEL") {
            true => Some(status.to_string()),
            false => variables.get(&name.to_ascii_uppercase()).cloned(),
        };
        let line = batch::expand(line, &variable, arguments);
        self.expanded(&line, arguments)
    }

    fn expanded(&mut self, line: &str, arguments: &[String]) -> Next {
        let (word, rest) = batch::first(line);
        if word.eq_ignore_ascii_case("if") {
            return match self.condition(rest) {
                Some((true, then)) => self.expanded(&then, arguments),
                Some((false, _)) => Next::Line,
                None => {
                    self.missing(line);
                    Next::Line
                }
            };
        }
        if word.eq_ignore_ascii_case("for") {
            return self.each(rest, arguments);
        }
        if line.starts_with('(') {
            return self.block(line, arguments);
        }
        for (join, simple) in batch::commands(line) {
            let due = match join {
                Join::Always => true,
                Join::IfGood => self.status == 0,
                Join::IfBad => self.status != 0,
            };
            if due {
                match self.simple(&simple, arguments) {
                    Next::Line => {}
                    other => return other,
                }
            }
        }
        Next::Line
    }

    /// Runs a command for each item of a loop.
    fn each(&mut self, text: &str, arguments: &[String]) -> Next {
        let read = batch::read_loop(text);
        let items = read.as_ref().map(|it| self.items(&it.items));
        let (Some(found), Some(Ok(items))) = (read, items) else {
            self.missing(&format!("for {text}"));
            return Next::Line;
        };
        for item in items {
            self.bound.insert(found.variable, item);
            match self.expanded(&found.body, arguments) {
                Next::Line => {}
                other => return other,
            }
        }
        self.bound.remove(&found.variable);
        Next::Line
    }

    fn items(&self, items: &Items) -> anyhow::Result<Vec<String>> {
        let ends = |path: &PathBuf, extension: &str| {
            path.extension().is_some_and(|it| it.eq_ignore_ascii_case(extension))
        };
        Ok(match items {
            Items::Words(words) => words.iter().map(|it| self.filled(it)).collect(),
            Items::Files { folder, extension } => {
                let (folder, root) = (self.filled(folder), self.file(&self.filled(folder)));
                let all = files::all(&root)?.into_iter().filter(|path| ends(path, extension));
                let relative = |path: PathBuf| {
                    let path = path.strip_prefix(&root).ok()?.to_str()?.replace('/', "\\");
                    Some(format!("{folder}\\{path}"))
                };
                all.filter_map(relative).collect()
            }
            Items::Lines { file, skip } => {
                let text = files::text(&self.file(&self.filled(file)))?;
                let lines = text.lines().skip(*skip).filter(|line| !line.is_empty());
                lines.map(str::to_owned).collect()
            }
        })
    }

    /// The text with the values of loops.
    fn filled(&self, text: &str) -> String {
        let mut made = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('%') {
            made.push_str(before);
            let mut next = after.chars();
            rest = match next.next().and_then(|name| self.bound.get(&name)) {
                Some(value) => {
                    made.push_str(value);
                    next.as_str()
                }
                None => {
                    made.push('%');
                    after
                }
            };
        }
        made + rest
    }

    /// Runs the commands in parentheses, with one place for the output of all.
    fn block(&mut self, text: &str, arguments: &[String]) -> Next {
        let Some((lines, after)) = batch::block(text) else {
            self.missing(text);
            return Next::Line;
        };
        let redirected = batch::commands(after).into_iter().next().map(|(_, simple)| simple);
        let outer = self.sink.clone();
        if let Some((file, adds)) = redirected.and_then(|it| it.output) {
            self.open(&file, adds);
        }
        let mut next = Next::Line;
        for line in lines {
            next = self.expanded(line, arguments);
            if !matches!(next, Next::Line) {
                break;
            }
        }
        self.sink = outer;
        next
    }

    /// `[/i] [not] exist FILE`, `defined NAME`, `A==B`, `A gtr B` or `errorlevel N`, and what
    /// follows it.
    fn condition(&self, text: &str) -> Option<(bool, String)> {
        let (mut rest, mut same_case, mut wanted) = (text.trim_start(), true, true);
        loop {
            let (word, after) = batch::first(rest);
            let (operand, then) = batch::first(after);
            let is = match word.to_ascii_lowercase().as_str() {
                "/i" => {
                    same_case = false;
                    None
                }
                "not" => {
                    wanted = !wanted;
                    None
                }
                "exist" => Some(self.file(&self.filled(&operand)).exists()),
                "defined" => Some(self.variables.contains_key(&operand.to_ascii_uppercase())),
                "errorlevel" => Some(self.status >= operand.parse().ok()?),
                _ => break,
            };
            match is {
                Some(is) => return Some((is == wanted, then.to_owned())),
                None => rest = after.trim_start(),
            }
        }
        let (left, after) = batch::first(rest);
        let (word, after) = batch::first(after);
        if word.eq_ignore_ascii_case("gtr") {
            let (right, then) = batch::first(after);
            let greater = left.parse::<i64>().ok()? > right.parse().ok()?;
            return Some((greater == wanted, then.to_owned()));
        }
        let (left, after) = rest.split_once("==")?;
        let after = after.trim_start();
        let end = match after.strip_prefix('"') {
            Some(quoted) => quoted.find('"')? + 2,
            None => after.find(' ')?,
        };
        let (left, right) = (left.trim(), &after[..end]);
        let equal = left == right || !same_case && left.to_lowercase() == right.to_lowercase();
        Some((equal == wanted, after[end..].to_owned()))
    }

    /// Runs one command, with its output where it belongs: also that of commands which it runs.
    fn simple(&mut self, simple: &Simple, arguments: &[String]) -> Next {
        let outer = self.sink.clone();
        if let Some((file, adds)) = &simple.output {
            self.open(&self.filled(file), *adds);
        }
        let next = self.command(simple.text.trim(), arguments);
        self.sink = outer;
        next
    }

    /// Sends output to a file from now on.
    fn open(&mut self, file: &str, adds: bool) {
        if !adds {
            self.write(file, false, "");
        }
        self.sink = Some(file.to_owned());
    }

    fn command(&mut self, text: &str, arguments: &[String]) -> Next {
        let (name, _) = batch::first(text);
        if ["if", "for"].contains(&name.to_ascii_lowercase().as_str()) {
            return self.expanded(text, arguments);
        }
        let text = &self.filled(text);
        let (name, rest) = batch::first(text);
        if name.is_empty() {
            return Next::Line;
        }
        self.counts.0 += 1;
        let lower = name.to_ascii_lowercase();
        let before = std::mem::take(&mut self.status);
        match lower.as_str() {
            "rem" | "setlocal" | "endlocal" | "title" | "chcp" | "color" | "cls" => {}
            "echo" if ["off", "on"].contains(&rest.to_ascii_lowercase().as_str()) => {}
            "echo" => self.say(rest),
            "echo." => self.say(""),
            "goto" if rest.eq_ignore_ascii_case(":eof") => return Next::End,
            "goto" => return Next::Label(rest.trim_start_matches(':').to_owned()),
            "exit" => {
                let words = batch::words(rest);
                let status = words.iter().find_map(|word| word.parse().ok());
                self.status = status.unwrap_or(before);
                return Next::End;
            }
            "set" => self.set(rest),
            "call" => self.call(rest, arguments),
            "start" => {
                // The title of the window comes first. Nothing here waits for its end.
                let (_, command) = batch::first(rest);
                self.expanded(command, arguments);
            }
            name if is_cmd(name) => {
                let at = rest.to_ascii_lowercase().find("/c ");
                match at {
                    Some(at) => drop(self.expanded(unquoted(rest[at + 3..].trim()), arguments)),
                    None if rest == "/k" => prompt(),
                    None => self.missing(text),
                }
            }
            "cd" | "md" | "mkdir" | "del" | "rmdir" | "rd" | "copy" | "type" => {
                if let Err(error) = self.on_files(&lower, &batch::words(rest)) {
                    say!("{text}: {error}");
                    self.status = 1;
                }
            }
            _ => self.program(&name, rest, text),
        }
        Next::Line
    }

    fn set(&mut self, text: &str) {
        let text = text.trim();
        if let Some(sum) = text.strip_prefix("/a ") {
            let variables = &self.variables;
            let variable = |name: &str| variables.get(&name.to_ascii_uppercase()).cloned();
            return match batch::arithmetic(sum, &variable) {
                Some((name, value)) => {
                    self.variables.insert(name.to_ascii_uppercase(), value.to_string());
                }
                None => self.missing(&format!("set {text}")),
            };
        }
        let text = text.trim_matches('"');
        match text.split_once('=') {
            Some((name, "")) => drop(self.variables.remove(&name.to_ascii_uppercase())),
            Some((name, value)) => {
                self.variables.insert(name.to_ascii_uppercase(), value.to_owned());
            }
            None => self.missing(&format!("set {text}")),
        }
    }

    /// Calls a label of this file, or another command.
    fn call(&mut self, text: &str, arguments: &[String]) {
        let (name, rest) = batch::first(text);
        match name.strip_prefix(':') {
            Some(label) => {
                let script = arguments.first().cloned().unwrap_or_default();
                let words = [vec![script.clone()], batch::words(rest)].concat();
                self.batch(&script, Some(label), &words);
            }
            None => drop(self.expanded(text, arguments)),
        }
    }

    /// Commands on files and folders.
    fn on_files(&mut self, name: &str, words: &[String]) -> anyhow::Result<()> {
        let words = words.iter().filter(|word| !word.starts_with('/')).collect::<Vec<_>>();
        let paths: Vec<_> = words.iter().map(|word| self.file(word)).collect();
        match (name, paths.as_slice()) {
            ("cd", [folder]) => {
                anyhow::ensure!(folder.is_dir(), "the system cannot find the path");
                self.places.folder.clone_from(words[0]);
            }
            ("md" | "mkdir", [folder]) => fs::create_dir_all(folder)?,
            ("del", [file]) => {
                // Its absence is no error for `del`.
                fs::remove_file(file).ok();
            }
            ("rmdir" | "rd", [folder]) => fs::remove_dir_all(folder)?,
            ("copy", [from, to]) => drop(fs::copy(from, to)?),
            ("type", [file]) => self.say(&files::text(file)?),
            _ => anyhow::bail!("not rehearsed"),
        }
        Ok(())
    }

    /// A batch file, or a program.
    fn program(&mut self, name: &str, rest: &str, text: &str) {
        let lower = name.to_ascii_lowercase();
        if lower.ends_with(".cmd") || lower.ends_with(".bat") {
            let words = [vec![name.to_owned()], batch::words(rest)].concat();
            return self.batch(name, None, &words);
        }
        let words: Vec<_> = batch::words(rest);
        let is_file = name.contains('\\');
        if is_file && !self.file(name).is_file() {
            return self.missing(text);
        }
        let outcome = self.tool(&lower, &words).or_else(|| {
            let mut registry = std::mem::take(&mut self.registry);
            let files = |path: &str| self.file(path);
            let machine = programs::Machine { drive: &self.places.drive, files: &files };
            let outcome = machine.run(&lower, &words, &mut registry);
            self.registry = registry;
            outcome
        });
        match outcome {
            Some(Ok(status)) => self.status = status,
            Some(Err(error)) => {
                say!("{text}: {error:#}");
                self.status = 1;
            }
            None => self.missing(text),
        }
    }

    /// Runs a program of Windows PE.
    fn tool(&mut self, name: &str, words: &[String]) -> Option<anyhow::Result<i32>> {
        let mut tools = self.tools.take()?;
        let mut places = self.places.clone();
        let outcome = tools.run(name, words, &mut places, &mut |text| self.say(text));
        (self.tools, self.places) = (Some(tools), places);
        outcome
    }

    /// Writes what a command says to the window, or to the file that gets its output.
    fn say(&mut self, text: &str) {
        match self.sink.clone() {
            None => say!("> {text}"),
            Some(file) if file.eq_ignore_ascii_case("con") => say!("> {text}"),
            Some(file) => self.write(&file, true, &format!("{text}\r\n")),
        }
    }

    fn write(&mut self, name: &str, adds: bool, text: &str) {
        if let Err(error) = self.places.write(name, adds, text) {
            say!("{name}: {error}");
            self.status = 1;
        }
    }
}

/// A prompt that waits for a person, and Windows with it.
fn prompt() -> ! {
    say!("a command prompt waits");
    loop {
        thread::park();
    }
}

fn is_cmd(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["cmd", "cmd.exe", "c:\\windows\\system32\\cmd.exe"].contains(&name.as_str())
}

/// `cmd /c` takes off the marks around a whole command.
fn unquoted(text: &str) -> &str {
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    inner.filter(|inner| !inner.contains('"')).map_or(text, |inner| inner)
}

#[cfg(test)]
mod test {
    use super::*;

    const SCRIPT: &str = "@echo off\r\n\
        setlocal EnableExtensions\r\n\
        set \"DONE=%SystemRoot%\\done\"\r\n\
        if not exist \"%DONE%\" call :once a\r\n\
        if /i \"%~1\"==\"LOGON\" >>C:\\log echo hello %2\r\n\
        sc.exe query None >nul 2>&1 || echo no service>>\"C:\\log\"\r\n\
        goto end\r\n\
        >>C:\\log echo never\r\n\
        :once\r\n\
        echo done>\"%DONE%\"\r\n\
        >>C:\\log echo once %1\r\n\
        exit /b 0\r\n\
        :end\r\n\
        exit /b 7\r\n";

    #[test]
    fn windows_pe_finds_the_script_of_another_drive() {
        let places = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [own, stick] = places.each_ref().map(tempfile::TempDir::path);
        fs::create_dir_all(stick.join("a")).unwrap();
        let script = "md \"%SystemRoot%\\Setup\" 2>nul\r\n\
            copy /y \"%~f0\" \"%SystemRoot%\\Setup\\b.cmd\" >nul\r\n\
            for %%d in (D E) do if not exist %%d:\\a echo %1 %%d>>X:\\log\r\n";
        fs::write(stick.join("a/b.cmd"), script).unwrap();
        let drive = Drive {
            kind: super::super::drives::Kind::RemovableReadOnly,
            is_cd: false,
            root: stick.to_owned(),
        };
        let mut shell = Shell::in_windows_pe(own, &[drive], Tools::default());
        let line = "cmd.exe /c for %d in (C D) do if exist %d:\\a\\b.cmd call %d:\\a\\b.cmd begin";
        assert_eq!((shell.run(line), shell.unknown()), (0, 0));
        assert_eq!(fs::read_to_string(own.join("log")).unwrap(), "begin D\r\nbegin E\r\n");
        assert_eq!(fs::read_to_string(own.join("Windows/Setup/b.cmd")).unwrap(), script);
    }

    const LOOPS: &str = "set \"FOUND=\"\r\n\
        for %%d in (D E) do for %%f in (x y) do if not defined FOUND if exist \"%%d:\\%%f\" \
        set \"FOUND=%%d:\\%%f\"\r\n\
        (\r\n  echo one\r\n  echo two ^& %FOUND%\r\n) > X:\\list\r\n\
        set \"COUNT=0\"\r\n\
        for /f \"usebackq delims=\" %%l in (\"X:\\list\") do set /a COUNT+=1 >nul\r\n\
        set /a FIRST=COUNT-1\r\n\
        if %FIRST% gtr 0 set \"SKIP=skip=%FIRST%\"\r\n\
        for /f \"usebackq %SKIP% delims=\" %%l in (\"X:\\list\") do >>X:\\log echo last %%l\r\n\
        for /r \"%~d0\\a\" %%i in (*.cmd) do >>X:\\log echo %%i\r\n\
        if exist \"X:\\list\" lunch.exe & if errorlevel 9009 goto end\r\n\
        echo never>>X:\\log\r\n\
        :end\r\n";

    #[test]
    fn loops_and_blocks_run_as_in_windows() {
        let places = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [own, stick] = places.each_ref().map(tempfile::TempDir::path);
        fs::create_dir_all(stick.join("a")).unwrap();
        fs::write(stick.join("a/b.cmd"), LOOPS).unwrap();
        fs::write(stick.join("y"), "").unwrap();
        let drives = [own, stick].map(|root| Drive {
            kind: super::super::drives::Kind::RemovableReadOnly,
            is_cd: false,
            root: root.to_owned(),
        });
        let mut shell = Shell::in_windows_pe(own, &drives, Tools::default());
        shell.run("cmd.exe /c D:\\a\\b.cmd");
        let read = |name: &str| fs::read_to_string(own.join(name)).unwrap();
        assert_eq!(read("list"), "one\r\ntwo & D:\\y\r\n");
        // Characters of the interpreter in a line of a file are only characters.
        assert_eq!(read("log"), "last two & D:\\y\r\nD:\\a\\b.cmd\r\n");
        assert_eq!(shell.unknown(), 1);
    }

    #[test]
    fn scripts_run_as_in_windows() {
        let drive = tempfile::tempdir().unwrap();
        let script = drive.path().join("Windows/System32/a.cmd");
        fs::create_dir_all(script.parent().unwrap()).unwrap();
        fs::write(&script, SCRIPT).unwrap();
        let mut shell = Shell::new(drive.path(), Registry::default());
        let line = "cmd.exe /d /c call \"%SystemRoot%\\SYSTEM32\\A.cmd\" logon ada";
        assert_eq!([shell.run(line), shell.run("cmd.exe /c A.CMD")], [7, 7]);
        let log = fs::read_to_string(drive.path().join("log")).unwrap();
        assert_eq!(log, "once a\r\nhello ada\r\nno service\r\nno service\r\n");
        assert_eq!(shell.unknown(), 0);
        assert_eq!(shell.run("lunch.exe /now"), NOT_FOUND);
        assert_eq!((shell.unknown(), shell.run("cmd.exe /c C:\\none.bat")), (1, NOT_FOUND));
    }
}
