//! Windows' storage drivers in machines that are saved, end, and go on in other processes: between
//! any two requests, in the middle of 100, and at any moment of all other checks.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use host::testutil::noise::Noise;
use rustix::fs::statvfs;
use serde_json::Value;
use tempfile::TempDir;
use transom_tests::lab::everything;
use transom_tests::program::{PATIENCE, Running};
use vmm::control::snapshot::save;
use vmm::control::{Client, Command, Then};

use crate::drivers::{self, KMDF, STORAGE};
use crate::report::Report;
use crate::{
    Driver, FINAL_BLOCKS, Kind, Machine, VIOSCSI, VIOSTOR, found_on, image, kmdf, new_disk,
};

/// Snapshots of each load: by default, and with `TRANSOM_TESTS=all` in the first mode and in each
/// other one.
const SNAPSHOTS: usize = 6;
const THOROUGH: [usize; 2] = [200, 40];
/// The longest time between two under load, and during all checks, in milliseconds.
const LOAD: u64 = 40;
const CHECKS: u64 = 200;
/// Without a limit, the disk has answered all requests when the machine is saved. With this one, it
/// serves 30 of 100 at once and the others within the next quarter of a second.
const LIMIT: &str = ",iops=300";
/// Blocks after those of the check `final` that the load writes: see `ONCE` in `saved.c`.
const ONCE: usize = 200 * 8;
/// The minimum number of checks with `saves=`.
const SAVED_CHECKS: usize = 22;
/// Room for the snapshots of tests that run at the same time, in bytes.
const ROOM: u64 = 2 << 30;
/// The queues of virtio-scsi for control and events come before those for requests.
const OTHER_QUEUES: usize = 2;

#[test]
fn viostor_between_any_two_requests_and_in_the_middle_of_100() -> Result<()> {
    each_mode("msix4", |mode, saves| in_the_middle(VIOSTOR, Kind::Sectors512, mode, saves))
}

#[test]
fn vioscsi_between_any_two_requests_and_in_the_middle_of_100() -> Result<()> {
    each_mode("wire", |mode, saves| in_the_middle(VIOSCSI, Kind::Sectors4096, mode, saves))
}

#[test]
fn viostor_at_any_moment_of_all_checks() -> Result<()> {
    kmdf::thorough(|| {
        each_mode("smp4", |mode, saves| at_any_moment(VIOSTOR, Kind::Sectors4096, mode, saves))
    })
}

#[test]
fn vioscsi_at_any_moment_of_all_checks() -> Result<()> {
    kmdf::thorough(|| {
        each_mode("smp2", |mode, saves| at_any_moment(VIOSCSI, Kind::Sectors512, mode, saves))
    })
}

#[test]
fn viorng_at_any_moment_of_all_checks() -> Result<()> {
    kmdf::thorough(|| KMDF.iter().try_for_each(|mode| viorng_at_any_moment(mode, THOROUGH[1])))
}

fn viorng_at_any_moment(mode: &'static str, saves: usize) -> Result<()> {
    let Some(image) = image::image()? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let machine = kmdf::random(mode);
    let running = machine.start(image, &folder.path().join("control"), Path::new(""))?;
    let mut life = Life::new("viorng", mode, folder, running)?;
    let outcome = life.is_disturbed(saves).and_then(|()| life.judge(machine.checks));
    outcome.with_context(|| life.story())
}

