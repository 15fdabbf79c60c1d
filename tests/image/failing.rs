//! A container whose start fails, because it has no KVM, and which shows the reason meanwhile: all
//! that tests of its files and programs need.

use std::io::Write as _;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use transom_tests::engine::Engine;
use transom_tests::program::{PATIENCE, said};

/// Exit status of a pod without KVM.
const NO_KVM: &str = "88";

pub(crate) struct Failing {
    engine: &'static Engine,
    name: String,
}

impl Failing {
    /// Starts an image with these options and this command, and waits until its pod runs.
    pub(crate) fn start(
        engine: &'static Engine,
        image: &str,
        options: &[&str],
        command: &[&str],
    ) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("transom-{}-failing-{number}", std::process::id());
        let run = ["run", "--detach", "--name", &name, "--network", "none"];
        let environment = ["--env", "VERSION=probe", "--env", "ERROR_HOLD=600"];
        said(&mut engine.podman(&[&run[..], &environment, options, &[image], command].concat()))?;
        let pod = Self { engine, name };
        let deadline = Instant::now() + PATIENCE;
        while !pod.logs()?.contains("(ERROR_HOLD)") {
            ensure!(Instant::now() < deadline, "timeout: {}", pod.logs()?);
            thread::sleep(Duration::from_millis(50));
        }
        Ok(pod)
    }

    fn logs(&self) -> Result<String> {
        let output = self.engine.podman(&["logs", &self.name]).output()?;
        let [out, errors] = [output.stdout, output.stderr].map(String::from_utf8);
        Ok(format!("{}{}", out?, errors?))
    }

    /// Runs a program in the container. Returns its status and its output.
    pub(crate) fn exec(&self, words: &[&str], input: &[u8]) -> Result<(i32, Vec<u8>)> {
        let mut exec = self.engine.podman(&[&["exec", "-i", &self.name], words].concat());
        exec.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = exec.spawn()?;
        let mut pipe = child.stdin.take().context("a pipe")?;
        let output = thread::scope(|scope| {
            // A program that reads nothing is no reason to fail.
            scope.spawn(move || pipe.write_all(input).ok());
            child.wait_with_output()
        })?;
        Ok((output.status.code().context("a signal")?, output.stdout))
    }

    /// Stops the container, which ends with the status of its failure.
    pub(crate) fn stop(&self) -> Result<()> {
        said(&mut self.engine.podman(&["stop", "--time", "20", &self.name]))?;
        let status = said(&mut self.engine.podman(&["wait", &self.name]))?;
        ensure!(status.trim() == NO_KVM, "{status}: {}", self.logs()?);
        Ok(())
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        said(&mut self.engine.podman(&["rm", "--force", "--time", "0", &self.name])).ok();
    }
}
