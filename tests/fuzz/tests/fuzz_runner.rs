//! The runner finds targets that break, in every way.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::process::Command;

/// Runs a target, and returns whether it passed, and the output.
fn run(target: &str, found: &Path, seed: Option<&str>) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fuzz"));
    command.arg(target).env("TRANSOM_FUZZ_FOUND", found).env("TRANSOM_FUZZ_SECONDS", "20");
    command.env_remove("TRANSOM_FUZZ_SEED");
    command.envs(seed.map(|seed| ("TRANSOM_FUZZ_SEED", seed)));
    let output = command.output().expect("the runner");
    (output.status.success(), String::from_utf8(output.stdout).expect("text"))
}

/// The only saved input.
fn kept(folder: &Path) -> Vec<u8> {
    let mut files = fs::read_dir(folder).expect("a folder");
    let file = files.next().expect("a file").expect("a file");
    assert!(files.next().is_none(), "more than one input was saved");
    fs::read(file.path()).expect("an input")
}

#[test]
fn a_failing_target_fails_the_run_and_saves_its_input() {
    for target in ["panics", "hangs", "grows", "dies-elsewhere"] {
        let folder = tempfile::tempdir().expect("a folder");
        let (fine, said) = run(target, folder.path(), None);
        assert!(!fine && said.contains(&format!("test fuzz::{target} ... FAILED")), "{said}");
        assert!(said.contains("0 passed; 1 failed;"), "{said}");
        assert!(!kept(&folder.path().join(target)).is_empty());
        // The next run begins with this input.
        let (fine, said) = run(target, folder.path(), None);
        assert!(!fine && said.contains("an input of tests/fuzz/found"), "{said}");
        assert!(said.contains("inputs=1 "), "{said}");
    }
}

#[test]
fn a_seed_reproduces_a_failure_and_each_run_has_a_new_one() {
    let seed = |said: &str| {
        let rest = said.split("seed=").nth(1).expect("a seed");
        rest.split(' ').next().expect("a seed").to_owned()
    };
    let folders = [(); 3].map(|()| tempfile::tempdir().expect("a folder"));
    let first = run("panics", folders[0].path(), None).1;
    let again = run("panics", folders[1].path(), Some(&seed(&first))).1;
    let other = run("panics", folders[2].path(), None).1;
    assert_eq!(seed(&first), seed(&again));
    assert_ne!(seed(&first), seed(&other));
    let [first, again, _] = folders.map(|folder| kept(&folder.path().join("panics")));
    assert_eq!(first, again);
}
