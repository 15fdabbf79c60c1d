//! The runner of a `harness = false` target. It takes the words of `cargo test` and ends with its
//! summary line.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;

use crate::lab::{self, Lab};
use crate::program::not_run;

/// Letters of an error in the list of failures.
const FAILURE: usize = 400;

/// Prints a line to standard output, which cargo shows, and ignores errors.
#[macro_export]
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        // A reader that is gone must end the lab and not the test in it.
        writeln!(std::io::stdout(), $($what)*).ok();
    }};
}

/// A test: its name, its body, and whether it takes too long for what it adds to the others.
pub struct Test {
    name: String,
    body: Box<dyn Fn() -> anyhow::Result<()>>,
    thorough: bool,
}

impl Test {
    pub fn new(name: impl Into<String>, body: impl Fn() -> anyhow::Result<()> + 'static) -> Self {
        Self { name: name.into(), body: Box::new(body), thorough: false }
    }

    /// The same test, run only with `TRANSOM_TESTS=all`; otherwise it is reported as skipped.
    #[must_use]
    pub fn thorough(self) -> Self {
        Self { thorough: true, ..self }
    }

    fn is_due(&self) -> bool {
        !self.thorough || lab::everything()
    }

    /// A panic is a failure.
    fn run(&self) -> anyhow::Result<()> {
        catch_unwind(AssertUnwindSafe(&self.body)).unwrap_or_else(|payload| {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
            bail!("a panic: {}", text.unwrap_or("no message"))
        })
    }
}

/// The tests of one target, from fast to slow, and their requirements for the lab.
pub struct Suite {
    /// The lab for hosts that cannot run the tests themselves.
    pub lab: Lab,
    /// Run in this order.
    pub tests: Vec<Test>,
}

impl Suite {
    /// Parses the command line and runs the tests: the whole of `main`.
    pub fn main(self) -> ExitCode {
        self.start(Lab::enter)
    }

    /// Like `main`, always in a lab with USB devices.
    pub fn main_with_usb(self) -> ExitCode {
        self.start(Lab::enter_with_usb)
    }

    /// Like `main`, but `prepare` runs first, on the host that the lab is on, when the programs are
    /// built.
    pub fn main_after(self, prepare: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
        self.start(|lab| {
            if !lab::inside() {
                lab::lacks()?;
                prepare()?;
            }
            lab.enter()
        })
    }

    /// Like `main`, but the tests always run in the Intel lab.
    pub fn main_on_intel(self) -> ExitCode {
        self.start(Lab::enter_each_intel)
    }

    /// Like `main`, but the tests always run on this host; their guests have labs of their own.
    pub fn main_outside(self) -> ExitCode {
        self.start(|_| Ok(None))
    }

    fn start(self, enter: impl FnOnce(&Lab) -> anyhow::Result<Option<ExitCode>>) -> ExitCode {
        let options = Options::read(std::env::args().skip(1));
        let outcome = options.and_then(|options| self.run(&options, enter));
        outcome.unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        })
    }

    fn run(
        self,
        options: &Options,
        enter: impl FnOnce(&Lab) -> anyhow::Result<Option<ExitCode>>,
    ) -> anyhow::Result<ExitCode> {
        let all = self.tests.len();
        let chosen: Vec<_> = self.tests.into_iter().filter(|it| options.wants(&it.name)).collect();
        if options.list {
            chosen.iter().for_each(|test| crate::say!("{}: test", test.name));
            crate::say!("\n{} tests, 0 benchmarks", chosen.len());
            return Ok(ExitCode::SUCCESS);
        }
        if chosen.iter().any(Test::is_due)
            && let Some(code) = enter(&self.lab)?
        {
            return Ok(code);
        }
        let filtered = all - chosen.len();
        let (due, others): (Vec<_>, Vec<_>) = chosen.into_iter().partition(Test::is_due);
        others.iter().for_each(|test| not_run(&test.name, lab::THOROUGH));
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
            failures.push(failure(&test.name, &error));
        }
    }
    if !failures.is_empty() {
        crate::say!("\nfailures:");
        failures.iter().for_each(|failure| crate::say!("    {failure}"));
    }
    crate::say!("\n{}\n", closing_line(tests.len(), failures.len(), filtered, start));
    // The exit status of cargo's own harness.
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(101) }
}

