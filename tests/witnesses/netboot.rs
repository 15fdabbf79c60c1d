//! A machine without a disk, with virtio-net and Intel's card. OVMF gets iPXE by DHCP, and TFTP
//! (PXE) or HTTP (UEFI HTTP boot). iPXE gets a script, Linux and files by HTTP: from virtio-net
//! through OVMF's driver, which it keeps for the card that it came by, and from Intel's card
//! through its own. Linux checks the files, and sends data through both cards at the same time.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use transom_tests::guest::{Guest, Machine};
use transom_tests::lab;
use transom_tests::linux::{Booted, Linux};
use transom_tests::network::{Route, Service, checksum, exchange, ip, noise};
use transom_tests::say;

use super::{BOOT, SOON, guest};

const MIB: usize = 1 << 20;

/// How firmware gets iPXE.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loads {
    /// PXE, which firmware tries first.
    ByTftp,
    /// UEFI HTTP boot, after PXE got no file.
    ByHttp,
}

impl Loads {
    /// DHCP's words for the file.
    fn offer(self) -> Vec<String> {
        let host = CARDS[0].route.host;
        match self {
            Self::ByTftp => vec!["--dhcp-boot=tag:!ipxe,ipxe.efi".into()],
            Self::ByHttp => vec![
                "--dhcp-vendorclass=set:http,HTTPClient".into(),
                "--dhcp-option-force=tag:http,60,HTTPClient".into(),
                "--dhcp-boot=tag:!ipxe,tag:!http,no-file".into(),
                format!("--dhcp-boot=tag:http,http://{host}/ipxe.efi"),
            ],
        }
    }

    fn firmwares_words(self) -> &'static str {
        match self {
            Self::ByTftp => "Start PXE over IPv4",
            Self::ByHttp => "Start HTTP Boot over IPv4",
        }
    }
}

