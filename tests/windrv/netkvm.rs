//! Windows's network driver, in each interrupt mode, on a network with a peer that sends frames
//! back (`tests/windrv/peer`).

use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use transom_tests::network::{in_namespace, ip};
use transom_tests::place;
use transom_tests::program::{Running, vmm};

use crate::PATIENCE;
use crate::drivers;
use crate::image;
use crate::kmdf;
use crate::report::Report;

/// OWN in `tests/windrv/ndis/traffic.c`.
const ADDRESS: &str = "52:54:00:77:69:6e";
const TAP: &str = "windrv";
/// The slot of the adapter. Every fourth slot has the same interrupt line.
const SLOT: u8 = 4;

/// A machine with a network device.
#[derive(Default)]
struct Machine {
    mode: &'static str,
    /// Words for the device and for the guest.
    device: &'static str,
    words: &'static str,
    /// Checks besides those of every mode.
    more: usize,
    /// The device's pairs of queues; 1 without it.
    pairs: Option<u32>,
    /// 512M without it.
    memory: Option<&'static str>,
    /// The slot of Intel's network card, which works on a network of its own meanwhile, and the
    /// name of the check of it.
    intel: Option<(u8, &'static str)>,
}

/// The tests of the adapter: one for each mode.
macro_rules! modes {
    ($($mode:ident)*) => {$(
        #[test]
        fn $mode() -> Result<()> {
            Machine { mode: stringify!($mode), ..Machine::default() }.on_a_socket()
        }
    )*};
}

modes! { msix4 msix1 two one wire }

/// The device tells the driver a shorter maximum of packets.
#[test]
fn mtu() -> Result<()> {
    Machine { mode: "msix1", device: ",mtu=1400", words: " mtu=1400", ..Machine::default() }
        .on_a_socket()
}

#[test]
fn above_4_gib() -> Result<()> {
    let memory = Some("5G");
    Machine { mode: "msix1", words: kmdf::HIGH, memory, ..Machine::default() }.on_a_socket()
}

/// Each card has an interrupt line of its own.
#[test]
fn beside_intels_card() -> Result<()> {
    beside(SLOT + 1, "beside")
}

/// Both cards have one interrupt line: each driver is asked whether its card was it.
#[test]
fn on_one_line_with_intels_card() -> Result<()> {
    beside(SLOT + 4, "on_one_line")
}

fn beside(slot: u8, check: &'static str) -> Result<()> {
    Machine { mode: "wire", intel: Some((slot, check)), more: 1, ..Machine::default() }
        .on_a_socket()
}

/// The host's kernel takes packets without checksums, and of many segments.
#[test]
fn offloads() -> Result<()> {
    if !place::runs_here("Windows' network driver on a tap") {
        return Ok(());
    }
    let machine = Machine {
        mode: "msix1",
        device: ",vhost=off",
        words: " offloads=on",
        more: OFFLOADS,
        ..Machine::default()
    };
    in_namespace(move || machine.on_a_tap())
}

/// Every processor has its own pair of queues, sends and receives.
#[test]
fn smp4_with_4_pairs() -> Result<()> {
    scaled("smp4", 4, "off")
}

#[test]
fn smp2_with_2_pairs() -> Result<()> {
    scaled("smp2", 2, "off")
}

/// Processors without queues of their own get their packets from other processors.
#[test]
fn smp4_with_2_pairs() -> Result<()> {
    kmdf::thorough(|| scaled("smp4", 2, "off"))
}

#[test]
fn smp4_with_1_pair() -> Result<()> {
    let machine = Machine { mode: "smp4", more: SCALING, ..Machine::default() };
    kmdf::thorough(|| machine.on_a_socket())
}

/// The kernel serves the queues where it can.
#[test]
fn smp4_with_vhost() -> Result<()> {
    kmdf::thorough(|| scaled("smp4", 4, "auto"))
}

fn scaled(mode: &'static str, pairs: u32, vhost: &str) -> Result<()> {
    if !place::runs_here("Windows' network driver on several queues of a tap") {
        return Ok(());
    }
    let machine = Machine {
        mode,
        device: if vhost == "off" { ",vhost=off" } else { "" },
        words: " offloads=on",
        more: OFFLOADS + SCALING + usize::try_from(pairs)?,
        pairs: Some(pairs),
        ..Machine::default()
    };
    in_namespace(move || machine.on_a_tap())
}

/// The minimum number of checks of every mode, and of those of offloads.
const CHECKS: usize = 42;
const OFFLOADS: usize = 7;
/// With more pairs than one, there is one more for each.
const SCALING: usize = 26;

impl Machine {
    fn on_a_socket(&self) -> Result<()> {
        let Some(image) = image::image()? else { return Ok(()) };
        let folder = tempfile::tempdir()?;
        let (_peer, network) = peer(&folder.path().join("network"))?;
        let Some((slot, _)) = self.intel else { return self.run(image, &network, &[]) };
        let (_peer, other) = peer(&folder.path().join("other"))?;
        self.run(image, &network, &["--device", &format!("e1000e,to={other},slot={slot:x}.0")])
    }

