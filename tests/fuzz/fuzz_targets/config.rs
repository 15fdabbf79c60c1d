//! What a user writes: options of the command line, and the configuration file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vmm::config::{Config, OPTIONS};

fuzz_target!(|data: &[u8]| {
    let Some((first, rest)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(rest) else { return };
    let mut config = Config::default();
    if let Some(option) = OPTIONS.get(usize::from(*first)) {
        config.set(option.key, text).ok();
    } else if let Ok(read) = Config::from_json(text) {
        config = read;
    }
    if config.check().is_ok() {
        config.cpus.settle(1024).ok();
    }
    // What was accepted is printed by `vmm inspect`, and reads back.
    let printed = serde_json::to_string(&config).expect("plain data");
    Config::from_json(&printed).expect("what we print, we read");
});
