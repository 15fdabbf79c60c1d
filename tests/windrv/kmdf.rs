//! Windows's drivers of the other devices (those of KMDF), in each interrupt mode that their INF
//! files allow.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use host::size::Size;
use serde_json::Value;
use transom_tests::lab;
use transom_tests::program::{Running, connect, not_run, vmm};
use vmm::control::{self, Client, LinkState};

use crate::PATIENCE;
use crate::drivers;
use crate::image;
use crate::report::Report;

const PAGE: u64 = 4096;
/// The disk's serial number.
pub(crate) const DISK: &str = "WINDRV-1";
/// The network device's name.
const NETWORK: &str = "virtio-net";

/// The named port, and the word that puts rings and data above 4 GiB.
const PORT: &str = "virtio-serial,name=org.qemu.guest_agent.0,to=socket:";
pub(crate) const HIGH: &str = " heap=high";

/// A machine with one device for one driver.
pub(crate) struct Machine {
    driver: &'static str,
    mode: &'static str,
    device: &'static str,
    memory: &'static str,
    /// Further words for the guest.
    words: &'static str,
    /// The minimum number of checks.
    pub(crate) checks: usize,
}

/// A machine with a named port, whose socket is in the test's folder.
const SERIAL: Machine = Machine {
    driver: "vioserial",
    mode: "msix",
    device: PORT,
    memory: "256M",
    words: "",
    checks: 40,
};
const RANDOM: Machine = Machine {
    driver: "viorng",
    mode: "msix",
    device: "virtio-rng",
    memory: "256M",
    words: "",
    checks: 18,
};
const BALLOON: Machine = Machine {
    driver: "balloon",
    mode: "wire",
    device: "virtio-balloon",
    memory: "512M",
    words: "",
    checks: 30,
};

#[test]
fn vioserial_with_messages() -> Result<()> {
    SERIAL.run()
}

/// `viorng_with_intx` has such an interrupt with the same shim.
#[test]
fn vioserial_with_intx() -> Result<()> {
    thorough(|| Machine { mode: "wire", ..SERIAL }.run())
}

/// The disks have memory there by default.
#[test]
fn vioserial_above_4_gib() -> Result<()> {
    thorough(|| Machine { memory: "5G", words: HIGH, ..SERIAL }.run())
}

#[test]
fn viorng_with_a_message() -> Result<()> {
    Machine { checks: 20, ..RANDOM }.run()
}

#[test]
fn viorng_with_intx() -> Result<()> {
    Machine { mode: "wire", ..RANDOM }.run()
}

pub(crate) fn random(mode: &'static str) -> Machine {
    Machine { mode, ..RANDOM }
}

/// The INF file of the balloon does not ask for messages.
#[test]
fn balloon() -> Result<()> {
    BALLOON.run()
}

/// Every second page of the balloon is above 4 GiB.
#[test]
fn balloon_above_4_gib() -> Result<()> {
    Machine { memory: "5G", ..BALLOON }.run()
}

#[test]
fn viorng_on_4_processors() -> Result<()> {
    Machine { mode: "smp4", checks: 22, ..RANDOM }.run()
}

#[test]
fn vioserial_on_4_processors() -> Result<()> {
    Machine { mode: "smp4", checks: 44, ..SERIAL }.run()
}

/// The interrupt is on another processor than the driver's thread.
#[test]
fn balloon_on_4_processors() -> Result<()> {
    thorough(|| Machine { mode: "smp_wire4", ..BALLOON }.run())
}

#[test]
fn viorng_on_2_processors_and_with_intx_on_4() -> Result<()> {
    thorough(|| {
        Machine { mode: "smp2", checks: 22, ..RANDOM }.run()?;
        Machine { mode: "smp_wire4", checks: 20, ..RANDOM }.run()
    })
}

#[test]
fn vioserial_on_2_processors_and_with_intx_on_4() -> Result<()> {
    thorough(|| {
        Machine { mode: "smp2", checks: 44, ..SERIAL }.run()?;
        Machine { mode: "smp_wire4", checks: 44, ..SERIAL }.run()
    })
}

/// Runs a test only with `TRANSOM_TESTS=all`.
pub(crate) fn thorough(test: impl FnOnce() -> Result<()>) -> Result<()> {
    if lab::everything() {
        return test();
    }
    not_run(&image::this_test(), lab::THOROUGH);
    Ok(())
}

impl Machine {
    /// Starts the guest, does what it asks the host for, and judges its report.
    fn run(&self) -> Result<()> {
        let Some(image) = image::image()? else { return Ok(()) };
        let folder = tempfile::tempdir()?;
        let control = folder.path().join("control");
        let socket = folder.path().join("port");
        let _program = (self.device == PORT).then(|| program("port", &socket)).transpose()?;
        let mut guest = self.start(image, &control, &socket)?;
        let status = obey(&mut guest, &control);
        let (output, log) = (guest.stdout.text(), guest.stderr.text());
        let everything = || format!("{}.{}:\n{output}\n{log}", self.driver, self.mode);
        ensure!(status.with_context(everything)? == 0, "vmm failed: {}", everything());
        Report::read(&output).and_then(|it| it.judge(self.checks)).with_context(everything)
    }

