//! The pod's network with address translation, tested with third-party programs: DHCP clients, a
//! DNS client and server, HTTP clients and servers, pings and a sniffer, each in its own network
//! namespace. Needs root.
//!
//! `cifs` mounts the shared folder in a Linux that is the guest. `beside` has the tests with
//! `DHCP=Y`, where the guest is a host of the outer network.
//!
//! This program also runs in the pod: with the word `pod::WORD` it starts the network, and forwards
//! frames between its tap and one in the guest's namespace, so that no machine is needed.
#![forbid(unsafe_code)]

#[path = "pod_network/beside.rs"]
mod beside;
#[path = "pod_network/cifs.rs"]
mod cifs;
#[path = "pod_network/pod.rs"]
mod pod;
#[path = "pod_network/share.rs"]
mod share;
#[path = "pod_network/six.rs"]
mod six;
#[path = "pod_network/town.rs"]
mod town;

use std::env;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::ensure;

use town::{Town, fails, run, says};

type Test = (&'static str, fn() -> anyhow::Result<()>);
/// The environment of a pod.
type Settings<'a> = &'a [(&'a str, &'a str)];

const TESTS: [Test; 15] = [
    ("the_guest_gets_its_address_and_reaches_the_outside", reaches_outside),
    ("incoming_traffic_reaches_the_guest_except_reserved_ports", is_reached),
    ("packets_fit_the_pods_network", packets_fit),
    ("two_pods_do_not_interfere_and_clean_up", leaves_nothing),
    ("missing_requirements_are_reported_in_one_sentence", reports_missing_requirements),
    ("the_shared_folder_is_at_the_gateway", share::is_at_the_gateway),
    ("the_shared_folder_fills_the_link", share::fills_the_link),
    ("the_shared_folder_keeps_what_linux_writes", cifs::keeps_files),
    ("the_shared_folder_passes_connectathons_tests", cifs::passes_connectathon),
    ("the_shared_folder_passes_xfstests", cifs::passes_xfstests),
    ("with_dhcp_the_guest_joins_the_pods_network", beside::is_a_host),
    ("a_killed_pods_card_is_replaced_and_removed", beside::leaves_nothing),
    ("the_guest_has_ipv6_where_the_pod_has_it", six::goes_outside),
    ("without_ipv6_forwarding_the_guest_has_ipv4_only", six::stays),
    (
        "missing_dhcp_requirements_are_reported_in_one_sentence",
        beside::reports_missing_requirements,
    ),
];

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    if let [word, rest @ ..] = words.as_slice()
        && word == pod::WORD
    {
        return pod::main(rest);
    }
    let chosen = |name: &str| {
        let mut filters = words.iter().filter(|word| !word.starts_with('-')).peekable();
        filters.peek().is_none() || filters.any(|filter| name.contains(filter.as_str()))
    };
    let mut failed = 0;
    for (name, test) in TESTS.iter().filter(|(name, _)| chosen(name)) {
        let result = test();
        failed += usize::from(result.is_err());
        let said = result.map_or_else(|error| format!("FAILED: {error:#}"), |()| "ok".into());
        writeln!(std::io::stdout(), "test {name} ... {said}").ok();
    }
    ExitCode::from(u8::from(failed > 0))
}

/// The DHCP options for the pod of these tests.
const OPTIONS: [(&str, &str); 9] = [
    ("ip", "172.30.0.2"),
    ("subnet", "255.255.255.0"),
    ("broadcast", "172.30.0.255"),
    ("router", "172.30.0.1"),
    ("dns", "172.30.0.1"),
    ("domain", "win.svc.cluster.local"),
    ("search", "win.svc.cluster.local svc.cluster.local"),
    ("mtu", "1450"),
    ("lease", "3600"),
];

