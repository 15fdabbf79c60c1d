//! `fuzz [--list] [TARGET…]`: runs fuzz targets for a while each, with inputs of a new seed.
#![forbid(unsafe_code)]

use std::env;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use fuzz::runner::{self, Plan};
use fuzz::{TARGETS, Target, child};
use rustix::rand::{GetRandomFlags, getrandom};

/// Seconds for each target: by default, and with `TRANSOM_TESTS=all`.
const SECONDS: u64 = 4;
const SECONDS_OF_ALL: u64 = 300;

fn main() -> anyhow::Result<ExitCode> {
    let words: Vec<String> = env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => {
            TARGETS.iter().for_each(|target| say(target.name));
            Ok(ExitCode::SUCCESS)
        }
        ["--child", name, seed, seconds, file] => {
            let target = Target::find(name).context("a target")?;
            let time = Duration::from_secs(seconds.parse()?);
            child::run(target, seed.parse()?, time, Path::new(file))?;
            Ok(ExitCode::SUCCESS)
        }
        _ => all(&words),
    }
}

fn all(names: &[String]) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let targets = runner::choose(names)?;
    let plan = Plan { seed: seed()?, time: Duration::from_secs(seconds()?) };
    say(&format!("\nrunning {} tests, seed {:#x}", targets.len(), plan.seed));
    let failed = runner::run(&targets, plan, say)?;
    // In libtest's format, which ./test reads.
    say(&format!(
        "\ntest result: {}. {} passed; {failed} failed; 0 ignored; 0 measured; {} filtered out; \
         finished in {:.2}s\n",
        if failed == 0 { "ok" } else { "FAILED" },
        targets.len() - failed,
        TARGETS.len() - targets.len(),
        start.elapsed().as_secs_f64(),
    ));
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The seed in the environment, to repeat a run, or a new one.
fn seed() -> anyhow::Result<u64> {
    let Ok(text) = env::var("TRANSOM_FUZZ_SEED") else {
        let mut bytes = [0; 8];
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        return Ok(u64::from_le_bytes(bytes));
    };
    let number =
        text.strip_prefix("0x").map_or_else(|| text.parse(), |hex| u64::from_str_radix(hex, 16));
    number.with_context(|| format!("TRANSOM_FUZZ_SEED={text}: not a number, such as 0x1f"))
}

fn seconds() -> anyhow::Result<u64> {
    let Ok(text) = env::var("TRANSOM_FUZZ_SECONDS") else {
        let all = env::var("TRANSOM_TESTS").is_ok_and(|it| it == "all");
        return Ok(if all { SECONDS_OF_ALL } else { SECONDS });
    };
    text.parse().with_context(|| format!("TRANSOM_FUZZ_SECONDS={text}: not a number of seconds"))
}

fn say(text: &str) {
    writeln!(std::io::stdout(), "{text}").ok();
}

#[cfg(test)]
mod test {
    use fuzz::found_folder;
    use fuzz::input::Inputs;

    use super::*;

    #[test]
    fn two_runs_have_different_seeds() {
        assert_ne!(seed().unwrap(), seed().unwrap());
    }

    #[test]
    fn every_found_input_has_a_target() {
        for folder in found_folder().read_dir().into_iter().flatten() {
            let name = folder.unwrap().file_name().into_string().unwrap();
            assert!(name == "README.md" || Target::find(&name).is_some(), "{name}");
        }
        let mut names: Vec<_> = TARGETS.iter().map(|it| it.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TARGETS.len());
    }

    #[test]
    fn inputs_depend_only_on_the_seed() {
        for target in TARGETS {
            let of = |seed| {
                let mut inputs = Inputs::new(target, seed, vec![vec![7; 20]]);
                [(); 40].map(|()| inputs.make())
            };
            assert_eq!(of(1), of(1), "{}", target.name);
            assert_ne!(of(1), of(2), "{}", target.name);
            assert!(of(3).iter().all(|input| input.len() <= target.max_length), "{}", target.name);
        }
        let first = |name| Inputs::new(Target::find(name).unwrap(), 1, Vec::new()).make();
        assert_ne!(first("nvme"), first("xhci"));
    }
}
