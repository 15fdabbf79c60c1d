//! The shared folder at the gateway's addresses, with Samba's `smbclient` as the guest.

use std::fs::{self, File};
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::Value;
use transom_tests::rdp_hosts::Process;
use transom_tests::{lab, say};

use crate::town::{Town, fails, run, within};

/// The size of the file that fills the link.
const LARGE: u64 = 1 << 30;
/// The part of the link that the file gets at least.
const SHARE_OF_LINK: f64 = 0.8;
/// A cable of 1 Gbit/s. A segmented packet fits its burst.
const CABLE: &str = "root tbf rate 1gbit burst 256k latency 100ms";

/// `smbclient` with an account, at an address.
fn client(account: &str, address: &str, command: &str) -> String {
    format!("smbclient //host.lan/Data -I {address} -U {account} -c {command}")
}

pub(crate) fn is_at_the_gateway() -> anyhow::Result<()> {
    let town = Town::new()?;
    let folder = town.volume(9, "shared");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("there"), "from the host")?;
    let mut pod = town.pod(9, &[("USERNAME", "bill"), ("PASSWORD", "secret")])?;
    pod.lease()?;
    for address in ["172.30.0.1", "20.20.20.1"] {
        let said = pod.guest(&client("bill%secret", address, "ls"))?;
        ensure!(said.contains("there"), "{address}: {said}");
    }
    pod.guest(&client("bill%secret", "172.30.0.1", "mkdir\tmade"))?;
    ensure!(folder.join("made").is_dir(), "a folder that the guest made is not on the host");
    for account in ["bill%wrong", "docker%secret", "%"] {
        fails(&pod.guest_ns(), &client(account, "172.30.0.1", "ls"))?;
    }
    fails(&pod.guest_ns(), &client("bill%secret", "172.30.0.1", "ls -m NT1"))?;
    // The pod's own address has no share, neither for the guest nor for outside hosts.
    fails(&pod.guest_ns(), "nc -nz -w 5 10.77.0.9 445")?;
    fails(&town.ns(), "nc -nz -w 5 10.77.0.9 445")?;
    run(&town.ns(), "ip route add 172.30.0.0/24 via 10.77.0.9")?;
    fails(&town.ns(), "nc -nz -w 5 172.30.0.1 445")?;
    fails(&pod.guest_ns(), "nc -nz -w 5 172.30.0.1 139")?;
    pod.end()?;
    // Without a folder, the port is closed.
    fs::remove_dir_all(&folder)?;
    let mut pod = town.pod(9, &[])?;
    pod.lease()?;
    fails(&pod.guest_ns(), "nc -nz -w 5 172.30.0.1 445")?;
    pod.end()
}

/// Reads and writes a large file over a cable of 1 Gbit/s, beside iperf3 on the same cable.
pub(crate) fn fills_the_link() -> anyhow::Result<()> {
    if !lab::everything() {
        skip::not_run("the_shared_folder_fills_the_link", lab::THOROUGH);
        return Ok(());
    }
    let town = Town::new()?;
    let folder = town.volume(9, "shared");
    fs::create_dir_all(&folder)?;
    File::create(folder.join("large"))?.set_len(LARGE)?;
    let mut pod = town.pod(9, &[("USERNAME", "bill"), ("PASSWORD", "secret")])?;
    pod.lease()?;
    for (space, card) in [(pod.guest_ns(), "eth0"), (pod.ns(), "qemu")] {
        run(&space, &format!("tc qdisc add dev {card} {CABLE}"))?;
    }
    let mut server = within(&town.ns(), "iperf3 -s");
    let _server = Process(server.stdout(Stdio::null()).spawn().context("iperf3")?);
    let (there, large) = ("172.30.0.1", folder.join("large").display().to_string());
    let transfer = |more: &str, command: &str| -> anyhow::Result<f64> {
        let start = Instant::now();
        pod.guest(&format!("{} {more}", client("bill%secret", there, command)))?;
        Ok((LARGE * 8) as f64 / start.elapsed().as_secs_f64())
    };
    for (way, reversed, command) in [
        ("read", "-R", "get\tlarge\t/dev/null".to_owned()),
        ("written", "", format!("put\t{large}\twritten")),
    ] {
        let link = link_rate(&pod.guest(&format!("iperf3 -J -t 5 {reversed} -c 10.77.0.1"))?)?;
        for protection in ["sign", "encrypt"] {
            let rate = transfer(&format!("--client-protection={protection}"), &command)?;
            let part = rate / link;
            say!(
                "1 GiB {way} ({protection}): {:.0} of {:.0} Mbit/s, {:.0} %",
                rate / 1e6,
                link / 1e6,
                part * 100.0
            );
            ensure!(part >= SHARE_OF_LINK, "{way}, {protection}: {part:.2} of the link");
        }
    }
    pod.end()
}

/// The received bits per second in a report of iperf3.
fn link_rate(report: &str) -> anyhow::Result<f64> {
    let report: Value = serde_json::from_str(report)?;
    report["end"]["sum_received"]["bits_per_second"].as_f64().with_context(|| report.to_string())
}
