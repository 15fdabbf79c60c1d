//! Runs the target in the environment variable TARGET.
#![no_main]

use std::sync::LazyLock;

use fuzz::Target;
use libfuzzer_sys::fuzz_target;

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    let name = std::env::var("TARGET").expect("TARGET names a target");
    Target::find(&name).expect("`cargo run -p fuzz -- --list` lists the targets")
});

fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));