fn reaches_outside() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut pod = town.pod(9, &[])?;
    let lease = pod.lease()?;
    for (name, value) in OPTIONS {
        let line = format!("{name}={value}");
        ensure!(lease.lines().any(|it| it == line), "udhcpc has no {line}: {lease}");
    }
    ensure!(lease.lines().any(|it| it == "hostname=Windows"), "{lease}");
    let other = pod.dhclient()?;
    for line in [
        "new_ip_address=172.30.0.2",
        "new_domain_name=win.svc.cluster.local",
        "new_domain_search=win.svc.cluster.local. svc.cluster.local.",
        "new_interface_mtu=1450",
        "new_dhcp_lease_time=3600",
        "new_dhcp_renewal_time=1800",
        "new_dhcp_rebinding_time=3150",
    ] {
        ensure!(other.lines().any(|it| it == line), "dhclient has no {line}: {other}");
    }

    let dig = |words: &str| pod.guest(&format!("dig @172.30.0.1 +short +tries=1 {words}"));
    let names = [
        ("host.lan", "172.30.0.1"),
        ("system.lan", "10.77.0.1"),
        ("files", "10.77.0.55"),
        ("share.example", "10.77.0.55"),
        ("Windows.lan", "172.30.0.2"),
        ("-x 172.30.0.1", "host.lan."),
        ("www.example", "10.77.0.1"),
        ("+tcp www.example", "10.77.0.1"),
        ("+noedns www.example", "10.77.0.1"),
        // The search list: a name with a dot, by UDP and TCP, with a CNAME before the address.
        ("web.other", "web.other.svc.cluster.local.\n10.77.0.50"),
        ("+tcp web.other", "web.other.svc.cluster.local.\n10.77.0.50"),
        ("web.other.svc.cluster.local", "10.77.0.50"),
    ];
    for (question, answer) in names {
        let said = dig(question)?;
        ensure!(said.trim() == answer, "dig {question}: {said:?}, not {answer:?}");
    }
    let long = dig("+noedns long.example TXT")?;
    ensure!(
        long.len() > 900,
        "an answer that is too long for a datagram must come by TCP: {long:?}"
    );
    let cut = pod.guest("dig @172.30.0.1 +noedns +ignore long.example TXT")?;
    ensure!(cut.lines().any(|line| line.contains("flags: qr") && line.contains(" tc ")), "{cut}");
    let none = pod.guest("dig @172.30.0.1 none.example")?;
    ensure!(none.contains("status: NXDOMAIN"), "{none}");

    pod.guest("ping -c 1 -W 5 172.30.0.1")?;
    pod.guest("ping -c 1 -W 5 10.77.0.1")?;
    let seen = pod.guest("curl -sS -m 20 http://10.77.0.1:8080/")?;
    ensure!(seen == "outside", "{seen:?}");
    let from = pod.guest("curl -sS -m 20 http://10.77.0.1:8080/cgi-bin/who")?;
    ensure!(from.trim() == "10.77.0.9", "the server must see the pod's address: {from:?}");
    // A guest with a forged IP or MAC address reaches nothing.
    pod.guest("ip address add 172.30.0.77/24 dev eth0")?;
    fails(&pod.guest_ns(), "ping -c 1 -W 1 -I 172.30.0.77 10.77.0.1")?;
    pod.guest("ip link set eth0 address 02:00:00:00:00:77")?;
    fails(&pod.guest_ns(), "ping -c 1 -W 1 10.77.0.1")?;
    fails(&pod.guest_ns(), "busybox udhcpc -f -q -n -t 2 -T 1 -i eth0 -s /bin/true")?;
    pod.end()
}