    /// Needs root, and a namespace of its own.
    fn on_a_tap(&self) -> Result<()> {
        let Some(image) = image::image()? else { return Ok(()) };
        ip(&format!("tuntap add {TAP} mode tap multi_queue vnet_hdr"))?;
        // So that the host sends nothing on its own.
        ip(&format!("link set {TAP} addrgenmode none"))?;
        ip(&format!("link set {TAP} arp off txqueuelen 10000 up"))?;
        let network = format!("tap:{TAP}");
        let mut peer = kmdf::program("peer", &network)?;
        peer.says("ready", 1)?;
        self.run(image, &network, &[])
    }

    fn run(&self, image: &Path, network: &str, more_devices: &[&str]) -> Result<()> {
        let Self { mode, device, words, more, memory, pairs, .. } = self;
        let (cpus, pairs) = (drivers::processors(mode).to_string(), pairs.unwrap_or(1));
        let folder = tempfile::tempdir()?;
        let control = folder.path().join("control");
        let device =
            format!("virtio-net,to={network},mac={ADDRESS},slot={SLOT:x}.0,pairs={pairs}{device}");
        let words =
            format!("driver=netkvm mode={mode} host=vmm processors={cpus} pairs={pairs}{words}");
        let mut machine = Command::new(vmm());
        machine.args(["run", "--cpus", &cpus, "--display", "none", "--serial", "stdio"]);
        machine.args(["--accept-emulation", "--device", &device]).args(more_devices);
        machine.args(["--memory", memory.unwrap_or("512M")]);
        machine.args(["--cmdline", &words, "--kernel"]).arg(image).arg("--control").arg(&control);
        let mut guest = Running::spawn(&mut machine)?;
        let status = kmdf::obey(&mut guest, &control);
        let (output, log) = (guest.stdout.text(), guest.stderr.text());
        let everything = || format!("netkvm.{mode}:\n{output}\n{log}");
        ensure!(status.with_context(everything)? == 0, "vmm failed: {}", everything());
        if let Some((_, check)) = self.intel {
            let passed = output.contains(&format!("pass netkvm.{mode}.{check} "));
            ensure!(passed, "{check} is not there: {}", everything());
        }
        Report::read(&output).and_then(|it| it.judge(CHECKS + more)).with_context(everything)
    }
}

/// A peer that listens at `socket`, and its network: the link must be up from the start.
fn peer(socket: &Path) -> Result<(Running, String)> {
    let path = socket.to_str().context("a path")?;
    let peer = kmdf::program("peer", path)?;
    let deadline = Instant::now() + PATIENCE;
    while !socket.exists() {
        ensure!(Instant::now() < deadline, "the peer does not listen: {}", peer.stderr.text());
        sleep(Duration::from_millis(5));
    }
    Ok((peer, format!("passt:{path}")))
}