    pub(crate) fn start(&self, image: &Path, control: &Path, socket: &Path) -> Result<Running> {
        let Self { driver, mode, device, memory, words, .. } = self;
        let cpus = drivers::processors(mode).to_string();
        let socket = if *device == PORT { socket.display().to_string() } else { String::new() };
        let mut machine = Command::new(vmm());
        machine.args(["run", "--cpus", &cpus, "--display", "none", "--serial", "stdio"]);
        machine.args(["--accept-emulation", "--memory", memory]);
        machine.args(["--device", &format!("{device}{socket}")]);
        machine.args([
            "--cmdline",
            &format!("driver={driver} mode={mode} processors={cpus}{words}"),
            "--kernel",
        ]);
        machine.arg(image).arg("--control").arg(control);
        Running::spawn(&mut machine)
    }
}

/// Starts the program at the host's end of a device: `tests/windrv/NAME`.
pub(crate) fn program(name: &str, place: impl AsRef<OsStr>) -> Result<Running> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("windrv").join(name);
    Running::spawn(Command::new(path).arg(place))
}

/// Obeys the guest's lines `host: …` (see `kmdf/balloon.c`, `ndis/control.c` and `source/grow.c`)
/// until the machine ends. Returns its exit status.
pub(crate) fn obey(guest: &mut Running, control: &Path) -> Result<i32> {
    let deadline = Instant::now() + PATIENCE;
    let (mut obeyed, mut host) = (0, None);
    loop {
        let output = guest.stdout.text();
        let lines = output.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        for line in lines.filter_map(|line| line.strip_prefix("host: ")).skip(obeyed) {
            let host = match &mut host {
                Some(host) => host,
                None => host.insert(Host::connect(control)?),
            };
            host.obey(line).with_context(|| line.to_owned())?;
            obeyed += 1;
        }
        if let Ok(status) = guest.wait(Duration::ZERO) {
            return Ok(status);
        }
        ensure!(Instant::now() < deadline, "the guest did not end within {PATIENCE:?}");
        sleep(Duration::from_millis(5));
    }
}

/// The operator of the machine.
pub(crate) struct Host {
    client: Client,
    /// The memory without a balloon, once it is known.
    memory: Option<u64>,
}

impl Host {
    pub(crate) fn connect(control: &Path) -> Result<Self> {
        Ok(Self { client: connect(control)?, memory: None })
    }

    fn balloon(&mut self, size: Option<u64>) -> Result<Value> {
        self.client.ask(&control::Command::Balloon { size: size.map(Size) })
    }

    fn link(&mut self, state: LinkState) -> Result<()> {
        let name = NETWORK.to_owned();
        self.client.ask(&control::Command::Link { name, state: Some(state), mtu: None }).map(|_| ())
    }

    fn actual(&mut self) -> Result<u64> {
        let state = self.balloon(None)?;
        state["actual"].as_u64().with_context(|| state.to_string())
    }

    pub(crate) fn obey(&mut self, line: &str) -> Result<()> {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["statistics", ref values @ ..] => self.compare(values),
            ["set", pages] => self.set(pages.parse()?).map(|_| ()),
            ["pages", pages] => {
                let size = self.set(pages.parse()?)?;
                let deadline = Instant::now() + PATIENCE;
                while self.actual()? != size {
                    ensure!(Instant::now() < deadline, "the guest never had {size} bytes");
                    sleep(Duration::from_millis(5));
                }
                Ok(())
            }
            ["grow", _, bytes] => {
                let (name, size) = (DISK.to_owned(), Some(Size(bytes.parse()?)));
                self.client.ask(&control::Command::Grow { name, size }).map(|_| ())
            }
            ["link", "up"] => self.link(LinkState::Up),
            ["link", "down"] => self.link(LinkState::Down),
            _ => bail!("unknown words"),
        }
    }

    /// Asks for a balloon of this many pages, and returns the memory that it leaves.
    fn set(&mut self, pages: u64) -> Result<u64> {
        let memory = match self.memory {
            Some(memory) => memory,
            None => self.actual()?,
        };
        self.memory = Some(memory);
        let size = memory - pages * PAGE;
        self.balloon(Some(size))?;
        Ok(size)
    }

    /// Compares the guest's statistics with words `NAME=VALUE`.
    fn compare(&mut self, values: &[&str]) -> Result<()> {
        let found = self.balloon(None)?;
        for word in values {
            let (name, value) = word.split_once('=').context("NAME=VALUE")?;
            let wanted: u64 = value.parse()?;
            ensure!(found["statistics"][name] == wanted, "{name} is not {wanted} in {found}");
        }
        Ok(())
    }
}
