//! `DHCP=Y`: the guest has an interface of its own on the pod's network, and leases its address
//! from a DHCP server there.

use std::fs;

use anyhow::{Context, ensure};

use crate::town::{LARGE, OWN_DEV, Pod, Town, fails, run};

const DHCP: (&str, &str) = ("DHCP", "Y");

/// The address that the guest leased from the outside server with its own MAC address.
fn leased(pod: &Pod<'_>, leases: &std::path::Path) -> anyhow::Result<String> {
    let lease = pod.lease()?;
    let ip = lease.lines().find_map(|line| line.strip_prefix("ip=")).context("no address")?;
    ensure!(ip.starts_with("10.77.0.1") && ip.len() == 11, "{lease}");
    ensure!(lease.lines().any(|line| line == "router=10.77.0.1"), "{lease}");
    let known = fs::read_to_string(leases)?;
    let line = known.lines().find(|line| line.contains(ip)).unwrap_or_default();
    ensure!(line.contains(&pod.card.0), "{} has not leased {ip}: {known}", pod.card.0);
    Ok(ip.to_owned())
}

fn get(space: &str, to: &str) -> anyhow::Result<String> {
    run(space, &format!("curl -sS -m 20 http://{to}/"))
}

/// As in a container on a macvlan network.
pub(crate) fn is_a_host() -> anyhow::Result<()> {
    let town = Town::new()?;
    let leases = town.lease_addresses()?;
    town.place(9, true)?;
    let mut pod = town.pod_in(9, OWN_DEV, &[DHCP])?;
    ensure!(pod.card.1 == 1450, "an MTU of {}", pod.card.1);
    pod.guest("ip link set eth0 mtu 1450")?;
    let ip = leased(&pod, &leases)?;
    let own = run(&pod.ns(), "ip address show dev qemu")?;
    ensure!(own.contains("mtu 1450") && own.contains(&pod.card.0), "{own}");
    ensure!(!own.contains("inet"), "the pod has an address on the guest's interface: {own}");

    run(&town.ns(), &format!("ping -c 1 -W 5 {ip}"))?;
    pod.guest("ping -c 1 -W 5 -M do -s 1422 10.77.0.1")?;
    let from = pod.guest("curl -sS -m 20 http://10.77.0.1:8080/cgi-bin/who")?;
    ensure!(from.trim() == ip, "outside does not see the guest's address: {from:?}");
    ensure!(pod.told("heard")? == ip, "the pod has learned another address");
    town.serve(&pod.guest_ns(), "0.0.0.0:8006", "guest")?;
    town.serve(&pod.ns(), "0.0.0.0:8006", "pod")?;
    // At the guest's address, all ports are the guest's; at the pod's address, the pod's.
    for space in [town.ns(), pod.ns()] {
        let seen = get(&space, &format!("{ip}:8006"))?;
        ensure!(seen == "guest", "from {space}: {seen:?}");
    }
    for space in [town.ns(), pod.guest_ns()] {
        let seen = get(&space, "10.77.0.9:8006")?;
        ensure!(seen == "pod", "from {space}: {seen:?}");
    }
    let sum = |space: &str, to: &str| {
        run(space, &format!("curl -sS -m 60 -o /dev/null -w %{{size_download}} http://{to}/large"))
    };
    ensure!(sum(&pod.guest_ns(), "10.77.0.1:8080")? == LARGE.to_string(), "a download is short");
    ensure!(sum(&town.ns(), &format!("{ip}:8006"))? == LARGE.to_string(), "an upload is short");
    // The guest takes another address, as any host may.
    pod.guest("ip address add 10.77.0.77/24 dev eth0")?;
    pod.guest("ping -c 1 -W 5 -I 10.77.0.77 10.77.0.9")?;
    ensure!(pod.told("heard")? == "10.77.0.77", "the pod has not learned the new address");
    pod.end()?;
    is_gone(&town)
}

fn is_gone(town: &Town) -> anyhow::Result<()> {
    let links = run(&town.pod_ns(9), "ip -o link")?;
    ensure!(!links.contains("qemu"), "the interface is left: {links}");
    let rules = run(&town.pod_ns(9), "nft list ruleset")?;
    ensure!(rules.trim().is_empty(), "rules are left: {rules}");
    let left = town.volume(9, "transom-macvtap");
    ensure!(!left.exists(), "the device node is left: {}", left.display());
    Ok(())
}

/// On an interface that is the pod's alone: the pod and its guest cannot reach each other, and a
/// killed pod's remains are replaced.
pub(crate) fn leaves_nothing() -> anyhow::Result<()> {
    let town = Town::new()?;
    let leases = town.lease_addresses()?;
    let mut first = town.pod_in(9, OWN_DEV, &[DHCP])?;
    let said = first.told("note the pod and its guest")?;
    ensure!(said.contains("/readyz"), "{said}");
    let ip = leased(&first, &leases)?;
    run(&town.ns(), &format!("ping -c 1 -W 5 {ip}"))?;
    first.kill()?;
    let links = run(&first.ns(), "ip -o link")?;
    ensure!(links.contains("qemu"), "the kernel removed the interface: nothing to test: {links}");
    let mut second = town.pod_in(9, OWN_DEV, &[DHCP])?;
    ensure!(leased(&second, &leases)? == ip, "the same MAC address got another address");
    // Each kind of network replaces the remains of the other.
    second.kill()?;
    let mut behind = town.pod(9, &[])?;
    behind.lease()?;
    behind.kill()?;
    let mut last = town.pod_in(9, OWN_DEV, &[DHCP])?;
    ensure!(leased(&last, &leases)? == ip, "the same MAC address got another address");
    last.end()?;
    is_gone(&town)
}

pub(crate) fn reports_missing_requirements() -> anyhow::Result<()> {
    let town = Town::new()?;
    town.place(9, true)?;
    let own = run(&town.pod_ns(9), "cat /sys/class/net/eth0/address")?;
    let without = |capability: &str| format!("{OWN_DEV} setpriv --bounding-set=-{capability}");
    let plain = || OWN_DEV.to_owned();
    let cases = [
        (without("net_admin"), ("DEV", ""), "20: DHCP=Y: a capability is missing: add --cap-add"),
        (without("mknod"), ("DEV", ""), "20: DHCP=Y: the device node cannot be created"),
        (plain(), ("DEV", "lo"), "20: DHCP=Y: lo does not support macvtap"),
        (plain(), ("DEV", "eth7"), "24: DEV=eth7: there is no such interface"),
        (plain(), ("TAP", "eth0"), "24: TAP=eth0: the pod has another interface with"),
        (plain(), ("MTU", "9000"), "24: MTU=9000: eth0 has an MTU of 1450"),
        (plain(), ("MAC", own.trim()), "20: DHCP=Y: another guest on eth0 has the"),
    ];
    for (around, setting, sentence) in cases {
        let pod = town.pod_in(9, &around, &[DHCP, setting]);
        let said = pod.err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(said.contains(sentence), "{around} {setting:?}: {said:?}");
        is_gone(&town)?;
    }
    // It works without NET_RAW, which the pod needs to learn the guest's address.
    let mut pod = town.pod_in(9, &without("net_raw"), &[DHCP])?;
    let said = pod.told("note without")?;
    ensure!(said.contains("NET_RAW"), "{said}");
    fails(&pod.ns(), "ip link add link eth0 name qemu type macvtap mode bridge")?;
    pod.end()?;
    is_gone(&town)
}
