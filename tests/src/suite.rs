//! The runner of a `harness = false` target: the words of `cargo test`, and its closing line.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;

use crate::lab::{self, Lab};
use crate::program::not_run;
use crate::tally;

/// Prints a line, whoever reads: the runner's output is what cargo shows.
#[macro_export]
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        // A reader that went away ends the lab, not the test in it.
        writeln!(std::io::stdout(), $($what)*).ok();
    }};
}

/// A test: its name, what it does, and whether it takes long beside what it adds to the others.
pub struct Test {
    name: String,
    body: Box<dyn Fn() -> anyhow::Result<()>>,
    thorough: bool,
}

impl Test {
    /// A test called `name`.
    pub fn new(name: impl Into<String>, body: impl Fn() -> anyhow::Result<()> + 'static) -> Self {
        Self { name: name.into(), body: Box::new(body), thorough: false }
    }

    /// The same test, run with `TRANSOM_TESTS=all` alone; it is reported as skipped otherwise.
    #[must_use]
    pub fn thorough(self) -> Self {
        Self { thorough: true, ..self }
    }

    /// Whether to run it now.
    fn is_due(&self) -> bool {
        let due = !self.thorough || lab::everything();
        if !due {
            not_run(&self.name, tally::THOROUGH);
        }
        due
    }

    /// Runs it; a panic is a failure like another.
    fn run(&self) -> anyhow::Result<()> {
        catch_unwind(AssertUnwindSafe(&self.body)).unwrap_or_else(|payload| {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
            bail!("a panic: {}", text.unwrap_or("without words"))
        })
    }
}

/// The tests of one target, from fast to slow, and what they need of the lab.
pub struct Suite {
    /// The lab, for a host that cannot run them itself.
    pub lab: Lab,
    /// The tests, in the order to run them.
    pub tests: Vec<Test>,
}

impl Suite {
    /// Does what the words of the command line ask for: the whole of `main`.
    pub fn main(self) -> ExitCode {
        self.start(Lab::enter)
    }

    /// As `main`, but the tests run here in any case: their guests have labs of their own.
    pub fn main_outside(self) -> ExitCode {
        self.start(|_| Ok(None))
    }

    fn start(self, enter: impl FnOnce(&Lab) -> anyhow::Result<Option<ExitCode>>) -> ExitCode {
        let asked = Asked::read(std::env::args().skip(1));
        let outcome = asked.and_then(|asked| self.obey(&asked, enter));
        outcome.unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        })
    }

    fn obey(
        self,
        asked: &Asked,
        enter: impl FnOnce(&Lab) -> anyhow::Result<Option<ExitCode>>,
    ) -> anyhow::Result<ExitCode> {
        let all = self.tests.len();
        let chosen: Vec<_> = self.tests.into_iter().filter(|it| asked.wants(&it.name)).collect();
        if asked.list {
            chosen.iter().for_each(|test| crate::say!("{}: test", test.name));
            crate::say!("\n{} tests, 0 benchmarks", chosen.len());
            return Ok(ExitCode::SUCCESS);
        }
        if !chosen.is_empty()
            && let Some(code) = enter(&self.lab)?
        {
            return Ok(code);
        }
        let filtered = all - chosen.len();
        let due: Vec<_> = chosen.into_iter().filter(Test::is_due).collect();
        Ok(run(&due, filtered))
    }
}

fn run(tests: &[Test], filtered: usize) -> ExitCode {
    let start = Instant::now();
    crate::say!("\nrunning {} test{}", tests.len(), if tests.len() == 1 { "" } else { "s" });
    let mut failures = Vec::new();
    for test in tests {
        let start = Instant::now();
        let outcome = test.run();
        let word = if outcome.is_ok() { "ok" } else { "FAILED" };
        crate::say!("test {} ... {word} <{:.1}s>", test.name, start.elapsed().as_secs_f64());
        if let Err(error) = outcome {
            crate::say!("{error:?}\n");
            failures.push(&test.name);
        }
    }
    if !failures.is_empty() {
        crate::say!("\nfailures:");
        failures.iter().for_each(|name| crate::say!("    {name}"));
    }
    crate::say!("\n{}\n", closing_line([tests.len(), failures.len(), filtered], start));
    // The status that cargo's own harness has.
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(101) }
}

/// The line that counts, as cargo's own harness writes it.
fn closing_line([all, failed, filtered]: [usize; 3], start: Instant) -> String {
    let word = if failed == 0 { "ok" } else { "FAILED" };
    format!(
        "test result: {word}. {} passed; {failed} failed; 0 ignored; 0 measured; {filtered} \
         filtered out; finished in {:.2}s",
        all - failed,
        start.elapsed().as_secs_f64()
    )
}

/// What the words of the command line ask for.
#[derive(Default)]
struct Asked {
    names: Vec<String>,
    skipped: Vec<String>,
    exact: bool,
    list: bool,
}

impl Asked {
    fn read(words: impl IntoIterator<Item = String>) -> anyhow::Result<Self> {
        let mut asked = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--exact" => asked.exact = true,
                "--list" => asked.list = true,
                "--skip" => asked.skipped.extend(words.next()),
                // Of the harness that we stand for; tests run one after the other and show all.
                "--nocapture" | "--show-output" | "-q" | "--quiet" => {}
                "--test-threads" | "--color" | "--format" => drop(words.next()),
                word if word.starts_with('-') => match word.split_once('=') {
                    Some(("--skip", name)) => asked.skipped.push(name.to_owned()),
                    Some(("--test-threads" | "--color" | "--format", _)) => {}
                    _ => bail!("{word} is not an option: names, --exact, --skip and --list are"),
                },
                name => asked.names.push(name.to_owned()),
            }
        }
        Ok(asked)
    }

    fn wants(&self, name: &str) -> bool {
        let is = |word: &String| if self.exact { name == word } else { name.contains(word) };
        (self.names.is_empty() || self.names.iter().any(is)) && !self.skipped.iter().any(is)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn asked(words: &[&str]) -> Asked {
        Asked::read(words.iter().map(|&word| word.to_owned())).unwrap()
    }

    #[test]
    fn names_choose_tests_as_cargo_does() {
        assert!(asked(&[]).wants("a"));
        assert!(asked(&["b", "a"]).wants("cab"));
        assert!(!asked(&["--exact", "a"]).wants("cab"));
        assert!(!asked(&["--skip", "ca", "--test-threads", "1"]).wants("cab"));
        assert!(!asked(&["--skip=ca"]).wants("cab"));
        assert!(Asked::read(["--wrong".to_owned()]).is_err());
    }

    #[test]
    fn the_closing_line_is_cargos() {
        let line = closing_line([3, 1, 4], Instant::now());
        assert!(line.starts_with("test result: FAILED. 2 passed; 1 failed; 0 ignored;"), "{line}");
        assert!(closing_line([3, 0, 0], Instant::now()).starts_with("test result: ok. 3 passed"));
    }

    #[test]
    fn a_panic_is_a_failure() {
        let error = Test::new("x", || panic!("at the disco")).run().unwrap_err();
        assert!(error.to_string().contains("at the disco"));
    }
}