/// Runs the test in the mode `first`, and with `TRANSOM_TESTS=all` in the others, too.
fn each_mode(first: &str, test: impl Fn(&'static str, usize) -> Result<()>) -> Result<()> {
    for mode in STORAGE {
        match (*mode == first, everything()) {
            (true, false) => test(mode, SNAPSHOTS)?,
            (false, false) => {}
            (first, true) => test(mode, THOROUGH[usize::from(!first)])?,
        }
    }
    Ok(())
}

fn in_the_middle(driver: Driver, kind: Kind, mode: &'static str, saves: usize) -> Result<()> {
    let Some(image) = image::image()? else { return Ok(()) };
    let words = format!(" saves={saves}");
    for limit in ["", LIMIT] {
        let options = format!("{}{limit}", kind.words());
        let mut life = Life::with_disk(image, driver, mode, &options, &words)?;
        let outcome = life.obeys(saves).and_then(|()| life.judge(SAVED_CHECKS));
        let disk = life.disk();
        let outcome = outcome.and_then(|()| found_on(&disk, kind, FINAL_BLOCKS + ONCE, false));
        let least = if limit.is_empty() { (2, 0) } else { (50, 10) };
        outcome.and_then(|()| life.was_busy(least)).with_context(|| life.story())?;
    }
    Ok(())
}

fn at_any_moment(driver: Driver, kind: Kind, mode: &'static str, saves: usize) -> Result<()> {
    let Some(image) = image::image()? else { return Ok(()) };
    let mut life = Life::with_disk(image, driver, mode, kind.words(), " host=vmm")?;
    let outcome = life.is_disturbed(saves).and_then(|()| life.judge(kind.checks(driver, mode)));
    let outcome = outcome.and_then(|()| found_on(&life.disk(), kind, FINAL_BLOCKS, true));
    outcome.with_context(|| life.story())
}

/// The requests that a snapshot has under way.
#[derive(Default)]
struct Found {
    /// Requests whose end the driver has not seen yet.
    in_flight: u32,
    /// Requests that the device has not answered yet.
    unanswered: u32,
}

/// A guest, in one process after the other.
struct Life {
    driver: &'static str,
    mode: &'static str,
    folder: TempDir,
    /// The folder of its snapshots.
    snapshots: TempDir,
    running: Running,
    /// Its output in earlier processes.
    before: String,
    /// The number of its lines `host: …` that were obeyed.
    obeyed: usize,
    /// The guest's address of its count of requests in flight.
    outstanding: Option<u64>,
    random: Noise,
    found: Vec<Found>,
}

impl Life {
    fn new(
        driver: &'static str,
        mode: &'static str,
        folder: TempDir,
        running: Running,
    ) -> Result<Self> {
        Ok(Self {
            driver,
            mode,
            folder,
            snapshots: in_memory()?,
            running,
            before: String::new(),
            obeyed: 0,
            outstanding: None,
            random: Noise::new(19),
            found: Vec::new(),
        })
    }

    /// A machine with a disk that has these options.
    fn with_disk(
        image: &Path,
        driver: Driver,
        mode: &'static str,
        options: &str,
        words: &str,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let disk = format!("path={},{options}", new_disk(folder.path())?.display());
        let machine = Machine { driver, mode, memory: "256M", words, disk: &disk };
        let running = machine.start(image, &folder.path().join("control"))?;
        Self::new(driver.name, mode, folder, running)
    }

    fn disk(&self) -> PathBuf {
        self.folder.path().join("disk.img")
    }

    fn output(&self) -> String {
        format!("{}{}", self.before, self.running.stdout.text())
    }

    /// The next line for the host.
    fn line(&mut self) -> Option<String> {
        let output = self.output();
        let lines = output.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        let line = lines.filter_map(|line| line.strip_prefix("host: ")).nth(self.obeyed)?;
        self.obeyed += 1;
        Some(line.to_owned())
    }

    /// Connects to the machine, as soon as it runs. `None`: it has ended.
    fn client(&mut self) -> Result<Option<Client>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Client::connect(&self.folder.path().join("control")) {
                Ok(client) => return Ok(Some(client)),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) if self.running.wait(Duration::ZERO).is_ok() => return Ok(None),
                Err(_) => sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Saves the machine and continues it in another process. Returns whether it still ran.
    fn moves(&mut self) -> Result<bool> {
        let dir = self.snapshots.path().join("snapshot");
        let Some(mut client) = self.client()? else { return Ok(false) };
        if let Err(error) = save(&mut client, &dir, Then::Quit, None) {
            // The guest may have switched itself off meanwhile.
            let status = self.running.wait(PATIENCE);
            ensure!(status.is_ok_and(|it| it == 0) && !dir.exists(), error);
            return Ok(false);
        }
        let status = self.running.wait(PATIENCE)?;
        ensure!(status == 0, "vmm ended with status {status}");
        self.before.push_str(&self.running.stdout.text());
        self.found.push(self.find(&dir)?);
        let how = self.random.choose(&["", ",copy", ",check=off"]);
        self.running = Running::vmm(&["run", "--restore", &format!("{}{how}", dir.display())])?;
        // Then it has opened all files.
        ensure!(self.client()?.is_some(), "it was not restored: {}", self.running.stderr.text());
        fs::remove_dir_all(&dir)?;
        Ok(true)
    }

    fn find(&self, dir: &Path) -> Result<Found> {
        let memory = File::open(dir.join("memory"))?;
        let state = fs::read_to_string(dir.join("machine.json"))?;
        let state: Value = serde_json::from_str(state.lines().nth(1).context("a second line")?)?;
        let queues = queues(&state["moment"]["devices"]).context("no queues in the snapshot")?;
        let skipped = if self.driver == VIOSCSI.name { OTHER_QUEUES } else { 0 };
        let mut found = Found::default();
        for queue in queues.iter().skip(skipped).filter(|queue| queue["enabled"] == true) {
            let number = |name: &str| queue[name].as_u64().context(name.to_owned());
            let mut offered = [0; 2];
            memory.read_exact_at(&mut offered, number("driver")? + 2)?;
            let taken = u16::try_from(number("next_available")?)?;
            let held = queue["held"].as_array().context("held")?.len();
            found.unanswered += u32::from(u16::from_le_bytes(offered).wrapping_sub(taken));
            found.unanswered += u32::try_from(held)?;
        }
        if let Some(at) = self.outstanding {
            let mut count = [0; 4];
            memory.read_exact_at(&mut count, at)?;
            found.in_flight = u32::from_le_bytes(count);
        }
        Ok(found)
    }

    /// Tells the guest that it may go on.
    fn press_the_power_button(&mut self) -> Result<()> {
        let mut client = self.client()?.context("it has ended")?;
        client.ask(&Command::PowerButton).map(|_| ())
    }

    /// Saves the machine where the guest asks for it, and `saves` times under load, until its end.
    fn obeys(&mut self, saves: usize) -> Result<()> {
        let mut deadline = Instant::now() + crate::PATIENCE;
        loop {
            let ended = self.running.wait(Duration::ZERO);
            let Some(line) = self.line() else {
                if let Ok(status) = ended {
                    ensure!(status == 0, "vmm ended with status {status}");
                    return Ok(());
                }
                ensure!(Instant::now() < deadline, "the guest did not end");
                sleep(Duration::from_millis(1));
                continue;
            };
            deadline = Instant::now() + crate::PATIENCE;
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["outstanding", "at", at] => {
                    self.outstanding = Some(u64::from_str_radix(at, 16)?);
                    continue;
                }
                ["save", said] => self.is_saved_with(said.parse()?)?,
                ["load"] => {
                    for _ in 0..saves {
                        sleep(Duration::from_millis(self.random.below(LOAD)));
                        ensure!(self.moves()?, "it has ended");
                    }
                }
                _ => bail!("unknown words: {line}"),
            }
            self.press_the_power_button()?;
        }
    }

    /// Saves the machine while its driver waits for this many requests. Other processors may start
    /// and end some of them meanwhile.
    fn is_saved_with(&mut self, said: u32) -> Result<()> {
        ensure!(self.moves()?, "it has ended");
        let found = self.found.last().map_or(0, |it| it.in_flight);
        let alone = drivers::processors(self.mode) == 1;
        ensure!(
            found == said || !alone,
            "the guest had {said} requests in flight, and the snapshot has {found}"
        );
        Ok(())
    }

    /// Saves the machine at random moments until its end, `saves` times at most.
    fn is_disturbed(&mut self, saves: usize) -> Result<()> {
        let longest = CHECKS * SNAPSHOTS as u64 / saves as u64;
        let mut deadline = Instant::now() + crate::PATIENCE;
        let mut next = Instant::now();
        loop {
            while let Some(line) = self.line() {
                kmdf::Host::connect(&self.folder.path().join("control"))?.obey(&line)?;
            }
            if let Ok(status) = self.running.wait(Duration::ZERO) {
                ensure!(status == 0, "vmm ended with status {status}");
                let count = self.found.len();
                ensure!(count >= SNAPSHOTS / 2, "only {count} snapshots were taken");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the guest did not end");
            if self.found.len() < saves && Instant::now() >= next {
                self.moves()?;
                deadline = Instant::now() + crate::PATIENCE;
                next = Instant::now() + Duration::from_millis(1 + self.random.below(longest));
            }
            sleep(Duration::from_millis(1));
        }
    }

    fn judge(&self, least: usize) -> Result<()> {
        Report::read(&self.output())?.judge(least)
    }

    /// Fails unless some snapshots were taken between requests, some with one in flight, and some
    /// with at least this many in flight, of which the device had not answered this many.
    fn was_busy(&self, (in_flight, unanswered): (u32, u32)) -> Result<()> {
        let any = |is: &dyn Fn(&Found) -> bool| self.found.iter().any(is);
        // Other processors end a single request while the first one waits.
        let one = any(&|it| it.in_flight == 1) || drivers::processors(self.mode) > 1;
        let idle = any(&|it| it.in_flight == 0);
        let many = any(&|it| it.in_flight >= in_flight && it.unanswered >= unanswered);
        ensure!(idle && one && many, "the snapshots are too much alike");
        Ok(())
    }

    fn story(&self) -> String {
        let Self { driver, mode, found, .. } = self;
        let each = found.iter().map(|it| format!("{}/{}", it.in_flight, it.unanswered));
        let each: Vec<_> = each.collect();
        format!(
            "{driver}.{mode} with {} snapshots (requests in flight/unanswered: {}):\n{}\n{}",
            found.len(),
            each.join(" "),
            self.output(),
            self.running.stderr.text()
        )
    }
}

/// A folder for snapshots, in memory if there is room: a disk would be the slowest part of a test.
fn in_memory() -> Result<TempDir> {
    let memory = Path::new("/dev/shm");
    let room = statvfs(memory).map_or(0, |it| it.f_bavail * it.f_frsize);
    Ok(if room > ROOM { tempfile::tempdir_in(memory)? } else { tempfile::tempdir()? })
}

/// The queues of the machine's virtio device.
fn queues(state: &Value) -> Option<&Vec<Value>> {
    match state {
        Value::Object(fields) => match fields.get("queues") {
            Some(Value::Array(queues)) => Some(queues),
            _ => fields.values().find_map(queues),
        },
        Value::Array(parts) => parts.iter().find_map(queues),
        _ => None,
    }
}