fn is_reached() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut pod = town
        .pod(9, &[("HOST_PORTS", "7149,7150/udp"), ("USER_PORTS", "2222"), ("VNC_PORT", "5900")])?;
    pod.lease()?;
    for port in [3389, 2222, 8006, 5900, 7149, 443] {
        town.serve(&pod.guest_ns(), &format!("0.0.0.0:{port}"), "guest")?;
    }
    town.serve(&pod.ns(), "0.0.0.0:8006", "pod")?;
    let get = |ns: &str, to: &str| run(ns, &format!("curl -sS -g -m 20 http://{to}/"));
    for port in [3389, 2222, 443] {
        let seen = get(&town.ns(), &format!("10.77.0.9:{port}"))?;
        ensure!(seen == "guest", "from outside, port {port}: {seen:?}");
    }
    let seen = get(&town.ns(), "10.77.0.9:8006")?;
    ensure!(seen == "pod", "a kept port: {seen:?}");
    for port in [5900, 7149] {
        fails(&town.ns(), &format!("curl -sS -m 5 http://10.77.0.9:{port}/"))?;
    }
    // The guest's own network does not bypass this.
    run(&town.ns(), "ip route add 172.30.0.0/24 via 10.77.0.9")?;
    fails(&town.ns(), "curl -sS -m 1 http://172.30.0.2:8006/")?;
    fails(&town.ns(), "dig @172.30.0.1 +tries=1 +time=1 host.lan")?;
    // Access from within the pod.
    for to in ["127.0.0.1:3389", "[::1]:3389", "127.0.0.1:2222", "10.77.0.9:3389", "10.77.0.9:443"]
    {
        let seen = get(&pod.ns(), to)?;
        ensure!(seen == "guest", "in the pod, {to}: {seen:?}");
    }
    let seen = get(&pod.ns(), "127.0.0.1:8006")?;
    ensure!(seen == "pod", "{seen:?}");
    // The guest reaches itself by the pod's address, and nothing of the pod itself.
    let seen = get(&pod.guest_ns(), "10.77.0.9:3389")?;
    ensure!(seen == "guest", "hairpin: {seen:?}");
    for to in ["172.30.0.1:8006", "10.77.0.9:8006", "20.20.20.1:8006", "172.30.0.1:3389"] {
        fails(&pod.guest_ns(), &format!("curl -sS -m 5 http://{to}/"))?;
    }
    // Datagrams: a port of the guest, and one that the pod keeps.
    for (port, heard) in [(5000, true), (7150, false)] {
        town.echo(&pod, port, heard)?;
    }
    pod.end()
}

fn packets_fit() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut pod = town.pod(9, &[])?;
    pod.lease()?;
    pod.guest("ip link set eth0 mtu 1500")?;
    town.serve(&pod.guest_ns(), "0.0.0.0:3389", "guest")?;
    // The guest believes in a larger MTU. An MSS of 1410 with its headers fits 1450: outside sees
    // it in both directions.
    let out = town.sniff("tcp[tcpflags] & tcp-syn != 0 and dst host 10.77.0.1", || {
        pod.guest("curl -sS -m 20 http://10.77.0.1:8080/").map(drop)
    })?;
    ensure!(out.contains("mss 1410"), "{out}");
    let back = town.sniff("tcp[tcpflags] & tcp-syn != 0 and src host 10.77.0.9", || {
        run(&town.ns(), "curl -sS -m 20 http://10.77.0.9:3389/").map(drop)
    })?;
    ensure!(back.contains("mss 1410"), "{back}");
    pod.guest("ip link set eth0 mtu 1450")?;
    pod.guest("ping -c 1 -W 5 -M do -s 1422 10.77.0.1")?;
    // A ping that is too large gets the right MTU.
    pod.guest("ip link set eth0 mtu 1500")?;
    let said = pod.guest("ping -c 1 -W 5 -M do -s 1472 10.77.0.1").unwrap_err().to_string();
    ensure!(said.contains("mtu = 1450") || said.contains("mtu=1450"), "{said}");
    let sum = |ns: &str, to: &str| {
        run(ns, &format!("curl -sS -m 60 -o /dev/null -w %{{size_download}} http://{to}/large"))
    };
    ensure!(sum(&pod.guest_ns(), "10.77.0.1:8080")? == town::LARGE.to_string(), "in");
    ensure!(sum(&town.ns(), "10.77.0.9:3389")? == town::LARGE.to_string(), "out");
    pod.end()
}

