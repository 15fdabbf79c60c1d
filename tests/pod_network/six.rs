//! IPv6 of a guest behind a pod that has IPv6.

use anyhow::{Context, ensure};

use crate::town::{Pod, READ_ONLY, Town, fails, run, says, until};

/// Gives the outside host and a pod IPv6 addresses.
fn place(town: &Town) -> anyhow::Result<()> {
    town.place(9, false)?;
    run(&town.ns(), "ip address add fd77::1/64 dev br0 nodad")?;
    run(&town.pod_ns(9), "ip address add fd77::9/64 dev eth0 nodad")?;
    run(&town.pod_ns(9), "ip route add default via fd77::1").map(drop)
}

/// Waits for the address that the guest makes from the router's advertisement.
fn address(pod: &Pod<'_>, network: &str) -> anyhow::Result<String> {
    let start = network.split("::").next().context("a network")?;
    let mut found = None;
    until("an address of the guest", || {
        let said = pod.guest("ip -6 -o address show dev eth0 scope global -tentative");
        let said = said.unwrap_or_default();
        let mut words = said.split_whitespace();
        found = words.find(|word| word.starts_with(start)).map(str::to_owned);
        found.is_some()
    })?;
    let found = found.context("an address")?;
    Ok(found.split('/').next().unwrap_or(&found).to_owned())
}

pub(crate) fn goes_outside() -> anyhow::Result<()> {
    let town = Town::new()?;
    place(&town)?;
    town.serve(&town.ns(), "[fd77::1]:8081", "outside")?;
    let mut pod = town.pod(9, &[])?;
    let network = pod.told("note the guest has IPv6 in")?;
    pod.lease()?;
    let guest = address(&pod, &network)?;
    pod.guest("ping -6 -c 1 -W 5 fd77::1")?;
    let from = pod.guest("curl -sS -g -m 20 http://[fd77::1]:8081/cgi-bin/who")?;
    ensure!(from.contains("fd77::9"), "outside does not see the pod's address: {from:?}");
    let large = "curl -sS -g -m 60 -o /dev/null -w %{size_download} http://[fd77::1]:8081/large";
    ensure!(pod.guest(large)? == crate::town::LARGE.to_string(), "the download is short");

    // Connections by IPv6 reach the guest's forwarded ports and the pod's own.
    town.serve(&pod.guest_ns(), "[::]:3389", "guest")?;
    town.serve(&pod.guest_ns(), "[::]:443", "guest")?;
    town.serve(&pod.ns(), "[::]:8006", "pod")?;
    for (port, word) in [(3389, "guest"), (8006, "pod")] {
        let seen = run(&town.ns(), &format!("curl -sS -g -m 20 http://[fd77::9]:{port}/"))?;
        ensure!(seen == word, "from outside, port {port}: {seen:?}");
    }
    // A route to the guest's network does not bypass this, and the guest reaches no port of the
    // pod.
    run(&town.ns(), &format!("ip route add {network} via fd77::9"))?;
    fails(&town.ns(), &format!("curl -sS -g -m 2 http://[{guest}]:443/"))?;
    let router = network.replace("/64", "1");
    pod.guest(&format!("ping -6 -c 1 -W 5 {router}"))?;
    for to in ["fd77::9", &router, "fe80::1%eth0"] {
        fails(&pod.guest_ns(), &format!("curl -sS -g -m 2 http://[{to}]:8006/"))?;
    }
    // Packets with a forged source address are dropped.
    pod.guest("ip address add fd78::7/64 dev eth0 nodad")?;
    fails(&pod.guest_ns(), "ping -6 -c 1 -W 1 -I fd78::7 fd77::1")?;
    pod.end()?;
    let forwards = says(&town.pod_ns(9), "cat /proc/sys/net/ipv6/conf/all/forwarding", "0");
    ensure!(forwards, "the pod still forwards packets");
    let rules = run(&town.pod_ns(9), "nft list ruleset")?;
    ensure!(rules.trim().is_empty(), "rules are left: {rules}");
    Ok(())
}

pub(crate) fn stays() -> anyhow::Result<()> {
    let town = Town::new()?;
    place(&town)?;
    let mut pod = town.pod_in(9, READ_ONLY, &[])?;
    let said = pod.told("note the guest has IPv4 only:")?;
    ensure!(said.contains("--sysctl net.ipv6.conf.all.forwarding=1"), "{said}");
    pod.lease()?;
    pod.guest("ping -c 1 -W 5 10.77.0.1")?;
    // The pod does not answer by IPv6, whatever address the guest takes.
    pod.guest("ip address add fe80::7/64 dev eth0 nodad")?;
    fails(&pod.guest_ns(), "ping -6 -c 1 -W 1 fe80::1%eth0")?;
    pod.end()
}