/// A card, as firmware, iPXE and Linux know it.
struct Card {
    tap: &'static str,
    mac: &'static str,
    route: Route,
    /// The driver's name in iPXE, and in Linux.
    drivers: [&'static str; 2],
    /// The device on each machine.
    ours: &'static str,
    qemu: &'static str,
}

/// Firmware has a driver for the first one only.
const CARDS: [Card; 2] = [
    Card {
        tap: "virtio",
        mac: "52:54:00:00:02:01",
        route: route(8),
        drivers: ["SNP", "virtio_net"],
        ours: "virtio-net",
        qemu: "virtio-net-pci,disable-legacy=on",
    },
    Card {
        tap: "intel",
        mac: "52:54:00:00:02:02",
        route: route(9),
        drivers: ["82574l", "e1000e"],
        ours: "e1000e",
        qemu: "e1000e",
    },
];

const fn route(network: u8) -> Route {
    Route {
        host: Ipv4Addr::new(10, network, 0, 1),
        seen: Ipv4Addr::new(10, network, 0, 2),
        within: Duration::from_secs(900),
    }
}

/// Bytes of the file that iPXE gets through each card, and that Linux sends to and fro.
fn large() -> usize {
    if lab::everything() { 64 * MIB } else { 4 * MIB }
}

/// iPXE's script. The last two files arrive through different cards.
fn script() -> String {
    let [virtio, intel] = CARDS.map(|card| card.route.host);
    format!(
        "#!ipxe
ifconf -c dhcp net0 || goto failed
ifconf -c dhcp net1 || goto failed
ifstat
echo witness: ${{version}}
kernel http://{virtio}/linux console=ttyS0 loglevel=1 || goto failed
initrd http://{virtio}/initrd || goto failed
initrd http://{virtio}/file /virtio || goto failed
initrd http://{intel}/file /intel || goto failed
ifstat
boot
:failed
echo witness: failed
sleep 3
exit 1
"
    )
}

/// Programs of the network, until they are dropped.
struct Network {
    dhcp: Service,
    _http: Service,
}

impl Network {
    /// DHCP, TFTP and HTTP on both taps, with the files of `folder`.
    fn start(folder: &Path, loads: Loads) -> anyhow::Result<Self> {
        let [virtio, ..] = CARDS.map(|card| card.route.host);
        let mut dhcp = Command::new("dnsmasq");
        dhcp.args(["--no-daemon", "--conf-file=/dev/null", "--port=0", "--user=root"]);
        dhcp.args(["--bind-interfaces", "--no-ping", "--dhcp-ignore-clid", "--enable-tftp"]);
        dhcp.args(["--log-dhcp", "--dhcp-option=option:router", "--dhcp-match=set:ipxe,175"]);
        dhcp.arg("--pid-file=").args(loads.offer());
        dhcp.arg(format!("--dhcp-boot=tag:ipxe,http://{virtio}/script"));
        dhcp.arg(format!("--tftp-root={}", folder.display()));
        dhcp.arg(format!("--dhcp-leasefile={}", folder.join("leases").display()));
        for Card { tap, mac, route, .. } in CARDS {
            ip(&format!("tuntap add {tap} mode tap"))?;
            ip(&format!("addr add {}/24 dev {tap}", route.host))?;
            ip(&format!("link set {tap} up"))?;
            dhcp.arg(format!("--interface={tap}"));
            dhcp.arg(format!("--dhcp-range={},static,255.255.255.0", route.seen));
            dhcp.arg(format!("--dhcp-host={mac},{}", route.seen));
        }
        let mut http = Command::new(lab::asset("BUSYBOX")?);
        http.args(["httpd", "-f", "-p", "80", "-h"]).arg(folder);
        Ok(Self { dhcp: Service::start(&mut dhcp)?, _http: Service::start(&mut http)? })
    }
}

/// The guest's Linux. Firmware and iPXE load it, and not the machine.
fn linux(kernel: &str) -> anyhow::Result<Linux> {
    let linux = Linux::new(Guest::transom(), &lab::asset(&format!("BZIMAGE_{kernel}"))?);
    let modules = lab::asset(&format!("MODULES_{kernel}"))?;
    Ok(linux.modules(&modules, &["e1000e", "virtio_pci", "virtio_net"]))
}

fn serve(kernel: &str, folder: &Path, data: &[u8]) -> anyhow::Result<()> {
    fs::write(folder.join("script"), script())?;
    fs::write(folder.join("file"), data)?;
    symlink(lab::asset("IPXE")?, folder.join("ipxe.efi"))?;
    symlink(lab::asset(&format!("BZIMAGE_{kernel}"))?, folder.join("linux"))?;
    symlink(linux(kernel)?.initrd()?, folder.join("initrd"))?;
    Ok(())
}

fn machine(machine: Machine, folder: &Path) -> anyhow::Result<Guest> {
    let mut guest = guest(machine, folder)?.memory("1G");
    for Card { tap, mac, ours, qemu, .. } in CARDS {
        guest = match machine {
            Machine::Transom => {
                guest.word("--device").word(format!("{ours},to=tap:{tap},mac={mac}"))
            }
            Machine::Qemu => guest
                .word("-netdev")
                .word(format!("tap,id={tap},ifname={tap},script=no,downscript=no"))
                .word("-device")
                .word(format!("{qemu},netdev={tap},mac={mac},romfile=")),
        };
    }
    Ok(guest)
}

pub(crate) fn starts_linux(on: Machine, kernel: &str, loads: Loads) -> anyhow::Result<()> {
    let (folder, data) = (tempfile::tempdir()?, noise(large()));
    serve(kernel, folder.path(), &data)?;
    let network = Network::start(folder.path(), loads)?;
    let work = tempfile::tempdir()?;
    let mut running = machine(on, work.path())?.start()?;
    running.expect(loads.firmwares_words(), BOOT)?;
    let banner = running.expect("iPXE 2.", BOOT);
    banner.with_context(|| network.dhcp.said())?;
    let seen = running.expect("witness: ", BOOT).with_context(|| network.dhcp.said())?;
    for Card { mac, drivers: [driver, _], .. } in CARDS {
        let wanted = format!("{mac} using {driver} on ");
        ensure!(seen.contains(&wanted), "iPXE does not say `{wanted}`: {seen}");
    }
    let (which, said) = running.expect_any(&[">>>transom ready\n", "witness: failed"], BOOT * 4)?;
    ensure!(which == 0, "iPXE failed: {said}\n{}", network.dhcp.said());
    let mut booted = Booted { running };
    has_files(&mut booted, &data)?;
    uses_both_cards(&mut booted, &data)?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// The files arrived as they were sent, and firmware started Linux.
fn has_files(booted: &mut Booted, data: &[u8]) -> anyhow::Result<()> {
    let wanted = checksum(data)?;
    for Card { tap, .. } in CARDS {
        let said = booted.run(&format!("md5sum /{tap}; rm /{tap}"), SOON)?;
        ensure!(said.starts_with(&wanted), "{tap}: the file has MD5 sum {said}, not {wanted}");
    }
    let said = booted.run("ls -d /sys/firmware/efi/efivars", SOON)?;
    ensure!(said.contains("efivars"), "not started by firmware: {said}");
    Ok(())
}

fn uses_both_cards(booted: &mut Booted, data: &[u8]) -> anyhow::Result<()> {
    for Card { mac, route, drivers: [_, driver], .. } in CARDS {
        let said = booted.run(&format!("grep -l {mac} /sys/class/net/*/address"), SOON)?;
        let name = said.trim().strip_prefix("/sys/class/net/").and_then(|it| it.split_once('/'));
        let (name, _) = name.with_context(|| format!("no card has {mac}: {said}"))?;
        booted.run(
            &format!("ip addr add {}/24 dev {name}; ip link set {name} up", route.seen),
            SOON,
        )?;
        let said = booted.run(&format!("readlink /sys/class/net/{name}/device/driver"), SOON)?;
        ensure!(said.trim().ends_with(&format!("/{driver}")), "{name} has the driver {said}");
        let ping = format!("ping -c 3 -A -W 20 {}", route.host);
        let answered = (0..10).any(|_| booted.try_run(&ping, SOON).is_ok_and(|it| it.status == 0));
        ensure!(answered, "{name}: no answer");
    }
    let routes = CARDS.map(|card| card.route);
    let times = exchange(&routes, booted, data)?;
    let (mib, [virtio, intel]) = (data.len() / MIB, [times[0], times[1]]);
    say!("{mib} MiB to and fro: virtio-net in {virtio:.1?}, beside e1000e in {intel:.1?}");
    Ok(())
}
