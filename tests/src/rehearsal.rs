//! Pieces of an installation without Windows: media, the steps, and a pod's log with them.

pub mod medium;
pub mod steps;

use std::time::{Duration, Instant};

use anyhow::bail;

use self::steps::{BOOT, PROMPT, STOPPED};
use crate::patience::Patience;
use crate::program::Running;
use crate::{say, standstill};

/// The place in a pod's log after the last step.
#[derive(Default)]
pub struct Log {
    at: usize,
}

impl Log {
    /// Waits for these words after those of the last step.
    pub fn reach(&mut self, pod: &mut Running, words: &str) -> anyhow::Result<()> {
        let (start, mut patience) = (Instant::now(), Patience::new(BOOT));
        loop {
            let text = pod.stdout.text();
            let new = &text[self.at..];
            if let Some(found) = new.find(words) {
                self.at += found + words.len();
                say!("{:6.1} s: {}", start.elapsed().as_secs_f64(), words.trim_end());
                return Ok(());
            }
            let ended = pod.wait(Duration::ZERO).is_ok();
            let stopped = [STOPPED, PROMPT].iter().any(|words| new.contains(words));
            if ended || stopped || !patience.rest() {
                let host = standstill::watch();
                bail!("no {words:?} (ended: {ended}) in:\n{text}\n{}\n{host}", pod.stderr.text());
            }
        }
    }
}
