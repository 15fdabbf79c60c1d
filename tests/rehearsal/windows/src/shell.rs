//! Windows' command interpreter: runs commands and batch files on the drive of Windows.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::batch::{self, Join, Simple};
use super::console::say;
use super::drives::Drive;
use super::registry::Registry;
use super::{files, programs};

/// The status of a command that does not exist.
const NOT_FOUND: i32 = 9009;
/// In place of a drive that does not exist.
const NO_DRIVE: &str = "/drive/none";
const SERIAL: &str = "/dev/ttyS0";
/// Files that call one another, at most.
const MAX_DEPTH: u32 = 16;

pub(crate) struct Shell {
    /// The drive of Windows.
    drive: PathBuf,
    /// The places of drives by their letters.
    letters: BTreeMap<char, PathBuf>,
    pub(crate) registry: Registry,
    variables: BTreeMap<String, String>,
    /// The current folder.
    folder: String,
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
            drive: drive.to_owned(),
            letters: [('C', drive.to_owned())].into(),
            registry,
            variables,
            folder: "C:\\Windows\\System32".to_owned(),
            sink: None,
            status: 0,
            depth: 0,
            counts: (0, 0),
        }
    }

    /// In Windows PE, whose own drive is X:. The others have the letters from C: on.
    pub(crate) fn in_windows_pe(own: &Path, others: &[Drive]) -> Self {
        let mut shell = Self::new(own, Registry::default());
        shell.letters = ('C'..).zip(others.iter().map(|it| it.root.clone())).collect();
        shell.letters.insert('X', own.to_owned());
        for value in shell.variables.values_mut().chain([&mut shell.folder]) {
            *value = value.replacen("C:", "X:", 1);
        }
        shell
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

    /// The file of a path of Windows.
    fn file(&self, path: &str) -> PathBuf {
        let path = path.trim_matches('"');
        if let Some((letter, rest)) = path.split_once(':') {
            let letter = letter.to_ascii_uppercase();
            let drive = letter.parse().ok().and_then(|letter: char| self.letters.get(&letter));
            return drive.map_or_else(|| NO_DRIVE.into(), |drive| files::below(drive, rest));
        }
        match path.starts_with('\\') {
            true => files::below(&self.drive, path),
            false => files::below(&self.drive, &format!("{}\\{path}", &self.folder[2..])),
        }
    }

    /// Runs a batch file, or from a label in it.
    fn batch(&mut self, path: &str, label: Option<&str>, arguments: &[String]) {
        let text = match files::text(&self.file(path)) {
            Ok(text) if self.depth < MAX_DEPTH => text,
            _ => return self.missing(path),
        };
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        let find = |label: &str| {
            let is = |line: &&str| line.strip_prefix(':').is_some_and(|it| it.trim() == label);
            lines.iter().position(is)
        };
        let mut at = match label.map(find) {
            None => 0,
            Some(Some(at)) => at,
            Some(None) => return self.missing(path),
        };
        let before = self.variables.clone();
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
            let Some(bodies) = batch::for_each(rest) else {
                self.missing(line);
                return Next::Line;
            };
            for body in bodies {
                match self.expanded(&body, arguments) {
                    Next::Line => {}
                    other => return other,
                }
            }
            return Next::Line;
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

    /// `[/i] [not] exist FILE`, `A==B` or `errorlevel N`, and what follows it.
    fn condition(&self, text: &str) -> Option<(bool, String)> {
        let (mut rest, mut same_case, mut wanted) = (text.trim_start(), true, true);
        loop {
            let (word, after) = batch::first(rest);
            match word.to_ascii_lowercase().as_str() {
                "/i" => same_case = false,
                "not" => wanted = !wanted,
                "exist" => {
                    let (file, then) = batch::first(after);
                    return Some((self.file(&file).exists() == wanted, then.to_owned()));
                }
                "errorlevel" => {
                    let (number, then) = batch::first(after);
                    return Some((
                        (self.status >= number.parse().ok()?) == wanted,
                        then.to_owned(),
                    ));
                }
                _ => break,
            }
            rest = after.trim_start();
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
            if !adds {
                self.write(file, false, "");
            }
            self.sink = Some(file.clone());
        }
        let next = self.command(simple.text.trim(), arguments);
        self.sink = outer;
        next
    }

    fn command(&mut self, text: &str, arguments: &[String]) -> Next {
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
        let text = text.trim().trim_matches('"');
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
                self.folder.clone_from(words[0]);
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
        let mut registry = std::mem::take(&mut self.registry);
        let files = |path: &str| self.file(path);
        let machine = programs::Machine { drive: &self.drive, files: &files };
        let outcome = machine.run(&lower, &words, &mut registry);
        self.registry = registry;
        match outcome {
            Some(Ok(status)) => self.status = status,
            Some(Err(error)) => {
                say!("{text}: {error:#}");
                self.status = 1;
            }
            None => self.missing(text),
        }
    }

    /// Writes what a command says to the window, or to the file that gets its output.
    fn say(&mut self, text: &str) {
        match self.sink.clone() {
            None => say!("> {text}"),
            Some(file) => self.write(&file, true, &format!("{text}\r\n")),
        }
    }

    fn write(&mut self, name: &str, adds: bool, text: &str) {
        let path = match name.to_ascii_lowercase().as_str() {
            "nul" | "&1" => return,
            "com1" if text.is_empty() => return,
            // The terminal writes the carriage return itself.
            "com1" => SERIAL.into(),
            _ => self.file(name),
        };
        let text =
            if path.as_os_str() == SERIAL { text.replace('\r', "") } else { text.to_owned() };
        let is_port = path.as_os_str() == SERIAL;
        let mut options = File::options();
        options.write(true).create(!is_port).append(adds && !is_port).truncate(!adds);
        let opened = options.open(&path);
        if let Err(error) = opened.and_then(|mut file| file.write_all(text.as_bytes())) {
            say!("{name}: {error}");
            self.status = 1;
        }
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
        let mut shell = Shell::in_windows_pe(own, &[drive]);
        let line = "cmd.exe /c for %d in (C D) do if exist %d:\\a\\b.cmd call %d:\\a\\b.cmd begin";
        assert_eq!((shell.run(line), shell.unknown()), (0, 0));
        assert_eq!(fs::read_to_string(own.join("log")).unwrap(), "begin D\r\nbegin E\r\n");
        assert_eq!(fs::read_to_string(own.join("Windows/Setup/b.cmd")).unwrap(), script);
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