/// A failed test and the beginning of its error, in one line. Reports of a run keep only the last
/// lines of a suite, and errors are followed by logs.
fn failure(name: &str, error: &anyhow::Error) -> String {
    let words = format!("{error:#}");
    let line: String = words.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("{name}: {}", line.chars().take(FAILURE).collect::<String>())
}

/// The summary line, in the format of cargo's own harness.
fn closing_line(all: usize, failed: usize, filtered: usize, start: Instant) -> String {
    let word = if failed == 0 { "ok" } else { "FAILED" };
    format!(
        "test result: {word}. {} passed; {failed} failed; 0 ignored; 0 measured; {filtered} \
         filtered out; finished in {:.2}s",
        all - failed,
        start.elapsed().as_secs_f64()
    )
}

#[derive(Default)]
struct Options {
    names: Vec<String>,
    skipped: Vec<String>,
    exact: bool,
    list: bool,
}

impl Options {
    fn read(words: impl IntoIterator<Item = String>) -> anyhow::Result<Self> {
        let mut options = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--exact" => options.exact = true,
                "--list" => options.list = true,
                "--skip" => options.skipped.extend(words.next()),
                // Options of cargo's own harness. Our tests run one by one and always show output.
                "--nocapture" | "--show-output" | "-q" | "--quiet" => {}
                "--test-threads" | "--color" | "--format" => drop(words.next()),
                word if word.starts_with('-') => match word.split_once('=') {
                    Some(("--skip", name)) => options.skipped.push(name.to_owned()),
                    Some(("--test-threads" | "--color" | "--format", _)) => {}
                    _ => bail!("{word}: unknown option: use names, --exact, --skip or --list"),
                },
                name => options.names.push(name.to_owned()),
            }
        }
        Ok(options)
    }

    fn wants(&self, name: &str) -> bool {
        let is = |word: &String| if self.exact { name == word } else { name.contains(word) };
        (self.names.is_empty() || self.names.iter().any(is)) && !self.skipped.iter().any(is)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn options(words: &[&str]) -> Options {
        Options::read(words.iter().map(|&word| word.to_owned())).unwrap()
    }

    #[test]
    fn filters_select_tests_like_cargo() {
        assert!(options(&[]).wants("a"));
        assert!(options(&["b", "a"]).wants("cab"));
        assert!(!options(&["--exact", "a"]).wants("cab"));
        assert!(!options(&["--skip", "ca", "--test-threads", "1"]).wants("cab"));
        assert!(!options(&["--skip=ca"]).wants("cab"));
        assert!(Options::read(["--wrong".to_owned()]).is_err());
    }

    #[test]
    fn the_summary_line_matches_cargos() {
        let line = closing_line(3, 1, 4, Instant::now());
        assert!(line.starts_with("test result: FAILED. 2 passed; 1 failed; 0 ignored;"), "{line}");
        assert!(closing_line(3, 0, 0, Instant::now()).starts_with("test result: ok. 3 passed"));
    }

    #[test]
    fn a_failure_is_one_line_with_the_beginning_of_its_error() {
        let error = anyhow::anyhow!("inner\n{}", "x".repeat(1000)).context("outer");
        let line = failure("name", &error);
        assert!(line.starts_with("name: outer: inner xxx"), "{line}");
        assert_eq!(line.len(), "name: ".len() + FAILURE);
    }

    #[test]
    fn a_panic_is_a_failure() {
        let error = Test::new("x", || panic!("at the disco")).run().unwrap_err();
        assert!(error.to_string().contains("at the disco"));
    }
}
