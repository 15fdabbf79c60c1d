//! A user who writes anything: options of the command line, and the configuration file.

use vmm::config::{Config, OPTIONS};

/// Reads the text as the option of this number, or as a file where there is none. What is accepted
/// is what `vmm inspect` prints, and reads back; what is not is told in a sentence.
pub(crate) fn read(option: usize, text: &str) {
    let mut config = Config::default();
    let read = match OPTIONS.get(option) {
        Some(option) => config.set(option.key, text),
        None => Config::from_json(text).map(|read| config = read),
    };
    if let Err(error) = read {
        assert!(!error.to_string().is_empty(), "{text}");
    }
    if config.check().is_ok() {
        config.cpus.settle(1024).ok();
    }
    let printed = serde_json::to_string(&config).expect("plain data");
    Config::from_json(&printed).expect("what we print, we read");
}