fn leaves_nothing() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut one = town.pod(9, &[])?;
    let mut other = town.pod(10, &[])?;
    for (pod, name) in [(&one, "one"), (&other, "other")] {
        pod.lease()?;
        town.serve(&pod.guest_ns(), "0.0.0.0:3389", name)?;
    }
    let get = |to: &str| run(&town.ns(), &format!("curl -sS -m 20 http://{to}:3389/"));
    ensure!(get("10.77.0.9")? == "one" && get("10.77.0.10")? == "other", "the wrong pod");
    // A second pod in the same container would take over the first one's network.
    let second = town.pod(9, &[]);
    let said = second.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(said.contains("another Transom"), "{said}");
    ensure!(get("10.77.0.9")? == "one", "the first pod is gone");

    one.kill()?;
    // The process that removes the rules does so when its input ends.
    town::until("the rules disappear", || says(&one.ns(), "nft list ruleset", ""))?;
    let mut again = town.pod(9, &[])?;
    again.lease()?;
    ensure!(get("10.77.0.9")? == "one", "the new pod does not reach its guest");
    let rules = run(&again.ns(), "nft list ruleset")?;
    ensure!(rules.matches("chain guard").count() == 1, "{rules}");
    again.end()?;
    other.end()?;
    for pod in [&again, &other] {
        let rules = run(&pod.ns(), "nft list ruleset")?;
        ensure!(rules.trim().is_empty(), "rules are left: {rules}");
        let links = run(&pod.ns(), "ip -o link")?;
        ensure!(!links.contains("qemu"), "the tap is left: {links}");
    }
    // A pod that starts after a killed one cannot know the original setting.
    let forward = says(&other.ns(), "cat /proc/sys/net/ipv4/ip_forward", "0");
    ensure!(forward, "the pod still forwards packets");
    Ok(())
}

fn reports_missing_requirements() -> anyhow::Result<()> {
    let town = Town::new()?;
    let refused = |around: &str, settings: &[(&str, &str)]| {
        let pod = town.pod_in(9, around, settings);
        pod.and_then(|mut pod| pod.end())
            .err()
            .map(|error| format!("{error:#}"))
            .unwrap_or_default()
    };
    let cases: [(&str, Settings, &str); 6] = [
        (
            "setpriv --bounding-set=-net_admin",
            &[],
            "24: NETWORK=nat needs a capability: add --cap-add NET_ADMIN",
        ),
        ("setpriv --bounding-set=-net_bind_service", &[], "NET_BIND_SERVICE"),
        ("", &[("DEV", "eth7")], "24: DEV=eth7: there is no such interface"),
        ("", &[("TAP", "eth0")], "24: TAP=eth0: the pod has another interface with"),
        ("", &[("IP", "10.77.0.30")], "24: IP=10.77.0.30: the network 10.77.0."),
        ("env PATH=/nowhere", &[], "24: there is no program `nft`"),
    ];
    for (around, settings, sentence) in cases {
        let said = refused(around, settings);
        ensure!(said.contains(sentence), "{around} {settings:?}: {said:?}");
        let rules = run(&town.pod_ns(9), "nft list ruleset")?;
        ensure!(rules.trim().is_empty(), "{sentence}: rules are left: {rules}");
        let links = run(&town.pod_ns(9), "ip -o link")?;
        ensure!(!links.contains("qemu"), "{sentence}: the tap is left: {links}");
    }
    // Packets are also forwarded where /proc/sys is read-only, as in most containers.
    let mut pod = town.pod_in(9, town::READ_ONLY, &[])?;
    ensure!(says(&pod.ns(), "cat /proc/sys/net/ipv4/ip_forward", "0"), "ip_forward was written");
    pod.lease()?;
    pod.guest("ping -c 1 -W 5 10.77.0.1")?;
    pod.end()
}
