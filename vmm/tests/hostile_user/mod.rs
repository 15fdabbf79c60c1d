//! A user who writes arbitrary options and configuration files.

use vmm::config::{Config, OPTIONS};

/// Parses the text as option number `option`, or as a configuration file if there is no such
/// option. A configuration that is accepted must survive printing and parsing; a refusal must have
/// a message.
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
